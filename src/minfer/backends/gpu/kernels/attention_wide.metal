// Attention for few queries where loads are slow to come: a threadgroup of four simdgroups has 64 rows of the window at a
// time, so that all of their keys, then all of their values, are under way together.
#include "window.h"

#define BLOCK 64  // rows at a time
#define GROUPS 4  // simdgroups

// One threadgroup has G query heads of one KV head, one query and one split of its rows; arguments, grid and outputs are
// those of `attention` (attention.metal). 128 threads. Scores: four lanes a row, 8 values each of 32. Softmax: a simdgroup
// a head. Values: a thread has 8 consecutive values of some rows. Sums are f32: a row's dot product over a lane's values in
// order, then the four lanes'; the values' sums over a thread's rows in order, then over simdgroups and lanes in order.
template <uint G>
kernel void attention_wide(constant attn_args & a [[buffer(0)]], device const float * q [[buffer(1)]], device const int * positions [[buffer(2)]],
                           device const int * window [[buffer(3), function_constant(has_window)]], device const uchar * k_rows [[buffer(4)]],
                           device const uchar * v_rows [[buffer(5)]], device float * y [[buffer(6), function_constant(is_whole)]],
                           device float * parts [[buffer(7), function_constant(is_split)]], uint3 tg [[threadgroup_position_in_grid]],
                           uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                           uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float queries[(G < 4 ? 4 : G) * 256];  // G heads; at the end the threads' sums of some heads
    threadgroup float weights[G * BLOCK];              // scores, then exp(score - max)
    threadgroup float fades[G], tops[G], totals[G];
    const uint group = a.n_head / a.n_kv_head, rounds = (group + G - 1) / G;
    const uint kv_head = tg.x / rounds, head0 = tg.x % rounds * G, query = tg.y;
    const uint units = head_dim / 8, sharing = SIMD / units, unit = lane % units, share = lane / units;
    const window_rows w = rows_of(positions, window, query, a.sliding);
    const int blocks = (w.last - w.first + BLOCK - 1) / BLOCK, per_split = (blocks + int(n_splits) - 1) / int(n_splits);
    const int first = w.first + BLOCK * per_split * int(tg.z), last = min(w.last, first + BLOCK * per_split);
    const uint part_size = head_dim + 2;
    if (is_split && first >= last) {  // the combination reads no more of a split without rows; the same for all threads
        if (tid < 2 * G && head0 + tid / 2 < group)
            parts[((ulong(query) * a.n_head + kv_head * group + head0 + tid / 2) * n_splits + tg.z) * part_size + head_dim + tid % 2] =
                tid % 2 == 0 ? -INFINITY : 0.0f;
        return;
    }
    device const float * own = q + ulong(query) * a.n_head * head_dim + (kv_head * group + head0) * head_dim;
    for (uint i = tid; i < G * head_dim; i += GROUPS * SIMD) queries[i] = head0 + i / head_dim < group ? own[i] * a.scale : 0.0f;
    if (tid < G) {
        tops[tid] = -INFINITY;
        totals[tid] = 0;
    }
    float4 low[G], high[G];
    for (uint g = 0; g < G; g++) low[g] = high[g] = float4(0.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int block = first; block < last; block += BLOCK) {
        const int n = min(last - block, BLOCK);
        float dots[2][G];
        device const uchar * rows[2];
        for (uint r = 0; r < 2; r++) {
            // A row past the last reads the last one again; its score is not used.
            rows[r] = k_rows + ulong(cell_of(window, query, block + min(int(tid / 4 + 32 * r), n - 1))) * a.row_bytes;
            for (uint g = 0; g < G; g++) dots[r][g] = 0;
        }
#pragma unroll(4)
        for (uint i = 8 * (tid % 4); i < head_dim; i += 32) {
            float4 ka[2], kb[2];
            float d = 0;
            for (uint r = 0; r < 2; r++) kv_load8(kv_format, rows[r], kv_head * head_dim + i, true, d, ka[r], kb[r]);
            for (uint g = 0; g < G; g++) {
                const float4 qa = *(threadgroup const float4 *)(queries + g * head_dim + i);
                const float4 qb = *(threadgroup const float4 *)(queries + g * head_dim + i + 4);
                for (uint r = 0; r < 2; r++) {
                    float s = dots[r][g];
                    s = fma(ka[r].x, qa.x, s), s = fma(ka[r].y, qa.y, s), s = fma(ka[r].z, qa.z, s), s = fma(ka[r].w, qa.w, s);
                    s = fma(kb[r].x, qb.x, s), s = fma(kb[r].y, qb.y, s), s = fma(kb[r].z, qb.z, s), s = fma(kb[r].w, qb.w, s);
                    dots[r][g] = s;
                }
            }
        }
        for (uint r = 0; r < 2; r++)
            for (uint g = 0; g < G; g++) {
                float score = dots[r][g] + simd_shuffle_xor(dots[r][g], 1);
                score += simd_shuffle_xor(score, 2);
                if (a.softcap > 0) score = soft_cap(score, a.softcap);
                if (g % 4 == tid % 4) weights[g * BLOCK + tid / 4 + 32 * r] = int(tid / 4 + 32 * r) < n ? score : -INFINITY;
            }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint g = sg; g < G; g += GROUPS) {
            const float s = weights[g * BLOCK + lane], t = weights[g * BLOCK + lane + 32], before = tops[g];
            const float next = max(before, simd_max(max(s, t)));  // finite: a block has at least one row
            const float e = exp(s - next), f = exp(t - next), fade = exp(before - next), sum = simd_sum(e + f);
            weights[g * BLOCK + lane] = e;
            weights[g * BLOCK + lane + 32] = f;
            simdgroup_barrier(mem_flags::mem_threadgroup);  // every lane has read the head's maximum
            if (lane == 0) {
                fades[g] = fade;
                tops[g] = next;
                totals[g] = totals[g] * fade + sum;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint g = 0; g < G; g++) {
            low[g] *= fades[g];
            high[g] *= fades[g];
        }
        if (share < sharing) {
#pragma unroll(8)
            for (uint r = sg * sharing + share; r < BLOCK; r += GROUPS * sharing) {
                device const uchar * row = v_rows + ulong(cell_of(window, query, block + min(int(r), n - 1))) * a.row_bytes;
                float4 va, vb;
                float d = 0;
                kv_load8(kv_format, row, kv_head * head_dim + 8 * unit, true, d, va, vb);
                for (uint g = 0; g < G; g++) {
                    const float weight = weights[g * BLOCK + r];  // zero past the last row
                    low[g] = fma(float4(weight), va, low[g]);
                    high[g] = fma(float4(weight), vb, high[g]);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    // The threads' sums side by side (simdgroup, share, head_dim) for as many heads as there is room, added in order.
    const uint lanes = GROUPS * sharing, at_once = max(G / 4, 1u);
    for (uint g0 = 0; g0 < G; g0 += at_once) {
        if (share < sharing)
            for (uint g = g0; g < g0 + at_once; g++)
                for (uint i = 0; i < 4; i++) {
                    threadgroup float * to = queries + ((g - g0) * lanes + sg * sharing + share) * head_dim + 8 * unit;
                    to[i] = low[g][i];
                    to[4 + i] = high[g][i];
                }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = tid; i < at_once * head_dim; i += GROUPS * SIMD) {
            const uint g = g0 + i / head_dim, at = i % head_dim, head = kv_head * group + head0 + g;
            if (head0 + g >= group) continue;
            float s = 0;
            for (uint k = 0; k < lanes; k++) s += queries[((g - g0) * lanes + k) * head_dim + at];
            if (is_whole) y[(ulong(query) * a.n_head + head) * head_dim + at] = totals[g] == 0 ? 0.0f : s / totals[g];
            if (is_split) parts[((ulong(query) * a.n_head + head) * n_splits + tg.z) * part_size + at] = s;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (is_split && tid < 2 * G && head0 + tid / 2 < group)
        parts[((ulong(query) * a.n_head + kv_head * group + head0 + tid / 2) * n_splits + tg.z) * part_size + head_dim + tid % 2] =
            tid % 2 == 0 ? tops[tid / 2] : totals[tid / 2];
}
typedef decltype(attention_wide<1>) attention_wide_t;
template [[host_name("attention_wide_g1")]] kernel attention_wide_t attention_wide<1>;
template [[host_name("attention_wide_g2")]] kernel attention_wide_t attention_wide<2>;
template [[host_name("attention_wide_g4")]] kernel attention_wide_t attention_wide<4>;
template [[host_name("attention_wide_g8")]] kernel attention_wide_t attention_wide<8>;
