// softmax(q k^T) v for a tile of queries and some KV heads, over blocks of 32 cells with an online softmax.
// One kernel for decode (a tile is one query's heads) and prefill: a query's arithmetic depends on its own rows alone.
// Blocks begin at multiples of 32 cells, and a query meets the cells of its runs in order.
#pragma once

#include "kernels.h"
#include "quantize.h"
#include "vecmath.h"

namespace minfer::MINFER_ISA {

// Per row (a query's head): the scaled query, the weighted sum of values so far, the largest score, the sum of weights.
struct AttendScratch {
  float *q, *sum, *most, *weight, *k, *v, *score;
  int64_t width;  // head_dim rounded up to whole vectors
};

inline AttendScratch attend_scratch(const AttendTile& tile, float* base) {
  const int64_t width = round_up(tile.head_dim, kLanes);
  const int64_t rows = static_cast<int64_t>(tile.n_kv_heads) * tile.n_queries * tile.group;
  AttendScratch s;
  s.width = width;
  // Eight cells, and scores, more than a block: the last group of eight may begin inside it.
  s.q = base, s.sum = s.q + rows * width, s.k = s.sum + rows * width, s.v = s.k + (kAttendBlock + 8) * width;
  s.score = s.v + kAttendBlock * width, s.most = s.score + kAttendBlock + 8, s.weight = s.most + rows;
  return s;
}

// score[i] = q . k[i] for cells [begin, end) of the block, eight at a time; what stands after `end` is masked later.
// A dot product is lane sums, then a fixed tree over lanes.
MINFER_INLINE void score_block(const float* q, const float* k, int64_t width, int begin, int end, float* score) {
  for (int i = begin; i < end; i += 8) {
    const float* cell = k + i * width;
    VF total[8];
    for (int u = 0; u < 8; ++u) total[u] = load<VF>(q) * load<VF>(cell + u * width);
#pragma GCC unroll 4
    for (int64_t d = kLanes; d < width; d += kLanes) {
      const VF x = load<VF>(q + d);
      for (int u = 0; u < 8; ++u) total[u] = fma(x, load<VF>(cell + u * width + d), total[u]);
    }
    F8 folded[8];
    for (int u = 0; u < 8; ++u) folded[u] = fold(total[u]);
    store(score + i, sums8(folded));
  }
}

// sum += weight[i] * v[i] for cells [begin, end), kVectors vectors of it at a time.
template <int kVectors>
MINFER_INLINE void weigh(const float* weight, const float* v, int64_t width, int begin, int end, float* sum) {
  VF total[kVectors];
  for (int d = 0; d < kVectors; ++d) total[d] = load<VF>(sum + d * kLanes);
#pragma GCC unroll 2
  for (int i = begin; i < end; ++i) {
    const VF p = splat<VF>(weight[i]);
    for (int d = 0; d < kVectors; ++d) total[d] = fma(p, load<VF>(v + i * width + d * kLanes), total[d]);
  }
  for (int d = 0; d < kVectors; ++d) store(sum + d * kLanes, total[d]);
}

MINFER_INLINE void weigh_block(const float* weight, const float* v, int64_t width, int begin, int end, float* sum) {
  constexpr int kMost = 64 / kLanes;
  int64_t d = 0;
  for (; d + kMost * kLanes <= width; d += kMost * kLanes) weigh<kMost>(weight, v + d, width, begin, end, sum + d);
  for (; d < width; d += kLanes) weigh<1>(weight, v + d, width, begin, end, sum + d);
}

// One query head meets cells [begin, end) of the block in scratch.
MINFER_INLINE void attend_row(const AttendTile& tile, const AttendScratch& s, int64_t row, int begin, int end) {
  float* sum = s.sum + row * s.width;
  score_block(s.q + row * s.width, s.k, s.width, begin, end, s.score);
  for (int i = 0; i < begin; ++i) s.score[i] = -INFINITY;
  for (int i = end; i < kAttendBlock; ++i) s.score[i] = -INFINITY;
  VF most = splat<VF>(-INFINITY);
  for (int i = 0; i < kAttendBlock; i += kLanes) {
    VF score = load<VF>(s.score + i);
    if (tile.softcap > 0.0f) {
      const VF capped = vtanh(score / tile.softcap) * tile.softcap;
      score = score == -INFINITY ? score : capped;
      store(s.score + i, score);
    }
    most = vmax(score, most);
  }
  const float highest = max(most);
  if (highest > s.most[row]) {
    const float factor = vexp(splat<VF>(s.most[row] - highest))[0];
    for (int64_t d = 0; d < s.width; d += kLanes) store(sum + d, load<VF>(sum + d) * factor);
    s.weight[row] *= factor;
    s.most[row] = highest;
  }
  VF weights{};
  for (int i = 0; i < kAttendBlock; i += kLanes) {
    const VF p = vexp(load<VF>(s.score + i) - s.most[row]);
    store(s.score + i, p);
    weights += p;
  }
  s.weight[row] += minfer::MINFER_ISA::sum(weights);
  weigh_block(s.score, s.v, s.width, begin, end, sum);
}

// What a query reads of the block of cells at `at`.
MINFER_INLINE Run in_block(Run run, int32_t at) {
  return {run.begin > at ? run.begin : at, run.end < at + kAttendBlock ? run.end : at + kAttendBlock};
}

// The rows of cells [begin, end), to be read soon: a stride of whole rows is not what the hardware foresees.
inline void fetch_rows(const AttendTile& tile, int32_t begin, int32_t end) {
  const KvRows& kv = *tile.kv;
  const int64_t head = kv.row_bytes * tile.head_dim / kv.n_values, from = tile.first_kv_head * head;
  for (int32_t cell = begin; cell < end; ++cell)
    for (int64_t line = from; line < from + tile.n_kv_heads * head; line += 64) {
      __builtin_prefetch(kv.k + cell * kv.row_bytes + line);
      __builtin_prefetch(kv.v + cell * kv.row_bytes + line);
    }
}

inline void attend(const AttendTile& tile, float* base) {
  const AttendScratch s = attend_scratch(tile, base);
  const KvRows& kv = *tile.kv;
  const int64_t d = tile.head_dim, rows = static_cast<int64_t>(tile.n_kv_heads) * tile.n_queries * tile.group;
  // A row is a query's head; those of a KV head lie together. f(row, query, head).
  const auto for_rows = [&](auto f) {
    int64_t row = 0;
    for (int h = 0; h < tile.n_kv_heads; ++h)
      for (int i = 0; i < tile.n_queries; ++i)
        for (int g = 0; g < tile.group; ++g) f(row++, i, (tile.first_kv_head + h) * tile.group + g);
  };
  for_rows([&](int64_t row, int i, int head) {
    float* q = s.q + row * s.width;
    const float* from = tile.q + i * tile.q_stride + head * d;
    for (int64_t j = 0; j < d; ++j) q[j] = from[j] * tile.scale;
    for (int64_t j = d; j < s.width; ++j) q[j] = 0.0f;
    s.most[row] = -INFINITY, s.weight[row] = 0.0f;
  });
  std::memset(s.sum, 0, 4 * rows * s.width);

  for (int r = 0; r < kRuns; ++r) {
    Run all{INT32_MAX, 0};  // of the queries' runs
    for (int i = 0; i < tile.n_queries; ++i) {
      const Run run = tile.windows[i].runs[r];
      if (run.begin >= run.end) continue;
      all = {run.begin < all.begin ? run.begin : all.begin, run.end > all.end ? run.end : all.end};
    }
    for (int32_t at = all.begin / kAttendBlock * kAttendBlock; at < all.end; at += kAttendBlock) {
      // The cells of this block that some query reads; no other is loaded.
      Run read{INT32_MAX, 0};
      for (int i = 0; i < tile.n_queries; ++i) {
        const Run run = in_block(tile.windows[i].runs[r], at);
        if (run.begin < run.end) read = {run.begin < read.begin ? run.begin : read.begin, run.end > read.end ? run.end : read.end};
      }
      fetch_rows(tile, at + kAttendBlock, all.end < at + 2 * kAttendBlock ? all.end : at + 2 * kAttendBlock);
      for (int h = 0; h < tile.n_kv_heads; ++h) {
        const int64_t first = (tile.first_kv_head + h) * d;
        const int64_t to = (read.begin - at) * s.width;
        unpack_kv(kv.format, kv.k, kv.row_bytes, first, d, read.begin, read.end, s.k + to, s.width);
        unpack_kv(kv.format, kv.v, kv.row_bytes, first, d, read.begin, read.end, s.v + to, s.width);
        for (int i = 0; i < tile.n_queries; ++i) {
          const Run run = in_block(tile.windows[i].runs[r], at);
          if (run.begin >= run.end) continue;
          const int64_t row = (static_cast<int64_t>(h) * tile.n_queries + i) * tile.group;
          for (int g = 0; g < tile.group; ++g) attend_row(tile, s, row + g, run.begin - at, run.end - at);
        }
      }
    }
  }

  for_rows([&](int64_t row, int i, int head) {
    if (tile.partial) {
      float* part = tile.partial + head * tile.partial_stride;
      part[0] = s.most[row], part[1] = s.weight[row];
      std::memcpy(part + 2, s.sum + row * s.width, 4 * d);
      return;
    }
    const float inverse = s.weight[row] == 0.0f ? 0.0f : 1.0f / s.weight[row];
    float* out = tile.out + i * tile.q_stride + head * d;
    for (int64_t j = 0; j < d; ++j) out[j] = s.sum[row * s.width + j] * inverse;
  });
}

// Joins n partial results (largest score, sum of weights, sums), in order. No rows at all give zeros.
inline void join_partials(const float* parts, int64_t n, int64_t stride, int head_dim, float* out) {
  float most = -INFINITY, weight = 0.0f;
  for (int64_t i = 0; i < n; ++i) most = parts[i * stride] > most ? parts[i * stride] : most;
  std::memset(out, 0, 4 * head_dim);
  for (int64_t i = 0; i < n; ++i) {
    const float* part = parts + i * stride;
    if (part[1] == 0.0f) continue;
    const float factor = vexp(splat<VF>(part[0] - most))[0];
    weight += part[1] * factor;
    for (int d = 0; d < head_dim; ++d) out[d] += part[2 + d] * factor;
  }
  if (weight != 0.0f)
    for (int d = 0; d < head_dim; ++d) out[d] /= weight;
}

}  // namespace minfer::MINFER_ISA
