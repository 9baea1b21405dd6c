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

// N sums over the lanes: of values v[0 ... N) of each lane, a lane gets the sum that `owner` numbers. Halves are exchanged,
// so N sums cost little more than one; the order is the tree of lanes 16, 8, 4, 2, 1 apart. N is a power of two.
template <uint N> inline float lanes_sums(thread float (&v)[N], uint lane) {
    ushort apart = 16;
#pragma unroll
    for (uint n = N / 2; n > 0; n /= 2, apart /= 2) {
        const bool upper = (lane & apart) != 0;
#pragma unroll
        for (uint i = 0; i < n; i++) {
            const float keep = upper ? v[n + i] : v[i], give = upper ? v[i] : v[n + i];
            v[i] = keep + simd_shuffle_xor(give, apart);
        }
    }
    for (; apart > 0; apart /= 2) v[0] += simd_shuffle_xor(v[0], apart);
    return v[0];
}
template <uint N> inline uint owner(uint lane) {
    uint found = 0, apart = 16;
    for (uint n = N / 2; n > 0; n /= 2, apart /= 2) found += (lane & apart) ? n : 0;
    return found;
}

// The lane's eight inputs of a step, for weights of a type.
inline void input8(ushort type, device const float * x, device const float * gain, uint n, float scale, uint step, uint lane,
                   thread float4 & a, thread float4 & b) {
    const uint at = 256 * step + place8(type, lane), apart = apart8(type);
    a = input4(type, x, at, n);
    b = input4(type, x, at + apart, n);
    if (has_norm) {
        a = a * scale * input4(type, gain, at, n);
        b = b * scale * input4(type, gain, at + apart, n);
    }
}

// v[r] = the lane's part of weight row row0 + r times x, over the steps part, part + across, ...; with swiglu and geglu
// v[R + r] is that of the second matrix. A row past the last reads the last one again: its sum is not used.
template <uint R>
inline void row_products(ushort type, device const uchar * w, uint row_bytes, ushort up_type, device const uchar * up, uint up_bytes,
                         uint rows, uint row0, device const float * x, device const float * gain, uint n_in, float scale, uint part,
                         uint lane, thread float (&v)[2 * R]) {
    float4 acc[2 * R];
    for (uint r = 0; r < 2 * R; r++) acc[r] = float4(0.0f);
    const uint steps = (n_in + 255) / 256;
    for (uint step = part; step < steps; step += across) {
        float4 a[2 * R], b[2 * R], xa, xb;
        for (uint r = 0; r < R; r++) {
            const ulong row = min(row0 + r, rows - 1);
            weight8(type, w + row * row_bytes, n_in, step, lane, a[r], b[r]);
            if (has_glu) weight8(up_type, up + row * up_bytes, n_in, step, lane, a[R + r], b[R + r]);
        }
        input8(type, x, gain, n_in, scale, step, lane, xa, xb);
        for (uint r = 0; r < R; r++) acc[r] = fma(b[r], xb, fma(a[r], xa, acc[r]));
        if (has_glu) {
            input8(up_type, x, gain, n_in, scale, step, lane, xa, xb);
            for (uint r = R; r < 2 * R; r++) acc[r] = fma(b[r], xb, fma(a[r], xa, acc[r]));
        }
    }
    for (uint r = 0; r < 2 * R; r++) v[r] = (acc[r].x + acc[r].y) + (acc[r].z + acc[r].w);
}

// y (n_out): the segments' rows in order, or act(gate) * up for a pair of rows; as `project` (project.metal), one token.
// Grid: x, groups of GROUPS / across times R rows of one segment. 128 threads. `across` simdgroups own R rows and add
// their sums in order. The order of a sum depends on the row's length and `across`, which is chosen by that length.
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
    threadgroup float chains[CHAINS * SIMD];
    threadgroup float sums[GROUPS * 2 * R];
    float scale = 1.0f;
    if (has_norm) {  // as sum_of_squares, its chains shared among the simdgroups
        for (uint c = sg; c < CHAINS; c += GROUPS) chains[SIMD * c + lane] = squares_chain(x, a.n_in, lane, c);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float s = chains[lane];
        for (uint c = 1; c < CHAINS; c++) s += chains[SIMD * c + lane];
        scale = norm_scale(simd_sum(s), a.n_in, a.eps);
    }
    const uint group = tg * (GROUPS / across) + sg / across, part = sg % across;
    const uint groups_0 = (a.rows[0] + R - 1) / R, groups_1 = (a.rows[1] + R - 1) / R;
    const uint which = has_glu || !has_1 || group < groups_0 ? 0 : !has_2 || group < groups_0 + groups_1 ? 1 : 2;
    const uint row0 = R * (group - (which > 0 ? groups_0 : 0) - (which > 1 ? groups_1 : 0));
    const uint rows = which == 0 ? a.rows[0] : which == 1 ? a.rows[1] : a.rows[2];
    const uint first = (which > 0 ? a.rows[0] : 0) + (which > 1 ? a.rows[1] : 0);

    float v[2 * R];
    if (which == 0) {
        row_products<R>(type_0, w0, a.row_bytes[0], type_1, has_glu ? w1 : w0, a.row_bytes[1], rows, row0, x, gain, a.n_in, scale, part, lane, v);
    } else if (which == 1 && has_1) {
        row_products<R>(type_1, w1, a.row_bytes[1], type_1, w1, a.row_bytes[1], rows, row0, x, gain, a.n_in, scale, part, lane, v);
    } else if (has_2) {
        row_products<R>(type_2, w2, a.row_bytes[2], type_2, w2, a.row_bytes[2], rows, row0, x, gain, a.n_in, scale, part, lane, v);
    }
    // One lane in 32 / (2 R) has a row's sum; they meet in threadgroup memory, where lane r of the first simdgroup ends it.
    const float mine = lanes_sums<2 * R>(v, lane);
    if (lane % (16 / R) == 0) sums[2 * R * sg + owner<2 * R>(lane)] = mine;
    if (across > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    else simdgroup_barrier(mem_flags::mem_threadgroup);
    const uint row = row0 + lane;
    if (part > 0 || lane >= R || row >= rows) return;
    float s = 0, up = 0;
    for (uint i = 0; i < across; i++) {
        s += sums[2 * R * (sg + i) + lane];
        if (has_glu) up += sums[2 * R * (sg + i) + R + lane];
    }
    if (has_glu) {
        y[row] = (epilogue == 3 ? silu(s) : gelu(s)) * up;
        return;
    }
    if (has_bias) s += which == 0 ? b0[row] : which == 1 && has_1 ? b1[row] : has_2 ? b2[row] : 0.0f;
    if (has_add) s = residual[first + row] + s;
    y[first + row] = s;
}
typedef decltype(project_wide<4>) project_wide_t;
template [[host_name("project_wide_r1")]] kernel project_wide_t project_wide<1>;
template [[host_name("project_wide_r2")]] kernel project_wide_t project_wide<2>;
template [[host_name("project_wide_r4")]] kernel project_wide_t project_wide<4>;
