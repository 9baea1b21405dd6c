// Matrix-matrix products by NVIDIA's tensor cores: weight codes, which a half holds exactly, by inputs rounded to halves
// that share a power of two a token, so that none is beyond a half's range; f32 sums, to which scales are applied.
#include "tile.h"

constant ushort type_0 [[function_constant(0)]];
constant ushort type_1 [[function_constant(1)]];
constant ushort type_2 [[function_constant(2)]];
constant uint n_segments [[function_constant(3)]];
constant uint epilogue [[function_constant(5)]];  // 0 none, 1 bias, 2 add, 3 swiglu, 4 geglu
constant bool has_1 = n_segments > 1;
constant bool has_2 = n_segments > 2;
constant bool has_bias = epilogue == 1;
constant bool has_bias_1 = has_bias && has_1;
constant bool has_bias_2 = has_bias && has_2;
constant bool has_add = epilogue == 2;
constant bool has_glu = epilogue > 2;

// x (n_in, n_tokens) as halves, and for each token the power of two that its halves are multiplied by. `fragments`: for each
// block of 32 values, each 16 tokens and either half of the block what the lanes hand to mma_16x8x16, 16 bytes a lane: with
// g = lane / 4 and t = lane % 4 values 4t and 4t + 2 of token g and of token g + 8, then 4t + 1 and 4t + 3. Zeros past n_in
// and n_tokens; blocks are even in number. Grid: x, for each 16 tokens eight pairs g, g + 8. 128 threads, which own a pair.
kernel void gemm_inputs(constant project_args & a [[buffer(0)]], device const float * x [[buffer(1)]],
                        device uint4 * fragments [[buffer(2)]], device float * scales [[buffer(3)]],
                        uint pair [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float meet[2][4];
    const uint group = pair / 8, groups = (a.n_tokens + 15) / 16, n_blocks = (a.n_in + 63) / 64 * 2;
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
        inverse[k] = token < a.n_tokens ? 1.0f / scale : 0.0f;
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
};

// Copies chunk `c` of the tile's rows as it lies, from the word in which it begins; zeros past a row's end. Eight threads a
// row take neighbouring pieces.
inline void copy_chunk(ushort type, threadgroup uchar * to, tile_rows rows, uint n_rows, uint c, uint tid, uint n_threads) {
    const uint stride = chunk_stride(type), skip = c * chunk_bytes(type);
    const bool wide = chunk_bytes(type) % 16 == 0 && rows.row_bytes % 16 == 0;
    const uint piece = wide ? 16 : 4, n = wide ? chunk_bytes(type) : (chunk_bytes(type) + (may_shift(type) ? 3 : 0) + 3) / 4 * 4;
    for (uint r = tid / 8; r < n_rows; r += n_threads / 8) {
        const ulong begin = ulong(rows.own(r)) * rows.row_bytes;
        const uint shift = may_shift(type) ? uint(begin + skip) & 3 : 0, left = rows.row_bytes - min(skip, rows.row_bytes) + shift;
        device const uchar * from = (rows.is_up(r) ? rows.up : rows.w) + begin + skip - shift;
        for (uint i = piece * (tid & 7); i < n; i += 8 * piece) {
            const uint some = min(left - min(i, left), piece);
            if (wide) copy16(to + r * stride + i, some > 0 ? from + i : rows.w, some);
            else copy4(to + r * stride + i, some > 0 ? from + i : rows.w, some);
        }
    }
}

// Adds a tile's products to `sums`: 2 by RG simdgroups of 16 I tokens and 32 rows each. `pool` has two slices of 64 inputs of
// the tokens, two chunks of the rows and the scales of one chunk; while one is multiplied the next is copied. A sum goes over
// the blocks of a row in order; within a block (16 or 32 values that share a scale) it is the tensor cores' own.
template <uint I, uint RG>
inline void tile_products(ushort type, tile_rows rows, device const uchar * fragments, constant project_args & a, uint token0,
                          threadgroup uchar * pool, uint tid, uint lane, uint sg, thread float4 (&sums)[I][4]) {
    const uint n_threads = 64 * RG, n_rows = 32 * RG, slice_bytes = 4096 * I, stride = chunk_stride(type);
    const uint per_chunk = chunk_values(type) / 64;
    threadgroup uchar * chunks = pool + 2 * slice_bytes;
    threadgroup float * scales = (threadgroup float *)(chunks + 2 * n_rows * stride), * seconds = scales + n_rows * n_scales(type);
    const uint g = lane / 4, t = lane & 3, rows_at = 32 * (sg % RG);
    const uint slices = (a.n_in + 63) / 64, groups = (a.n_tokens + 15) / 16;
    uint shift[4];
    for (uint j = 0; j < 4; j++) shift[j] = rows.own(rows_at + 8 * j + g) * rows.row_bytes & 3;
    const uint2 ones = uint2(0x3C003C00u);

    copy_chunk(type, chunks, rows, n_rows, 0, tid, n_threads);
    for (uint n = 0; n <= slices; n++) {  // slice n is asked for, and slice n - 1 multiplied
        if (n > 0) {
            if (per_chunk > 1 && n > 1 && (n - 2) % per_chunk == 0) wait_for_copies<1>();  // the last is a chunk for later
            else wait_for_copies<0>();
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        if (n < slices) {
            threadgroup uchar * to = pool + (n & 1) * slice_bytes;
            for (uint i = tid; i < 256 * I; i += n_threads) {
                const uint block = i / (128 * I), group = min(token0 / 16 + i / 64 % (2 * I), groups - 1);
                copy16(to + 16 * i, fragments + 16 * ((ulong(2 * n + block) * groups + group) * 64 + (i & 63)), 16);
            }
        }
        end_copies();
        if (n == 0) continue;
        const uint chunk = (n - 1) / per_chunk, within = (n - 1) % per_chunk;
        threadgroup const uchar * rows_here = chunks + (chunk & 1) * n_rows * stride;
        const uint skip = chunk * chunk_bytes(type);
        if (within == 0) {
            if ((chunk + 1) * per_chunk < slices) copy_chunk(type, chunks + ((chunk + 1) & 1) * n_rows * stride, rows, n_rows, chunk + 1, tid, n_threads);
            end_copies();
            for (uint i = tid; i < n_rows * n_scales(type); i += n_threads) {
                const uint r = i % n_rows, at = may_shift(type) ? (rows.own(r) * rows.row_bytes + skip) & 3 : 0;
                const float2 both = chunk_scale(type, rows_here + r * stride + at, i / n_rows);
                scales[i] = both.x;
                if (has_minimum(type) || has_inverse(type)) seconds[i] = both.y;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        threadgroup const uint4 * inputs = (threadgroup const uint4 *)(pool + ((n - 1) & 1) * slice_bytes);
        for (uint half_ = 0; half_ < 2; half_++) {
            const uint block = 2 * within + half_;
            uint4 x[I][2];
            float4 totals[I][2];  // of the inputs of either 16, where there is a minimum to multiply them with
            for (uint i = 0; i < I; i++) {
                for (uint k = 0; k < 2; k++) x[i][k] = inputs[64 * (2 * I * half_ + I * (sg / RG) + i) + 32 * k + lane];
                if (has_minimum(type)) {
                    totals[i][0] = product_16x8x16(x[i][0], ones, lane);
                    if (has_16(type)) totals[i][1] = product_16x8x16(x[i][1], ones, lane);
                    else mma_16x8x16(totals[i][0], x[i][1], ones, lane);
                }
            }
            for (uint j = 0; j < 4; j++) {
                const uint r = rows_at + 8 * j + g, at = may_shift(type) ? (shift[j] + skip) & 3 : 0;
                const float inverse = has_inverse(type) ? seconds[n_rows * block + r] : 0.0f;
                const uint4 codes = chunk_codes(type, rows_here + r * stride + at, block, t, inverse);
                for (uint k = 0; k < (has_16(type) ? 2 : 1); k++) {
                    const uint s = n_rows * (has_16(type) ? 2 * block + k : block) + rows_at + 8 * j + 2 * t;
                    const float2 scale = *(threadgroup const float2 *)(scales + s);
                    const float2 least = has_minimum(type) ? *(threadgroup const float2 *)(seconds + s) : float2(0.0f);
                    for (uint i = 0; i < I; i++) {
                        float4 p = product_16x8x16(x[i][k], k == 0 ? codes.xy : codes.zw, lane);
                        if (!has_16(type)) mma_16x8x16(p, x[i][1], codes.zw, lane);
                        sums[i][j] = fma(p, scale.xyxy, sums[i][j]);
                        if (has_minimum(type)) sums[i][j] = fma(totals[i][k].xxzz, least.xyxy, sums[i][j]);
                    }
                }
            }
        }
    }
}

// y (n_out, n_tokens): as `project` (project.metal), without its norm, of what `gemm_inputs` made of x; the gate and up of
// swiglu and geglu are of one type. Grid: x, tiles of 32 RG rows within a segment (half as many of gate, and of up); y, tiles of
// 32 I tokens. 64 RG threads. A threadgroup owns its tile of y. `pool`: see tile_products.
template <uint I, uint RG>
kernel void gemm_mma(constant project_args & a [[buffer(0)]], device const uchar * fragments [[buffer(1)]],
                     device const float * token_scales [[buffer(2)]], device const uchar * w0 [[buffer(3)]],
                     device const uchar * w1 [[buffer(4), function_constant(has_1)]],
                     device const uchar * w2 [[buffer(5), function_constant(has_2)]],
                     device const float * b0 [[buffer(6), function_constant(has_bias)]],
                     device const float * b1 [[buffer(7), function_constant(has_bias_1)]],
                     device const float * b2 [[buffer(8), function_constant(has_bias_2)]],
                     device const float * residual [[buffer(9), function_constant(has_add)]], device float * y [[buffer(10)]],
                     threadgroup uchar * pool [[threadgroup(0)]], uint2 tg [[threadgroup_position_in_grid]],
                     uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                     uint sg [[simdgroup_index_in_threadgroup]]) {
    const uint ROWS = 32 * RG, token0 = 32 * I * tg.y;
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
    if (has_glu || type == type_0) tile_products<I, RG>(type_0, rows, fragments, a, token0, pool, tid, lane, sg, sums);
    else if (has_1 && type_1 != type_0 && type == type_1) tile_products<I, RG>(type_1, rows, fragments, a, token0, pool, tid, lane, sg, sums);
    else if (has_2 && type_2 != type_0 && type_2 != type_1) tile_products<I, RG>(type_2, rows, fragments, a, token0, pool, tid, lane, sg, sums);

    next_may_be_placed();
    const uint first = (which > 0 ? a.rows[0] : 0) + (which > 1 ? a.rows[1] : 0);
    const uint g = lane / 4, t = lane & 3, tokens_at = 16 * I * (sg / RG), rows_at = 32 * (sg % RG);
    for (uint i = 0; i < I; i++)
        for (uint h = 0; h < 2; h++) {
            const uint token = token0 + tokens_at + 16 * i + 8 * h + g;
            if (token >= a.n_tokens) continue;
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
typedef decltype(gemm_mma<4, 2>) gemm_t;
template [[host_name("gemm_mma_128x64")]] kernel gemm_t gemm_mma<4, 2>;
template [[host_name("gemm_mma_64x64")]] kernel gemm_t gemm_mma<2, 2>;
template [[host_name("gemm_mma_32x32")]] kernel gemm_t gemm_mma<1, 1>;
