// Attention for many queries by NVIDIA's tensor cores (causal and span windows): the query heads of a KV head share tiles of
// its rows. Operands have 11 bits: f16 where KV rows are f16, else tf32, which has f32's range. Sums are f32.
#include "kv.h"
#include "mma.h"

constant uint head_dim [[function_constant(0)]];
constant uint kv_format [[function_constant(1)]];
constant uint layout [[function_constant(2)]];  // int32 values a query in the window input: 0 causal, 2 span
constant bool has_window = layout != 0;
constant bool is_half = kv_format == KV_F16;

constant constexpr uint ROWS = 64;  // a threadgroup's rows, 16 a simdgroup
constant constexpr float LOG2E = 1.44269504f;
// Simdgroups that share rows, each with its part of every tile's keys: with four simdgroups a core would wait for most
// instructions. Tiles of more than 128 values have too few keys for two.
constant uint SHARING = head_dim <= 128 ? 2 : 1;
constant uint THREADS = ROWS / 16 * SHARING * SIMD;

// A tile of KEYS rows of WIDTH values (head_dim, then zeros) in words of threadgroup memory, one of keys, one of values.
//   keys    row after row; a word has one value in tf32, two in f16
//   values  tf32: the same; f16: two rows side by side, a word has a value of each
// Strides let the lanes of a fragment read different banks.
constant uint WIDTH = (head_dim + 15) / 16 * 16;
constant uint KEYS = is_half ? (head_dim <= 64 ? 64 : head_dim <= 128 ? 32 : 16) : head_dim <= 64 ? 48 : head_dim <= 128 ? 16 : 8;
constant uint OWN = KEYS / SHARING;  // of a simdgroup
constant uint K_STRIDE = is_half ? WIDTH / 2 | 8 : WIDTH + 8;
constant uint V_STRIDE = is_half ? WIDTH + 8 : WIDTH + 4;
constant uint CHUNKS = is_half ? WIDTH / 16 : WIDTH / 8;  // of values that one mma multiplies
constant uint UNITS = is_half ? WIDTH / 8 : WIDTH / 4;    // of 16 bytes in a row of a tile
constant uint LOADS = is_half ? (KEYS / 2 * UNITS + THREADS - 1) / THREADS * 2 : (KEYS * UNITS + THREADS - 1) / THREADS;

// Which row of a tile, and which of its values, is the i-th of the units of a thread, LOADS at most. With `pairs` a thread has the
// same unit of two rows side by side.
struct unit_place { uint key, at; };
inline unit_place place_of(bool pairs, uint i, uint tid) {
    unit_place p;
    const uint unit = tid + THREADS * (pairs ? i / 2 : i);
    p.key = pairs ? unit / UNITS * 2 + i % 2 : unit / UNITS;
    p.at = unit % UNITS * (is_half ? 8 : 4);
    return p;
}
inline uint4 load_unit(device const uchar * row, uint v) {
    return is_half ? *(device const uint4 *)(row + 2 * v) : as_type<uint4>(kv_load4(kv_format, row, v));
}
// A thread's part of the tile of rows from `base`: zeros in rows that no query reads (`read`, a bit each) and past head_dim.
inline void load_tile(device const uchar * rows, ulong row_bytes, uint first, int base, uint2 read, bool pairs, uint tid,
                      thread uint4 (&part)[4]) {
    rows += ulong(uint(base)) * row_bytes;
    const bool whole = (read.x & read.y) == 0xFFFFFFFFu;  // no branch a row then
#pragma unroll
    for (uint i = 0; i < LOADS; i++) {
        const unit_place p = place_of(pairs, i, tid);
        part[i] = uint4(0);
        if (whole && p.key < KEYS && p.at < head_dim) part[i] = load_unit(rows + p.key * row_bytes, first + p.at);
    }
    if (whole) return;
    for (uint i = 0; i < LOADS; i++) {
        const unit_place p = place_of(pairs, i, tid);
        if (p.key < KEYS && p.at < head_dim && ((p.key < 32 ? read.x : read.y) >> (p.key & 31) & 1) != 0)
            part[i] = load_unit(rows + p.key * row_bytes, first + p.at);
    }
}
inline uint4 rounded(uint4 v) {
    const float4 x = as_type<float4>(v);
    return as_type<uint4>(float4(to_tf32(x.x), to_tf32(x.y), to_tf32(x.z), to_tf32(x.w)));
}
inline void store_keys(threadgroup uint * tile, uint tid, thread const uint4 (&part)[4]) {
#pragma unroll
    for (uint i = 0; i < LOADS; i++) {
        const unit_place p = place_of(false, i, tid);
        if (p.key >= KEYS) continue;
        *(threadgroup uint4 *)(tile + p.key * K_STRIDE + (is_half ? p.at / 2 : p.at)) = is_half ? part[i] : rounded(part[i]);
    }
}
inline void store_values(threadgroup uint * tile, uint tid, thread const uint4 (&part)[4]) {
#pragma unroll
    for (uint i = 0; i < LOADS; i += is_half ? 2 : 1) {
        const unit_place p = place_of(is_half, i, tid);
        if (p.key >= KEYS) continue;
        if (!is_half) {
            *(threadgroup uint4 *)(tile + p.key * V_STRIDE + p.at) = rounded(part[i]);
            continue;
        }
        const uint4 a = part[i], b = part[min(i + 1, 3u)], low = (a & 0xFFFFu) | b << 16, high = a >> 16 | (b & 0xFFFF0000u);
        threadgroup uint4 * to = (threadgroup uint4 *)(tile + p.key / 2 * V_STRIDE + p.at);
        to[0] = uint4(low.x, high.x, low.y, high.y);
        to[1] = uint4(low.z, high.z, low.w, high.w);
    }
}
// Value `at` of row `key` of a tile of values; whether a thread's part of it has NaN or Inf.
inline float value_at(threadgroup const uint * tile, uint key, uint at) {
    if (!is_half) return as_type<float>(tile[key * V_STRIDE + at]);
    const half2 both = as_type<half2>(tile[key / 2 * V_STRIDE + at]);
    return key % 2 == 0 ? float(both.x) : float(both.y);
}
inline bool not_finite(uint word) {
    if (!is_half) return (word & 0x7F800000u) == 0x7F800000u;
    return (word & 0x7C00u) == 0x7C00u || (word & 0x7C000000u) == 0x7C000000u;
}
inline bool has_not_finite(thread const uint4 (&part)[4]) {
    bool found = false;
#pragma unroll
    for (uint i = 0; i < LOADS; i++)
        found = found || not_finite(part[i].x) || not_finite(part[i].y) || not_finite(part[i].z) || not_finite(part[i].w);
    return found;
}

// Of a word of two halves, the bits of those that are finite.
inline uint finite_halves(uint word) {
    return ((word & 0x7C00u) == 0x7C00u ? 0u : 0xFFFFu) | ((word & 0x7C000000u) == 0x7C000000u ? 0u : 0xFFFF0000u);
}

inline bool any_odd(threadgroup const uint * odd) {
    uint any = 0;
    for (uint i = 0; i < THREADS / SIMD; i++) any |= odd[i];
    return any != 0;
}

// The first tile from row `start` on that a query reads, INT_MAX if none does. A lane has two of the queries' spans; causal
// ones have no gaps between them.
inline int next_tile(thread const int (&low)[2], thread const int (&high)[2], int lowest, int highest, int start) {
    int at = highest > max(lowest, start) ? max(lowest, start) : INT_MAX;
    if (has_window) {
        at = INT_MAX;
        for (uint h = 0; h < 2; h++)
            if (high[h] > max(low[h], start)) at = min(at, max(low[h], start));
        at = simd_min(at);
    }
    return at == INT_MAX ? at : at / int(KEYS) * int(KEYS);
}
// Which rows of the tile at `base` a query reads, a bit each; `whole` says that all do.
inline uint2 rows_read(threadgroup const int * spans, uint n_spans, int base, bool whole, uint lane) {
    uint2 read = uint2(0xFFFFFFFFu);
    if (whole) return read;
    for (uint part = 0; part < (KEYS + 31) / 32; part++) {
        const int cell = base + int(lane + SIMD * part);
        bool any = false;
        for (uint i = 0; i < n_spans; i++) any = any || (cell >= spans[2 * i] && cell < spans[2 * i + 1]);
        read[part] = uint(simd_vote::vote_t(simd_ballot(any)));
    }
    return read;
}

// y (n_head * head_dim, n). Grid: x, tiles of 64 rows; y, KV heads. A row is a query with one of the KV head's query heads:
// row i is head i % group of query i / group. 128 threads; simdgroup s owns rows 16 s ... 16 s + 15, of which a lane
// has g = lane / 4 and g + 8. Query i reads rows [first, last) of its window, as in attention.metal. Tiles and rows of KV that
// none of a threadgroup's queries reads are left out.
//   scores (16, KEYS): q (16, head_dim) by keys, 8 or 16 values at a time in order. Both have a row's values in an order that
//     lets a lane read neighbours: those at 2t and 2t + 1 (f16: 4t ... 4t + 3) stand where mma.h has t and t + 4 (2t, 2t + 1,
//     2t + 8, 2t + 9). f16 queries are divided by a power of two a row, so that none leaves f16's range.
//   weights: online softmax in powers of two; the sum is that of the rounded weights, a lane's own first, then of 4 lanes
//   y (16, head_dim): weights by values, tiles in order, in a tile 8 or 16 keys at a time. Keys are in the order in which the
//     scores lie in a lane; of 16 columns a lane has 4t ... 4t + 3.
[[max_total_threads_per_threadgroup(256)]]
kernel void attention_mma(constant attn_args & a [[buffer(0)]], device const float * q [[buffer(1)]],
                          device const int * positions [[buffer(2)]],
                          device const int * window [[buffer(3), function_constant(has_window)]],
                          device const uchar * k_rows [[buffer(4)]], device const uchar * v_rows [[buffer(5)]],
                          device float * y [[buffer(6)]], uint2 tg [[threadgroup_position_in_grid]],
                          uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                          uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup uint keys[3456];      // KEYS * K_STRIDE; 48 * 72 at most
    threadgroup uint values[3264];    // KEYS * V_STRIDE, in f16 half of it; 48 * 68 at most
    threadgroup int spans[2 * ROWS];  // [first, last) of the threadgroup's queries
    threadgroup uint odd[8];          // by simdgroup, whether it stored a NaN or Inf among the values
    const uint tid = thread_ % THREADS;  // the same; a compiler then sees which units there are
    const uint group = a.n_head / a.n_kv_head, kv_head = tg.y, row0 = ROWS * tg.x, n_rows = a.n_queries * group;
    const uint query0 = row0 / group, n_spans = (min(row0 + ROWS, n_rows) - 1) / group - query0 + 1;
    const uint g = lane / 4, t = lane & 3, row16 = 16 * (sg % (ROWS / 16)), own = OWN * (sg / (ROWS / 16));
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

    // What is asked of all queries together, by the simdgroup: a lane has two of them.
    int low[2], high[2];
    for (uint h = 0; h < 2; h++) {
        const uint i = min(lane + SIMD * h, n_spans - 1);
        low[h] = spans[2 * i];
        high[h] = spans[2 * i + 1];
    }
    const int lowest = simd_min(min(low[0], low[1])), highest = simd_max(max(high[0], high[1]));
    const int all_first = simd_max(max(low[0], low[1])), all_last = simd_min(min(high[0], high[1]));

    // The lane's two rows. A row past the last reads what the last one does; it is not stored.
    int first[2], last[2];
    float scale[2], unit[2] = {1.0f, 1.0f};  // of queries, and of the scores that come of them
    device const float * q_row[2];
    for (uint h = 0; h < 2; h++) {
        const uint row = min(row0 + row16 + g + 8 * h, n_rows - 1), query = row / group;
        first[h] = spans[2 * (query - query0)];
        last[h] = spans[2 * (query - query0) + 1];
        q_row[h] = q + (ulong(query) * a.n_head + kv_head * group + row % group) * head_dim;
        scale[h] = a.softcap > 0 ? a.scale : a.scale * LOG2E;
    }
    // Rows of KV that every one, and that any of the simdgroup's rows reads.
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
            // 2^-126 ... 2^126: neither it nor its inverse is zero
            const uint power = min(max(as_type<uint>(largest) & 0x7F800000u, 1u << 23), 253u << 23);
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
            queries[c] = uint4(pack_half(x.x, x.y), pack_half(z.x, z.y), pack_half(x.z, x.w), pack_half(z.z, z.w));
        } else if (8 * c < head_dim) {
            device const float * x = q_row[0] + 8 * c + 2 * t, * z = q_row[1] + 8 * c + 2 * t;
            queries[c] = rounded(as_type<uint4>(float4(x[0] * scale[0], z[0] * scale[1], x[1] * scale[0], z[1] * scale[1])));
        }
    }

    float4 sums[32];
#pragma unroll
    for (uint j = 0; j < WIDTH / 8; j++) sums[j] = float4(0.0f);
    float4 total = float4(0.0f);  // as of a ninth column of values, all ones
    float top[2] = {-INFINITY, -INFINITY};

    int base = next_tile(low, high, lowest, highest, 0);
    uint2 read = uint2(0);  // rows of the tile that is loaded
    uint4 k_part[4], v_part[4];
    if (base != INT_MAX) {
        read = rows_read(spans, n_spans, base, base >= all_first && base + int(KEYS) <= all_last, lane);
        load_tile(k_rows, a.row_bytes, kv_head * head_dim, base, read, false, tid, k_part);
        store_keys(keys, tid, k_part);
        load_tile(v_rows, a.row_bytes, kv_head * head_dim, base, read, is_half, tid, v_part);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Two barriers a tile: before its values are read, and before the keys of the next. Loads are under way across them.
    while (base != INT_MAX) {
        const int end = base + int(KEYS), next = next_tile(low, high, lowest, highest, end);
        const bool whole = base >= all_first && end <= all_last;      // the same for the threadgroup
        const int begin = base + int(own);                            // these for the simdgroup
        const bool own_whole = begin >= own_first && begin + int(OWN) <= own_last;
        const bool busy = begin < any_last && begin + int(OWN) > any_first;
        float4 s[8];
        if (busy) {
#pragma unroll
            for (uint j = 0; j < OWN / 8; j++) s[j] = float4(0.0f);
#pragma unroll
            for (uint c = 0; c < CHUNKS; c++)
#pragma unroll
                for (uint j = 0; j < OWN / 8; j++) {
                    const uint2 k = *(threadgroup const uint2 *)(keys + (own + 8 * j + g) * K_STRIDE + 8 * c + 2 * t);
                    if (is_half) mma_16x8x16(s[j], queries[c], k, lane);
                    else mma_16x8x8(s[j], as_type<float4>(queries[c]), as_type<float2>(k), lane);
                }
        }
        store_values(values, tid, v_part);
        if (!whole) {
            const bool found = simd_any(has_not_finite(v_part));
            if (lane == 0) odd[sg] = found;
        }
        if (next != INT_MAX) {
            read = rows_read(spans, n_spans, next, next >= all_first && next + int(KEYS) <= all_last, lane);
            load_tile(k_rows, a.row_bytes, kv_head * head_dim, next, read, false, tid, k_part);
        }
        if (busy) {
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
                        const int cell = begin + int(8 * j + 2 * t + e % 2);
                        if (cell < first[e / 2] || cell >= last[e / 2]) s[j][e] = -INFINITY;
                    }
            }
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
            if (simd_any(fade[0] != 1 || fade[1] != 1)) {
                const float4 f = float4(fade[0], fade[0], fade[1], fade[1]);
                total *= f;
#pragma unroll
                for (uint j = 0; j < WIDTH / 8; j++) sums[j] *= f;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (!whole && any_odd(odd)) {
            // A weight of 0 does not hide NaN or Inf from a row that does not read it: those that do read it add it here.
            for (uint key = own; key < own + OWN; key++) {
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
            for (uint i = tid; i < (is_half ? KEYS / 2 : KEYS) * WIDTH; i += THREADS) {
                threadgroup uint & word = values[i / WIDTH * V_STRIDE + i % WIDTH];
                if (not_finite(word)) word = is_half ? word & finite_halves(word) : 0;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        if (busy) {
#pragma unroll
            for (uint j = 0; j < OWN / 8; j += is_half ? 2 : 1) {
                const float4 w = s[j], z = s[min(j + 1, 7u)];
                threadgroup const uint * at = values + (is_half ? own / 2 + 4 * j + t : own + 8 * j + 2 * t) * V_STRIDE + 2 * g;
                uint4 left = as_type<uint4>(w.xzyw) & 0xFFFFE000u;  // towards zero, to tf32: the total has the same weights
                if (is_half) {
                    left = uint4(pack_half(w.x, w.y), pack_half(w.z, w.w), pack_half(z.x, z.y), pack_half(z.z, z.w));
                    mma_16x8x16(total, left, uint2(0x3C003C00u), lane);
                } else {
                    mma_16x8x8(total, as_type<float4>(left), float2(1.0f), lane);
                }
#pragma unroll
                for (uint c = 0; c < WIDTH / 16; c++) {
                    const uint2 v = *(threadgroup const uint2 *)(at + 16 * c);
                    const uint2 x = *(threadgroup const uint2 *)(at + (is_half ? 4 : 1) * V_STRIDE + 16 * c);
                    for (uint n = 0; n < 2; n++) {
                        if (is_half) mma_16x8x16(sums[2 * c + n], left, uint2(v[n], x[n]), lane);
                        else mma_16x8x8(sums[2 * c + n], as_type<float4>(left), as_type<float2>(uint2(v[n], x[n])), lane);
                    }
                }
            }
        }
        if (next != INT_MAX) {
            store_keys(keys, tid, k_part);
            load_tile(v_rows, a.row_bytes, kv_head * head_dim, next, read, is_half, tid, v_part);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        base = next;
    }

    // Simdgroups that share rows: the second hands its sums over, four columns of eight at a time.
    if (SHARING > 1) {
        const uint slot = row16 / 16 * SIMD + lane;
        threadgroup float4 * other = (threadgroup float4 *)values;
        if (own != 0) other[slot] = float4(top[0], top[1], total.x, total.z);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float4 fade = float4(0.0f), more = float4(0.0f);
        if (own == 0) {
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
                if (own != 0) other[(i - j) * ROWS / 16 * SIMD + slot] = sums[i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = j; i < min(j + 4, WIDTH / 8); i++)
                if (own == 0) sums[i] = sums[i] * fade + other[(i - j) * ROWS / 16 * SIMD + slot] * more;
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
    for (uint h = 0; h < 2; h++) {
        const uint row = row0 + row16 + g + 8 * h;
        if (row >= n_rows || own != 0) continue;
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
