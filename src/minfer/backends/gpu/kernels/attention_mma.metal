// Attention for many queries (causal and span windows) by NVIDIA's tensor cores: the query heads of a KV head share tiles of
// its rows. Products are of f16 where KV rows are f16, else of tf32, which has f32's range; sums are f32.
#include "kv.h"
#include "mma.h"

constant uint head_dim [[function_constant(0)]];
constant uint kv_format [[function_constant(1)]];
constant uint layout [[function_constant(2)]];   // int32 values a query in the window input: 0 causal, 2 span
constant uint sharing [[function_constant(3)]];  // simdgroups that share rows, each with its part of every tile's keys: 1, 2
constant bool has_window = layout != 0;
constant bool is_half = kv_format == KV_F16;

constant constexpr uint ROWS = 64;  // a threadgroup's rows, 16 a simdgroup
constant constexpr float LOG2E = 1.44269504f;
constant uint THREADS = ROWS / 16 * SIMD * sharing;

// A tile of KEYS rows of WIDTH values (head_dim, then zeros) in words of threadgroup memory, one of keys, one of values.
//   keys    row after row; a word has one value in tf32, two in f16
//   values  GROUP rows together: of each value two words, in tf32 of one row each, in f16 of two
// Strides let the lanes of a fragment read different banks.
constant uint WIDTH = (head_dim + 15) / 16 * 16;
constant uint KEYS_F16 = head_dim <= 64 ? 64 : head_dim <= 128 ? 32 : 16;
constant uint KEYS_TF32 = head_dim <= 64 ? 48 : head_dim <= 128 ? 16 : 8;
constant uint KEYS = is_half ? KEYS_F16 : KEYS_TF32;
constant uint OWN = KEYS / sharing;  // keys of a simdgroup
constant uint GROUP = is_half ? 4 : 2;
constant uint K_STRIDE = is_half ? WIDTH / 2 | 8 : WIDTH + 8;
constant uint V_STRIDE = 2 * WIDTH + 8;
constant uint CHUNKS = is_half ? WIDTH / 16 : WIDTH / 8;  // of values that one mma multiplies

// A thread loads and stores units: four values of GROUP rows. In f16 a uint4 has two rows of a unit.
constant uint UNITS = KEYS / GROUP * (WIDTH / 4);
constant uint LOADS = (UNITS + THREADS - 1) / THREADS;  // up to 3
constant constexpr uint PART = 6;

// A thread's part of the tile whose rows begin at `rows`: zeros in rows whose bit of `read` is 0 and past head_dim.
inline void load_rows(device const uchar * rows, uint row_bytes, uint first, uint2 read, bool whole, uint tid,
                      thread uint4 (&part)[PART]) {
#pragma unroll
    for (uint i = 0; i < LOADS; i++) {
        const uint unit = tid + THREADS * i, key = unit / (WIDTH / 4) * GROUP, at = unit % (WIDTH / 4) * 4;
        part[2 * i] = part[2 * i + 1] = uint4(0);
        if (unit >= UNITS || at >= head_dim) continue;
        for (uint r = 0; r < GROUP; r++) {
            if (!whole && ((key + r < 32 ? read.x : read.y) >> (key + r & 31) & 1) == 0) continue;
            device const uchar * row = rows + ulong(key + r) * row_bytes;
            if (is_half) {
                const uint2 v = *(device const uint2 *)(row + 2 * (first + at));
                part[2 * i + r / 2][r % 2 * 2] = v.x;
                part[2 * i + r / 2][r % 2 * 2 + 1] = v.y;
            } else {
                part[2 * i + r % 2] = as_type<uint4>(kv_load4(kv_format, row, first + at));
            }
        }
    }
}
inline uint4 rounded(uint4 v) {
    const float4 x = as_type<float4>(v);
    return as_type<uint4>(float4(to_tf32(x.x), to_tf32(x.y), to_tf32(x.z), to_tf32(x.w)));
}
// In f16, rows 4t ... 4t + 3 of 16 go where a lane has its scores (columns 2t and 2t + 1 of two products), so that these are
// of rows side by side, as the values are.
inline void store_keys(threadgroup uint * tile, uint tid, thread const uint4 (&part)[PART]) {
#pragma unroll
    for (uint i = 0; i < LOADS; i++) {
        const uint unit = tid + THREADS * i, key = unit / (WIDTH / 4) * GROUP, at = unit % (WIDTH / 4) * 4;
        if (unit >= UNITS) continue;
        const uint4 a = part[2 * i], b = part[2 * i + 1];
        if (is_half) {
            threadgroup uint * to = tile + (key / 16 * 16 + key % 16 / 2) * K_STRIDE + at / 2;
            *(threadgroup uint2 *)to = a.xy;
            *(threadgroup uint2 *)(to + K_STRIDE) = a.zw;
            *(threadgroup uint2 *)(to + 8 * K_STRIDE) = b.xy;
            *(threadgroup uint2 *)(to + 9 * K_STRIDE) = b.zw;
        } else {
            *(threadgroup uint4 *)(tile + key * K_STRIDE + at) = rounded(a);
            *(threadgroup uint4 *)(tile + (key + 1) * K_STRIDE + at) = rounded(b);
        }
    }
}
inline uint low_halves(uint a, uint b) { return (a & 0xFFFFu) | b << 16; }
inline uint high_halves(uint a, uint b) { return a >> 16 | (b & 0xFFFF0000u); }
inline void store_values(threadgroup uint * tile, uint tid, thread const uint4 (&part)[PART]) {
#pragma unroll
    for (uint i = 0; i < LOADS; i++) {
        const uint unit = tid + THREADS * i;
        if (unit >= UNITS) continue;
        uint4 a = part[2 * i], b = part[2 * i + 1];
        threadgroup uint4 * to = (threadgroup uint4 *)(tile + unit / (WIDTH / 4) * V_STRIDE + unit % (WIDTH / 4) * 8);
        if (is_half) {
            to[0] = uint4(low_halves(a.x, a.z), low_halves(b.x, b.z), high_halves(a.x, a.z), high_halves(b.x, b.z));
            to[1] = uint4(low_halves(a.y, a.w), low_halves(b.y, b.w), high_halves(a.y, a.w), high_halves(b.y, b.w));
        } else {
            a = rounded(a), b = rounded(b);
            to[0] = uint4(a.x, b.x, a.y, b.y);
            to[1] = uint4(a.z, b.z, a.w, b.w);
        }
    }
}
// Value `at` of row `key` of a tile of values.
inline float value_at(threadgroup const uint * tile, uint key, uint at) {
    tile += key / GROUP * V_STRIDE + 2 * at;
    if (!is_half) return as_type<float>(tile[key % 2]);
    const half2 both = as_type<half2>(tile[key % 4 / 2]);
    return key % 2 == 0 ? float(both.x) : float(both.y);
}
inline bool not_finite(uint word) {
    if (!is_half) return (word & 0x7F800000u) == 0x7F800000u;
    return (word & 0x7C00u) == 0x7C00u || (word & 0x7C000000u) == 0x7C000000u;
}
// Whether a simdgroup's parts of a tile of values have a NaN or Inf. Reached by the whole simdgroup.
inline void store_odd(threadgroup uint * odd, uint sg, uint lane, thread const uint4 (&part)[PART]) {
    bool found = false;
#pragma unroll
    for (uint i = 0; i < 2 * LOADS; i++)
        found = found || not_finite(part[i].x) || not_finite(part[i].y) || not_finite(part[i].z) || not_finite(part[i].w);
    found = simd_any(found);
    if (lane == 0) odd[sg] = found;
}
inline uint finite_part(uint word) {  // zero for a value that is not
    if (!is_half) return not_finite(word) ? 0 : word;
    return word & (((word & 0x7C00u) == 0x7C00u ? 0u : 0xFFFFu) | ((word & 0x7C000000u) == 0x7C000000u ? 0u : 0xFFFF0000u));
}

// The rows that a threadgroup's queries read: each has a span [first, last), of which a lane knows two.
struct read_rows {
    int first[2], last[2];
    int lowest, highest;      // that any of them reads
    int all_first, all_last;  // that all of them read
};
inline bool all_read(read_rows r, int base) { return base >= r.all_first && base + int(KEYS) <= r.all_last; }
// The first tile from row `start` on that a query reads, INT_MAX if none does. Causal spans have no gaps between them.
inline int next_tile(read_rows r, int start) {
    int at = r.highest > max(r.lowest, start) ? max(r.lowest, start) : INT_MAX;
    if (has_window) {
        at = INT_MAX;
        for (uint h = 0; h < 2; h++)
            if (r.last[h] > max(r.first[h], start)) at = min(at, max(r.first[h], start));
        at = simd_min(at);
    }
    return at == INT_MAX ? at : at / int(KEYS) * int(KEYS);
}
// A thread's part of the tile at row `base`, of values `first` and on. Reached by the whole simdgroup.
inline void load_tile(device const uchar * rows, uint row_bytes, uint first, threadgroup const int * spans, uint n_spans,
                      read_rows r, int base, uint tid, thread uint4 (&part)[PART]) {
    rows += ulong(uint(base)) * row_bytes;
    if (all_read(r, base)) {
        load_rows(rows, row_bytes, first, uint2(0), true, tid, part);
        return;
    }
    uint2 read = uint2(0);
    for (uint i = 0; i < (KEYS + SIMD - 1) / SIMD; i++) {
        const int cell = base + int(tid % SIMD + SIMD * i);
        bool any = false;
        for (uint n = 0; n < n_spans; n++) any = any || (cell >= spans[2 * n] && cell < spans[2 * n + 1]);
        read[i] = uint(simd_vote::vote_t(simd_ballot(any)));
    }
    load_rows(rows, row_bytes, first, read, false, tid, part);
}

// y (n_head * head_dim, n). Grid: x, tiles of 64 rows; y, KV heads. A row is a query with one of the KV head's query heads:
// row i is head i % group of query i / group. 128 threads times `sharing`. Simdgroup s owns rows 16 (s % 4) and on, with its
// part of each tile's keys; of these a lane has rows g = lane / 4 and g + 8. Query i reads rows [first, last) of its window, as
// in attention.metal. Tiles and rows of KV that none of a threadgroup's queries reads are left out.
//   scores (16, OWN): q (16, head_dim) by keys, 8 or 16 values at a time in order. Both have a row's values in an order that
//     lets a lane read neighbours: what mma.h has at t and t + 4 (f16: 2t, 2t + 1, 2t + 8, 2t + 9) is at 2t and 2t + 1 (4t ...
//     4t + 3). f16 queries are divided by a power of two a row, so that they stay in f16's range.
//   weights: online softmax in powers of two, rounded; their sum is a product of them with ones
//   y (16, head_dim): weights by values, tiles in order, in a tile 8 or 16 keys at a time; of 16 columns a lane has
//     4t ... 4t + 3. Where simdgroups share rows, their sums are added at the end.
[[max_total_threads_per_threadgroup(256)]]
kernel void attention_mma(constant attn_args & a [[buffer(0)]], device const float * q [[buffer(1)]],
                          device const int * positions [[buffer(2)]],
                          device const int * window [[buffer(3), function_constant(has_window)]],
                          device const uchar * k_rows [[buffer(4)]], device const uchar * v_rows [[buffer(5)]],
                          device float * y [[buffer(6)]], uint2 tg [[threadgroup_position_in_grid]],
                          uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                          uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup uint keys[3456];      // KEYS * K_STRIDE: 48 * 72 at most
    threadgroup uint values[3264];    // KEYS / GROUP * V_STRIDE: 24 * 136 at most
    threadgroup int spans[2 * ROWS];  // [first, last) of the threadgroup's queries
    threadgroup uint odd[8];          // by simdgroup, whether it stored a NaN or Inf among the values
    const uint tid = thread_ % THREADS;  // as it is; a compiler then sees how many units there are
    const uint group = a.n_head / a.n_kv_head, kv_head = tg.y, row0 = ROWS * tg.x, n_rows = a.n_queries * group;
    const uint query0 = row0 / group, n_spans = (min(row0 + ROWS, n_rows) - 1) / group - query0 + 1;
    const uint g = lane / 4, t = lane & 3, own_row = 16 * (sg % 4), own_key = OWN * (sg / 4);
    if (tid < n_spans) {
        const uint query = query0 + tid;
        int first = 0, last = 0;
        if (has_window) first = window[2 * query], last = max(window[2 * query + 1], first);
        else last = positions[query] + 1;
        if (a.sliding > 0) first = max(first, last - int(a.sliding));
        spans[2 * tid] = first;
        spans[2 * tid + 1] = last;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    read_rows r;
    for (uint h = 0; h < 2; h++) {
        const uint i = min(lane + SIMD * h, n_spans - 1);
        r.first[h] = spans[2 * i];
        r.last[h] = spans[2 * i + 1];
    }
    r.lowest = simd_min(min(r.first[0], r.first[1]));
    r.highest = simd_max(max(r.last[0], r.last[1]));
    r.all_first = simd_max(max(r.first[0], r.first[1]));
    r.all_last = simd_min(min(r.last[0], r.last[1]));

    // The lane's two rows. A row past the last reads what the last one does; it is not stored.
    int first[2], last[2];
    float scale[2], unit[2] = {1.0f, 1.0f};  // of queries, and of the scores that come of them
    device const float * q_row[2];
    for (uint h = 0; h < 2; h++) {
        const uint row = min(row0 + own_row + g + 8 * h, n_rows - 1), query = row / group;
        first[h] = spans[2 * (query - query0)];
        last[h] = spans[2 * (query - query0) + 1];
        q_row[h] = q + (ulong(query) * a.n_head + kv_head * group + row % group) * head_dim;
        scale[h] = a.softcap > 0 ? a.scale : a.scale * LOG2E;
    }
    // Rows of KV that all, and that any of the simdgroup's rows read.
    const int own_first = simd_max(max(first[0], first[1])), own_last = simd_min(min(last[0], last[1]));
    const int any_first = simd_min(min(first[0], first[1])), any_last = simd_max(max(last[0], last[1]));

    if (is_half)
        for (uint h = 0; h < 2; h++) {
            float largest = 0;
#pragma unroll
            for (uint c = 0; c < CHUNKS; c++) {
                if (16 * c + 4 * t >= head_dim) continue;
                const float4 x = fabs(load4(q_row[h] + 16 * c + 4 * t) * scale[h]);
                largest = max(largest, max(max(x.x, x.y), max(x.z, x.w)));
            }
            largest = max(largest, simd_shuffle_xor(largest, 1));
            largest = max(largest, simd_shuffle_xor(largest, 2));
            // 2^-60 ... 2^126: smaller queries make no difference to a score, and its inverse is neither zero nor infinite
            const uint power = min(max(as_type<uint>(largest) & 0x7F800000u, 67u << 23), 253u << 23);
            unit[h] = as_type<float>(power);
            scale[h] *= as_type<float>((254u << 23) - power);
        }
    uint4 queries[32];
#pragma unroll
    for (uint c = 0; c < CHUNKS; c++) {
        queries[c] = uint4(0);
        if (is_half) {
            if (16 * c + 4 * t >= head_dim) continue;
            const float4 x = load4(q_row[0] + 16 * c + 4 * t) * scale[0], z = load4(q_row[1] + 16 * c + 4 * t) * scale[1];
            queries[c] = uint4(pack_halves(x.x, x.y), pack_halves(z.x, z.y), pack_halves(x.z, x.w), pack_halves(z.z, z.w));
        } else if (8 * c < head_dim) {
            const float2 x = *(device const float2 *)(q_row[0] + 8 * c + 2 * t) * scale[0];
            const float2 z = *(device const float2 *)(q_row[1] + 8 * c + 2 * t) * scale[1];
            queries[c] = rounded(as_type<uint4>(float4(x.x, z.x, x.y, z.y)));
        }
    }

    float4 sums[32];
#pragma unroll
    for (uint j = 0; j < WIDTH / 8; j++) sums[j] = float4(0.0f);
    float4 total = float4(0.0f);  // as if of values that are all ones
    float top[2] = {-INFINITY, -INFINITY};

    const uint at_head = kv_head * head_dim;
    int base = next_tile(r, 0);
    uint4 k_part[PART], v_part[PART];
    if (base != INT_MAX) {
        load_tile(k_rows, a.row_bytes, at_head, spans, n_spans, r, base, tid, k_part);
        load_tile(v_rows, a.row_bytes, at_head, spans, n_spans, r, base, tid, v_part);
        store_keys(keys, tid, k_part);
        store_values(values, tid, v_part);
        store_odd(odd, sg, lane, v_part);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    while (base != INT_MAX) {
        const int next = next_tile(r, base + int(KEYS));
        if (next != INT_MAX) {  // on its way while this tile is multiplied
            load_tile(k_rows, a.row_bytes, at_head, spans, n_spans, r, next, tid, k_part);
            load_tile(v_rows, a.row_bytes, at_head, spans, n_spans, r, next, tid, v_part);
        }
        const bool whole = all_read(r, base);   // the same for the threadgroup
        const int begin = base + int(own_key);  // these for the simdgroup
        const bool own_whole = begin >= own_first && begin + int(OWN) <= own_last;
        bool any_odd = false;
        for (uint i = 0; i < THREADS / SIMD && !whole; i++) any_odd = any_odd || odd[i] != 0;
        if (any_odd) {
            // A weight of 0 does not hide NaN or Inf from a row that does not read it. Rows that do read it add it here.
            for (uint key = own_key; key < own_key + OWN; key++) {
                const int cell = base + int(key);
#pragma unroll
                for (uint c = 0; c < WIDTH / 4; c++) {
                    const float v = value_at(values, key, 16 * (c / 4) + 4 * t + c % 4);
                    if (isfinite(v)) continue;
                    for (uint h = 0; h < 2; h++)
                        if (cell >= first[h] && cell < last[h]) sums[c / 4 * 2 + c % 2][2 * h + c % 4 / 2] += v;
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = tid; i < KEYS / GROUP * 2 * WIDTH; i += THREADS) {
                threadgroup uint & word = values[i / (2 * WIDTH) * V_STRIDE + i % (2 * WIDTH)];
                word = finite_part(word);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        if (begin < any_last && begin + int(OWN) > any_first) {
            float4 s[8];
#pragma unroll
            for (uint j = 0; j < OWN / 8; j++) s[j] = float4(0.0f);
#pragma unroll
            for (uint c = 0; c < CHUNKS; c++)
#pragma unroll
                for (uint j = 0; j < OWN / 8; j++) {
                    const uint2 k = *(threadgroup const uint2 *)(keys + (own_key + 8 * j + g) * K_STRIDE + 8 * c + 2 * t);
                    if (is_half) mma_16x8x16(s[j], queries[c], k, lane);
                    else mma_16x8x8(s[j], as_type<float4>(queries[c]), as_type<float2>(k), lane);
                }
            float by[2] = {unit[0], unit[1]};
            if (a.softcap > 0) {
#pragma unroll
                for (uint j = 0; j < OWN / 8; j++)
                    for (uint e = 0; e < 4; e++) s[j][e] = soft_cap(s[j][e] * by[e / 2], a.softcap) * LOG2E;
                by[0] = by[1] = 1;
            }
            if (!own_whole) {
#pragma unroll
                for (uint j = 0; j < OWN / 8; j++)
                    for (uint e = 0; e < 4; e++) {
                        const int cell = begin + int(is_half ? j / 2 * 16 + 4 * t + j % 2 * 2 + e % 2 : 8 * j + 2 * t + e % 2);
                        if (cell < first[e / 2] || cell >= last[e / 2]) s[j][e] = -INFINITY;
                    }
            }
            uint4 weights[8];
            float fade[2], least[2];
#pragma unroll
            for (uint h = 0; h < 2; h++) {
                float best = -INFINITY;
                for (uint j = 0; j < OWN / 8; j++) best = max(best, max(s[j][2 * h], s[j][2 * h + 1]));
                best = max(best, simd_shuffle_xor(best, 1));
                best = max(best, simd_shuffle_xor(best, 2));
                const float next_top = max(top[h], best * by[h]);
                least[h] = next_top == -INFINITY ? 0.0f : next_top;  // a row without a score has weights 2^-inf, not 2^NaN
                fade[h] = power_of_two(top[h] - least[h]);
                top[h] = next_top;
            }
#pragma unroll
            for (uint j = 0; j < OWN / 8; j++)
                for (uint e = 0; e < 4; e++) s[j][e] = power_of_two(fma(s[j][e], by[e / 2], -least[e / 2]));
#pragma unroll
            for (uint j = 0; j < OWN / 8; j++) {
                const float4 w = s[j];
                if (!is_half) weights[j] = as_type<uint4>(w.xzyw) & 0xFFFFE000u;  // to tf32, towards zero
                else if (j % 2 == 0) weights[j / 2].xy = uint2(pack_halves(w.x, w.y), pack_halves(w.z, w.w));
                else weights[j / 2].zw = uint2(pack_halves(w.x, w.y), pack_halves(w.z, w.w));
            }
            if (simd_any(fade[0] != 1 || fade[1] != 1)) {
                const float4 f = float4(fade[0], fade[0], fade[1], fade[1]);
                total *= f;
#pragma unroll
                for (uint j = 0; j < WIDTH / 8; j++) sums[j] *= f;
            }
#pragma unroll
            for (uint j = 0; j < OWN / GROUP / 4; j++) {
                threadgroup const uint * at = values + (own_key / GROUP + 4 * j + t) * V_STRIDE + 4 * g;
                if (is_half) mma_16x8x16(total, weights[j], uint2(0x3C003C00u), lane);
                else mma_16x8x8(total, as_type<float4>(weights[j]), float2(1.0f), lane);
#pragma unroll
                for (uint c = 0; c < WIDTH / 16; c++) {
                    const uint4 v = *(threadgroup const uint4 *)(at + 32 * c);
                    if (is_half) {
                        mma_16x8x16(sums[2 * c], weights[j], v.xy, lane);
                        mma_16x8x16(sums[2 * c + 1], weights[j], v.zw, lane);
                    } else {
                        mma_16x8x8(sums[2 * c], as_type<float4>(weights[j]), as_type<float2>(v.xy), lane);
                        mma_16x8x8(sums[2 * c + 1], as_type<float4>(weights[j]), as_type<float2>(v.zw), lane);
                    }
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (next != INT_MAX) {
            store_keys(keys, tid, k_part);
            store_values(values, tid, v_part);
            if (!all_read(r, next)) store_odd(odd, sg, lane, v_part);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        base = next;
    }

    // Simdgroups that share rows: the second hands its sums over, four columns of eight at a time.
    if (sharing > 1) {
        const uint slot = own_row / 16 * SIMD + lane;
        threadgroup float4 * other = (threadgroup float4 *)values;
        if (own_key != 0) other[slot] = float4(top[0], top[1], total.x, total.z);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float4 fade = float4(0.0f), more = float4(0.0f);
        if (own_key == 0) {
            const float4 theirs = other[slot];
            for (uint h = 0; h < 2; h++) {
                const float both = max(top[h], theirs[h]), least = both == -INFINITY ? 0.0f : both;
                fade[2 * h] = fade[2 * h + 1] = power_of_two(top[h] - least);
                more[2 * h] = more[2 * h + 1] = power_of_two(theirs[h] - least);
            }
            total = total * fade + float4(theirs.z, theirs.z, theirs.w, theirs.w) * more;
        }
        other = (threadgroup float4 *)keys;
#pragma unroll
        for (uint j = 0; j < WIDTH / 8; j += 4) {
            for (uint i = j; i < min(j + 4, WIDTH / 8); i++)
                if (own_key != 0) other[(i - j) * ROWS / 16 * SIMD + slot] = sums[i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = j; i < min(j + 4, WIDTH / 8); i++)
                if (own_key == 0) sums[i] = sums[i] * fade + other[(i - j) * ROWS / 16 * SIMD + slot] * more;
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
    for (uint h = 0; h < 2; h++) {
        const uint row = row0 + own_row + g + 8 * h;
        if (row >= n_rows || own_key != 0) continue;
        device float * to = y + (ulong(row / group) * a.n_head + kv_head * group + row % group) * head_dim;
        const float share = total[2 * h] == 0 ? 0.0f : 1.0f / total[2 * h];
#pragma unroll
        for (uint c = 0; c < WIDTH / 16; c++) {
            if (16 * c + 4 * t >= head_dim) continue;
            const float4 v = sums[2 * c], z = sums[2 * c + 1];
            *(device float4 *)(to + 16 * c + 4 * t) = float4(v[2 * h], z[2 * h], v[2 * h + 1], z[2 * h + 1]) * share;
        }
    }
}
