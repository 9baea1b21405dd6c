// Armv8.2 with dot product: 256-bit vectors are pairs of 128-bit registers.
#pragma once

#include <arm_neon.h>

#include "simd.h"

namespace minfer::MINFER_ISA {

template <class V>
struct Pair {
  V low, high;
};

MINFER_INLINE F8 fma(F8 a, F8 b, F8 c) {
  const auto x = bits<Pair<float32x4_t>>(a), y = bits<Pair<float32x4_t>>(b), z = bits<Pair<float32x4_t>>(c);
  return bits<F8>(Pair<float32x4_t>{vfmaq_f32(z.low, x.low, y.low), vfmaq_f32(z.high, x.high, y.high)});
}
MINFER_INLINE F8 half8(const void* p) {
  const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(static_cast<const uint16_t*>(p)));
  return bits<F8>(Pair<float32x4_t>{vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))});
}
MINFER_INLINE float one_half(const uint8_t* p) {
  __fp16 half;
  std::memcpy(&half, p, 2);
  return half;
}
MINFER_INLINE void store_half8(void* p, F8 v) {
  const auto x = bits<Pair<float32x4_t>>(v);
  const float16x8_t h = vcombine_f16(vcvt_f16_f32(x.low), vcvt_f16_f32(x.high));
  vst1q_u16(static_cast<uint16_t*>(p), vreinterpretq_u16_f16(h));
}
MINFER_INLINE F8 half8_strided(const uint8_t* p, const uint8_t* q, int64_t stride) {
  uint16_t h[8];
  for (int i = 0; i < 4; ++i) std::memcpy(&h[i], p + i * stride, 2), std::memcpy(&h[4 + i], q + i * stride, 2);
  return half8(h);
}
MINFER_INLINE void half8_pairs(const uint8_t* p, const uint8_t* q, int64_t stride, F8& first, F8& second) {
  first = half8_strided(p, q, stride), second = half8_strided(p + 2, q + 2, stride);
}

#define MINFER_LOOP MINFER_INLINE
#include "simd_generic.inc"

MINFER_INLINE I8 dot32(U8x32 w, S8x32 x) {
  const auto a = bits<Pair<int8x16_t>>(w), b = bits<Pair<int8x16_t>>(x);
  const int32x4_t zero = vdupq_n_s32(0);
  return bits<I8>(Pair<int32x4_t>{vdotq_s32(zero, a.low, b.low), vdotq_s32(zero, a.high, b.high)});
}

}  // namespace minfer::MINFER_ISA
