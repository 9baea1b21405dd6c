// Matrix-matrix products by simdgroup matrices, for many tokens. Operands and sums are f32: no value leaves f16's range.
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
#define TOKENS 32  // tokens a threadgroup
#define DEPTH 32   // values of a row at a time

// Two runs of 16 values of a weight row, the thread's share of the tile: row `tid / 2`, half `tid % 2`.
inline void load_weights(ushort type, device const uchar * w, uint row_bytes, uint rows, uint row, uint n_in, uint unit,
                         threadgroup float * to) {
    float4 v[4];
    if (row < rows) weight16(type, w + ulong(row) * row_bytes, n_in, unit, v);
    for (uint k = 0; k < 4; k++)
        for (uint i = 0; i < 4; i++) to[4 * k + i] = row < rows ? v[k][i] : 0.0f;
}

// y (n_out, n_tokens): as `project` (project.metal), without its norm.
// Grid: x, tiles of 64 rows within a segment (with swiglu and geglu 32 rows of gate, then the same 32 of up); y, tiles of
// 32 tokens. 128 threads. A threadgroup owns its tile of y; simdgroup s has rows 16 s ... 16 s + 15 of all 32 tokens.
// A sum runs over the row in steps of 8 in order, whatever the tile.
kernel void gemm(constant project_args & a [[buffer(0)]], device const float * x [[buffer(1)]],
                 device const uchar * w0 [[buffer(3)]], device const uchar * w1 [[buffer(4), function_constant(has_1)]],
                 device const uchar * w2 [[buffer(5), function_constant(has_2)]],
                 device const float * b0 [[buffer(6), function_constant(has_bias)]],
                 device const float * b1 [[buffer(7), function_constant(has_bias_1)]],
                 device const float * b2 [[buffer(8), function_constant(has_bias_2)]],
                 device const float * residual [[buffer(9), function_constant(has_add)]], device float * y [[buffer(10)]],
                 uint2 tg [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                 uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float tile[(ROWS + TOKENS) * DEPTH];  // weights (32, 64), then x (32, 32); at the end y (64, 32)
    threadgroup float * weights = tile;
    threadgroup float * inputs = tile + ROWS * DEPTH;
    const uint tiles_0 = (a.rows[0] + ROWS - 1) / ROWS, tiles_1 = (a.rows[1] + ROWS - 1) / ROWS;
    const uint which = has_glu || !has_1 || tg.x < tiles_0 ? 0 : !has_2 || tg.x < tiles_0 + tiles_1 ? 1 : 2;
    const uint row0 = has_glu ? 32 * tg.x : ROWS * (tg.x - (which > 0 ? tiles_0 : 0) - (which > 1 ? tiles_1 : 0));
    const uint token0 = TOKENS * tg.y;

    simdgroup_float8x8 sums[2][4];
    for (uint r = 0; r < 2; r++)
        for (uint t = 0; t < 4; t++) sums[r][t] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    for (uint k0 = 0; k0 < a.n_in; k0 += DEPTH) {
        threadgroup float * to = weights + tid * 16;
        const uint row = row0 + tid / 2, unit = k0 / 16 + (tid & 1);
        if (has_glu && tid >= 64) load_weights(type_1, w1, a.row_bytes[1], a.rows[1], row - 32, a.n_in, unit, to);
        else if (which == 0) load_weights(type_0, w0, a.row_bytes[0], has_glu ? min(a.rows[0], row0 + 32) : a.rows[0], row, a.n_in, unit, to);
        else if (which == 1 && has_1) load_weights(type_1, w1, a.row_bytes[1], a.rows[1], row, a.n_in, unit, to);
        else if (has_2) load_weights(type_2, w2, a.row_bytes[2], a.rows[2], row, a.n_in, unit, to);
        const uint token = token0 + tid / 4, column = k0 + 8 * (tid & 3);
        for (uint i = 0; i < 8; i++)
            inputs[8 * tid + i] = token < a.n_tokens && column + i < a.n_in ? x[ulong(token) * a.n_in + column + i] : 0.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint k = 0; k < DEPTH; k += 8) {
            simdgroup_float8x8 w[2], v;
            for (uint r = 0; r < 2; r++) simdgroup_load(w[r], weights + (16 * sg + 8 * r) * DEPTH + k, DEPTH, ulong2(0, 0), true);
            for (uint t = 0; t < 4; t++) {
                simdgroup_load(v, inputs + 8 * t * DEPTH + k, DEPTH);
                for (uint r = 0; r < 2; r++) simdgroup_multiply_accumulate(sums[r][t], v, w[r], sums[r][t]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint r = 0; r < 2; r++)
        for (uint t = 0; t < 4; t++) simdgroup_store(sums[r][t], tile + 8 * t * ROWS + 16 * sg + 8 * r, ROWS);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (has_glu) {
        for (uint i = tid; i < 32 * TOKENS; i += 128) {
            const uint r = i % 32, t = i / 32;
            if (row0 + r < a.rows[0] && token0 + t < a.n_tokens) {
                const float gate = tile[t * ROWS + r], up = tile[t * ROWS + 32 + r];
                y[ulong(token0 + t) * a.n_out + row0 + r] = (epilogue == 3 ? silu(gate) : gelu(gate)) * up;
            }
        }
        return;
    }
    const uint rows = which == 0 ? a.rows[0] : which == 1 ? a.rows[1] : a.rows[2];
    const uint first = (which > 0 ? a.rows[0] : 0) + (which > 1 ? a.rows[1] : 0);
    for (uint i = tid; i < ROWS * TOKENS; i += 128) {
        const uint row = row0 + i % ROWS, token = token0 + i / ROWS;
        if (row < rows && token < a.n_tokens) {
            const ulong at = ulong(token) * a.n_out + first + row;
            float s = tile[i];
            if (has_bias) s += which == 0 ? b0[row] : which == 1 && has_1 ? b1[row] : has_2 ? b2[row] : 0.0f;
            if (has_add) s = residual[at] + s;
            y[at] = s;
        }
    }
}
