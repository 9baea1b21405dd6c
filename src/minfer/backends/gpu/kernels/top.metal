// The k largest values of a row and its log-sum-exp: parts of 1024 values each give their own, then the parts are merged.
// Order: larger first, the lower index first among equals; NaN and Inf count as +Inf, so they come before all numbers.
#include "common.h"

#define PART 1024      // values a part
#define MAX_PARTS 1024

constant constexpr uint NONE = 0xFFFFFFFFu;  // no index: after all others

// A part's record in `parts`: k indices, the bits of k values, the bits of the largest value m and of sum(exp(x - m)).
inline uint record(uint k) { return 2 * k + 2; }

// The simdgroup's best of (value, index), one a lane. Reached by the whole simdgroup.
inline uint best_index(float value, uint at, thread float & top) {
    top = simd_max(value);
    return simd_min(value == top ? at : NONE);
}

// parts (record(k), n_parts, n_rows) from x (n, n_rows). Grid: x, parts; y, rows. 32 threads.
// Lane l has values l, l + 32, ... of the part, in memory that no other lane touches. A sum runs over them in order,
// then over the lanes by simd_sum.
kernel void top_parts(constant top_args & a [[buffer(0)]], device const float * x [[buffer(1)]], device uint * parts [[buffer(2)]],
                      uint2 tg [[threadgroup_position_in_grid]], uint2 size [[threadgroups_per_grid]],
                      uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float keys[PART];
    const uint first = tg.x * PART, n = min(a.n - first, uint(PART));
    device const float * row = x + ulong(tg.y) * a.n + first;
    device uint * out = parts + (ulong(tg.y) * size.x + tg.x) * record(a.k);

    float most = -INFINITY;
    for (uint i = lane; i < n; i += SIMD) most = max(most, row[i]);  // NaN loses
    most = simd_max(most);
    float sum = 0;
    for (uint i = lane; i < n; i += SIMD) sum += row[i] == -INFINITY ? 0.0f : exp(row[i] - most);  // a NaN stays one
    sum = simd_sum(sum);
    if (lane == 0) {
        out[2 * a.k] = as_type<uint>(most);
        out[2 * a.k + 1] = as_type<uint>(sum);
    }

    float own = -INFINITY;
    uint at = NONE;
    for (uint i = lane; i < n; i += SIMD) {
        const float key = isfinite(row[i]) ? row[i] : INFINITY;
        keys[i] = key;
        if (key > own) own = key, at = i;
    }
    for (uint j = 0; j < a.k; j++) {
        float top;
        const uint winner = best_index(own, at, top);
        if (lane == 0) {
            out[j] = winner == NONE ? NONE : first + winner;
            out[a.k + j] = winner == NONE ? 0 : as_type<uint>(row[winner]);
        }
        if (at != winner || winner == NONE) continue;
        keys[at] = own = -INFINITY;  // taken; the lane's next best
        at = NONE;
        for (uint i = lane; i < n; i += SIMD)
            if (keys[i] > own) own = keys[i], at = i;
    }
}

// y (2k + 1, n_rows): indices, values' bits, log-sum-exp's bits, from parts (record(k), n_parts, n_rows). Grid: x, rows.
// 32 threads. Lane l has parts l, l + 32, ...: where it is in each is in memory that no other lane touches.
kernel void top_merge(constant top_args & a [[buffer(0)]], device const uint * parts [[buffer(1)]], device uint * y [[buffer(2)]],
                      uint token [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup ushort taken[MAX_PARTS];
    const uint n_parts = (a.n + PART - 1) / PART, size = record(a.k);
    device const uint * own = parts + ulong(token) * n_parts * size;
    device uint * out = y + ulong(token) * (2 * a.k + 1);

    float most = -INFINITY;
    for (uint p = lane; p < n_parts; p += SIMD) {
        most = max(most, as_type<float>(own[p * size + 2 * a.k]));
        taken[p] = 0;
    }
    most = simd_max(most);
    float sum = 0;
    for (uint p = lane; p < n_parts; p += SIMD) {
        const float part = as_type<float>(own[p * size + 2 * a.k + 1]);
        if (part != 0) sum += part * exp(as_type<float>(own[p * size + 2 * a.k]) - most);
    }
    sum = simd_sum(sum);
    if (lane == 0) out[2 * a.k] = as_type<uint>(most + log(sum));

    float best = 0;
    uint at = NONE, from = NONE;  // the lane's best: its index, and the part that it is in
    bool stale = true;
    for (uint j = 0; j < a.k; j++) {
        if (stale) {
            best = -INFINITY;
            at = from = NONE;
            for (uint p = lane; p < n_parts; p += SIMD) {
                if (taken[p] == a.k || own[p * size + taken[p]] == NONE) continue;
                const float value = as_type<float>(own[p * size + a.k + taken[p]]);
                const float key = isfinite(value) ? value : INFINITY;
                if (key > best) best = key, at = own[p * size + taken[p]], from = p;  // parts are in order of index
            }
        }
        float top;
        const uint winner = best_index(best, at, top);
        stale = at == winner && at != NONE;
        if (!stale) continue;
        out[j] = at;
        out[a.k + j] = own[from * size + a.k + taken[from]];
        taken[from]++;
    }
}
