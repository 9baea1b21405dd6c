// Matrix-matrix products by NVIDIA's tensor cores: weights and inputs rounded to halves that share a power of two a row and a
// token, so that none is beyond a half's range; f32 sums.
#include "tile.h"

constant ushort type_0 [[function_constant(0)]];
constant ushort type_1 [[function_constant(1)]];
constant ushort type_2 [[function_constant(2)]];
constant uint n_segments [[function_constant(3)]];
constant uint parts [[function_constant(4)]];     // of the depth, each a share of a threadgroup's threads
constant uint epilogue [[function_constant(5)]];  // 0 none, 1 bias, 2 add, 3 swiglu, 4 geglu
constant bool has_1 = n_segments > 1;
constant bool has_2 = n_segments > 2;
constant bool has_bias = epilogue == 1;
constant bool has_bias_1 = has_bias && has_1;
constant bool has_bias_2 = has_bias && has_2;
constant bool has_add = epilogue == 2;
constant bool has_glu = epilogue > 2;

inline uint n_groups(uint n_tokens) { return (n_tokens + 127) / 128 * 8; }  // of 16 tokens

// x (n_in, n_tokens) as halves, and for each token the power of two that its halves are multiplied by. `fragments`: for each
// block of 32 values, each 16 tokens and either half of the block what the lanes hand to mma_16x8x16, 16 bytes a lane: with
// g = lane / 4 and t = lane % 4 values 4t and 4t + 2 of token g and of token g + 8, then 4t + 1 and 4t + 3. Zeros past n_in
// and n_tokens; blocks are even in number, tokens whole 128. Grid: x, for each 16 tokens eight pairs g, g + 8. 128 threads, which
// own a pair.
kernel void gemm_inputs(constant project_args & a [[buffer(0)]], device const float * x [[buffer(1)]],
                        device uint4 * fragments [[buffer(2)]], device float * scales [[buffer(3)]],
                        uint pair [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float meet[2][4];
    const uint group = pair / 8, groups = n_groups(a.n_tokens), n_blocks = (a.n_in + 63) / 64 * 2;
    const bool whole = a.n_in % 4 == 0;
    float inverse[2];
    device const float * row[2];
    for (uint k = 0; k < 2; k++) {
        row[k] = x + ulong(min(16 * group + pair % 8 + 8 * k, a.n_tokens - 1)) * a.n_in;
        float most = 0.0f;
        if (whole) {
            for (uint i = 4 * tid; i < a.n_in; i += 512) {
                const float4 v = fabs(load4(row[k] + i));
                most = max(most, max(max(v.x, v.y), max(v.z, v.w)));
            }
        } else {
            for (uint i = tid; i < a.n_in; i += 128) most = max(most, fabs(row[k][i]));
        }
        most = simd_max(most);
        if (lane == 0) meet[k][sg] = most;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = 0; k < 2; k++) {
        const uint token = 16 * group + pair % 8 + 8 * k;
        const float scale = power_below(max(max(meet[k][0], meet[k][1]), max(meet[k][2], meet[k][3])));
        if (tid == 0 && token < a.n_tokens) scales[token] = scale;
        inverse[k] = token < a.n_tokens ? inverse_power(scale) : 0.0f;
    }
    for (uint i = tid; i < 8 * n_blocks; i += 128) {
        const uint t = i & 3, at = 16 * (i / 4) + 4 * t;
        float4 v[2];
        for (uint k = 0; k < 2; k++) {
            v[k] = float4(0.0f);
            if (whole && at < a.n_in) v[k] = load4(row[k] + at);
            for (uint c = 0; c < 4; c++)
                if (!whole && at + c < a.n_in) v[k][c] = row[k][at + c];
            v[k] = inverse[k] == 0.0f ? float4(0.0f) : v[k] * inverse[k];
        }
        fragments[(ulong(i / 8) * groups + group) * 64 + 32 * (i / 4 & 1) + 4 * (pair % 8) + t] =
            uint4(as_type<uint>(half2(v[0].xz)), as_type<uint>(half2(v[1].xz)), as_type<uint>(half2(v[0].yw)), as_type<uint>(half2(v[1].yw)));
    }
}

// The weight rows of a tile: `own(r)` is the row of the matrix that stands in row r. With swiglu and geglu a tile has eight
// rows of gate and the same eight of up in turn.
struct tile_rows {
    device const uchar * w, * up;
    uint row_bytes, row0, rows;
    uint own(uint r) const { return min(has_glu ? row0 + 8 * (r / 16) + r % 8 : row0 + r, rows - 1); }
    bool is_up(uint r) const { return has_glu && r / 8 % 2 == 1; }
    // Bytes from where 16 of them begin to chunk `c` of row r.
    uint shift(ushort type, uint r, uint c) const { return may_shift(type) ? (own(r) * row_bytes + c * chunk_bytes(type)) & 15 : 0; }
};

// Copies chunk `c` of the tile's rows as it lies, from the 16 bytes in which it begins; zeros past a row's end. T threads
// a row take pieces in turn.
template <uint T>
inline void copy_chunk(ushort type, threadgroup uchar * to, tile_rows rows, uint c, uint tid) {
    const uint r = tid / T, skip = c * chunk_bytes(type), shift = rows.shift(type, r, c);
    const uint left = rows.row_bytes - skip + shift, n = 16 * chunk_pieces(type);
    device const uchar * from = (rows.is_up(r) ? rows.up : rows.w) + ulong(rows.own(r)) * rows.row_bytes + skip - shift;
#pragma unroll
    for (uint k = 0; k < n; k += 16 * T) {
        const uint i = k + 16 * (tid % T), some = min(left - min(i, left), 16u);
        if (i < n) copy16(to + r * chunk_stride(type) + i, some > 0 ? from + i : rows.w, some);
    }
}

// The scales of a chunk over the rows' powers of two, twice in a word as halves: `scales[n_rows * i + r]` is scale `i` of row r,
// and `minima` its minimum; of values that are not codes, one over the power. `powers[r]` is the least that serves the row's
// values so far, and `before` those of the chunk before. Lanes side by side have the scales of a row; T threads for each row.
template <uint T>
inline void tile_scales(ushort type, tile_rows rows, uint n_rows, uint c, bool is_first, threadgroup const uchar * chunk,
                        threadgroup uint * scales, threadgroup uint * minima, threadgroup const float * before,
                        threadgroup float * powers, uint tid) {
    const uint n = n_scales(type);
#pragma unroll
    for (uint k = 0; k < n; k += T) {
        const uint at = n_rows * k + tid, r = at / n, i = at % n;
        const float2 both = chunk_scale(type, chunk + r * chunk_stride(type) + rows.shift(type, r, c), i);
        float most = is_divided(type) ? both.x : fma(128.0f, fabs(both.x), fabs(both.y));  // no code is larger
        for (ushort m = 1; m < n; m *= 2) most = max(most, simd_shuffle_xor(most, m));
        const float power = max(is_first ? 0.0f : before[r], power_below(most)), inverse = inverse_power(power);
        if (i == 0) powers[r] = power;
        scales[n_rows * i + r] = is_divided(type) ? as_type<uint>(inverse) : pack_halves(both.x * inverse, both.x * inverse);
        if (has_minimum(type)) minima[n_rows * i + r] = pack_halves(both.y * inverse, both.y * inverse);
    }
}

// Adds products of a tile to `sums`: T by RG simdgroups of 16 I tokens and 32 rows each, of chunks from `first` on, in `steps`
// slices of 64 values. `pool` has two slices of the tokens' inputs, two chunks of the rows, two powers of two a row and the
// scales of a chunk; while one is multiplied the next is copied. A sum goes over the values in order; within 16 of them it is
// the tensor cores' own. All simdgroups of a threadgroup take as many steps.
template <uint I, uint T, uint RG>
inline void tile_products(ushort type, tile_rows rows, device const uchar * fragments, constant project_args & a, uint token0, uint first,
                          uint steps, threadgroup uchar * pool, uint tid, uint lane, uint sg, thread float4 (&sums)[I][4]) {
    const uint n_threads = 32 * T * RG, n_rows = 32 * RG, block_size = 1024 * I * T, stride = chunk_stride(type);
    const uint per_chunk = chunk_values(type) / 64, slices = (a.n_in + 63) / 64;
    const uint mine = min(slices - min(first * per_chunk, slices), steps);
    threadgroup uchar * chunks = pool + 4 * block_size;
    threadgroup float * powers = (threadgroup float *)(chunks + 2 * n_rows * stride);
    threadgroup uint * scales = (threadgroup uint *)(powers + 2 * n_rows), * minima = scales + n_rows * n_scales(type);
    const uint g = lane / 4, t = lane & 3, rows_at = 32 * (sg % RG);
    const ulong next_block = 1024 * n_groups(a.n_tokens);
    device const uchar * source = fragments + 2 * first * per_chunk * next_block + 64 * token0 + 16 * tid;
    uint shift[4];
    for (uint j = 0; j < 4; j++) shift[j] = rows.shift(type, rows_at + 8 * j + g, first);

    if (mine > 0) copy_chunk<T>(type, chunks, rows, first, tid);
    for (uint n = 0; n <= steps; n++) {  // slice n is asked for, and slice n - 1 multiplied
        if (n > 0) {
            if (per_chunk > 1 && n > 1 && (n - 2) % per_chunk == 0) wait_for_copies<1>();  // the last is a chunk for later
            else wait_for_copies<0>();
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        if (n < mine) {
            threadgroup uchar * to = pool + (n & 1) * 2 * block_size + 16 * tid;
#pragma unroll
            for (uint block = 0; block < 2; block++) {
#pragma unroll
                for (uint i = 0; i < block_size; i += 16 * n_threads) copy16(to + block_size * block + i, source + i, 16);
                source += next_block;
            }
        }
        end_copies();
        if (n == 0) continue;
        const uint chunk = (n - 1) / per_chunk, within = (n - 1) % per_chunk;
        threadgroup const uchar * rows_here = chunks + (chunk & 1) * n_rows * stride;
        if (within == 0) {
            if ((chunk + 1) * per_chunk < mine) copy_chunk<T>(type, chunks + (~chunk & 1) * n_rows * stride, rows, first + chunk + 1, tid);
            end_copies();
            if (type != F16) {
                threadgroup float * now = powers + (chunk & 1) * n_rows, * before = powers + (~chunk & 1) * n_rows;
                if (n <= mine) tile_scales<T>(type, rows, n_rows, first + chunk, chunk == 0, rows_here, scales, minima, before, now, tid);
                threadgroup_barrier(mem_flags::mem_threadgroup);
                for (uint j = 0; j < 4 && chunk > 0 && n <= mine; j++) {
                    const uint r = rows_at + 8 * j + 2 * t;
                    const float2 from = float2(before[r], before[r + 1]), to = float2(now[r], now[r + 1]);
                    if (from.x == to.x && from.y == to.y) continue;
                    const float2 less = from * float2(inverse_power(to.x), inverse_power(to.y));
                    for (uint i = 0; i < I; i++) sums[i][j] *= less.xyxy;
                }
            }
        }
        if (n > mine) continue;
        threadgroup const uint4 * inputs = (threadgroup const uint4 *)(pool + ((n - 1) & 1) * 2 * block_size) + 64 * I * (sg / RG) + lane;
#pragma unroll
        for (uint half_ = 0; half_ < 2; half_++) {
            const uint block = 2 * within + half_;
            uint4 w[4];
            for (uint j = 0; j < 4; j++) {
                const uint r = rows_at + 8 * j + g, at = may_shift(type) ? (shift[j] + chunk * chunk_bytes(type)) & 15 : 0;
                const float inverse = is_divided(type) ? as_type<float>(scales[n_rows * block + r]) : 0.0f;
                w[j] = chunk_codes(type, rows_here + r * stride + at, block, t, inverse);
                for (uint k = 0; k < 4 && type != F16 && !is_divided(type); k++) {
                    const uint s = n_rows * (has_16(type) ? 2 * block + k / 2 : block) + r;
                    w[j][k] = fma_halves(w[j][k], scales[s], has_minimum(type) ? minima[s] : 0);
                }
            }
            for (uint k = 0; k < 2; k++) {
                uint4 x[I];
                for (uint i = 0; i < I; i++) x[i] = inputs[64 * I * T * half_ + 64 * i + 32 * k];
                for (uint j = 0; j < 4; j++)
                    for (uint i = 0; i < I; i++) mma_16x8x16(sums[i][j], x[i], k == 0 ? w[j].xy : w[j].zw, lane);
            }
        }
    }
    if (type == F16 || mine == 0) return;
    threadgroup const float * last = powers + ((mine - 1) / per_chunk & 1) * n_rows + rows_at + 2 * t;
    for (uint j = 0; j < 4; j++)
        for (uint i = 0; i < I; i++) sums[i][j] *= float2(last[8 * j], last[8 * j + 1]).xyxy;
}

// Of the chunks of a row those that are `part`'s.
template <uint I, uint T, uint RG>
inline void part_products(ushort type, tile_rows rows, device const uchar * fragments, constant project_args & a, uint token0, uint part,
                          threadgroup uchar * pool, uint tid, uint lane, uint sg, thread float4 (&sums)[I][4]) {
    const uint per_chunk = chunk_values(type) / 64, slices = (a.n_in + 63) / 64, n_chunks = (slices + per_chunk - 1) / per_chunk;
    const uint n = (n_chunks + parts - 1) / parts, n_scaled = n_scales(type) * (has_minimum(type) ? 2 : 1) + 2;
    const uint nbytes = 4096 * I * T + 32 * RG * (2 * chunk_stride(type) + 4 * n_scaled);
    tile_products<I, T, RG>(type, rows, fragments, a, token0, part * n, min(n * per_chunk, slices), pool + part * nbytes, tid, lane, sg, sums);
}

// y (n_out, n_tokens): as `project` (project.metal), without its norm, of what `gemm_inputs` made of x; the gate and up of
// swiglu and geglu are of one type. Grid: x, tiles of 32 RG rows within a segment (half as many of gate, and of up); y, tiles of
// 16 I T tokens. 32 T RG threads for each part. A threadgroup owns its tile of y: each part sums some chunks of the rows, then the
// first adds up. `pool`: see tile_products, for each part.
template <uint I, uint T, uint RG>
kernel void gemm_mma(constant project_args & a [[buffer(0)]], device const uchar * fragments [[buffer(1)]],
                     device const float * token_scales [[buffer(2)]], device const uchar * w0 [[buffer(3)]],
                     device const uchar * w1 [[buffer(4), function_constant(has_1)]],
                     device const uchar * w2 [[buffer(5), function_constant(has_2)]],
                     device const float * b0 [[buffer(6), function_constant(has_bias)]],
                     device const float * b1 [[buffer(7), function_constant(has_bias_1)]],
                     device const float * b2 [[buffer(8), function_constant(has_bias_2)]],
                     device const float * residual [[buffer(9), function_constant(has_add)]], device float * y [[buffer(10)]],
                     threadgroup uchar * pool [[threadgroup(0)]], uint2 tg [[threadgroup_position_in_grid]],
                     uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                     uint simdgroup_ [[simdgroup_index_in_threadgroup]]) {
    const uint n_threads = 32 * T * RG, part = thread_ / n_threads, tid = thread_ % n_threads, sg = simdgroup_ % (T * RG);
    const uint ROWS = 32 * RG, token0 = 16 * I * T * tg.y;
    const uint tiles_0 = (a.rows[0] + ROWS - 1) / ROWS, tiles_1 = (a.rows[1] + ROWS - 1) / ROWS;
    const uint which = has_glu || !has_1 || tg.x < tiles_0 ? 0 : !has_2 || tg.x < tiles_0 + tiles_1 ? 1 : 2;
    const uint row0 = has_glu ? ROWS / 2 * tg.x : ROWS * (tg.x - (which > 0 ? tiles_0 : 0) - (which > 1 ? tiles_1 : 0));
    const uint n_rows = which == 0 ? a.rows[0] : which == 1 ? a.rows[1] : a.rows[2];
    tile_rows rows = {w0, w0, a.row_bytes[0], row0, n_rows};
    if (has_1 && (has_glu || which == 1)) rows.up = w1;
    if (has_1 && which == 1) rows.w = w1, rows.row_bytes = a.row_bytes[1];
    if (has_2 && which == 2) rows.w = w2, rows.row_bytes = a.row_bytes[2];
    float4 sums[I][4];
    for (uint i = 0; i < I; i++)
        for (uint j = 0; j < 4; j++) sums[i][j] = float4(0.0f);
    const ushort type = which == 0 ? type_0 : which == 1 ? type_1 : type_2;  // each type is one body
    if (has_glu || type == type_0) part_products<I, T, RG>(type_0, rows, fragments, a, token0, part, pool, tid, lane, sg, sums);
    else if (has_1 && type_1 != type_0 && type == type_1) part_products<I, T, RG>(type_1, rows, fragments, a, token0, part, pool, tid, lane, sg, sums);
    else if (has_2 && type_2 != type_0 && type_2 != type_1) part_products<I, T, RG>(type_2, rows, fragments, a, token0, part, pool, tid, lane, sg, sums);
    if (parts > 1) {
        threadgroup float4 * meet = (threadgroup float4 *)pool + tid;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < 4 * I && part > 0; i++) meet[n_threads * ((part - 1) * 4 * I + i)] = sums[i / 4][i % 4];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < (parts - 1) * 4 * I && part == 0; i++) sums[i / 4 % I][i % 4] += meet[n_threads * i];
    }

    next_may_be_placed();
    const uint first = (which > 0 ? a.rows[0] : 0) + (which > 1 ? a.rows[1] : 0);
    const uint g = lane / 4, t = lane & 3, tokens_at = 16 * I * (sg / RG), rows_at = 32 * (sg % RG);
    for (uint i = 0; i < I; i++)
        for (uint h = 0; h < 2; h++) {
            const uint token = token0 + tokens_at + 16 * i + 8 * h + g;
            if (token >= a.n_tokens || part > 0) continue;
            const float scale = token_scales[token];
            for (uint j = 0; j < 4; j++) {
                if (has_glu && j % 2 == 1) continue;
                const uint at_row = has_glu ? row0 + rows_at / 2 + 4 * j + 2 * t : row0 + rows_at + 8 * j + 2 * t;
                for (uint c = 0; c < 2; c++) {
                    const uint row = at_row + c;
                    if (row >= n_rows) continue;
                    const ulong at = ulong(token) * a.n_out + first + row;
                    float s = sums[i][j][2 * h + c] * scale;
                    if (has_glu) s = (epilogue == 3 ? silu(s) : gelu(s)) * (sums[i][min(j + 1, 3u)][2 * h + c] * scale);
                    if (has_bias) s += which == 0 ? b0[row] : which == 1 && has_1 ? b1[row] : has_2 ? b2[row] : 0.0f;
                    if (has_add) s = residual[at] + s;
                    y[at] = s;
                }
            }
        }
}
typedef decltype(gemm_mma<4, 2, 2>) gemm_t;
template [[host_name("gemm_mma_128x64")]] kernel gemm_t gemm_mma<4, 2, 2>;
template [[host_name("gemm_mma_64x64")]] kernel gemm_t gemm_mma<2, 2, 2>;
template [[host_name("gemm_mma_32x32")]] kernel gemm_t gemm_mma<1, 2, 1>;
