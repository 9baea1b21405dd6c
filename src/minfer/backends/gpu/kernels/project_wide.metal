// Matrix-vector products for one token where loads are slow to come and many must be under way: simdgroups share a row.
#include "wide.h"

constant ushort type_0 [[function_constant(0)]];
constant ushort type_1 [[function_constant(1)]];
constant ushort type_2 [[function_constant(2)]];
constant uint n_segments [[function_constant(3)]];
constant bool has_norm [[function_constant(4)]];
constant uint epilogue [[function_constant(5)]];  // 0 none, 1 bias, 2 add, 3 swiglu, 4 geglu
constant uint across [[function_constant(6)]];    // simdgroups that share rows: 1, 2, 4
constant bool has_1 = n_segments > 1;
constant bool has_2 = n_segments > 2;
constant bool has_bias = epilogue == 1;
constant bool has_bias_1 = has_bias && has_1;
constant bool has_bias_2 = has_bias && has_2;
constant bool has_add = epilogue == 2;
constant bool has_glu = epilogue > 2;

#define GROUPS 4  // simdgroups a threadgroup

// acc[r] += the lane's share of weight row row0 + r times x, over the steps part, part + across, ...
template <uint R>
inline void row_products(ushort type, device const uchar * w, uint row_bytes, uint rows, uint row0, device const float * x,
                         device const float * gain, uint n_in, float scale, uint part, uint lane, thread float4 (&acc)[R]) {
    const uint steps = (n_in + 255) / 256;
    for (uint r = 0; r < R; r++) acc[r] = float4(0.0f);
    for (uint step = part; step < steps; step += across) {
        const uint at = 256 * step + place8(type, lane), apart = apart8(type);
        float4 xa = input4(type, x, at, n_in), xb = input4(type, x, at + apart, n_in);
        if (has_norm) {
            xa = xa * scale * input4(type, gain, at, n_in);
            xb = xb * scale * input4(type, gain, at + apart, n_in);
        }
        for (uint r = 0; r < R; r++) {
            // A row past the last reads the last one again: its sum is not used.
            float4 a, b;
            weight8(type, w + ulong(min(row0 + r, rows - 1)) * row_bytes, n_in, step, lane, a, b);
            acc[r] = fma(b, xb, fma(a, xa, acc[r]));
        }
    }
}

// y (n_out): the segments' rows in order, or act(gate) * up for a pair of rows; as `project` (project.metal), one token.
// Grid: x, groups of GROUPS / across times R rows of one segment. 128 threads. `across` simdgroups own R rows and add
// their sums in order; lane r of the first writes row r. The order of a sum depends on the row's length and `across`,
// which is chosen by that length.
template <uint R>
kernel void project_wide(constant project_args & a [[buffer(0)]], device const float * x [[buffer(1)]],
                         device const float * gain [[buffer(2), function_constant(has_norm)]], device const uchar * w0 [[buffer(3)]],
                         device const uchar * w1 [[buffer(4), function_constant(has_1)]],
                         device const uchar * w2 [[buffer(5), function_constant(has_2)]],
                         device const float * b0 [[buffer(6), function_constant(has_bias)]],
                         device const float * b1 [[buffer(7), function_constant(has_bias_1)]],
                         device const float * b2 [[buffer(8), function_constant(has_bias_2)]],
                         device const float * residual [[buffer(9), function_constant(has_add)]], device float * y [[buffer(10)]],
                         uint tg [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                         uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[GROUPS][2 * R];
    const float scale = has_norm ? norm_scale(sum_of_squares(x, a.n_in, lane), a.n_in, a.eps) : 1.0f;
    const uint group = tg * (GROUPS / across) + sg / across, part = sg % across;
    const uint groups_0 = (a.rows[0] + R - 1) / R, groups_1 = (a.rows[1] + R - 1) / R;
    const uint which = has_glu || !has_1 || group < groups_0 ? 0 : !has_2 || group < groups_0 + groups_1 ? 1 : 2;
    const uint row0 = R * (group - (which > 0 ? groups_0 : 0) - (which > 1 ? groups_1 : 0));
    const uint rows = which == 0 ? a.rows[0] : which == 1 ? a.rows[1] : a.rows[2];
    const uint first = (which > 0 ? a.rows[0] : 0) + (which > 1 ? a.rows[1] : 0);

    float4 acc[R], up[R];
    if (which == 0) row_products<R>(type_0, w0, a.row_bytes[0], rows, row0, x, gain, a.n_in, scale, part, lane, acc);
    else if (which == 1 && has_1) row_products<R>(type_1, w1, a.row_bytes[1], rows, row0, x, gain, a.n_in, scale, part, lane, acc);
    else if (has_2) row_products<R>(type_2, w2, a.row_bytes[2], rows, row0, x, gain, a.n_in, scale, part, lane, acc);
    if (has_glu) row_products<R>(type_1, w1, a.row_bytes[1], rows, row0, x, gain, a.n_in, scale, part, lane, up);

    float mine = 0, other = 0;  // lane r has row r
    for (uint r = 0; r < R; r++) {
        const float s = simd_sum((acc[r].x + acc[r].y) + (acc[r].z + acc[r].w));
        const float u = has_glu ? simd_sum((up[r].x + up[r].y) + (up[r].z + up[r].w)) : 0.0f;
        if (lane == r) mine = s, other = u;
    }
    if (across > 1) {
        if (lane < R) {
            sums[sg][lane] = mine;
            sums[sg][R + lane] = other;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (part == 0 && lane < R)
            for (uint s = 1; s < across; s++) {
                mine += sums[sg + s][lane];
                other += sums[sg + s][R + lane];
            }
    }
    const uint row = row0 + lane;
    if (part > 0 || lane >= R || row >= rows) return;
    if (has_glu) {
        y[row] = (epilogue == 3 ? silu(mine) : gelu(mine)) * other;
        return;
    }
    if (has_bias) mine += which == 0 ? b0[row] : which == 1 && has_1 ? b1[row] : has_2 ? b2[row] : 0.0f;
    if (has_add) mine = residual[first + row] + mine;
    y[first + row] = mine;
}
typedef decltype(project_wide<4>) project_wide_t;
template [[host_name("project_wide_r1")]] kernel project_wide_t project_wide<1>;
template [[host_name("project_wide_r2")]] kernel project_wide_t project_wide<2>;
template [[host_name("project_wide_r4")]] kernel project_wide_t project_wide<4>;
