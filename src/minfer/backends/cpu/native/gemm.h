// Matrix products for many tokens. A panel of rows is unpacked once: its codes in the order the products take them (lane
// i of a vector is row i, four values of it), its scales and minimums as floats; then all tokens stream past it.
// An output is one sum over its blocks in order, whatever the tokens beside it.
#pragma once

#include "unpack.h"

namespace minfer::MINFER_ISA {

constexpr int kRowVectors = 2;
constexpr int kPanelRows = kRowVectors * kLanes;
constexpr int kTokenTile = 4;

// codes [n_in / 4][kPanelRows][4], d and m [groups][kPanelRows].
struct Panel {
  uint8_t* codes;
  float *d, *m;
};

constexpr int64_t panel_bytes(int64_t n_in) { return n_in * kPanelRows + 2 * (n_in / 16) * kPanelRows * 4; }

// Eight rows' scales (a lane a group) to groups of rows.
MINFER_INLINE void store_groups(const F8 rows[8], int n, float* out) {
  W8 words[8];
  for (int i = 0; i < 8; ++i) words[i] = bits<W8>(rows[i]);
  transpose8(words);
  for (int i = 0; i < n; ++i) store(out + i * kPanelRows, words[i]);
}

// Rows from r on that are not below r1 are zero.
template <class C>
void unpack_panel(const Matrix& w, int64_t r, int64_t r1, const Panel& panel) {
  constexpr int kParts = 32 / C::kGroup;
  const int64_t n_blocks = w.n_in / 32;
  for (int set = 0; set < kPanelRows; set += 8) {
    const uint8_t* row[8];
    uint8_t padded[8][C::kSmall ? C::kChunkBytes : 1];
    for (int i = 0; i < 8; ++i) {
      row[i] = r + set + i < r1 ? w.data + (r + set + i) * w.row_bytes : nullptr;
      if (C::kSmall && row[i] && n_blocks < 8) {
        std::memset(padded[i], 0, sizeof padded[i]);
        row[i] = static_cast<const uint8_t*>(std::memcpy(padded[i], row[i], w.row_bytes));
      }
    }
    for (int64_t b = 0; b < n_blocks; b += 8) {
      // The last chunk of small blocks may begin inside the one before it.
      const int64_t first = b + 8 <= n_blocks || n_blocks < 8 ? b : n_blocks - 8;
      const uint8_t* p[8];
      F8 d[kParts][8], m[kParts][8];
      for (int i = 0; i < 8; ++i) {
        p[i] = row[i] ? row[i] + first * C::kChunkBytes / 8 : nullptr;
        Scales s{};
        if (p[i]) chunk_scales<C>(p[i], s);
        for (int part = 0; part < kParts; ++part) d[part][i] = s.d[part], m[part][i] = s.m[part];
      }
      const int n = static_cast<int>(n_blocks < 8 ? n_blocks : 8);
      for (int part = 0; part < kParts; ++part) {
        const int64_t at = (first * kParts + 8 * part) * kPanelRows + set;
        store_groups(d[part], n, panel.d + at);
        store_groups(m[part], n, panel.m + at);
      }
      for (int j = static_cast<int>(b - first); j < n; ++j) {
        W8 words[8];
        for (int i = 0; i < 8; ++i) words[i] = p[i] ? bits<W8>(chunk_codes<C>(p[i], j)) : W8{};
        transpose8(words);
        for (int i = 0; i < 8; ++i) store(panel.codes + (((first + j) * 8 + i) * kPanelRows + set) * 4, words[i]);
      }
    }
  }
}

// One panel and kTokens tokens. out[t * stride + row], `rows` of them.
template <class C, int kTokens>
void multiply_tile(const Panel& panel, int64_t n_in, const Q8Row* x, float* out, int64_t stride, int64_t rows) {
  constexpr int kSteps = C::kGroup / 4;
  constexpr bool kLow = C::kMaxCode >= 0 || kSignedOffset != 0;
  using Block = Sum<C::kMaxCode>;
  VF total[kRowVectors][kTokens] = {};
  for (int t = 0; t < kTokens; ++t) __builtin_prefetch(out + t * stride, 1);  // written when the products are made
  const uint8_t* w = panel.codes;
  for (int64_t g = 0; g < n_in / C::kGroup; ++g) {
    Block block[kRowVectors][kTokens];
    for (int v = 0; v < kRowVectors; ++v)
      for (int t = 0; t < kTokens; ++t) block[v][t].clear();
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step, w += 4 * kPanelRows) {
      VB codes[kRowVectors];
      for (int v = 0; v < kRowVectors; ++v) codes[v] = load<VB>(w + 4 * kLanes * v);
      for (int t = 0; t < kTokens; ++t) {
        const VB xs = splat4(x[t].codes + g * C::kGroup + 4 * step);
        for (int v = 0; v < kRowVectors; ++v) {
          block[v][t].add(codes[v], xs, step % Block::kSteps == 0);
          if (step % Block::kSteps == Block::kSteps - 1 || step == kSteps - 1) block[v][t].flush(step < Block::kSteps);
        }
      }
    }
    for (int v = 0; v < kRowVectors; ++v) {
      const VF d = load<VF>(panel.d + g * kPanelRows + v * kLanes), m = load<VF>(panel.m + g * kPanelRows + v * kLanes);
      for (int t = 0; t < kTokens; ++t) {
        const float scale = C::kGroup == 16 ? x[t].d_half[g] : x[t].d[g];
        const float low = C::kGroup == 16 ? x[t].sums_half[g] : x[t].sums[g];
        total[v][t] = fma(to_float(block[v][t].total()), d * scale, total[v][t]);
        if (kLow) total[v][t] = fma(m, splat<VF>(low), total[v][t]);
      }
    }
  }
  for (int t = 0; t < kTokens; ++t)
    for (int v = 0; v < kRowVectors; ++v) {
      const int64_t left = rows - v * kLanes;
      if (left >= kLanes) store(out + t * stride + v * kLanes, total[v][t]);
      else if (left > 0) store_part(out + t * stride + v * kLanes, total[v][t], left);
    }
}

template <class C>
void gemm(const Matrix& w, int64_t r0, int64_t r1, const Activations& a, int64_t n_tokens, float* out, int64_t stride,
          uint8_t* scratch) {
  const int64_t groups = w.n_in / C::kGroup;
  float* scales = reinterpret_cast<float*>(scratch + w.n_in * kPanelRows);
  const Panel panel{scratch, scales, scales + groups * kPanelRows};
  for (int64_t r = r0; r < r1; r += kPanelRows) {
    unpack_panel<C>(w, r, r1, panel);
    const int64_t rows = r1 - r;
    // The rows after these are fetched meanwhile, a share of them with each tile.
    const uint8_t* next = w.data + (r + kPanelRows) * w.row_bytes;
    const uint8_t* const last = w.data + (r + 2 * kPanelRows < w.n_out ? r + 2 * kPanelRows : w.n_out) * w.row_bytes;
    const int64_t share = round_up(kPanelRows * w.row_bytes * kTokenTile / n_tokens, 64);
    for (int64_t t = 0; t < n_tokens; t += kTokenTile) {
      for (const uint8_t* end = next + share; next < end && next < last; next += 64) __builtin_prefetch(next, 0, 2);
      Q8Row x[kTokenTile];
      const int n = static_cast<int>(n_tokens - t < kTokenTile ? n_tokens - t : kTokenTile);
      for (int u = 0; u < n; ++u) x[u] = q8_row(a.q8 + (t + u) * a.q8_stride, w.n_in);
      float* to = out + t * stride + (r - r0);
      if (n == 4) multiply_tile<C, 4>(panel, w.n_in, x, to, stride, rows);
      else if (n == 3) multiply_tile<C, 3>(panel, w.n_in, x, to, stride, rows);
      else if (n == 2) multiply_tile<C, 2>(panel, w.n_in, x, to, stride, rows);
      else multiply_tile<C, 1>(panel, w.n_in, x, to, stride, rows);
    }
  }
}

}  // namespace minfer::MINFER_ISA
