// AVX-512 (F, BW, VL, DQ) with VNNI: 512-bit floats and products; blocks of 32 codes stay 256 bits wide.
#pragma once

#include "simd_avx2.h"

namespace minfer::MINFER_ISA {

constexpr int kSignedOffset = 128;  // the products take unsigned codes: signed ones are shifted, their minimum undoes it

MINFER_INLINE VF fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
MINFER_INLINE float sum(VF v) { return sum(F8(_mm512_castps512_ps256(v)) + F8(_mm512_extractf32x8_ps(v, 1))); }
MINFER_INLINE float max(VF v) {
  return max(F8(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))));
}
MINFER_INLINE F8 fold(VF v) { return F8(_mm512_castps512_ps256(v)) + F8(_mm512_extractf32x8_ps(v, 1)); }
MINFER_INLINE VF half_lanes(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
MINFER_INLINE VF bf16_lanes(const void* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

MINFER_INLINE I8 dot32(U8x32 w, S8x32 x) {
  return bits<I8>(_mm256_dpbusd_epi32(_mm256_setzero_si256(), bits<__m256i>(w), bits<__m256i>(x)));
}
MINFER_INLINE I8 dot32_signed(U8x32 w, S8x32 x) { return dot32(w, x); }
MINFER_INLINE I8 dot64(U8x32 w0, S8x32 x0, U8x32 w1, S8x32 x1) {
  return bits<I8>(_mm256_dpbusd_epi32(bits<__m256i>(dot32(w0, x0)), bits<__m256i>(w1), bits<__m256i>(x1)));
}

template <int kMaxCode>
struct Sum {
  static constexpr int kSteps = 8;
  __m512i wide;
  MINFER_INLINE void clear() { wide = _mm512_setzero_si512(); }
  MINFER_INLINE void add(VB w, VB x, bool) { wide = _mm512_dpbusd_epi32(wide, bits<__m512i>(w), bits<__m512i>(x)); }
  MINFER_INLINE void flush(bool) {}
  MINFER_INLINE VI total() const { return bits<VI>(wide); }
};

}  // namespace minfer::MINFER_ISA
