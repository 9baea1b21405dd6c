// f16 by integer arithmetic, for code that runs on any machine. Exact; rounding is half to even.
// `static`: a copy compiled for one instruction set must not be linked into the code of another.
#pragma once

#include <cstdint>
#include <cstring>

namespace minfer {

static inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

static inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31, fraction = half & 0x3ff;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return float_of_bits(sign | bits_of_float(magnitude));
  }
  return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline uint16_t float_to_half(float x) {
  const uint32_t all = bits_of_float(x), sign = all >> 16 & 0x8000, magnitude = all & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more round to Inf
  if (magnitude < 0x38800000) {  // below 2^-14 the result is subnormal: adding 0.5 aligns and rounds the fraction
    const uint32_t aligned = bits_of_float(float_of_bits(magnitude) + 0.5f);
    return static_cast<uint16_t>(sign | (aligned - 0x3f000000));
  }
  const uint32_t odd = magnitude >> 13 & 1;
  return static_cast<uint16_t>(sign | ((magnitude + 0xfff + odd - 0x38000000) >> 13));
}

static inline uint16_t load_u16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
static inline float load_half(const uint8_t* p) { return half_to_float(load_u16(p)); }

}  // namespace minfer
