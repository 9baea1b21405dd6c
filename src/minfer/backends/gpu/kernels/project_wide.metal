// Matrix-vector products for one token where loads are slow to come and many must be under way: copies run ahead, and
// simdgroups share a row.
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

#define R 4          // sums a simdgroup makes at a time: of rows, or of R / 2 pairs of rows with swiglu and geglu
#define SLICE 1024   // inputs of a simdgroup: 32 a lane
#define ACROSS 5     // the most simdgroups that share a row; a longer one takes several passes
#define TURN 4       // groups of R sums between barriers
#define SIMDS 8      // the most simdgroups a threadgroup
#define RING 14336   // bytes of threadgroup memory for weights: R slots a simdgroup

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

// What a simdgroup takes for R sums: its slice of rows of one segment, or of both sides of pairs of rows.
struct piece {
    device const uchar * w, * up;
    uint row_bytes, up_bytes, of_slice, of_up, rows, row0, which;
};
// Groups of R sums in segment i.
inline uint groups_of(constant project_args & a, uint i) { return ((has_glu ? 2 : 1) * a.rows[i] + R - 1) / R; }
inline piece piece_of(constant project_args & a, device const uchar * w0, device const uchar * w1, device const uchar * w2, uint group) {
    piece p;
    uint before = 0;
    p.which = 0;
    p.w = w0, p.up = w1, p.rows = a.rows[0], p.row_bytes = a.row_bytes[0], p.up_bytes = a.row_bytes[1];
    p.of_slice = slice_bytes(type_0), p.of_up = slice_bytes(type_1);
    if (has_1 && !has_glu) {
        const uint g0 = groups_of(a, 0), g1 = g0 + groups_of(a, 1);
        if (group >= g0) p.which = 1, before = g0, p.w = w1, p.rows = a.rows[1], p.row_bytes = a.row_bytes[1], p.of_slice = slice_bytes(type_1);
        if (has_2 && group >= g1)
            p.which = 2, before = g1, p.w = w2, p.rows = a.rows[2], p.row_bytes = a.row_bytes[2], p.of_slice = slice_bytes(type_2);
    }
    p.row0 = (has_glu ? R / 2 : R) * (group - before);
    return p;
}
// Begins to copy the slices of sums r and r + 1 to their slots; `shifts` are where in the first 16 bytes they begin there. A
// row past the last is the last again: its sum is not used.
inline void copy_slices(piece p, uint slice, uint r, uint slot, uint lane, threadgroup uint4 * slots, thread uint (&shifts)[R]) {
    const uint row = p.row0 + (has_glu ? r / 2 : r);
#pragma unroll
    for (uint i = 0; i < 2; i++) {
        const bool up = has_glu && i == 1;
        const uint row_bytes = up ? p.up_bytes : p.row_bytes, of_slice = up ? p.of_up : p.of_slice;
        const uint bytes = min(of_slice, row_bytes - slice * of_slice);
        device const uchar * w = up ? p.up : p.w;
        threadgroup uint4 * to = slots + (r + i) * (slot / 16);
        if (row + 3 < p.rows) {  // up to 30 bytes more are copied: two rows follow that have them
            const ulong at = ulong(row) * row_bytes + (has_glu ? 0 : i * row_bytes) + slice * of_slice;
            const uint n = (bytes + 30) / 16;
            shifts[r + i] = uint(at) & 15;
            device const uint4 * from = (device const uint4 *)(w + 16 * lane + (at & ~ulong(15)));
            if (lane < n) copy16(to + lane, from);
            if (slot / 16 > SIMD && lane + SIMD < n) copy16(to + lane + SIMD, from + SIMD);
            if (slot / 16 > 2 * SIMD && lane + 2 * SIMD < n) copy16(to + lane + 2 * SIMD, from + 2 * SIMD);
        } else {  // the matrix's last 16 bytes can be fewer
            const ulong at = ulong(min(row + (has_glu ? 0 : i), p.rows - 1)) * row_bytes + slice * of_slice;
            device const uchar * from = w + (at & ~ulong(15));
            shifts[r + i] = uint(at) & 15;
            const uint whole = (shifts[r + i] + bytes) / 16, left = 16 * whole + lane;
#pragma unroll 1
            for (uint k = lane; k < whole; k += SIMD) copy16(to + k, (device const uint4 *)from + k);
            if (left < shifts[r + i] + bytes) ((threadgroup uchar *)to)[left] = from[left];
        }
    }
}
// The lane's part of a row's sum, whose slice begins at `shift` in the slot `from`. A lane past the row's end has zeros for
// inputs and takes a block that is there.
inline float slot_product(ushort type, uint n, uint shift, threadgroup const uint4 * from, uint lane, thread const inputs32 & x) {
    const uint last = n / (is_super(type) ? 256 : 32) - 1, bytes = block_bytes(type);
    const uint at = (bytes % 16 ? shift : 0) + bytes * min(is_super(type) ? lane / 8 : lane, last);
    return dot32(type, (threadgroup const uint *)from, at, lane, x);
}

// y (n_out): the segments' rows in order, or act(gate) * up for a pair of rows; as `project` (project.metal), one token, and
// no plain weights. Grid: x, any number of threadgroups. Threads: whole teams of simdgroups that share rows, `across` each.
// The teams of all threadgroups share the rows evenly, R sums of one segment at a time. A simdgroup has a slice of 1024
// inputs, as whole numbers in registers; it copies its slices of rows to R slots of its own, one ahead of each that it works
// on. Inputs (normed, where there is a norm) are made whole numbers in threadgroup memory, all at once or pass by pass.
[[max_total_threads_per_threadgroup(640)]]
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
                         uint sg [[simdgroup_index_in_threadgroup]], uint sgs [[simdgroups_per_threadgroup]]) {
    threadgroup uint4 ring[RING / 16];
    threadgroup uint2 planes[3 * ACROSS * SLICE / 8];
    threadgroup float block_steps[ACROSS * SLICE / 256];
    threadgroup float sums[2][SIMDS * TURN * R];  // in turn, so that one barrier a turn is enough
    threadgroup float chains[CHAINS * SIMD];
    device const uchar * s1 = w0, * s2 = w0;
    if (has_1) s1 = w1;
    if (has_2) s2 = w2;
    const uint slot = max(slot_bytes(type_0), max(slot_bytes(type_1), slot_bytes(type_2))), most = min(uint(ACROSS), RING / (R * slot));
    const uint slices = (a.n_in + SLICE - 1) / SLICE, passes = (slices + most - 1) / most, across = (slices + passes - 1) / passes;
    const uint teams = sgs / across, team = sg / across, own = sg % across;
    // Of the groups of R sums this team has begin ... end, TURN at a time: lot ... lot_end, all passes of them.
    const uint groups = groups_of(a, 0) + (has_1 && !has_glu ? groups_of(a, 1) : 0) + (has_2 ? groups_of(a, 2) : 0);
    const uint share = groups / (tgs * teams), more = groups % (tgs * teams), number = tg * teams + team;
    const uint begin = share * number + min(number, more), end = begin + share + (number < more ? 1 : 0);
    const uint turns = (share + (more > 0 ? 1 : 0) + TURN - 1) / TURN;
    threadgroup uint4 * slots = ring + sg * R * (slot / 16);
    // What is copied next: group `next` of `pass_next`.
    uint next = begin, next_lot = begin, next_end = min(begin + TURN, end), pass_next = 0, which_next, shifts[R];
    {
        const piece p = piece_of(a, w0, s1, s2, next);
#pragma unroll
        for (uint r = 0; r < R; r += 2) {
            if (begin < end) copy_slices(p, own, r, slot, lane, slots, shifts);
            copies_end_group();
        }
        which_next = p.which;
    }
    wait_for_those_before();
    float scale = 1.0f;
    if (has_norm) {  // as sum_of_squares, its chains shared among the simdgroups
        for (uint c = sg; c < CHAINS; c += sgs) chains[SIMD * c + lane] = squares_chain(x, a.n_in, lane, c);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float s = chains[lane];
        for (uint c = 1; c < CHAINS; c++) s += chains[SIMD * c + lane];
        scale = norm_scale(simd_sum(s), a.n_in, a.eps);
    }
    inputs32 in;
    for (uint turn = 0; turn < turns; turn++) {
        const uint lot = min(begin + TURN * turn, end), lot_end = min(lot + TURN, end);
        threadgroup float * meet = sums[turn & 1] + sg * TURN * R;
        for (uint pass = 0; pass < passes; pass++) {
            const uint slice = min(pass * across + own, slices - 1), n = min(a.n_in - SLICE * slice, uint(SLICE));
            if (turn == 0 || passes > 1) {
                threadgroup_barrier(mem_flags::mem_threadgroup);  // the inputs before were read
                for (uint i = 8 * tid; i < across * SLICE; i += 8 * SIMD * sgs) {  // a simdgroup a block of 256
                    const uint at = pass * across * SLICE + i;
                    float4 p = float4(0.0f), q = float4(0.0f);
                    if (at < a.n_in) {
                        p = load4(x + at), q = load4(x + at + 4);
                        if (has_norm) p = p * scale * load4(gain + at), q = q * scale * load4(gain + at + 4);
                    }
                    const uint4 f = max(as_type<uint4>(fabs(p)), as_type<uint4>(fabs(q)));  // in the order of the numbers; NaN is largest
                    uint bits = max(max(f.x, f.y), max(f.z, f.w));
                    const float largest = as_type<float>(simd_max(bits)), inverse = largest > TINY ? LARGEST / largest : 0.0f;
                    const uint3 u = pack4(p, inverse), v = pack4(q, inverse);
                    planes[i / 8] = uint2(u.x, v.x);
                    planes[ACROSS * SLICE / 8 + i / 8] = uint2(u.y, v.y);
                    planes[2 * (ACROSS * SLICE / 8) + i / 8] = uint2(u.z, v.z);
                    if (lane == 0) block_steps[i / 256] = largest * (1.0f / LARGEST);
                }
                threadgroup_barrier(mem_flags::mem_threadgroup);
            }
            threadgroup const uint2 * inputs = planes + own * SLICE / 8;
            threadgroup const float * steps = block_steps + own * SLICE / 256;
            uint parts = 0;  // no inputs are in registers
            for (uint group = lot; group < lot_end; group++) {
                const uint which = which_next;
                if (++next == next_end) {
                    if (++pass_next < passes) next = next_lot;
                    else pass_next = 0, next_lot = next_end, next_end = min(next_end + TURN, end);
                }
                const piece ahead = piece_of(a, w0, s1, s2, next);
                which_next = ahead.which;
                const uint slice_next = min(pass_next * across + own, slices - 1);
                float v[R];
#pragma unroll
                for (uint r = 0; r < R; r += 2) {  // two at a time: each fills the other's waits
                    copies_wait<R / 2 - 1>();
                    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
                    for (uint i = r; i < r + 2; i++) {
                        const uint w = has_glu ? i & 1 : which;
                        const bool first = w == 0 || (w == 1 ? type_1 : type_2) == type_0, second = w == 1 || type_2 == type_1;
                        // Types differ in the inputs that a lane takes.
                        if (i == 0 || (has_glu && parts_of(type_1) != parts_of(type_0))) {
                            if (first && parts != parts_of(type_0)) load_inputs(type_0, inputs, ACROSS * SLICE / 8, steps, lane, in), parts = parts_of(type_0);
                            else if (!first && second && parts != parts_of(type_1)) load_inputs(type_1, inputs, ACROSS * SLICE / 8, steps, lane, in), parts = parts_of(type_1);
                            else if (!first && !second && parts != parts_of(type_2)) load_inputs(type_2, inputs, ACROSS * SLICE / 8, steps, lane, in), parts = parts_of(type_2);
                        }
                        threadgroup const uint4 * from = slots + i * (slot / 16);
                        if (first) v[i] = slot_product(type_0, n, shifts[i], from, lane, in);
                        else if (second) v[i] = slot_product(type_1, n, shifts[i], from, lane, in);
                        else v[i] = slot_product(type_2, n, shifts[i], from, lane, in);
                    }
                    simdgroup_barrier(mem_flags::mem_threadgroup);
                    if (next < end) copy_slices(ahead, slice_next, r, slot, lane, slots, shifts);
                    copies_end_group();
                }
                const float mine = lanes_sums<R>(v, lane);
                if (lane % (SIMD / R) == 0) {
                    threadgroup float * to = meet + R * (group - lot) + owner<R>(lane);
                    *to = pass > 0 ? *to + mine : mine;
                }
            }
        }
        // The sums of a team meet; one of its threads ends a row.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint n = has_glu ? R / 2 : R, t = lane + SIMD * own;
        if (t < n * (lot_end - lot)) {
            const piece p = piece_of(a, w0, s1, s2, lot + t / n);
            const uint row = p.row0 + t % n, to = row + (p.which > 0 ? a.rows[0] : 0) + (p.which > 1 ? a.rows[1] : 0);
            threadgroup const float * of = sums[turn & 1] + team * across * TURN * R + (has_glu ? 2 : 1) * t;
            float s = 0, u = 0;
            for (uint i = 0; i < across; i++, of += TURN * R) {
                s += of[0];
                if (has_glu) u += of[1];
            }
            if (row < p.rows) {
                if (has_glu) s = (epilogue == 3 ? silu(s) : gelu(s)) * u;
                if (has_bias) s += p.which == 0 ? b0[row] : p.which == 1 && has_1 ? b1[row] : has_2 ? b2[row] : 0.0f;
                if (has_add) s = residual[to] + s;
                y[to] = s;
            }
        }
    }
}
