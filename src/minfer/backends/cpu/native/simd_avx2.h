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

// 16 bytes at p in the low half, 16 at q in the high one.
MINFER_INLINE U8x32 two16(const void* p, const void* q) {
  const __m128i low = _mm_loadu_si128(static_cast<const __m128i*>(p)), high = _mm_loadu_si128(static_cast<const __m128i*>(q));
  return bits<U8x32>(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}
MINFER_INLINE U8x32 twice16(const void* p) {
  return bits<U8x32>(_mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
MINFER_INLINE U8x32 low_nibbles(U8x32 v) { return v & 15; }
MINFER_INLINE U8x32 high_nibbles(U8x32 v) { return bits<U8x32>(_mm256_srli_epi16(bits<__m256i>(v), 4)) & 15; }

// 16 bytes to 32 codes: low nibbles, then high nibbles.
MINFER_INLINE U8x32 nibbles(const uint8_t* p) {
  const __m256i shifts = _mm256_setr_epi64x(0, 0, 4, 4);
  return bits<U8x32>(_mm256_srlv_epi64(bits<__m256i>(twice16(p)), shifts)) & 15;
}

// The f16 scales of four blocks at p and of four at q, `stride` bytes apart: each load has its half where the result has it,
// so that one blend takes it.
MINFER_INLINE __m128i strided_halves(const uint8_t* p, int64_t stride) {
  const auto at = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * (stride - 2))); };
  return _mm_blend_epi16(_mm_blend_epi16(_mm_blend_epi16(at(0), at(1), 1 << 1), at(2), 1 << 2), at(3), 1 << 3);
}
MINFER_INLINE F8 half8_strided(const uint8_t* p, const uint8_t* q, int64_t stride) {
  return _mm256_cvtph_ps(_mm_unpacklo_epi64(strided_halves(p, stride), strided_halves(q, stride)));
}

// Likewise of pairs of halves.
MINFER_INLINE __m128i strided_pairs(const uint8_t* p, int64_t stride) {
  const auto at = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * (stride - 4))); };
  return _mm_blend_epi32(_mm_blend_epi32(_mm_blend_epi32(at(0), at(1), 1 << 1), at(2), 1 << 2), at(3), 1 << 3);
}
MINFER_INLINE void half8_pairs(const uint8_t* p, const uint8_t* q, int64_t stride, F8& first, F8& second) {
  const __m128i a = strided_pairs(p, stride), b = strided_pairs(q, stride);
  const __m256 x = _mm256_cvtph_ps(_mm_unpacklo_epi64(a, b)), y = _mm256_cvtph_ps(_mm_unpackhi_epi64(a, b));
  first = _mm256_shuffle_ps(x, y, _MM_SHUFFLE(2, 0, 2, 0));
  second = _mm256_shuffle_ps(x, y, _MM_SHUFFLE(3, 1, 3, 1));
}

MINFER_INLINE float sum(F8 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
MINFER_INLINE void sum_halves(F8 v, float sums[2]) {
  const __m256 pairs = _mm256_hadd_ps(v, v), quads = _mm256_hadd_ps(pairs, pairs);
  sums[0] = _mm256_cvtss_f32(quads), sums[1] = _mm_cvtss_f32(_mm256_extractf128_ps(quads, 1));
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

// Four floats in both halves.
MINFER_INLINE F8 twice4(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }

// Even lanes to the low half, odd lanes to the high one.
MINFER_INLINE F8 split_pairs(F8 v) { return _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)); }

// table[code] for codes below 16.
MINFER_INLINE U8x32 lookup(U8x32 codes, const uint8_t table[16]) {
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return bits<U8x32>(_mm256_shuffle_epi8(levels, bits<__m256i>(codes)));
}

// Byte i is 0xff where bit i of a word is set, else 0. Of a word at p: its 32 bits; of words at p and q: the low 16 bits of
// each, and the high ones. Reads 16 bytes from each.
MINFER_INLINE U8x32 mask_of_bytes(__m256i words, __m256i spread) {
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  return bits<U8x32>(_mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(words, spread), bit), bit));
}
MINFER_INLINE U8x32 mask_of_bits(const uint8_t* p) {
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  return mask_of_bytes(bits<__m256i>(twice16(p)), spread);
}
MINFER_INLINE void mask_of_bits(const uint8_t* p, const uint8_t* q, U8x32& low, U8x32& high) {
  const __m256i words = bits<__m256i>(two16(p, q));
  low = mask_of_bytes(words, _mm256_setr_epi64x(0, 0x0101010101010101, 0, 0x0101010101010101));
  high = mask_of_bytes(words, _mm256_setr_epi64x(0x0202020202020202, 0x0303030303030303, 0x0202020202020202, 0x0303030303030303));
}

// 8 floats to 8 integers, half to even.
MINFER_INLINE I8 round8(F8 v) { return bits<I8>(_mm256_cvtps_epi32(v)); }

// Sums of neighbours within each half: lanes 0 1 of a, 2 3 of a, 0 1 of b, 2 3 of b, then the high halves'. No lane is
// larger than kMost in magnitude.
template <int64_t kMost>
MINFER_INLINE I8 add_pairs(I8 a, I8 b) {
  if constexpr (kMost > INT16_MAX) return bits<I8>(_mm256_hadd_epi32(bits<__m256i>(a), bits<__m256i>(b)));
  const __m256i packed = _mm256_packs_epi32(bits<__m256i>(a), bits<__m256i>(b));
  return bits<I8>(_mm256_madd_epi16(packed, _mm256_set1_epi16(1)));
}

// The halves of a added, then those of b.
MINFER_INLINE I8 add_halves(I8 a, I8 b) {
  return bits<I8>(_mm256_permute2x128_si256(bits<__m256i>(a), bits<__m256i>(b), 0x20)) +
         bits<I8>(_mm256_permute2x128_si256(bits<__m256i>(a), bits<__m256i>(b), 0x31));
}

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

// The same of two products added, of codes up to 63.
MINFER_INLINE I8 dot64(U8x32 w0, S8x32 x0, U8x32 w1, S8x32 x1) {
  const __m256i first = _mm256_maddubs_epi16(bits<__m256i>(w0), bits<__m256i>(x0));
  const __m256i second = _mm256_maddubs_epi16(bits<__m256i>(w1), bits<__m256i>(x1));
  return bits<I8>(_mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1)));
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
    asm("" : "+x"(wide));
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
