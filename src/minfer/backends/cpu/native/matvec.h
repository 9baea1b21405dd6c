// Matrix products for one token and for a few: the weight streams past once, straight from the file's blocks.
// An output is a sum over chunks of 256 values in order; lane j of its accumulators holds every product 8 k + j.
#pragma once

#include "unpack.h"

namespace minfer::MINFER_ISA {

constexpr int kFewTokens = 8;

// Products of one chunk: block j of `codes(j)` with the activation codes at x, times scaled[j].
template <class C, class Codes>
MINFER_INLINE void dot_block(Codes codes, const int8_t* x, const float* scaled, int j, F8& total) {
  const S8x32 xs = load<S8x32>(x + 32 * j);
  const F8 products = to_float(C::kMaxCode < 0 ? dot32_signed(codes, xs) : dot32(codes, xs));
  total = fma(products, C::kGroup == 16 ? splat_halves(scaled + 2 * j) : splat<F8>(scaled[j]), total);
}

// Scales of a chunk times those of the activations, and the part of the result that the minimums make.
template <class C>
MINFER_INLINE void scale_chunk(const Scales& s, const Q8Row& x, int64_t b, float* scaled, F8& low) {
  constexpr bool kLow = C::kMaxCode >= 0 || kSignedOffset != 0;
  if constexpr (C::kGroup == 16) {
    for (int i = 0; i < 2; ++i) {
      store(scaled + 8 * i, s.d[i] * load<F8>(x.d_half + 2 * b + 8 * i));
      if (kLow) low = fma(s.m[i], load<F8>(x.sums_half + 2 * b + 8 * i), low);
    }
  } else {
    store(scaled, s.d[0] * load<F8>(x.d + b));
    if (kLow) low = fma(s.m[0], load<F8>(x.sums + b), low);
  }
}

template <class C>
void matvec_one(const Matrix& w, int64_t r0, int64_t r1, const Q8Row& x, float* out) {
  const int64_t n_blocks = w.n_in / 32;
  for (int64_t r = r0; r < r1; ++r) {
    const uint8_t* p = w.data + r * w.row_bytes;
    F8 even{}, odd{}, low{};
    int64_t b = 0;
    for (; b + 8 <= n_blocks; b += 8, p += C::kChunkBytes) {
      Scales s;
      alignas(32) float scaled[16];
      C::scales(p, 8, s);
      scale_chunk<C>(s, x, b, scaled, low);
#pragma GCC unroll 4
      for (int j = 0; j < 8; j += 2) {
        dot_block<C>(C::codes(p, j), x.codes + 32 * b, scaled, j, even);
        dot_block<C>(C::codes(p, j + 1), x.codes + 32 * b, scaled, j + 1, odd);
      }
    }
    if (b < n_blocks) {
      const int n = static_cast<int>(n_blocks - b);
      Scales s;
      alignas(32) float scaled[16];
      C::scales(p, n, s);
      scale_chunk<C>(s, x, b, scaled, low);
      for (int j = 0; j < n; ++j) dot_block<C>(C::codes(p, j), x.codes + 32 * b, scaled, j, j % 2 ? odd : even);
    }
    out[r - r0] = sum((even + odd) + low);
  }
}

// Up to kFewTokens tokens: a chunk's codes are unpacked once.
template <class C>
void matvec_few(const Matrix& w, int64_t r0, int64_t r1, const Activations& a, int n_tokens, float* out, int64_t stride) {
  const int64_t n_blocks = w.n_in / 32;
  Q8Row x[kFewTokens];
  for (int t = 0; t < n_tokens; ++t) x[t] = q8_row(a.q8 + t * a.q8_stride, w.n_in);
  for (int64_t r = r0; r < r1; ++r) {
    const uint8_t* p = w.data + r * w.row_bytes;
    F8 even[kFewTokens] = {}, odd[kFewTokens] = {}, low[kFewTokens] = {};
    for (int64_t b = 0; b < n_blocks; b += 8, p += C::kChunkBytes) {
      const int n = static_cast<int>(n_blocks - b < 8 ? n_blocks - b : 8);
      Scales s;
      alignas(32) float scaled[16];
      U8x32 codes[8];
      C::scales(p, n, s);
      for (int j = 0; j < n; ++j) codes[j] = C::codes(p, j);
      for (int t = 0; t < n_tokens; ++t) {
        scale_chunk<C>(s, x[t], b, scaled, low[t]);
        F8 first = even[t], second = odd[t];
        for (int j = 0; j + 2 <= n; j += 2) {
          dot_block<C>(codes[j], x[t].codes + 32 * b, scaled, j, first);
          dot_block<C>(codes[j + 1], x[t].codes + 32 * b, scaled, j + 1, second);
        }
        if (n % 2) dot_block<C>(codes[n - 1], x[t].codes + 32 * b, scaled, n - 1, first);
        even[t] = first, odd[t] = second;
      }
    }
    for (int t = 0; t < n_tokens; ++t) out[t * stride + r - r0] = sum((even[t] + odd[t]) + low[t]);
  }
}

// A row of a float weight as f32, `scratch` holding it where it is not already.
inline const float* float_row(Type type, const uint8_t* row, int64_t n, float* scratch) {
  if (type == Type::F32) {
    std::memcpy(scratch, row, 4 * n);  // rows in a file are not aligned for floats
    return scratch;
  }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store(scratch + i, type == Type::F16 ? half_lanes(row + 2 * i) : bf16_lanes(row + 2 * i));
  if (i < n) {
    uint16_t tail[kLanes] = {};
    std::memcpy(tail, row + 2 * i, 2 * (n - i));
    store_part(scratch + i, type == Type::F16 ? half_lanes(tail) : bf16_lanes(tail), n - i);
  }
  return scratch;
}

// Float weights, any number of tokens; sums of kLanes partial sums, the tail last. `scratch` holds n_in floats.
inline void matmul_float(const Matrix& w, int64_t r0, int64_t r1, const Activations& a, int64_t n_tokens, float* out,
                         int64_t stride, float* scratch) {
  for (int64_t r = r0; r < r1; ++r) {
    const float* row = float_row(w.type, w.data + r * w.row_bytes, w.n_in, scratch);
    const int64_t whole = w.n_in / kLanes * kLanes;
    const auto finish = [&](VF total, const float* x) {
      if (whole < w.n_in)
        total = fma(load_part(row + whole, w.n_in - whole), load_part(x + whole, w.n_in - whole), total);
      return sum(total);
    };
    int64_t t = 0;
    for (; t + 4 <= n_tokens; t += 4) {
      const float* x = a.f32 + t * a.f32_stride;
      VF total[4] = {};
      for (int64_t i = 0; i < whole; i += kLanes) {
        const VF v = load<VF>(row + i);
        for (int u = 0; u < 4; ++u) total[u] = fma(v, load<VF>(x + u * a.f32_stride + i), total[u]);
      }
      for (int u = 0; u < 4; ++u) out[(t + u) * stride + r - r0] = finish(total[u], x + u * a.f32_stride);
    }
    for (; t < n_tokens; ++t) {
      const float* x = a.f32 + t * a.f32_stride;
      VF total{};
      for (int64_t i = 0; i < whole; i += kLanes) total = fma(load<VF>(row + i), load<VF>(x + i), total);
      out[t * stride + r - r0] = finish(total, x);
    }
  }
}

}  // namespace minfer::MINFER_ISA
