// AVX2, FMA and F16C. Also the 256-bit half of AVX-512.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace minfer::MINFER_ISA {

MINFER_INLINE F8 fma(F8 a, F8 b, F8 c) { return _mm256_fmadd_ps(a, b, c); }
MINFER_INLINE F8 half8(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
MINFER_INLINE float one_half(const uint8_t* p) { return _cvtsh_ss(load_u16(p)); }
MINFER_INLINE void store_half8(void* p, F8 v) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
MINFER_INLINE F8 bf16x8(const void* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
MINFER_INLINE F8 int8x8(const void* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
MINFER_INLINE F8 uint8x8(const void* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}

// 16 bytes to 32 codes: low nibbles, then high nibbles.
MINFER_INLINE U8x32 nibbles(const uint8_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(v), _mm_srli_epi16(v, 4), 1);
  return bits<U8x32>(_mm256_and_si256(both, _mm256_set1_epi8(15)));
}

// Eight halves that lie `stride` bytes apart, those beyond `last` bytes being the one there. Inserts one by one: a vector
// put together in memory stalls.
MINFER_INLINE F8 half8_strided(const uint8_t* p, int64_t stride, int64_t last) {
  const auto at = [&](int i) { return load_u16(p + (i * stride < last ? i * stride : last)); };
  __m128i h = _mm_cvtsi32_si128(at(0));
  h = _mm_insert_epi16(h, at(1), 1);
  h = _mm_insert_epi16(h, at(2), 2);
  h = _mm_insert_epi16(h, at(3), 3);
  h = _mm_insert_epi16(h, at(4), 4);
  h = _mm_insert_epi16(h, at(5), 5);
  h = _mm_insert_epi16(h, at(6), 6);
  return _mm256_cvtph_ps(_mm_insert_epi16(h, at(7), 7));
}

// Eight pairs of halves, likewise.
MINFER_INLINE void half8_pairs(const uint8_t* p, int64_t stride, int64_t last, F8& first, F8& second) {
  const auto at = [&](int i) {
    int word;
    std::memcpy(&word, p + (i * stride < last ? i * stride : last), 4);
    return word;
  };
  const auto four = [&](int i) {
    __m128i v = _mm_cvtsi32_si128(at(i));
    v = _mm_insert_epi32(v, at(i + 1), 1);
    v = _mm_insert_epi32(v, at(i + 2), 2);
    return _mm_insert_epi32(v, at(i + 3), 3);
  };
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const __m128i a = _mm_shuffle_epi8(four(0), order), b = _mm_shuffle_epi8(four(4), order);  // firsts, then seconds
  first = _mm256_cvtph_ps(_mm_unpacklo_epi64(a, b));
  second = _mm256_cvtph_ps(_mm_unpackhi_epi64(a, b));
}

MINFER_INLINE float sum(F8 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
MINFER_INLINE float max(F8 v) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Lane i of the result is the sum of v[i]'s lanes.
MINFER_INLINE F8 sums8(const F8 v[8]) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// Column i of eight rows of eight 32-bit words becomes row i.
MINFER_INLINE void transpose8(W8 r[8]) {
  __m256i t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(bits<__m256i>(r[2 * i]), bits<__m256i>(r[2 * i + 1]));
    t[2 * i + 1] = _mm256_unpackhi_epi32(bits<__m256i>(r[2 * i]), bits<__m256i>(r[2 * i + 1]));
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      u[4 * i + 2 * j] = _mm256_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
      u[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
    }
  for (int i = 0; i < 4; ++i) {
    r[i] = bits<W8>(_mm256_permute2x128_si256(u[i], u[i + 4], 0x20));
    r[i + 4] = bits<W8>(_mm256_permute2x128_si256(u[i], u[i + 4], 0x31));
  }
}

// p[0] in the four low lanes, p[1] in the four high ones.
MINFER_INLINE F8 splat_halves(const float* p) {
  const __m256 pairs = _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
  return _mm256_permutevar_ps(pairs, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

// table[code] for codes below 16.
MINFER_INLINE U8x32 lookup(U8x32 codes, const uint8_t table[16]) {
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return bits<U8x32>(_mm256_shuffle_epi8(levels, bits<__m256i>(codes)));
}

// Byte i is 0xff where bit i is set, else 0.
MINFER_INLINE U8x32 mask_of_bits(uint32_t word) {
  const __m256i spread = _mm256_shuffle_epi8(
      _mm256_set1_epi32(static_cast<int>(word)),
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  return bits<U8x32>(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit));
}

// 8 floats to 8 integers, half to even.
MINFER_INLINE I8 round8(F8 v) { return bits<I8>(_mm256_cvtps_epi32(v)); }

// 32 integers within int8, in order, to bytes.
MINFER_INLINE S8x32 narrow(const I8 v[4]) {
  const __m256i low = _mm256_packs_epi32(bits<__m256i>(v[0]), bits<__m256i>(v[1]));
  const __m256i high = _mm256_packs_epi32(bits<__m256i>(v[2]), bits<__m256i>(v[3]));
  const __m256i mixed = _mm256_packs_epi16(low, high);
  return bits<S8x32>(_mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

#if !defined(MINFER_AVX512)

constexpr int kSignedOffset = 0;  // added to signed codes so that they can be multiplied as unsigned ones

// Lane i: the sum of products 4 i .. 4 i + 3. Unsigned codes are at most 127: 2 * 127 * 127 fits 16 bits.
MINFER_INLINE I8 dot32(U8x32 w, S8x32 x) {
  const __m256i pairs = _mm256_maddubs_epi16(bits<__m256i>(w), bits<__m256i>(x));
  return bits<I8>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
MINFER_INLINE I8 dot32_signed(U8x32 w, S8x32 x) {
  const __m256i v = bits<__m256i>(w);
  return dot32(bits<U8x32>(_mm256_abs_epi8(v)), bits<S8x32>(_mm256_sign_epi8(bits<__m256i>(x), v)));
}

// The sum of products of codes up to kMaxCode (kMaxCode < 0: signed codes), four a lane and step. 16-bit sums hold
// kSteps steps: 2 * kMaxCode * 127 * kSteps < 32768; `flush` moves them to 32 bits.
template <int kMaxCode>
struct Sum {
  static constexpr int kSteps = kMaxCode < 0 ? 1 : kMaxCode <= 15 ? 8 : kMaxCode <= 31 ? 4 : 2;
  __m256i wide, narrow;
  MINFER_INLINE void clear() { wide = narrow = _mm256_setzero_si256(); }
  MINFER_INLINE void add(VB w, VB x, bool first) {
    __m256i a = bits<__m256i>(w), b = bits<__m256i>(x);
    if (kMaxCode < 0) b = _mm256_sign_epi8(b, a), a = _mm256_abs_epi8(a);
    const __m256i pairs = _mm256_maddubs_epi16(a, b);
    narrow = first ? pairs : _mm256_add_epi16(narrow, pairs);
    asm("" : "+x"(narrow));  // adds in this order: a tree of sums, as GCC would have it, does not fit the registers
  }
  MINFER_INLINE void flush(bool first) {
    const __m256i quads = _mm256_madd_epi16(narrow, _mm256_set1_epi16(1));
    wide = first ? quads : _mm256_add_epi32(wide, quads);
  }
  MINFER_INLINE VI total() const { return bits<VI>(wide); }
};

MINFER_INLINE VF half_lanes(const void* p) { return half8(p); }
MINFER_INLINE VF bf16_lanes(const void* p) { return bf16x8(p); }
MINFER_INLINE F8 fold(VF v) { return v; }

#endif

MINFER_INLINE VB splat4(const void* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return bits<VB>(VW{} + word);
}

}  // namespace minfer::MINFER_ISA
