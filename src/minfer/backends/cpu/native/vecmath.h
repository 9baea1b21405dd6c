// exp and what is made of it, a vector at a time. Every lane is computed alike, so a value does not depend on its place.
#pragma once

#include MINFER_SIMD

namespace minfer::MINFER_ISA {

// e^x within 2 units in the last place; 0 below -87.3, the largest float above 88.7, NaN for NaN.
MINFER_INLINE VF vexp(VF x) {
  const VF clamped = x < -87.3f ? splat<VF>(-87.3f) : x > 88.72f ? splat<VF>(88.72f) : x;
  // x = n ln 2 + r; adding 1.5 * 2^23 rounds to an integer. ln 2 in two parts, the first exact in few bits.
  const VF shifted = fma(clamped, splat<VF>(1.44269504f), splat<VF>(12582912.0f));
  const VF n = shifted - 12582912.0f;
  const VF r = fma(n, splat<VF>(2.12194440e-4f), fma(n, splat<VF>(-0.693359375f), clamped));
  // Taylor's coefficients, the last ones bent to the interval.
  VF p = splat<VF>(1.9875691500e-4f);
  p = fma(p, r, splat<VF>(1.3981999507e-3f));
  p = fma(p, r, splat<VF>(8.3334519073e-3f));
  p = fma(p, r, splat<VF>(4.1665795894e-2f));
  p = fma(p, r, splat<VF>(1.6666665459e-1f));
  p = fma(p, r, splat<VF>(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  // Times 2^n in two steps: n may be 128.
  const VI whole = bits<VI>(shifted) - 0x4b400000, half = whole >> 1;
  const VF first = bits<VF>((half + 127) << 23), second = bits<VF>((whole - half + 127) << 23);
  const VF y = p * first * second;
  return x < -87.3f ? VF{} : y;
}

MINFER_INLINE VF sigmoid(VF x) { return 1.0f / (1.0f + vexp(-x)); }
MINFER_INLINE VF silu(VF x) { return x / (1.0f + vexp(-x)); }
// 0.5 x (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
MINFER_INLINE VF gelu(VF x) { return x / (1.0f + vexp(x * -1.59576912f * (1.0f + 0.044715f * x * x))); }
MINFER_INLINE VF vtanh(VF x) {
  const VF positive = 1.0f - 2.0f / (1.0f + vexp(vabs(x) * 2.0f));
  return x < 0.0f ? -positive : positive;
}

}  // namespace minfer::MINFER_ISA
