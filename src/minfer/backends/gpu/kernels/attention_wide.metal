// Attention for few queries where loads are slow to come: eight simdgroups walk a window side by side. Each has rows, a
// maximum and sums of its own, keeps the next rows' loads under way, and meets the others once, at the end.
#include "window.h"

#define GROUPS 8     // simdgroups
#define AT_ONCE 4    // key rows that a lane has under way
#define MEETING 4096 // sums in threadgroup memory at a time

constant uint key_lanes = head_dim <= 64 ? 8 : head_dim <= 128 ? 16 : 32;  // that share a key row, 8 values each
constant uint value_lanes = 2 * key_lanes;                                 // likewise of a value row, 4 values each
constant uint tile = AT_ONCE * SIMD / key_lanes;                           // rows of a simdgroup at a time: 16, 8 or 4

// N sums over the lanes that share a key row: of v[0 ... N) of each lane, a lane gets the sum that `sum_of` numbers. Halves
// are exchanged, so N sums cost little more than one. N is a power of two, at most 8.
template <uint N> inline float row_sums(thread float (&v)[N], uint lane) {
    ushort apart = key_lanes / 2;
#pragma unroll
    for (uint n = N / 2; n > 0; n /= 2, apart /= 2) {
        const bool upper = (lane & apart) != 0;
#pragma unroll
        for (uint i = 0; i < n; i++) {
            const float keep = upper ? v[n + i] : v[i], give = upper ? v[i] : v[n + i];
            v[i] = keep + simd_shuffle_xor(give, apart);
        }
    }
    for (; apart > 0; apart /= 2) v[0] += simd_shuffle_xor(v[0], apart);
    return v[0];
}
template <uint N> inline uint sum_of(uint lane) {
    uint found = 0, apart = key_lanes / 2;
    for (uint n = N / 2; n > 0; n /= 2, apart /= 2) found += (lane & apart) ? n : 0;
    return found;
}

// Four values of a lane of each of its next rows, `at` and on; a row past the last is the last one again.
struct rows_read {
    device const int * window;
    uint query, row_bytes, first_value;
    int last;
};
inline device const uchar * row_at(device const uchar * rows, rows_read from, int row) {
    return rows + ulong(cell_of(from.window, from.query, min(row, from.last - 1))) * from.row_bytes;
}
// Keys: a lane has values 4 unit and head_dim / 2 + 4 unit of rows share, share + SIMD / key_lanes, ...
inline void load_keys(device const uchar * rows, rows_read from, int at, uint lane, thread uint4 (&a)[AT_ONCE], thread uint4 (&b)[AT_ONCE]) {
    const uint unit = lane % key_lanes, share = lane / key_lanes;
    for (uint r = 0; r < AT_ONCE; r++) {
        device const uchar * row = row_at(rows, from, at + int(share + SIMD / key_lanes * r));
        a[r] = b[r] = uint4(0);
        if (8 * unit < head_dim) {
            a[r] = kv_raw4(kv_format, row, from.first_value + 4 * unit);
            b[r] = kv_raw4(kv_format, row, from.first_value + head_dim / 2 + 4 * unit);
        }
    }
}
// Values: the tile's fours are numbered along its rows, value_lanes a row; a lane has lane, lane + SIMD, ...
inline void load_values(device const uchar * rows, rows_read from, int at, uint lane, thread uint4 (&v)[2 * AT_ONCE]) {
    for (uint i = 0; i < 2 * AT_ONCE; i++) {
        const uint unit = (lane + SIMD * i) % value_lanes;
        device const uchar * row = row_at(rows, from, at + int((lane + SIMD * i) / value_lanes));
        v[i] = uint4(0);
        if (4 * unit < head_dim) v[i] = kv_raw4(kv_format, row, from.first_value + 4 * unit);
    }
}
// Asks for the rows first ... last of a KV head, before those of this step are there.
inline void prefetch_rows(device const uchar * k_rows, device const uchar * v_rows, rows_read from, int first, uint tid) {
    const uint begin = kv_bytes(kv_format, from.first_value), n = kv_bytes(kv_format, head_dim);
    for (int row = first + int(tid / 2); row < from.last; row += int(GROUPS * SIMD / 2))
        for (uint i = 0; i < n; i += 128) prefetch(row_at(tid % 2 == 0 ? k_rows : v_rows, from, row) + begin + i);
}

// One threadgroup has G query heads of one KV head, one query and one split of its rows; arguments, grid and outputs are
// those of `attention` (attention.metal). 256 threads. Sums are f32: a row's dot product over a lane's values in order, then
// over the lanes by row_sums; a value's sum over a lane's rows in order, then over the lanes 16 apart that share it, then
// over the simdgroups in order, each weighed by its maximum.
template <uint G>
kernel void attention_wide(constant attn_args & a [[buffer(0)]], device const float * q [[buffer(1)]], device const int * positions [[buffer(2)]],
                           device const int * window [[buffer(3), function_constant(has_window)]], device const uchar * k_rows [[buffer(4)]],
                           device const uchar * v_rows [[buffer(5)]], device float * y [[buffer(6), function_constant(is_whole)]],
                           device float * parts [[buffer(7), function_constant(is_split)]], uint3 tg [[threadgroup_position_in_grid]],
                           uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                           uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float queries[G * 256];
    threadgroup float weights[GROUPS * 16 * G];  // (G, tile) of a simdgroup: exp(score - max)
    threadgroup float fades[GROUPS * G];
    threadgroup float meeting[MEETING], tops[GROUPS * G], totals[GROUPS * G];
    const uint group = a.n_head / a.n_kv_head, rounds = (group + G - 1) / G;
    const uint kv_head = tg.x / rounds, head0 = tg.x % rounds * G, query = tg.y;
    // Positions and windows are the step's inputs, which no launch writes; nor does one write rows of earlier steps, which
    // lie before the first query's where rows are in the order of positions.
    const int settled = layout == 0 ? positions[0] : 0;
    const window_rows w = rows_of(positions, window, query, a.sliding);
    const int block = GROUPS * tile, blocks = (w.last - w.first + block - 1) / block;
    const int rows = block * ((blocks + int(a.n_splits) - 1) / int(a.n_splits)), first = w.first + rows * int(tg.z);
    rows_read from;
    from.window = window;
    from.query = query;
    from.row_bytes = a.row_bytes;
    from.first_value = kv_head * head_dim;
    from.last = min(w.last, first + rows);
    prefetch_rows(k_rows, v_rows, from, first, tid);
    int at = first + int(tile * sg);
    uint4 ka[AT_ONCE], kb[AT_ONCE], v[2 * AT_ONCE];
    const bool early = at + int(tile) <= settled;
    if (early) {
        load_keys(k_rows, from, at, lane, ka, kb);
        load_values(v_rows, from, at, lane, v);
    }
    wait_for_those_before();
    if (!early && at < from.last) {
        load_keys(k_rows, from, at, lane, ka, kb);
        load_values(v_rows, from, at, lane, v);
    }
    device const float * own = q + ulong(query) * a.n_head * head_dim + (kv_head * group + head0) * head_dim;
    for (uint i = tid; i < G * head_dim; i += GROUPS * SIMD) queries[i] = head0 + i / head_dim < group ? own[i] * a.scale : 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Scores of head `mine`, of rows share, share + SIMD / key_lanes, ...: several lanes may have the same ones.
    const uint unit = lane % key_lanes, share = lane / key_lanes, mine = sum_of<G>(lane);
    const bool writes = lane % (key_lanes / G) == 0;
    float top = -INFINITY, total = 0;
    float4 sums[2][G];
    for (uint g = 0; g < G; g++) sums[0][g] = sums[1][g] = float4(0.0f);
    for (; at < from.last; at += block) {
        float dots[AT_ONCE][G];
        for (uint g = 0; g < G; g++) {
            float4 qa = float4(0.0f), qb = float4(0.0f);
            if (8 * unit < head_dim) {
                qa = *(threadgroup const float4 *)(queries + g * head_dim + 4 * unit);
                qb = *(threadgroup const float4 *)(queries + g * head_dim + head_dim / 2 + 4 * unit);
            }
            for (uint r = 0; r < AT_ONCE; r++) {
                const float4 x = kv_floats(kv_format, ka[r]), z = kv_floats(kv_format, kb[r]);
                float s = x.x * qa.x;
                s = fma(x.y, qa.y, s), s = fma(x.z, qa.z, s), s = fma(x.w, qa.w, s);
                s = fma(z.x, qb.x, s), s = fma(z.y, qb.y, s), s = fma(z.z, qb.z, s), s = fma(z.w, qb.w, s);
                dots[r][g] = s;
            }
        }
        if (at + block < from.last) load_keys(k_rows, from, at + block, lane, ka, kb);
        float scores[AT_ONCE], next = top;
        for (uint r = 0; r < AT_ONCE; r++) {
            float score = row_sums<G>(dots[r], lane);
            if (a.softcap > 0) score = soft_cap(score, a.softcap);
            scores[r] = at + int(share + SIMD / key_lanes * r) < from.last ? score : -INFINITY;
            next = max(next, scores[r]);
        }
        for (ushort apart = key_lanes; apart < SIMD; apart *= 2) next = max(next, simd_shuffle_xor(next, apart));
        const float fade = exp(top - next);  // next is finite: row `at` is there
        total *= fade;
        for (uint r = 0; r < AT_ONCE; r++) {
            const float weight = exp(scores[r] - next);
            total += weight;
            if (writes) weights[(tile * sg + share + SIMD / key_lanes * r) * G + mine] = weight;
        }
        if (writes && share == 0) fades[sg * G + mine] = fade;
        top = next;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint g = 0; g < G; g++) {
            sums[0][g] *= fades[sg * G + g];
            if (value_lanes > SIMD) sums[1][g] *= fades[sg * G + g];
        }
        for (uint i = 0; i < 2 * AT_ONCE; i++) {
            const float4 value = kv_floats(kv_format, v[i]);
            const uint half_ = value_lanes > SIMD ? i % 2 : 0;
            for (uint g = 0; g < G; g++) {  // a row past the last has a weight of zero
                const float weight = weights[(tile * sg + (lane + SIMD * i) / value_lanes) * G + g];
                sums[half_][g] = fma(float4(weight), value, sums[half_][g]);
            }
        }
        if (at + block < from.last) load_values(v_rows, from, at + block, lane, v);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (ushort apart = key_lanes; apart < SIMD; apart *= 2) total += simd_shuffle_xor(total, apart);
    if (writes && share == 0) {
        tops[sg * G + mine] = top;
        totals[sg * G + mine] = total;
    }
    if (value_lanes < SIMD)
        for (uint g = 0; g < G; g++)
            for (uint c = 0; c < 4; c++) sums[0][g][c] += simd_shuffle_xor(sums[0][g][c], 16);

    // The simdgroups' sums side by side (simdgroup, head, head_dim) for as many heads as there is room.
    const uint heads = min(G, MEETING / (GROUPS * head_dim));
    for (uint g0 = 0; g0 < G; g0 += heads) {
        for (uint half_ = 0; half_ < (value_lanes > SIMD ? 2 : 1); half_++) {
            const uint value = 4 * (lane + SIMD * half_);
            if (value < head_dim && lane < value_lanes)
                for (uint g = 0; g < G; g++)
                    if (g >= g0 && g < g0 + heads)
                        *(threadgroup float4 *)(meeting + (sg * heads + g - g0) * head_dim + value) = sums[half_][g];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = tid; i < heads * head_dim; i += GROUPS * SIMD) {
            const uint g = g0 + i / head_dim, value = i % head_dim, head = kv_head * group + head0 + g;
            if (g >= G || head0 + g >= group) continue;
            float most = -INFINITY, all = 0, s = 0;
            for (uint k = 0; k < GROUPS; k++) most = max(most, tops[k * G + g]);
            for (uint k = 0; k < GROUPS; k++) {
                const float part = totals[k * G + g];
                if (part == 0) continue;  // it had no rows; a NaN is kept
                const float weight = exp(tops[k * G + g] - most);
                all = fma(part, weight, all);
                s = fma(meeting[(k * heads + g - g0) * head_dim + value], weight, s);
            }
            if (is_whole) y[(ulong(query) * a.n_head + head) * head_dim + value] = all == 0 ? 0.0f : s / all;
            if (is_split) {
                const ulong part = part_of(a, query, head, tg.z);
                parts[part * head_dim + value] = s;
                if (value < 2) parts[pairs_from(a) + 2 * part + value] = value == 0 ? most : all;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
typedef decltype(attention_wide<1>) attention_wide_t;
template [[host_name("attention_wide_g1")]] kernel attention_wide_t attention_wide<1>;
template [[host_name("attention_wide_g2")]] kernel attention_wide_t attention_wide<2>;
template [[host_name("attention_wide_g4")]] kernel attention_wide_t attention_wide<4>;
template [[host_name("attention_wide_g8")]] kernel attention_wide_t attention_wide<8>;
