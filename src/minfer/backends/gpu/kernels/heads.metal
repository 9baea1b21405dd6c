// Work on the heads of a token: head norms, rope, KV store, and all of it in one launch after the q, k, v projections.
// A simdgroup has one head of one token in threadgroup memory; head dims are multiples of 8 up to 256.
#include "kv.h"

constant uint head_dim [[function_constant(0)]];
constant uint rotary [[function_constant(1)]];  // values of a head that rotate
constant bool is_neox [[function_constant(2)]];
constant uint kv_format [[function_constant(3)]];
constant bool has_bias [[function_constant(4)]];
constant bool has_q_norm [[function_constant(5)]];
constant bool has_k_norm [[function_constant(6)]];

// h = x (+ bias). A barrier of the simdgroup follows before other lanes read.
inline void read_head(threadgroup float * h, device const float * x, uint lane) {
    for (uint i = lane; i < head_dim; i += SIMD) h[i] = x[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

inline void norm_head(threadgroup float * h, device const float * gain, float eps, uint lane) {
    const float scale = norm_scale(sum_of_squares((threadgroup const float *)h, head_dim, lane), head_dim, eps);
    for (uint i = lane; i < head_dim; i += SIMD) h[i] = h[i] * scale * gain[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Cosine and sine of the angles by which a lane's pairs i = lane, lane + 32, ... turn.
struct rotation { float c[4], s[4]; };

// table (2, rotary / 2): the turns a position as a sum of two floats, high and low, so that the angle keeps its fraction of
// a turn at any position below 2^24; `magnitude` multiplies the result (YaRN).
inline rotation rotation_at(device const float * table, int position, float magnitude, uint lane) {
    rotation r;
    const float p = float(position);
    for (uint j = 0; j < 4; j++) {
        const uint i = lane + SIMD * j;
        r.c[j] = r.s[j] = 0;
        if (i >= rotary / 2) continue;
        const float high = table[2 * i], low = table[2 * i + 1];
        const float turns = p * high, rest = fma(p, high, -turns);
        const float angle = ((turns - floor(turns)) + fma(p, low, rest)) * 6.283185307179586f;
        r.c[j] = precise::cos(angle) * magnitude;
        r.s[j] = precise::sin(angle) * magnitude;
    }
    return r;
}

// Pairs are (2i, 2i + 1), or (i, i + rotary / 2) in neox style.
inline void rope_head(threadgroup float * h, rotation r, uint lane) {
    for (uint j = 0; j < 4; j++) {
        const uint i = lane + SIMD * j, first = is_neox ? i : 2 * i, second = is_neox ? i + rotary / 2 : 2 * i + 1;
        if (i >= rotary / 2) continue;
        const float a = h[first], b = h[second];
        h[first] = a * r.c[j] - b * r.s[j];
        h[second] = a * r.s[j] + b * r.c[j];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Asks for the values of a head.
inline void prefetch_head(device const float * values, uint lane) {
    if (32 * lane < head_dim) prefetch((device const uchar *)(values + 32 * lane));
}

inline void write_head(device float * y, threadgroup const float * h, uint lane) {
    for (uint i = lane; i < head_dim; i += SIMD) y[i] = h[i];
}

// y = head norm of x, both (heads * head_dim, n). Grid: x, heads; y, tokens. 32 threads.
kernel void head_norm(constant heads_args & a [[buffer(0)]], device const float * x [[buffer(1)]], device const float * gain [[buffer(2)]],
                      device float * y [[buffer(3)]], uint2 tg [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float h[256];
    const ulong at = ulong(tg.y) * a.width + tg.x * head_dim;
    read_head(h, x + at, lane);
    norm_head(h, gain, a.q_eps, lane);
    write_head(y + at, h, lane);
}

// y = x rotated, both (heads * head_dim, n). Grid: x, heads; y, tokens. 32 threads.
kernel void rope(constant heads_args & a [[buffer(0)]], device const float * x [[buffer(1)]], device const int * positions [[buffer(2)]],
                 device const float * table [[buffer(3)]], device float * y [[buffer(4)]], uint2 tg [[threadgroup_position_in_grid]],
                 uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float h[256];
    const ulong at = ulong(tg.y) * a.width + tg.x * head_dim;
    read_head(h, x + at, lane);
    rope_head(h, rotation_at(table, positions[tg.y], a.magnitude, lane), lane);
    write_head(y + at, h, lane);
}

// Rows of k and v (n_values, n) into the cells of a layer's region. Grid: x, blocks of 32 values; y, tokens; z, k or v.
// 32 threads. Cells are checked on the host.
kernel void kv_store(constant heads_args & a [[buffer(0)]], device const float * k [[buffer(1)]], device const float * v [[buffer(2)]],
                     device const int * cells [[buffer(3)]], device uchar * k_rows [[buffer(4)]], device uchar * v_rows [[buffer(5)]],
                     uint3 tg [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    const uint i = 32 * tg.x + lane;
    const ulong cell = ulong(uint(cells[tg.y])) * a.row_bytes;
    const float x = i < a.width ? (tg.z == 0 ? k : v)[ulong(tg.y) * a.width + i] : 0.0f;
    kv_store32(kv_format, (tg.z == 0 ? k_rows : v_rows) + cell, tg.x, a.width, x, lane);
}

// From qkv (q, k and v side by side, n): biases, head norms and rope; stores k and v, gives the rotated q (q_width, n).
// Grid: x, the heads of q, then k, then v; y, tokens. 32 threads. Cells are checked on the host. In q8_0 a head is whole
// blocks of 32.
kernel void head_rope_store(constant heads_args & a [[buffer(0)]], device const float * qkv [[buffer(1)]],
                            device const int * positions [[buffer(2)]], device const int * cells [[buffer(3)]],
                            device const float * table [[buffer(4)]], device float * y [[buffer(5)]], device uchar * k_rows [[buffer(6)]],
                            device uchar * v_rows [[buffer(7)]],
                            device const float * q_bias [[buffer(8), function_constant(has_bias)]],
                            device const float * k_bias [[buffer(9), function_constant(has_bias)]],
                            device const float * v_bias [[buffer(10), function_constant(has_bias)]],
                            device const float * q_gain [[buffer(11), function_constant(has_q_norm)]],
                            device const float * k_gain [[buffer(12), function_constant(has_k_norm)]],
                            uint2 tg [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float h[256];
    const uint head = tg.x, kv = head < a.n_head ? 0 : (head - a.n_head) % a.n_kv_head;  // which head of q, k or v
    const uint part = head < a.n_head ? 0 : head < a.n_head + a.n_kv_head ? 1 : 2;
    const uint width = (a.n_head + 2 * a.n_kv_head) * head_dim, own = (part == 0 ? head : kv) * head_dim;
    device const float * x = qkv + ulong(tg.y) * width + head * head_dim;
    // What no launch writes is asked for, or worked out, while those before still run: inputs, weights, tables.
    if (has_bias) prefetch_head((part == 0 ? q_bias : part == 1 ? k_bias : v_bias) + own, lane);
    if (has_q_norm && part == 0) prefetch_head(q_gain, lane);
    if (has_k_norm && part == 1) prefetch_head(k_gain, lane);
    const rotation turn = rotation_at(table, positions[tg.y], a.magnitude, lane);
    const ulong cell = uint(cells[tg.y]);
    wait_for_those_before();
    if (has_bias) {
        for (uint i = lane; i < head_dim; i += SIMD)
            h[i] = x[i] + (part == 0 ? q_bias[own + i] : part == 1 ? k_bias[own + i] : v_bias[own + i]);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    } else {
        read_head(h, x, lane);
    }
    // `part` is one for the whole simdgroup: its collectives are reached together.
    if (has_q_norm && part == 0) norm_head(h, q_gain, a.q_eps, lane);
    if (has_k_norm && part == 1) norm_head(h, k_gain, a.k_eps, lane);
    if (part < 2) rope_head(h, turn, lane);
    if (part == 0) {
        write_head(y + ulong(tg.y) * a.n_head * head_dim + own, h, lane);
        return;
    }
    device uchar * row = (part == 1 ? k_rows : v_rows) + cell * a.row_bytes;
    for (uint i = 0; i < head_dim; i += 32) {
        // The row's blocks of 32 need not start where a head does; in f32 and f16 a value goes to its own place.
        const float value = i + lane < head_dim ? h[i + lane] : 0.0f;
        if (kv_format == KV_Q8_0) {
            kv_store32(KV_Q8_0, row, (own + i) / 32, a.n_kv_head * head_dim, value, lane);
        } else if (i + lane < head_dim) {
            if (kv_format == KV_F32) ((device float *)row)[own + i + lane] = value;
            else ((device half *)row)[own + i + lane] = half(value);
        }
    }
}
