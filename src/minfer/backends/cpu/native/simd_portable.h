// No instruction set assumed: loops over lanes, which the compiler vectorizes as far as its target allows. A product is
// rounded before it is added (no fused multiply-add without hardware for it).
#pragma once

#include "simd.h"

namespace minfer::MINFER_ISA {

MINFER_INLINE F8 fma(F8 a, F8 b, F8 c) { return a * b + c; }
MINFER_INLINE float one_half(const uint8_t* p) { return load_half(p); }
static __attribute__((noinline)) F8 half8_strided(const uint8_t* p, const uint8_t* q, int64_t stride) {
  F8 v;
  for (int i = 0; i < 4; ++i) v[i] = load_half(p + i * stride), v[4 + i] = load_half(q + i * stride);
  return v;
}
MINFER_INLINE F8 half8(const void* p) { return half8_strided(static_cast<const uint8_t*>(p), static_cast<const uint8_t*>(p) + 8, 2); }
MINFER_INLINE void half8_pairs(const uint8_t* p, const uint8_t* q, int64_t stride, F8& first, F8& second) {
  first = half8_strided(p, q, stride), second = half8_strided(p + 2, q + 2, stride);
}

#define MINFER_LOOP static __attribute__((noinline))
#include "simd_generic.inc"

MINFER_LOOP void store_half8(void* p, F8 v) {
  uint16_t h[8];
  for (int i = 0; i < 8; ++i) h[i] = float_to_half(v[i]);
  std::memcpy(p, h, 16);
}

MINFER_LOOP I8 dot32(U8x32 w, S8x32 x) {
  int32_t lanes[8];
  for (int i = 0; i < 8; ++i) {
    lanes[i] = 0;
    for (int j = 4 * i; j < 4 * i + 4; ++j) lanes[i] += static_cast<int8_t>(w[j]) * x[j];
  }
  return load<I8>(lanes);
}

}  // namespace minfer::MINFER_ISA
