// Attention for many queries (causal and span windows): 8 queries of a head share tiles of 64 KV rows.
#include "kv.h"

constant uint head_dim [[function_constant(0)]];
constant uint kv_format [[function_constant(1)]];
constant uint layout [[function_constant(2)]];  // int32 values a query in the window input: 0 causal, 2 span
constant bool has_window = layout != 0;

#define QUERIES 8
#define TILE 64

// y (n_head * head_dim, n). Grid: x, query heads; y, groups of 8 queries. 32 threads, one simdgroup, which owns its 8
// outputs. Lane l works on query l / 4. Query i reads rows [first, last) of its window, as in attention.metal. Tiles and
// rows that none of the 8 reads are left out, so spans far apart cost their own rows.
//   scores (64, 8): q (head_dim, 8) by keys, 8 values of 64 rows at a time, summed in order of the values
//   weights: online softmax; a lane sums its 16 rows in order, then its query's four lanes are added
//   y: tiles in order; within a tile, 8 rows at a time by simdgroup matrices where every query reads all of them. Where
//   some query does not, each adds only rows that it reads, so that what lies in others (even NaN) cannot reach it.
kernel void attention_tiled(constant attn_args & a [[buffer(0)]], device const float * q [[buffer(1)]],
                            device const int * positions [[buffer(2)]],
                            device const int * window [[buffer(3), function_constant(has_window)]],
                            device const uchar * k_rows [[buffer(4)]], device const uchar * v_rows [[buffer(5)]],
                            device float * y [[buffer(6)]],
                            uint2 tg [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float queries[QUERIES * 256];
    threadgroup float sums[QUERIES * 256];
    threadgroup float scores[QUERIES * TILE];
    threadgroup float slab[TILE * 8];  // 8 values of 64 rows, of keys or of values
    const uint head = tg.x, kv_head = head / (a.n_head / a.n_kv_head), query0 = QUERIES * tg.y;
    const uint row = lane / 4, part = lane & 3, query = query0 + row;
    for (uint i = lane; i < QUERIES * head_dim; i += SIMD) {
        const uint n = query0 + i / head_dim;
        queries[i] = n < a.n_queries ? q[(ulong(n) * a.n_head + head) * head_dim + i % head_dim] * a.scale : 0.0f;
        sums[i] = 0;
    }
    int first = 0, last = 0;
    if (query < a.n_queries) {
        if (has_window) first = window[2 * query], last = max(window[2 * query + 1], first);
        else last = positions[query] + 1;
        if (a.sliding > 0) first = max(first, last - int(a.sliding));
    }
    // Rows that every one of the queries reads.
    const int all_first = simd_max(first), all_last = simd_min(last);
    float top = -INFINITY, total = 0;

    for (int start = 0;;) {
        // The next tile that a query reads; `start` is where the one before ended.
        const int base = simd_min(last > max(first, start) ? max(first, start) : INT_MAX) / TILE * TILE;
        if (base == INT_MAX / TILE * TILE) break;
        start = base + TILE;
        // Whether any query reads the lane's rows of the tile, base + lane and base + lane + 32.
        bool read[2] = {false, false};
        for (ushort i = 0; i < QUERIES; i++) {
            const int low = simd_shuffle(first, ushort(4 * i)), high = simd_shuffle(last, ushort(4 * i));
            for (uint half_ = 0; half_ < 2; half_++) {
                const int cell = base + int(lane + 32 * half_);
                read[half_] = read[half_] || (cell >= low && cell < high);
            }
        }
        simdgroup_float8x8 s[8];
        for (uint j = 0; j < 8; j++) s[j] = make_filled_simdgroup_matrix<float, 8>(0.0f);
        float d[2] = {0, 0};
        for (uint at = 0; at < head_dim; at += 8) {
            for (uint half_ = 0; half_ < 2; half_++) {
                const int cell = base + int(lane + 32 * half_);
                float4 x = float4(0.0f), z = float4(0.0f);
                if (read[half_])
                    kv_load8(kv_format, k_rows + ulong(uint(cell)) * a.row_bytes, kv_head * head_dim + at, at == 0, d[half_], x, z);
                for (uint i = 0; i < 4; i++) {
                    slab[(lane + 32 * half_) * 8 + i] = x[i];
                    slab[(lane + 32 * half_) * 8 + 4 + i] = z[i];
                }
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            simdgroup_float8x8 m, k;
            simdgroup_load(m, queries + at, head_dim);
            for (uint j = 0; j < 8; j++) {
                simdgroup_load(k, slab + 64 * j, 8, ulong2(0, 0), true);
                simdgroup_multiply_accumulate(s[j], m, k, s[j]);
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (uint j = 0; j < 8; j++) simdgroup_store(s[j], scores + 8 * j, TILE);
        simdgroup_barrier(mem_flags::mem_threadgroup);

        float best = -INFINITY;
        for (uint i = 0; i < 16; i++) {
            const int cell = base + int(16 * part + i);
            float score = scores[row * TILE + 16 * part + i];
            if (a.softcap > 0) score = soft_cap(score, a.softcap);
            score = cell >= first && cell < last ? score : -INFINITY;
            scores[row * TILE + 16 * part + i] = score;
            best = max(best, score);
        }
        best = max(best, simd_shuffle_xor(best, 1));
        best = max(best, simd_shuffle_xor(best, 2));
        const float next = max(top, best), fade = top > -INFINITY ? exp(top - next) : 0.0f;
        float sum = 0;
        for (uint i = 0; i < 16; i++) {
            const float score = scores[row * TILE + 16 * part + i];
            const float weight = score == -INFINITY ? 0.0f : exp(score - next);  // a NaN stays one
            scores[row * TILE + 16 * part + i] = weight;
            sum += weight;
        }
        sum += simd_shuffle_xor(sum, 1);
        sum += simd_shuffle_xor(sum, 2);
        total = total * fade + sum;
        top = next;
        for (uint i = part; i < head_dim; i += 4) sums[row * head_dim + i] *= fade;
        simdgroup_barrier(mem_flags::mem_threadgroup);

        for (uint at = 0; at < head_dim; at += 8) {
            for (uint half_ = 0; half_ < 2; half_++) {
                const int cell = base + int(lane + 32 * half_);
                float4 x = float4(0.0f), z = float4(0.0f);
                float scale = 0;
                if (read[half_])
                    kv_load8(kv_format, v_rows + ulong(uint(cell)) * a.row_bytes, kv_head * head_dim + at, true, scale, x, z);
                for (uint i = 0; i < 4; i++) {
                    slab[(lane + 32 * half_) * 8 + i] = x[i];
                    slab[(lane + 32 * half_) * 8 + 4 + i] = z[i];
                }
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            simdgroup_float8x8 o, p, v;
            simdgroup_load(o, sums + at, head_dim);
            for (uint j = 0; j < 8; j++) {  // `all_first` and `all_last` are one for the simdgroup
                if (base + int(8 * j) < all_first || base + int(8 * j + 8) > all_last) continue;
                simdgroup_load(p, scores + 8 * j, TILE);
                simdgroup_load(v, slab + 64 * j, 8);
                simdgroup_multiply_accumulate(o, p, v, o);
            }
            simdgroup_store(o, sums + at, head_dim);
            simdgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = 2 * part; i < 2 * part + 2; i++) {
                float r = sums[row * head_dim + at + i];
                for (uint j = 0; j < 8; j++) {
                    if (base + int(8 * j) >= all_first && base + int(8 * j + 8) <= all_last) continue;
                    for (uint c = 8 * j; c < 8 * j + 8; c++)
                        if (base + int(c) >= first && base + int(c) < last) r = fma(scores[row * TILE + c], slab[8 * c + i], r);
                }
                sums[row * head_dim + at + i] = r;
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (query < a.n_queries)
        for (uint i = part; i < head_dim; i += 4)
            y[(ulong(query) * a.n_head + head) * head_dim + i] = total == 0 ? 0.0f : sums[row * head_dim + i] / total;
}
