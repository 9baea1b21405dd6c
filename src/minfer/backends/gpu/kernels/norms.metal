// Over the features of a token: RMSNorm and softmax. One simdgroup a token.
#include "common.h"

// y = x * scale * gain, shapes (n, n_tokens). Grid: a threadgroup of 32 a token.
kernel void rms_norm(constant norm_args & a [[buffer(0)]], device const float * x [[buffer(1)]], device const float * gain [[buffer(2)]],
                     device float * y [[buffer(3)]], uint token [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]]) {
    device const float * row = x + ulong(token) * a.n;
    const float scale = norm_scale(sum_of_squares(row, a.n, lane), a.n, a.eps);
    for (uint i = lane; i < a.n; i += SIMD) y[ulong(token) * a.n + i] = row[i] * scale * gain[i];
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
