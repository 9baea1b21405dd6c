// Matrix-vector products for one to eight tokens at a time, fused with what stands around them.
#include "weights.h"

constant ushort type_0 [[function_constant(0)]];
constant ushort type_1 [[function_constant(1)]];
constant ushort type_2 [[function_constant(2)]];
constant uint n_segments [[function_constant(3)]];
constant bool has_norm [[function_constant(4)]];
constant uint epilogue [[function_constant(5)]];  // 0 none, 1 bias, 2 add, 3 swiglu, 4 geglu
constant bool has_1 = n_segments > 1;
constant bool has_2 = n_segments > 2;
constant bool has_bias = epilogue == 1;
constant bool has_bias_1 = has_bias && has_1;
constant bool has_bias_2 = has_bias && has_2;
constant bool has_add = epilogue == 2;
constant bool has_glu = epilogue > 2;

// acc[r][t] = weight row (row0 + r) . x of token (token0 + t), all lanes' shares not yet added.
// The order of a lane's sum is step by step, then k; it depends on nothing but the row's length.
template <uint R, uint T>
inline void row_products(ushort type, device const uchar * w, uint row_bytes, uint rows, uint row0, device const float * x,
                         device const float * gain, uint n_in, uint n_tokens, uint token0, thread float (&scale)[T], uint lane,
                         thread float4 (&acc)[R][T]) {
    for (uint r = 0; r < R; r++)
        for (uint t = 0; t < T; t++) acc[r][t] = float4(0.0f);
    const uint steps = (n_in + 1023) / 1024;
    for (uint step = 0; step < steps; step++) {
        // A lane past the row's end has nothing to add; super-blocks are read by all lanes together.
        if (!is_super(type) && share_start(type, step, lane) >= n_in) continue;
        float4 g[8], xs[8], ws[8];
        if (has_norm) load_share(type, gain, n_in, step, lane, g);
        for (uint r = 0; r < R; r++) {
            const uint row = row0 + r;
            weight_share(type, w + ulong(row) * row_bytes, n_in, step, lane, row < rows, ws);
            for (uint t = 0; t < T; t++) {
                if (token0 + t >= n_tokens) break;
                if (T > 1 || r == 0) {
                    load_share(type, x + ulong(token0 + t) * n_in, n_in, step, lane, xs);
                    if (has_norm) for (uint k = 0; k < 8; k++) xs[k] = xs[k] * scale[t] * g[k];
                }
                for (uint k = 0; k < 8; k++) acc[r][t] = fma(ws[k], xs[k], acc[r][t]);
            }
        }
    }
}
inline float lanes_sum(float4 a) { return simd_sum((a.x + a.y) + (a.z + a.w)); }

// y (n_out, n_tokens): the segments' rows side by side, or one row of act(gate) * up for a pair of rows.
// Grid: x, groups of 4 simdgroups, R rows of one segment a simdgroup; y, groups of T tokens. 128 threads.
// A simdgroup owns its rows for its tokens; lane 0 writes them. Simdgroups past the last row do the collectives only.
template <uint R, uint T>
kernel void project(constant project_args & a [[buffer(0)]], device const float * x [[buffer(1)]],
                    device const float * gain [[buffer(2), function_constant(has_norm)]], device const uchar * w0 [[buffer(3)]],
                    device const uchar * w1 [[buffer(4), function_constant(has_1)]],
                    device const uchar * w2 [[buffer(5), function_constant(has_2)]],
                    device const float * b0 [[buffer(6), function_constant(has_bias)]],
                    device const float * b1 [[buffer(7), function_constant(has_bias_1)]],
                    device const float * b2 [[buffer(8), function_constant(has_bias_2)]],
                    device const float * residual [[buffer(9), function_constant(has_add)]], device float * y [[buffer(10)]],
                    uint2 tg [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                    uint sg [[simdgroup_index_in_threadgroup]]) {
    const uint token0 = tg.y * T;
    float scale[T];
    for (uint t = 0; t < T; t++) {
        scale[t] = 1.0f;
        if (has_norm && token0 + t < a.n_tokens)
            scale[t] = norm_scale(sum_of_squares(x + ulong(token0 + t) * a.n_in, a.n_in, lane), a.n_in, a.eps);
    }
    uint group = tg.x * 4 + sg;
    const uint groups_0 = (a.rows[0] + R - 1) / R, groups_1 = (a.rows[1] + R - 1) / R;
    float4 acc[R][T];
    if (has_glu) {
        float4 up[R][T];
        const uint row0 = group * R;
        row_products<R, T>(type_0, w0, a.row_bytes[0], a.rows[0], row0, x, gain, a.n_in, a.n_tokens, token0, scale, lane, acc);
        row_products<R, T>(type_1, w1, a.row_bytes[1], a.rows[0], row0, x, gain, a.n_in, a.n_tokens, token0, scale, lane, up);
        for (uint r = 0; r < R; r++)
            for (uint t = 0; t < T; t++) {
                const float g = lanes_sum(acc[r][t]), u = lanes_sum(up[r][t]);
                if (lane == 0 && row0 + r < a.rows[0] && token0 + t < a.n_tokens)
                    y[ulong(token0 + t) * a.n_out + row0 + r] = (epilogue == 3 ? silu(g) : gelu(g)) * u;
            }
        return;
    }
    uint first = 0, rows = a.rows[0], row0 = group * R, which = 0;
    if (!has_1 || group < groups_0) {
        row_products<R, T>(type_0, w0, a.row_bytes[0], rows, row0, x, gain, a.n_in, a.n_tokens, token0, scale, lane, acc);
    } else if (!has_2 || group < groups_0 + groups_1) {
        which = 1, first = a.rows[0], rows = a.rows[1], row0 = (group - groups_0) * R;
        row_products<R, T>(type_1, w1, a.row_bytes[1], rows, row0, x, gain, a.n_in, a.n_tokens, token0, scale, lane, acc);
    } else {
        which = 2, first = a.rows[0] + a.rows[1], rows = a.rows[2], row0 = (group - groups_0 - groups_1) * R;
        row_products<R, T>(type_2, w2, a.row_bytes[2], rows, row0, x, gain, a.n_in, a.n_tokens, token0, scale, lane, acc);
    }
    for (uint r = 0; r < R; r++)
        for (uint t = 0; t < T; t++) {
            float s = lanes_sum(acc[r][t]);
            const uint row = row0 + r;
            if (lane == 0 && row < rows && token0 + t < a.n_tokens) {
                const ulong at = ulong(token0 + t) * a.n_out + first + row;
                if (has_bias) s += which == 0 ? b0[row] : which == 1 && has_1 ? b1[row] : has_2 ? b2[row] : 0.0f;
                if (has_add) s = residual[at] + s;
                y[at] = s;
            }
        }
}
typedef decltype(project<4, 1>) project_t;
template [[host_name("project_t1")]] kernel project_t project<4, 1>;
template [[host_name("project_t2")]] kernel project_t project<4, 2>;
template [[host_name("project_t4")]] kernel project_t project<2, 4>;
template [[host_name("project_t8")]] kernel project_t project<2, 8>;
