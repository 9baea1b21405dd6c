// The AVX-512 intrinsics that simd_avx512.h uses, as loops, so that its kernels run on processors without them.
// Included before everything else (-include); the file is compiled for AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

template <class To, class From>
To bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct Floats { float v[16]; };
struct Words { int32_t v[16]; };
struct Codes { uint8_t v[64]; };

inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const Floats x = bits<Floats>(a), y = bits<Floats>(b), z = bits<Floats>(c);
  Floats r;
  for (int i = 0; i < 16; ++i) r.v[i] = __builtin_fmaf(x.v[i], y.v[i], z.v[i]);
  return bits<__m512>(r);
}
inline __m256 half_ps(__m512 a, int which) {
  const Floats x = bits<Floats>(a);
  __m256 r;
  std::memcpy(&r, x.v + 8 * which, 32);
  return r;
}
inline __m512 join_ps(__m256 low, __m256 high) {
  Floats r;
  std::memcpy(r.v, &low, 32), std::memcpy(r.v + 8, &high, 32);
  return bits<__m512>(r);
}
inline __m512 cvtph_ps(__m256i h) {
  return join_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)));
}
inline __m512i cvtepu16_epi32(__m256i h) {
  uint16_t x[16];
  std::memcpy(x, &h, 32);
  Words r;
  for (int i = 0; i < 16; ++i) r.v[i] = x[i];
  return bits<__m512i>(r);
}
inline __m512i slli_epi32(__m512i a, int n) {
  Words r = bits<Words>(a);
  for (int32_t& x : r.v) x = static_cast<int32_t>(static_cast<uint32_t>(x) << n);
  return bits<__m512i>(r);
}
// Unsigned times signed bytes, four a lane, added without saturation.
template <class V>
V dpbusd(V sum, V a, V b) {
  constexpr int n = sizeof(V) / 4;
  int32_t r[n];
  uint8_t x[4 * n];
  int8_t y[4 * n];
  std::memcpy(r, &sum, sizeof r), std::memcpy(x, &a, sizeof x), std::memcpy(y, &b, sizeof y);
  for (int i = 0; i < 4 * n; ++i) r[i / 4] += x[i] * y[i];
  V out;
  std::memcpy(&out, r, sizeof out);
  return out;
}

}  // namespace emulated

#undef _mm256_dpbusd_epi32
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_castps512_ps256(a) emulated::half_ps(a, 0)
#define _mm512_extractf32x8_ps(a, which) emulated::half_ps(a, which)
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_castsi512_ps(a) emulated::bits<__m512>(a)
#define _mm512_setzero_si512() __m512i{}
#define _mm512_dpbusd_epi32 emulated::dpbusd<__m512i>
#define _mm256_dpbusd_epi32 emulated::dpbusd<__m256i>
