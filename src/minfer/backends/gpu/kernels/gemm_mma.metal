// Matrix-matrix products by NVIDIA's tensor cores: operands rounded to tf32 (f32's range, 10 bits of fraction), f32 sums.
#include "mma.h"
#include "weights.h"

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

#define ROWS 64    // weight rows a threadgroup
#define TOKENS 64  // tokens a threadgroup
#define DEPTH 32   // values of a row at a time
#define STRIDE 36  // floats between rows in threadgroup memory: lanes of a fragment then read different banks

// Sixteen values of a row of x from `at`; zeros past the row's end, which only rows of plain weights can have there.
inline void load_inputs(device const float * row, uint at, uint n_in, thread float4 (&v)[4]) {
    if (!is_plain(type_0) || n_in % DEPTH == 0) {
        for (uint k = 0; k < 4; k++) v[k] = load4(row + at + 4 * k);
        return;
    }
    for (uint i = 0; i < 16; i++) v[i / 4][i % 4] = at + i < n_in ? row[at + i] : 0.0f;
}
inline void store_rounded(threadgroup float * to, thread const float4 (&v)[4]) {
    for (uint k = 0; k < 4; k++)
        *(threadgroup float4 *)(to + 4 * k) = float4(to_tf32(v[k].x), to_tf32(v[k].y), to_tf32(v[k].z), to_tf32(v[k].w));
}

// y (n_out, n_tokens): as `project` (project.metal), without its norm.
// Grid: x, tiles of 64 rows within a segment (with swiglu and geglu 32 rows of gate and the same 32 of up, eight by eight
// in turn); y, tiles of 64 tokens. 128 threads. A threadgroup owns its tile of y; simdgroup (s / 2, s % 2) has 32 tokens
// and 32 rows of it. A sum runs over the row in steps of 8 in order, whatever the tile.
kernel void gemm_mma(constant project_args & a [[buffer(0)]], device const float * x [[buffer(1)]],
                     device const uchar * w0 [[buffer(3)]], device const uchar * w1 [[buffer(4), function_constant(has_1)]],
                     device const uchar * w2 [[buffer(5), function_constant(has_2)]],
                     device const float * b0 [[buffer(6), function_constant(has_bias)]],
                     device const float * b1 [[buffer(7), function_constant(has_bias_1)]],
                     device const float * b2 [[buffer(8), function_constant(has_bias_2)]],
                     device const float * residual [[buffer(9), function_constant(has_add)]], device float * y [[buffer(10)]],
                     uint2 tg [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float weights[ROWS * STRIDE];
    threadgroup float inputs[TOKENS * STRIDE];
    const uint tiles_0 = (a.rows[0] + ROWS - 1) / ROWS, tiles_1 = (a.rows[1] + ROWS - 1) / ROWS;
    const uint which = has_glu || !has_1 || tg.x < tiles_0 ? 0 : !has_2 || tg.x < tiles_0 + tiles_1 ? 1 : 2;
    const uint row0 = has_glu ? 32 * tg.x : ROWS * (tg.x - (which > 0 ? tiles_0 : 0) - (which > 1 ? tiles_1 : 0));
    const uint token0 = TOKENS * tg.y;
    const uint rows = which == 0 ? a.rows[0] : which == 1 ? a.rows[1] : a.rows[2];

    // What this thread loads at each depth: half of a weight row's 32 values, half of a token's. A row or a token past the
    // last reads the last one again: what comes of it is not stored.
    const uint slot = tid / 2, own = min(has_glu ? row0 + 8 * (slot / 16) + slot % 8 : row0 + slot, rows - 1);
    const bool is_up = has_glu && slot / 8 % 2 == 1;
    device const float * x_row = x + ulong(min(token0 + slot, a.n_tokens - 1)) * a.n_in;
    device const uchar * own_row = is_up || which == 1 ? (has_1 ? w1 : w0) : which == 2 && has_2 ? w2 : w0;
    const uint own_bytes = is_up ? a.row_bytes[1] : a.row_bytes[which];
    own_row += ulong(own) * own_bytes;
    float4 w[4], v[4];
    float4 sums[2][4];
    for (uint i = 0; i < 2; i++)
        for (uint j = 0; j < 4; j++) sums[i][j] = float4(0.0f);
    const uint g = lane / 4, t = lane & 3, tokens_at = 32 * (sg / 2), rows_at = 32 * (sg & 1);
    load_inputs(x_row, 16 * (tid & 1), a.n_in, v);
    for (uint k0 = 0; k0 < a.n_in; k0 += DEPTH) {
        const uint unit = k0 / 16 + (tid & 1);
        if (has_1 && (is_up || which == 1)) weight16(type_1, own_row, a.n_in, unit, w);
        else if (has_2 && which == 2) weight16(type_2, own_row, a.n_in, unit, w);
        else weight16(type_0, own_row, a.n_in, unit, w);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the last depth was read
        store_rounded(weights + slot * STRIDE + 16 * (tid & 1), w);
        store_rounded(inputs + slot * STRIDE + 16 * (tid & 1), v);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // Under way while this depth is multiplied: the next inputs, and the weights after the next.
        if (k0 + DEPTH < a.n_in) load_inputs(x_row, 16 * unit + DEPTH, a.n_in, v);
        touch(own_row + min(ulong(k0 + 2 * DEPTH) * own_bytes / a.n_in, ulong(own_bytes - 1)));
        for (uint k = 0; k < DEPTH; k += 8) {
            float4 left[2];
            for (uint i = 0; i < 2; i++) {
                threadgroup const float * p = inputs + (tokens_at + 16 * i + g) * STRIDE + k + t;
                left[i] = float4(p[0], p[8 * STRIDE], p[4], p[8 * STRIDE + 4]);
            }
            for (uint j = 0; j < 4; j++) {
                threadgroup const float * p = weights + (rows_at + 8 * j + g) * STRIDE + k + t;
                const float2 right = float2(p[0], p[4]);
                for (uint i = 0; i < 2; i++) mma_16x8x8(sums[i][j], left[i], right, lane);
            }
        }
    }

    const uint first = (which > 0 ? a.rows[0] : 0) + (which > 1 ? a.rows[1] : 0);
    for (uint i = 0; i < 2; i++)
        for (uint h = 0; h < 2; h++) {
            const uint token = token0 + tokens_at + 16 * i + 8 * h + g;
            if (token >= a.n_tokens) continue;
            for (uint j = 0; j < 4; j++) {
                if (has_glu && j % 2 == 1) continue;
                const uint at_row = has_glu ? row0 + rows_at / 2 + 4 * j + 2 * t : row0 + rows_at + 8 * j + 2 * t;
                for (uint c = 0; c < 2; c++) {
                    const uint row = at_row + c;
                    if (row >= rows) continue;
                    const ulong at = ulong(token) * a.n_out + first + row;
                    float s = sums[i][j][2 * h + c];
                    if (has_glu) s = (epilogue == 3 ? silu(s) : gelu(s)) * sums[i][min(j + 1, 3u)][2 * h + c];
                    if (has_bias) s += which == 0 ? b0[row] : which == 1 && has_1 ? b1[row] : has_2 ? b2[row] : 0.0f;
                    if (has_add) s = residual[at] + s;
                    y[at] = s;
                }
            }
        }
}
