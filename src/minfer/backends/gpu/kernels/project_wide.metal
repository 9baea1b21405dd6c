// Matrix-vector products for one token where loads are slow to come and many must be under way: simdgroups share a row.
#include "wide.h"

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

#define GROUPS 4    // simdgroups a threadgroup
#define R 4         // rows a simdgroup
#define CHUNK 5120  // inputs in threadgroup memory at a time

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

// The codes of R rows, and with swiglu and geglu of the same rows of the second matrix. A row past the last is the last one
// again: its sum is not used.
inline void load_rows(ushort type, device const uchar * w, uint row_bytes, ushort up_type, device const uchar * up, uint up_bytes,
                      uint rows, uint row0, uint n_in, uint step, uint lane, thread codes8 (&to)[2 * R]) {
    for (uint r = 0; r < R; r++) {
        const ulong row = min(row0 + r, rows - 1);
        to[r] = load8(type, w + row * row_bytes, n_in, step, lane);
        if (has_glu) to[R + r] = load8(up_type, up + row * up_bytes, n_in, step, lane);
    }
}

// Adds to v[r] the lane's part of weight row row0 + r times the inputs that stand in threadgroup memory, `at` in the row
// and n of them: simdgroup `sg` has steps sg, sg + GROUPS, ...; with swiglu and geglu to v[R + r] that of the second matrix.
inline void row_products(ushort type, device const uchar * w, uint row_bytes, ushort up_type, device const uchar * up, uint up_bytes,
                         uint rows, uint row0, threadgroup const input4 * x, threadgroup const float * block_steps, uint at, uint n,
                         uint n_in, uint sg, uint lane, thread float (&v)[2 * R]) {
    const uint steps = (n + 255) / 256, sides = has_glu ? 2 : 1;
    codes8 next[2 * R], now[2 * R];  // the codes of the next step are under way while those of this one are multiplied
    load_rows(type, w, row_bytes, up_type, up, up_bytes, rows, row0, n_in, sg + at / 256, lane, next);
    for (uint step = sg; step < steps; step += GROUPS) {
        for (uint i = 0; i < sides * R; i++) now[i] = next[i];
        load_rows(type, w, row_bytes, up_type, up, up_bytes, rows, row0, n_in, step + GROUPS + at / 256, lane, next);
        for (uint side = 0; side < sides; side++) {
            const ushort t = side == 0 ? type : up_type;
            const uint p = 256 * step + place8(t, lane), q = p + apart8(t);
            const input4 a = x[p / 4], b = x[q / 4];
            const float sa = block_steps[p / 32], sb = block_steps[q / 32];
            for (uint r = 0; r < R; r++) v[R * side + r] += dot8(t, now[R * side + r], lane, a, b, sa, sb);
        }
    }
}
// Asks for rows before what they are multiplied with is there.
inline void prefetch_rows(device const uchar * w, uint row_bytes, uint rows, uint row0, uint tid) {
    for (uint r = 0; r < R; r++)
        for (uint i = 128 * tid; i < row_bytes; i += 128 * SIMD * GROUPS)
            prefetch(w + ulong(min(row0 + r, rows - 1)) * row_bytes + i);
}

// y (n_out): the segments' rows in order, or act(gate) * up for a pair of rows; as `project` (project.metal), one token, and
// no plain weights. Grid: x, as many threadgroups as the device has room for; each takes R rows of one segment, then the
// next that no other takes. 128 threads. Its simdgroups share the rows and add their sums in order. Inputs (normed, where
// there is a norm) are made whole numbers in threadgroup memory, all at once or chunk by chunk.
[[max_total_threads_per_threadgroup(128)]]
kernel void project_wide(constant project_args & a [[buffer(0)]], device const float * x [[buffer(1)]],
                         device const float * gain [[buffer(2), function_constant(has_norm)]], device const uchar * w0 [[buffer(3)]],
                         device const uchar * w1 [[buffer(4), function_constant(has_1)]],
                         device const uchar * w2 [[buffer(5), function_constant(has_2)]],
                         device const float * b0 [[buffer(6), function_constant(has_bias)]],
                         device const float * b1 [[buffer(7), function_constant(has_bias_1)]],
                         device const float * b2 [[buffer(8), function_constant(has_bias_2)]],
                         device const float * residual [[buffer(9), function_constant(has_add)]], device float * y [[buffer(10)]],
                         uint tg [[threadgroup_position_in_grid]], uint tgs [[threadgroups_per_grid]],
                         uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                         uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup input4 inputs[CHUNK / 4];
    threadgroup float block_steps[CHUNK / 32];
    threadgroup float sums[2][GROUPS * 2 * R];  // in turn, so that one barrier a round is enough
    threadgroup float chains[CHAINS * SIMD];
    const uint groups_0 = (a.rows[0] + R - 1) / R, groups_1 = has_1 && !has_glu ? (a.rows[1] + R - 1) / R : 0;
    const uint groups = groups_0 + groups_1 + (has_2 ? (a.rows[2] + R - 1) / R : 0);
    if (tg < groups_0) {
        prefetch_rows(w0, a.row_bytes[0], a.rows[0], R * tg, tid);
        if (has_glu) prefetch_rows(w1, a.row_bytes[1], a.rows[1], R * tg, tid);
    }
    wait_for_those_before();
    float scale = 1.0f;
    if (has_norm) {  // as sum_of_squares, its chains shared among the simdgroups
        for (uint c = sg; c < CHAINS; c += GROUPS) chains[SIMD * c + lane] = squares_chain(x, a.n_in, lane, c);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float s = chains[lane];
        for (uint c = 1; c < CHAINS; c++) s += chains[SIMD * c + lane];
        scale = norm_scale(simd_sum(s), a.n_in, a.eps);
    }
    uint turn = 0;
    for (uint group = tg; group < groups; group += tgs) {
        const uint which = has_glu || !has_1 || group < groups_0 ? 0 : !has_2 || group < groups_0 + groups_1 ? 1 : 2;
        const uint row0 = R * (group - (which > 0 ? groups_0 : 0) - (which > 1 ? groups_1 : 0));
        const uint rows = which == 0 ? a.rows[0] : which == 1 ? a.rows[1] : a.rows[2];
        const uint first = (which > 0 ? a.rows[0] : 0) + (which > 1 ? a.rows[1] : 0);
        float v[2 * R];
        for (uint r = 0; r < 2 * R; r++) v[r] = 0;
        for (uint at = 0; at < a.n_in; at += CHUNK) {
            const uint n = min(a.n_in - at, uint(CHUNK)), filled = (n + 255) / 256 * 256;
            if (turn == 0 || a.n_in > CHUNK) {
                threadgroup_barrier(mem_flags::mem_threadgroup);  // the chunk before was read
                for (uint i = 8 * tid; i < filled; i += 8 * GROUPS * SIMD) {  // four threads a block of 32
                    float4 p = float4(0.0f), q = float4(0.0f);
                    if (i < n) {
                        p = load4(x + at + i), q = load4(x + at + i + 4);
                        if (has_norm) p = p * scale * load4(gain + at + i), q = q * scale * load4(gain + at + i + 4);
                    }
                    const float4 f = max(fabs(p), fabs(q));
                    float most = max(max(f.x, f.y), max(f.z, f.w));
                    most = max(most, simd_shuffle_xor(most, 1));
                    most = max(most, simd_shuffle_xor(most, 2));
                    const float step = most / LARGEST, inverse = most > 0 ? LARGEST / most : 0.0f;
                    inputs[i / 4] = pack4(p, inverse, step);
                    inputs[i / 4 + 1] = pack4(q, inverse, step);
                    if ((tid & 3) == 0) block_steps[i / 32] = step;
                }
                threadgroup_barrier(mem_flags::mem_threadgroup);
            }
            threadgroup const input4 * own = inputs;
            threadgroup const float * steps = block_steps;
            if (which == 0) row_products(type_0, w0, a.row_bytes[0], has_glu ? type_1 : type_0, has_glu ? w1 : w0, a.row_bytes[1], rows, row0, own, steps, at, n, a.n_in, sg, lane, v);
            else if (which == 1 && has_1) row_products(type_1, w1, a.row_bytes[1], type_1, w1, 0, rows, row0, own, steps, at, n, a.n_in, sg, lane, v);
            else if (has_2) row_products(type_2, w2, a.row_bytes[2], type_2, w2, 0, rows, row0, own, steps, at, n, a.n_in, sg, lane, v);
        }
        // One lane in 16 / R has a sum; they meet in threadgroup memory, where thread r ends row r.
        const float mine = lanes_sums<2 * R>(v, lane);
        threadgroup float * meet = sums[turn & 1];
        if (lane % (16 / R) == 0) meet[2 * R * sg + owner<2 * R>(lane)] = mine;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint row = row0 + tid;
        if (tid < R && row < rows) {
            float s = 0, u = 0;
            for (uint i = 0; i < GROUPS; i++) {
                s += meet[2 * R * i + tid];
                if (has_glu) u += meet[2 * R * i + R + tid];
            }
            if (has_glu) s = (epilogue == 3 ? silu(s) : gelu(s)) * u;
            if (has_bias) s += which == 0 ? b0[row] : which == 1 && has_1 ? b1[row] : has_2 ? b2[row] : 0.0f;
            if (has_add) s = residual[first + row] + s;
            y[first + row] = s;
        }
        turn++;
    }
}
