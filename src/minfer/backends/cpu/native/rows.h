// Norms, rotation and elementwise functions over rows of floats.
#pragma once

#include <limits>

#include "kernels.h"
#include "vecmath.h"

namespace minfer::MINFER_ISA {

// Calls f(index, count) for whole vectors, then for the tail.
template <class F>
MINFER_INLINE void for_lanes(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, n - i);
}

MINFER_INLINE VF load_lanes(const float* p, int64_t n) { return n == kLanes ? load<VF>(p) : load_part(p, n); }
MINFER_INLINE void store_lanes(float* p, VF v, int64_t n) {
  if (n == kLanes) store(p, v);
  else store_part(p, v, n);
}

inline void rms_norm(const float* x, const float* gain, int64_t n, float eps, float* out) {
  VF total[2] = {};
  for_lanes(n, [&](int64_t i, int64_t k) {
    const VF v = load_lanes(x + i, k);
    total[i / kLanes % 2] = fma(v, v, total[i / kLanes % 2]);
  });
  const float scale = 1.0f / std::sqrt(sum(total[0] + total[1]) / static_cast<float>(n) + eps);
  for_lanes(n, [&](int64_t i, int64_t k) {
    store_lanes(out + i, load_lanes(x + i, k) * scale * load_lanes(gain + i, k), k);
  });
}

inline void unary(Unary kind, const float* x, float value, int64_t n, float* out) {
  for_lanes(n, [&](int64_t i, int64_t k) {
    const VF v = load_lanes(x + i, k);
    VF y{};
    switch (kind) {
      case Unary::Silu: y = silu(v); break;
      case Unary::Gelu: y = gelu(v); break;
      case Unary::Scale: y = v * value; break;
      case Unary::SoftCap: y = vtanh(v / value) * value; break;
    }
    store_lanes(out + i, y, k);
  });
}

inline void binary(Binary kind, const float* x, const float* y, int64_t n, float* out) {
  for_lanes(n, [&](int64_t i, int64_t k) {
    const VF a = load_lanes(x + i, k), b = load_lanes(y + i, k);
    VF c{};
    switch (kind) {
      case Binary::Add: c = a + b; break;
      case Binary::Mul: c = a * b; break;
      case Binary::SwiGLU: c = silu(a) * b; break;
      case Binary::GeGLU: c = gelu(a) * b; break;
    }
    store_lanes(out + i, c, k);
  });
}

inline void softmax(const float* x, int64_t n, float* out) {
  VF most = splat<VF>(-INFINITY), total{};
  for_lanes(n, [&](int64_t i, int64_t k) {
    VF v = splat<VF>(-INFINITY);
    std::memcpy(&v, x + i, 4 * k);
    most = vmax(v, most);
  });
  const float highest = max(most);
  for_lanes(n, [&](int64_t i, int64_t k) {
    VF v = splat<VF>(-INFINITY);
    std::memcpy(&v, x + i, 4 * k);
    const VF y = vexp(v - highest);
    total += y;
    store_lanes(out + i, y, k);
  });
  const float inverse = 1.0f / sum(total);
  for_lanes(n, [&](int64_t i, int64_t k) { store_lanes(out + i, load_lanes(out + i, k) * inverse, k); });
}

// Whole groups of vectors are passed over at once. NaN and Inf of either sign are no numbers.
inline int64_t next_above(const float* x, int64_t i, int64_t n, float bound) {
  constexpr int64_t kGroup = 4 * kLanes;
  for (; i + kGroup <= n; i += kGroup) {
    VI within = ~VI{};
    for (int v = 0; v < 4; ++v) {
      const VF value = load<VF>(x + i + v * kLanes);
      within &= (value <= bound) & (value >= -std::numeric_limits<float>::max());
    }
    uint64_t words[sizeof(VI) / 8], all = ~uint64_t{0};
    std::memcpy(words, &within, sizeof words);
    for (const uint64_t word : words) all &= word;
    if (all != ~uint64_t{0}) break;
  }
  while (i < n && x[i] <= bound && std::isfinite(x[i])) ++i;
  return i;
}

// A NaN shows in the sum, and so does Inf, from which it is taken.
inline float exp_sum(const float* x, int64_t n, float* most) {
  const auto lanes = [&](int64_t i, int64_t k) {
    VF v = splat<VF>(-INFINITY);
    std::memcpy(&v, x + i, 4 * k);
    return v;
  };
  VF top = splat<VF>(-INFINITY), total{};
  for_lanes(n, [&](int64_t i, int64_t k) { top = vmax(lanes(i, k), top); });
  *most = max(top);
  for_lanes(n, [&](int64_t i, int64_t k) { total += vexp(lanes(i, k) - *most); });
  return sum(total);
}

// Rotates pairs of one head: neighbours, or values half of n_dims apart (neox).
inline void rotate(float* head, const float* cos, const float* sin, int n_dims, bool neox) {
  const int half = n_dims / 2, step = neox ? 1 : 2, apart = neox ? half : 1;
  for (int i = 0; i < half; ++i) {
    const float a = head[i * step], b = head[i * step + apart];
    head[i * step] = a * cos[i] - b * sin[i];
    head[i * step + apart] = a * sin[i] + b * cos[i];
  }
}

}  // namespace minfer::MINFER_ISA
