// softmax(q k^T) v for a tile of queries that share a KV head, over blocks of 32 cells with an online softmax.
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
  const int64_t width = round_up(tile.head_dim, kLanes), rows = static_cast<int64_t>(tile.n_queries) * tile.group;
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

inline void attend(const AttendTile& tile, float* base) {
  const AttendScratch s = attend_scratch(tile, base);
  const int64_t rows = static_cast<int64_t>(tile.n_queries) * tile.group;
  for (int i = 0; i < tile.n_queries; ++i)
    for (int h = 0; h < tile.group; ++h) {
      float* q = s.q + (i * tile.group + h) * s.width;
      const float* from = tile.q + i * tile.q_stride + h * tile.head_dim;
      for (int d = 0; d < tile.head_dim; ++d) q[d] = from[d] * tile.scale;
      for (int64_t d = tile.head_dim; d < s.width; ++d) q[d] = 0.0f;
    }
  std::memset(s.sum, 0, 4 * rows * s.width);
  for (int64_t row = 0; row < rows; ++row) s.most[row] = -INFINITY, s.weight[row] = 0.0f;

  for (int r = 0; r < kRuns; ++r) {
    int32_t first = INT32_MAX, last = 0;
    for (int i = 0; i < tile.n_queries; ++i) {
      const Run run = tile.windows[i].runs[r];
      if (run.begin >= run.end) continue;
      first = run.begin < first ? run.begin : first, last = run.end > last ? run.end : last;
    }
    for (int32_t at = first / kAttendBlock * kAttendBlock; at < last; at += kAttendBlock) {
      // The cells of this block that some query reads; no other is loaded.
      int32_t low = INT32_MAX, high = 0;
      for (int i = 0; i < tile.n_queries; ++i) {
        const Run run = tile.windows[i].runs[r];
        const int32_t b = run.begin > at ? run.begin : at;
        const int32_t e = run.end < at + kAttendBlock ? run.end : at + kAttendBlock;
        if (b < e) low = b < low ? b : low, high = e > high ? e : high;
      }
      for (int32_t cell = low; cell < high; ++cell) {
        unpack_kv(tile.kv->format, tile.kv->k + cell * tile.kv->row_bytes, tile.kv_at, tile.head_dim, s.k + (cell - at) * s.width);
        unpack_kv(tile.kv->format, tile.kv->v + cell * tile.kv->row_bytes, tile.kv_at, tile.head_dim, s.v + (cell - at) * s.width);
      }
      for (int i = 0; i < tile.n_queries; ++i) {
        const Run run = tile.windows[i].runs[r];
        const int32_t b = run.begin > at ? run.begin : at;
        const int32_t e = run.end < at + kAttendBlock ? run.end : at + kAttendBlock;
        if (b >= e) continue;
        for (int h = 0; h < tile.group; ++h) attend_row(tile, s, i * tile.group + h, b - at, e - at);
      }
    }
  }

  for (int i = 0; i < tile.n_queries; ++i)
    for (int h = 0; h < tile.group; ++h) {
      const int64_t row = i * tile.group + h;
      if (tile.partial) {
        float* part = tile.partial + h * tile.partial_stride;
        part[0] = s.most[row], part[1] = s.weight[row];
        std::memcpy(part + 2, s.sum + row * s.width, 4 * tile.head_dim);
        continue;
      }
      const float inverse = s.weight[row] == 0.0f ? 0.0f : 1.0f / s.weight[row];
      float* out = tile.out + i * tile.q_stride + h * tile.head_dim;
      for (int d = 0; d < tile.head_dim; ++d) out[d] = s.sum[row * s.width + d] * inverse;
    }
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
