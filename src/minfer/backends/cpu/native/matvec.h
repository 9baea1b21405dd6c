// Matrix products for one token and for a few: the weight streams past once, straight from the file's blocks. A step takes
// eight blocks: of one row's super-block, or four of each of two rows, whose sums are halves of the same vectors.
// An output is lane sums over blocks (lane j: products with block 4 k + j, or 8 k + j), then their sum.
#pragma once

#include "unpack.h"

namespace minfer::MINFER_ISA {

constexpr int kFewTokens = 8;
// How far ahead of each row's bytes those of the next rows of its run are fetched.
constexpr int64_t kAhead = 2048;

// Products of blocks j of two rows with activations, of the first and the last 16 codes: four lanes a row.
template <class C>
MINFER_INLINE I8 dot_pair(U8x32 low, U8x32 high, const int8_t* x) {
  const S8x32 first = bits<S8x32>(twice16(x)), last = bits<S8x32>(twice16(x + 16));
  return C::kMaxCode < 0 ? dot32_signed(low, first) + dot32_signed(high, last) : dot64(low, first, high, last);
}

// Lane sums of four vectors, by halves.
template <int64_t kMost>
MINFER_INLINE I8 add_quads(I8 a, I8 b, I8 c, I8 d) {
  return add_pairs<2 * kMost>(add_pairs<kMost>(a, b), add_pairs<kMost>(c, d));
}

// Largest magnitude of a sum of n products.
template <class C>
constexpr int64_t most(int n) {
  return C::kMaxCode < 0 ? INT32_MAX : 127 * C::kMaxCode * n;
}

// The codes of a step: unpacked where they are used, or once for several tokens.
template <class C>
struct Step {
  const uint8_t *p, *q;  // four blocks each; where C is of super-blocks, a chunk at p
  MINFER_INLINE void pair(int j, U8x32& low, U8x32& high) const { C::pair(p + j * C::kBlockBytes, q + j * C::kBlockBytes, low, high); }
  MINFER_INLINE U8x32 codes(int j) const {
    if constexpr (C::kSmall) return C::codes((j < 4 ? p : q) + j % 4 * C::kBlockBytes);
    else return C::codes(p, j);
  }
};
template <class C>
struct Unpacked {
  U8x32 v[8];
  MINFER_INLINE explicit Unpacked(const Step<C>& step) {
    for (int j = 0; j < 4; ++j) {
      if constexpr (C::kNibbles) step.pair(j, v[2 * j], v[2 * j + 1]);
      else v[j] = step.codes(j), v[4 + j] = step.codes(4 + j);
    }
  }
  MINFER_INLINE void pair(int j, U8x32& low, U8x32& high) const { low = v[2 * j], high = v[2 * j + 1]; }
  MINFER_INLINE U8x32 codes(int j) const { return v[j]; }
};

// Adds the products of a step with activations from block b on: total + low.
template <class C, class Codes>
MINFER_INLINE void dot_step(const Scales& s, const Codes& step, const Q8Row& x, int64_t b, F8& total, F8& low) {
  constexpr bool kLow = C::kMaxCode >= 0 || kSignedOffset != 0;
  if constexpr (C::kNibbles) {
    I8 quads[4];
    for (int j = 0; j < 4; ++j) {
      U8x32 first, last;
      step.pair(j, first, last);
      quads[j] = dot_pair<C>(first, last, x.codes + 32 * (b + j));
    }
    const I8 dots = add_quads<most<C>(8)>(quads[0], quads[1], quads[2], quads[3]);
    total = fma(to_float(dots), s.d[0] * twice4(x.d + b), total);
    if (kLow) low = fma(s.m[0], twice4(x.sums + b), low);
  } else {
    // Lanes 0-3: the first 16 codes of blocks 0-3; lanes 4-7: the last 16.
    I8 half[2];
    for (int i = 0; i < 2; ++i) {
      I8 quads[4];
      for (int j = 0; j < 4; ++j) {
        const S8x32 codes = load<S8x32>(x.codes + 32 * (b + (C::kSmall ? j : 4 * i + j)));
        quads[j] = C::kMaxCode < 0 ? dot32_signed(step.codes(4 * i + j), codes) : dot32(step.codes(4 * i + j), codes);
      }
      half[i] = add_quads<most<C>(4)>(quads[0], quads[1], quads[2], quads[3]);
    }
    if constexpr (C::kGroup == 16) {
      for (int i = 0; i < 2; ++i) {
        total = fma(to_float(half[i]), split_pairs(s.d[i] * load<F8>(x.d_half + 2 * b + 8 * i)), total);
        if (kLow) low = fma(s.m[i], load<F8>(x.sums_half + 2 * b + 8 * i), low);
      }
    } else {
      total = fma(to_float(add_halves(half[0], half[1])), s.d[0] * (C::kSmall ? twice4(x.d + b) : load<F8>(x.d + b)), total);
      if (kLow) low = fma(s.m[0], C::kSmall ? twice4(x.sums + b) : load<F8>(x.sums + b), low);
    }
  }
}

// The end of rows of small blocks whose number is not a multiple of four: the last four blocks, those counted already
// having activations of zero.
struct RowEnd {
  float values[2][4] = {};
  Q8Row x;
  MINFER_INLINE void take(const Q8Row& row, int64_t n_blocks) {
    const int64_t rest = n_blocks % 4;
    std::memcpy(values[0] + 4 - rest, row.d + n_blocks - rest, 4 * rest);
    std::memcpy(values[1] + 4 - rest, row.sums + n_blocks - rest, 4 * rest);
    x = row, x.d = values[0] - (n_blocks - 4), x.sums = values[1] - (n_blocks - 4);
  }
};

// Rows that dot_rows takes at a time, each of another run: of small blocks a pair a step. Two steps of one token share the
// loads of its activations.
template <class C, int kTokens>
constexpr int kSide = (C::kSmall ? 2 : 1) * (kTokens == 1 ? 2 : 1);

// Products of row r and of the kSide - 1 rows that are `apart` from one another behind it with kTokens tokens (n_tokens where
// that is 0). A row that is not there repeats the first.
template <class C, int kTokens>
MINFER_INLINE void dot_rows(const Matrix& w, int64_t r, const RowRuns& rows, const Q8Row* x, const RowEnd* end, int n_tokens,
                            float* out, int64_t apart, int64_t stride) {
  constexpr int kMost = kTokens ? kTokens : kFewTokens, kRows = kSide<C, kTokens>, kSteps = C::kSmall ? kRows / 2 : kRows;
  constexpr int64_t kBlocks = C::kSmall ? 4 : 8, kBytes = C::kSmall ? C::kChunkBytes / 2 : C::kChunkBytes;
  const int n = kTokens ? kTokens : n_tokens;
  const int64_t n_blocks = w.n_in / 32;
  const uint8_t* row[kRows];
  uint8_t padded[kRows][C::kSmall ? kBytes : 1];
  for (int i = 0; i < kRows; ++i) {
    row[i] = w.data + (r + i * rows.apart < rows.end ? r + i * rows.apart : r) * w.row_bytes;
    if (C::kSmall && n_blocks < 4) {
      std::memset(padded[i], 0, sizeof padded[i]);
      row[i] = static_cast<const uint8_t*>(std::memcpy(padded[i], row[i], w.row_bytes));
    }
  }
  F8 total[kSteps][kMost] = {}, low[kSteps][kMost] = {};
  const auto take = [&](int64_t at, int64_t b, auto token) {
    for (int i = 0; i < kRows; ++i)
      for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(row[i] + at + kAhead + line);
#pragma GCC unroll 4
    for (int i = 0; i < kSteps; ++i) {
      const Step<C> step{row[i * kRows / kSteps] + at, row[(i + 1) * kRows / kSteps - 1] + at};
      Scales s;
      if constexpr (C::kSmall) C::scales(step.p, step.q, s);
      else C::scales(step.p, s);
      if constexpr (kTokens == 1) {
        dot_step<C>(s, step, token(0), b, total[i][0], low[i][0]);
      } else {
        const Unpacked<C> codes(step);
        for (int t = 0; t < n; ++t) dot_step<C>(s, codes, token(t), b, total[i][t], low[i][t]);
      }
    }
  };
  const auto whole = [&](int t) { return x[t]; };
  int64_t at = 0, b = 0;
  do take(at, b, whole);
  while (at += kBytes, b += kBlocks, b + kBlocks <= n_blocks);
  if (C::kSmall && b < n_blocks) take((n_blocks - 4) * (kBytes / 4), n_blocks - 4, [&](int t) { return end[t].x; });
  for (int i = 0; i < kSteps; ++i)
    for (int t = 0; t < n; ++t) {
      const F8 sums = total[i][t] + low[i][t];
      float* to = out + t * stride + i * kRows / kSteps * apart;
      if constexpr (C::kSmall) {
        float values[2];
        sum_halves(sums, values);
        for (int j = 0; j < 2; ++j)
          if (r + (2 * i + j) * rows.apart < rows.end) to[j * apart] = values[j];
      } else if (r + i * rows.apart < rows.end) {
        to[0] = sum(sums);
      }
    }
}

template <class C, int kTokens>
void matvec(const Matrix& w, const RowRuns& rows, const Activations& a, int n_tokens, float* out, int64_t apart, int64_t stride) {
  constexpr int kMost = kTokens ? kTokens : kFewTokens;
  Q8Row x[kMost];
  RowEnd end[kMost];
  for (int t = 0; t < (kTokens ? kTokens : n_tokens); ++t) {
    x[t] = q8_row(a.q8 + t * a.q8_stride, w.n_in);
    if (C::kSmall && w.n_in / 32 % 4 && w.n_in >= 128) end[t].take(x[t], w.n_in / 32);
  }
  for (int run = 0; run < kStreams; run += kSide<C, kTokens>)
    for (int64_t i = 0; i < rows.count && rows.first + run * rows.apart + i < rows.end; ++i)
      dot_rows<C, kTokens>(w, rows.first + run * rows.apart + i, rows, x, end, n_tokens, out + run * apart + i, apart, stride);
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
