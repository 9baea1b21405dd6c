// Matrix-vector products for one token where loads are slow to come and many must be under way: copies run ahead, and
// simdgroups share a row.
#include "wide.h"

constant ushort type_0 [[function_constant(0)]];
constant ushort type_1 [[function_constant(1)]];
constant ushort type_2 [[function_constant(2)]];
constant uint n_segments [[function_constant(3)]];
constant bool has_norm [[function_constant(4)]];
constant uint epilogue [[function_constant(5)]];  // 0 none, 1 bias, 2 add, 3 swiglu, 4 geglu
constant uint across [[function_constant(6)]];    // simdgroups that share a row: a team
constant uint passes [[function_constant(7)]];    // in which they take the row's slices
constant bool has_1 = n_segments > 1;
constant bool has_2 = n_segments > 2;
constant bool has_bias = epilogue == 1;
constant bool has_bias_1 = has_bias && has_1;
constant bool has_bias_2 = has_bias && has_2;
constant bool has_add = epilogue == 2;
constant bool has_glu = epilogue > 2;

// A simdgroup takes R sums at a time, 2 over slices of 2048 inputs where a weight has super-blocks, else 4 over slices of 1024.
// `lower/project.py` knows these numbers, and what memory they take.
#define MOST 4    // the most sums at a time: of rows, or of both sides of pairs of rows with swiglu and geglu
#define TURN 16   // sums of a team between barriers

// N sums over the lanes: of values v[0 ... N) of each lane, a lane gets the sum that `owner` numbers. Halves are exchanged,
// so N sums cost little more than one; the order is the tree of lanes 16, 8, 4, 2, 1 apart. N is a power of two.
template <uint N> inline float lanes_sums(thread float (&v)[MOST], uint lane) {
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
inline uint owner(uint n, uint lane) { return n == 2 ? lane / 16 : lane / 16 * 2 + (lane / 8 & 1); }

// What a simdgroup takes for R sums: its slice of rows of one segment, or of both sides of pairs of rows.
struct piece {
    device const uchar * w, * up;
    ulong at, up_at;  // of the first row's slice
    uint row_bytes, up_bytes, bytes, bytes_up, first, rows, which;
};
// Groups of R sums in segment i.
inline uint groups_of(constant project_args & a, uint i, uint R) { return ((has_glu ? 2 : 1) * a.rows[i] + R - 1) / R; }
inline piece piece_of(constant project_args & a, device const uchar * w0, device const uchar * w1, device const uchar * w2, uint R,
                      uint group, uint slice, uint n_slice) {
    piece p;
    uint before = 0, of_slice = slice_bytes(type_0, n_slice);
    p.which = 0;
    p.w = w0, p.up = w1, p.rows = a.rows[0], p.row_bytes = a.row_bytes[0], p.up_bytes = a.row_bytes[1];
    if (has_1 && !has_glu) {
        const uint g0 = groups_of(a, 0, R), g1 = g0 + groups_of(a, 1, R);
        if (group >= g0) p.which = 1, before = g0, p.w = w1, p.rows = a.rows[1], p.row_bytes = a.row_bytes[1], of_slice = slice_bytes(type_1, n_slice);
        if (has_2 && group >= g1)
            p.which = 2, before = g1, p.w = w2, p.rows = a.rows[2], p.row_bytes = a.row_bytes[2], of_slice = slice_bytes(type_2, n_slice);
    }
    const uint of_up = slice_bytes(type_1, n_slice);
    p.first = (has_glu ? R / 2 : R) * (group - before);
    p.at = ulong(p.first) * p.row_bytes + slice * of_slice, p.up_at = ulong(p.first) * p.up_bytes + slice * of_up;
    p.bytes = min(of_slice, p.row_bytes - slice * of_slice), p.bytes_up = min(of_up, p.up_bytes - slice * of_up);
    return p;
}
// Begins to copy the slice of sum r to its slot. Gives where in the first 16 bytes it begins there. A row past the last is the
// last again: its sum is not used.
inline uint copy_slice(piece p, uint R, uint r, uint slot, uint lane, threadgroup uint4 * to) {
    const bool up = has_glu && (r & 1);
    const uint row = has_glu ? r / 2 : r, row_bytes = up ? p.up_bytes : p.row_bytes, bytes = up ? p.bytes_up : p.bytes;
    const ulong start = up ? p.up_at : p.at;
    device const uchar * w = up ? p.up : p.w;
    if (p.first + R + 2 <= p.rows) {  // up to 30 bytes more are copied: two rows follow that have them
        const ulong at = start + row * row_bytes;
        const uint n = (bytes + 30) / 16;
        device const uint4 * from = (device const uint4 *)(w + 16 * lane + (at & ~ulong(15)));
#pragma unroll
        for (uint i = 0; i < slot / 16; i += SIMD)
            if (i + lane < n) copy16(to + i + lane, from + i);
        return uint(at) & 15;
    }
    // The matrix's last 16 bytes can be fewer.
    const ulong at = start + min(row, p.rows - 1 - p.first) * row_bytes;
    const uint shift = uint(at) & 15, whole = (shift + bytes) / 16, left = 16 * whole + lane;  // filled up with zeros
    device const uchar * from = w + (at - shift);
#pragma unroll 1
    for (uint i = lane; i < whole; i += SIMD) copy16(to + i, (device const uint4 *)from + i);
    if (lane < 16) ((threadgroup uchar *)to)[left] = left < shift + bytes ? from[left] : 0;
    return shift;
}
// The lane's part of a row's sum, whose slice of n values begins at `shift` in a slot. A lane past the row's end has zeros for
// inputs and takes a block that is there.
inline float slot_product(ushort type, uint words, uint n, uint shift, threadgroup const uint4 * slot, uint lane, thread const lane_inputs & x) {
    const uint bytes = block_bytes(type), start = bytes % 16 ? shift : 0;
    threadgroup const uint * s = (threadgroup const uint *)slot;
    if (is_super(type)) return super_product(type, s, start + bytes * min(lane / 4, n / 256 - 1), lane, x);
    if (words == 8) return block_product(type, s, start + bytes * min(lane, n / 32 - 1), 0, x);
    return block_product(type, s, start + bytes * min(2 * lane, n / 32 - 1), 0, x) +
           block_product(type, s, start + bytes * min(2 * lane + 1, n / 32 - 1), 1, x);
}

// Inputs from `at` on, `count` of them (normed, where there is a norm), as whole numbers: three planes in threadgroup memory, and
// a step a block of 256, which a simdgroup makes. Those past the row's end are zero.
inline void pack_inputs(device const float * x, device const float * gain, float scale, uint at, uint count, uint n_in, uint threads, uint tid,
                        threadgroup uint2 * planes, threadgroup float * steps) {
#pragma unroll 2
    for (uint i = 8 * tid; i < count; i += 8 * threads) {
        float4 p = float4(0.0f), q = float4(0.0f);
        if (at + i < n_in) {
            p = load4(x + at + i), q = load4(x + at + i + 4);
            if (has_norm) p = p * scale * load4(gain + at + i), q = q * scale * load4(gain + at + i + 4);
        }
        const uint4 f = max(as_type<uint4>(fabs(p)), as_type<uint4>(fabs(q)));  // in the order of the numbers; NaN is largest
        const float largest = as_type<float>(simd_max(max(max(f.x, f.y), max(f.z, f.w))));
        const float inverse = largest > TINY ? LARGEST / largest : 0.0f;
        const uint3 u = pack4(p, inverse), v = pack4(q, inverse);
        planes[i / 8] = uint2(u.x, v.x), planes[(count + i) / 8] = uint2(u.y, v.y), planes[(2 * count + i) / 8] = uint2(u.z, v.z);
        if (tid % SIMD == 0) steps[i / 256] = largest * (1.0f / LARGEST);
    }
}
// Sum of squares of x as sum_of_squares has it, its chains shared among the simdgroups, two at a time.
inline float shared_squares(device const float * x, uint n, uint sg, uint sgs, uint lane, threadgroup float * chains) {
    for (uint c = sg; c < CHAINS; c += 2 * sgs) {
        const uint apart = SIMD * sgs;
        float s = 0, u = 0;
#pragma unroll 4
        for (uint i = SIMD * c + lane; i < n; i += SIMD * CHAINS) {
            s = fma(x[i], x[i], s);
            if (i + apart < n) u = fma(x[i + apart], x[i + apart], u);
        }
        chains[SIMD * c + lane] = s;
        if (c + sgs < CHAINS) chains[SIMD * c + apart + lane] = u;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float s = chains[lane];
    for (uint c = 1; c < CHAINS; c++) s += chains[SIMD * c + lane];
    return simd_sum(s);
}

// y (n_out): the segments' rows in order, or act(gate) * up for a pair of rows; as `project` (project.metal), one token, and
// no plain weights. Grid: x, any number of threadgroups. Threads: whole teams of simdgroups.
// The teams of all threadgroups share the rows evenly, R sums of one segment at a time. A simdgroup has a slice of inputs, as
// whole numbers in registers; it copies its slices of rows to R slots of its own, the next ones while it works on these.
// Inputs (normed, where there is a norm) are made whole numbers in threadgroup memory, all at once or pass by pass.
// The stated number of threads is more than are launched: it bounds the registers, so that four threadgroups fit a core.
[[max_total_threads_per_threadgroup(512)]]
kernel void project_wide(constant project_args & a [[buffer(0)]], device const float * x [[buffer(1)]],
                         device const float * gain [[buffer(2), function_constant(has_norm)]], device const uchar * w0 [[buffer(3)]],
                         device const uchar * w1 [[buffer(4), function_constant(has_1)]],
                         device const uchar * w2 [[buffer(5), function_constant(has_2)]],
                         device const float * b0 [[buffer(6), function_constant(has_bias)]],
                         device const float * b1 [[buffer(7), function_constant(has_bias_1)]],
                         device const float * b2 [[buffer(8), function_constant(has_bias_2)]],
                         device const float * residual [[buffer(9), function_constant(has_add)]], device float * y [[buffer(10)]],
                         threadgroup uint4 * pool [[threadgroup(0)]], uint tg [[threadgroup_position_in_grid]], uint tgs [[threadgroups_per_grid]],
                         uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                         uint sg [[simdgroup_index_in_threadgroup]], uint sgs [[simdgroups_per_threadgroup]]) {
    device const uchar * s1 = w0, * s2 = w0;
    if (has_1) s1 = w1;
    if (has_2) s2 = w2;
    const bool supers = is_super(type_0) || is_super(type_1) || is_super(type_2);
    const uint words = supers ? 16 : 8, n_slice = 4 * SIMD * words, R = supers ? 2 : 4, lot = TURN / R;
    const uint slot = (max(slice_bytes(type_0, n_slice), max(slice_bytes(type_1, n_slice), slice_bytes(type_2, n_slice))) + 30) / 16 * 16;
    const uint slices = (a.n_in + n_slice - 1) / n_slice;
    const uint teams = sgs / across, team = sg / across, own = sg % across;
    // Of the groups of R sums this team has begin ... end, `lot` a turn, all passes of them.
    const uint groups = groups_of(a, 0, R) + (has_1 && !has_glu ? groups_of(a, 1, R) : 0) + (has_2 ? groups_of(a, 2, R) : 0);
    const uint share = groups / (tgs * teams), more = groups % (tgs * teams), number = team * tgs + tg;
    const uint begin = share * number + min(number, more), end = begin + share + (number < more ? 1 : 0);
    const uint turns = (share + (more > 0 ? 1 : 0) + lot - 1) / lot;
    // The pool: inputs in three planes, a step for each 256 of them; for the simdgroups R slots each, sums of two turns (so that
    // one barrier a turn is enough); the chains of the norm.
    const uint inputs = across * n_slice;
    threadgroup float * steps = (threadgroup float *)(pool + 3 * inputs / 16);
    threadgroup uint4 * slots = pool + 3 * inputs / 16 + inputs / 1024 + sg * R * (slot / 16);
    threadgroup float * sums = (threadgroup float *)(pool + 3 * inputs / 16 + inputs / 1024 + sgs * R * (slot / 16));
    threadgroup float * chains = sums + 2 * sgs * TURN;
    // What is copied next: group `next` in pass `pass_next` of the turn's groups from `next_lot` on.
    uint next = begin, next_lot = begin, next_end = min(begin + lot, end), pass_next = 0, which_next = 0, shifts[MOST];
    if (begin < end) {
        const piece p = piece_of(a, w0, s1, s2, R, next, own, n_slice);
#pragma unroll
        for (uint r = 0; r < R; r++) {
            shifts[r] = copy_slice(p, R, r, slot, lane, slots + r * (slot / 16));
            copies_end_group();
        }
        which_next = p.which;
    }
    wait_for_those_before();
    float scale = 1.0f;
    if (passes > 1)  // what later passes read comes nearer
        for (uint i = SIMD * tid; i < a.n_in; i += SIMD * SIMD * sgs) touch((device const uchar *)(x + i));
    if (has_norm) scale = norm_scale(shared_squares(x, a.n_in, sg, sgs, lane, chains), a.n_in, a.eps);
    lane_inputs in;
    for (uint turn = 0; turn < turns; turn++) {
        const uint from = min(begin + lot * turn, end), to = min(from + lot, end);
        threadgroup float * meet = sums + ((turn & 1) * sgs + sg) * TURN;
        // One of the team's threads ends a row. What it adds is read early, where there are registers for it.
        const uint rows = has_glu ? R / 2 : R, t = lane + SIMD * own;
        const piece last = piece_of(a, w0, s1, s2, R, min(from + t / rows, groups - 1), 0, n_slice);
        const uint row = last.first + t % rows, out = row + (last.which > 0 ? a.rows[0] : 0) + (last.which > 1 ? a.rows[1] : 0);
        const bool ends = t < rows * (to - from) && row < last.rows;
        float bias = 0, before = 0;
        if (passes == 1) {
            if (has_bias && ends) bias = last.which == 0 ? b0[row] : last.which == 1 && has_1 ? b1[row] : has_2 ? b2[row] : 0.0f;
            if (has_add && ends) before = residual[out];
        }
        for (uint pass = 0; pass < passes; pass++) {
            // A simdgroup past the last slice takes it again, times zeros.
            const uint slice = min(pass * across + own, slices - 1), n = min(a.n_in - n_slice * slice, n_slice);
            if (turn == 0 || passes > 1) {
                threadgroup_barrier(mem_flags::mem_threadgroup);  // the inputs before were read
                pack_inputs(x, gain, scale, pass * inputs, inputs, a.n_in, SIMD * sgs, tid, (threadgroup uint2 *)pool, steps);
                threadgroup_barrier(mem_flags::mem_threadgroup);
            }
            const float step = steps[(own * n_slice + 4 * words * lane) / 256];
            uint places = 2;  // as whose type inputs are in registers: none yet
            for (uint group = from; group < to; group++) {
                const uint which = which_next;
                if (++next == next_end) {
                    if (++pass_next < passes) next = next_lot;
                    else pass_next = 0, next_lot = next_end, next_end = min(next_end + lot, end);
                }
                const piece ahead = piece_of(a, w0, s1, s2, R, next, min(pass_next * across + own, slices - 1), n_slice);
                which_next = ahead.which;
                float v[MOST];
#pragma unroll
                for (uint r = 0; r < R; r += R / 2) {  // two at a time of 32 values a lane: each fills the other's waits
                    if (supers) copies_wait<1>();
                    else copies_wait<2>();
                    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
                    for (uint i = r; i < r + R / 2; i++) {
                        // Segments of one type share the code.
                        const uint segment = has_glu ? i & 1 : which;
                        const bool first = segment == 0 || (segment == 1 ? type_1 : type_2) == type_0;
                        const bool second = segment == 1 || type_2 == type_1;
                        const bool quartered = first ? is_quartered(type_0) : second ? is_quartered(type_1) : is_quartered(type_2);
                        if (places != uint(quartered)) load_inputs(quartered, words, pool + own * n_slice / 16, inputs / 16, lane, in);
                        places = quartered;
                        threadgroup const uint4 * of = slots + i * (slot / 16);
                        if (first) v[i] = slot_product(type_0, words, n, shifts[i], of, lane, in);
                        else if (second) v[i] = slot_product(type_1, words, n, shifts[i], of, lane, in);
                        else v[i] = slot_product(type_2, words, n, shifts[i], of, lane, in);
                    }
                    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
                    for (uint i = r; i < r + R / 2; i++) {
                        if (next < end) shifts[i] = copy_slice(ahead, R, i, slot, lane, slots + i * (slot / 16));
                        copies_end_group();
                    }
                }
#pragma unroll
                for (uint r = 0; r < R; r++) v[r] *= step;
                const float mine = supers ? lanes_sums<2>(v, lane) : lanes_sums<4>(v, lane);
                if (lane % (SIMD / R) == 0) {
                    threadgroup float * sum = meet + R * (group - from) + owner(R, lane);
                    *sum = pass > 0 ? *sum + mine : mine;
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the sums of a team meet
        if (ends) {
            threadgroup const float * of = sums + ((turn & 1) * sgs + team * across) * TURN + (has_glu ? 2 : 1) * t;
            float s = 0, u = 0;
            for (uint i = 0; i < across; i++, of += TURN) {
                s += of[0];
                if (has_glu) u += of[1];
            }
            if (has_glu) s = (epilogue == 3 ? silu(s) : gelu(s)) * u;
            if (passes > 1) {
                if (has_bias) bias = last.which == 0 ? b0[row] : last.which == 1 && has_1 ? b1[row] : has_2 ? b2[row] : 0.0f;
                if (has_add) before = residual[out];
            }
            if (has_bias) s += bias;
            if (has_add) s = before + s;
            y[out] = s;
        }
    }
}
