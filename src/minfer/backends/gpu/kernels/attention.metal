// Attention of each query over its window, split over the window's rows, and the combination of the splits.
// Any head dim that is a multiple of 8 up to 256, every window layout and KV format; KV rows are read as they lie.
#include "window.h"

#define MAX_SPLITS 128  // as in lower/choose.py
#define COMBINERS 256   // threads of the combination

// One threadgroup (one simdgroup) has G query heads of one KV head, one query and one split of its rows.
// Grid: x, KV heads times groups of G heads; y, queries; z, splits. It owns its heads' outputs: y (n_head * head_dim, n)
// when there is one split, else a part in `parts`: head_dim values, a maximum and a sum (window.h says where).
// Rows go in blocks of 32. Scores: a lane has a row and reads its key once for all G heads. Values: 8 consecutive values
// a lane; head_dim / 8 lanes read a row, the others the next rows. Sums are f32: a row's dot product in order of its
// values; the values' sums over the rows of a lane in order, then over the lanes that share them in order.
template <uint G>
kernel void attention(constant attn_args & a [[buffer(0)]], device const float * q [[buffer(1)]], device const int * positions [[buffer(2)]],
                      device const int * window [[buffer(3), function_constant(has_window)]], device const uchar * k_rows [[buffer(4)]],
                      device const uchar * v_rows [[buffer(5)]], device float * y [[buffer(6), function_constant(is_whole)]],
                      device float * parts [[buffer(7), function_constant(is_split)]], uint3 tg [[threadgroup_position_in_grid]],
                      uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float queries[G * 256];  // G heads; later the sums of the lanes that share values
    threadgroup float weights[G * 32];   // a block's rows: exp(score - max)
    const uint group = a.n_head / a.n_kv_head, rounds = (group + G - 1) / G;
    const uint kv_head = tg.x / rounds, head0 = tg.x % rounds * G;  // head0: the first of G heads within its group
    const uint query = tg.y, units = head_dim / 8, sharing = SIMD / units, unit = lane % units, share = lane / units;
    device const float * own = q + ulong(query) * a.n_head * head_dim + (kv_head * group + head0) * head_dim;
    for (uint i = lane; i < G * head_dim; i += SIMD) queries[i] = head0 + i / head_dim < group ? own[i] * a.scale : 0.0f;
    simdgroup_barrier(mem_flags::mem_threadgroup);

    const window_rows w = rows_of(positions, window, query, a.sliding);
    const int blocks = (w.last - w.first + 31) / 32, per_split = (blocks + int(a.n_splits) - 1) / int(a.n_splits);
    const int first = w.first + 32 * per_split * int(tg.z), last = min(w.last, first + 32 * per_split);

    float top[G], total[G];
    float4 low[G], high[G];
    for (uint g = 0; g < G; g++) {
        top[g] = -INFINITY;
        total[g] = 0;
        low[g] = high[g] = float4(0.0f);
    }
    for (int block = first; block < last; block += 32) {
        const bool live = block + int(lane) < last;
        const uint cell = live ? cell_of(window, query, block + int(lane)) : 0;
        float4 dots[G];
        for (uint g = 0; g < G; g++) dots[g] = float4(0.0f);
        if (live) {
            device const uchar * row = k_rows + ulong(cell) * a.row_bytes;
            float d = 0;
            for (uint i = 0; i < head_dim; i += 8) {
                float4 ka, kb;
                kv_load8(kv_format, row, kv_head * head_dim + i, i == 0, d, ka, kb);
                for (uint g = 0; g < G; g++) {
                    threadgroup const float4 * qs = (threadgroup const float4 *)(queries + g * head_dim + i);
                    dots[g] = fma(kb, qs[1], fma(ka, qs[0], dots[g]));
                }
            }
        }
        for (uint g = 0; g < G; g++) {
            float score = (dots[g].x + dots[g].y) + (dots[g].z + dots[g].w);
            if (a.softcap > 0) score = soft_cap(score, a.softcap);
            if (!live) score = -INFINITY;
            const float next = max(top[g], simd_max(score));  // finite: a block has at least one row
            const float weight = exp(score - next), fade = exp(top[g] - next);
            total[g] = total[g] * fade + simd_sum(weight);
            top[g] = next;
            low[g] *= fade;
            high[g] *= fade;
            weights[g * 32 + lane] = weight;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        const int n = min(last - block, 32);
        if (share < sharing)
            for (int r = int(share); r < n; r += int(sharing)) {
                device const uchar * row = v_rows + ulong(cell_of(window, query, block + r)) * a.row_bytes;
                float4 va, vb;
                float d = 0;
                kv_load8(kv_format, row, kv_head * head_dim + 8 * unit, true, d, va, vb);
                for (uint g = 0; g < G; g++) {
                    const float weight = weights[g * 32 + r];
                    low[g] = fma(float4(weight), va, low[g]);
                    high[g] = fma(float4(weight), vb, high[g]);
                }
            }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    // The lanes that share values: their sums side by side (sharing, head_dim), added in order, head by head.
    for (uint g = 0; g < G; g++) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (share < sharing)
            for (uint i = 0; i < 4; i++) {
                queries[share * head_dim + 8 * unit + i] = low[g][i];
                queries[share * head_dim + 8 * unit + 4 + i] = high[g][i];
            }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        const uint head = kv_head * group + head0 + g;
        if (head0 + g >= group) continue;  // the same for every lane
        for (uint i = lane; i < head_dim; i += SIMD) {
            float s = 0;
            for (uint k = 0; k < sharing; k++) s += queries[k * head_dim + i];
            if (is_whole) y[(ulong(query) * a.n_head + head) * head_dim + i] = total[g] == 0 ? 0.0f : s / total[g];
            if (is_split) parts[part_of(a, query, head, tg.z) * head_dim + i] = s;
        }
        if (is_split && lane < 2) parts[pairs_from(a) + 2 * part_of(a, query, head, tg.z) + lane] = lane == 0 ? top[g] : total[g];
    }
}
typedef decltype(attention<1>) attention_t;
template [[host_name("attention_g1")]] kernel attention_t attention<1>;
template [[host_name("attention_g2")]] kernel attention_t attention<2>;
template [[host_name("attention_g4")]] kernel attention_t attention<4>;
template [[host_name("attention_g8")]] kernel attention_t attention<8>;

// y (head_dim, n_head, n) from parts (see window.h). Grid: x, heads; y, queries. 256 threads.
// A thread has four values and every runs-th split, in order; then the runs are added in order. Splits without rows have a
// sum of 0 and count nothing: what they left is not read. A query without rows gives zeros. A NaN is kept: it is no 0.
kernel void attention_combine(constant attn_args & a [[buffer(0)]], device const float * parts [[buffer(1)]],
                              device float * y [[buffer(2)]], uint2 tg [[threadgroup_position_in_grid]],
                              uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                              uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float weights[MAX_SPLITS];  // of each split: exp(its max - the max), 0 where it has no rows
    threadgroup float4 sums[COMBINERS];
    const ulong part = part_of(a, tg.y, tg.x, 0);
    device const float * pairs = parts + pairs_from(a) + 2 * part;
    float tops[MAX_SPLITS / SIMD], totals[MAX_SPLITS / SIMD], top = -INFINITY, total = 0;
    for (uint i = 0; i < MAX_SPLITS / SIMD; i++) {  // every simdgroup for itself
        const uint s = lane + SIMD * i;
        tops[i] = s < a.n_splits ? pairs[2 * s] : -INFINITY;
        totals[i] = s < a.n_splits ? pairs[2 * s + 1] : 0.0f;
        top = max(top, tops[i]);
    }
    top = simd_max(top);
    for (uint i = 0; i < MAX_SPLITS / SIMD; i++) {
        const float weight = totals[i] != 0 ? exp(tops[i] - top) : 0.0f;
        if (totals[i] != 0) total += totals[i] * weight;
        if (sg == 0) weights[lane + SIMD * i] = weight;
    }
    total = simd_sum(total);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint units = head_dim / 4, runs = COMBINERS / units, unit = tid % units, run = tid / units;
    float4 sum = float4(0.0f);
    if (run < runs)
        for (uint first = run; first < a.n_splits; first += 4 * runs) {
            float4 values[4];
            float scales[4];
            for (uint i = 0; i < 4; i++) {
                const uint s = first + i * runs;
                scales[i] = s < a.n_splits ? weights[s] : 0.0f;
                values[i] = scales[i] != 0 ? load4(parts + (part + s) * head_dim + 4 * unit) : float4(0.0f);
            }
            for (uint i = 0; i < 4; i++) sum = fma(values[i], float4(scales[i]), sum);
        }
    sums[tid] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid >= units) return;
    for (uint r = 1; r < runs; r++) sum += sums[tid + r * units];
    for (uint i = 0; i < 4; i++) y[(ulong(tg.y) * a.n_head + tg.x) * head_dim + 4 * tid + i] = total == 0 ? 0.0f : sum[i] / total;
}
