// Over the features of a token: RMSNorm and softmax.
#include "common.h"

#define GROUPS 4

// y = x * scale * gain, shapes (n, n_tokens). Grid: a threadgroup of 128 a token. Its simdgroups share the chains of
// sum_of_squares, which are added as there.
kernel void rms_norm(constant norm_args & a [[buffer(0)]], device const float * x [[buffer(1)]], device const float * gain [[buffer(2)]],
                     device float * y [[buffer(3)]], uint token [[threadgroup_position_in_grid]],
                     uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                     uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float chains[CHAINS * SIMD];
    device const float * row = x + ulong(token) * a.n;
    for (uint c = sg; c < CHAINS; c += GROUPS) chains[SIMD * c + lane] = squares_chain(row, a.n, lane, c);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float s = chains[lane];
    for (uint c = 1; c < CHAINS; c++) s += chains[SIMD * c + lane];
    const float scale = norm_scale(simd_sum(s), a.n, a.eps);
    for (uint i = tid; i < a.n; i += GROUPS * SIMD) y[ulong(token) * a.n + i] = row[i] * scale * gain[i];
}

// y = softmax of each row of n. Grid: a threadgroup of 32 a token. A row of -inf alone gives zeros.
kernel void softmax(constant norm_args & a [[buffer(0)]], device const float * x [[buffer(1)]], device float * y [[buffer(2)]],
                    uint token [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    device const float * row = x + ulong(token) * a.n;
    float top = -INFINITY;
    for (uint i = lane; i < a.n; i += SIMD) top = max(top, row[i]);
    top = simd_max(top);
    float sum = 0;
    for (uint i = lane; i < a.n; i += SIMD) sum += row[i] == -INFINITY ? 0.0f : exp(row[i] - top);  // a NaN stays one
    sum = simd_sum(sum);
    for (uint i = lane; i < a.n; i += SIMD) y[ulong(token) * a.n + i] = sum == 0 ? 0.0f : exp(row[i] - top) / sum;
}
