// The tensor cores' products, as NVIDIA's `mma` has them, and what goes with them. Elsewhere the same by plain instructions, so
// that a kernel made for them is checked where there is no tensor core.
// With g = lane / 4 and t = lane % 4, a lane has of d (16, 8): (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
// https://docs.nvidia.com/cuda/parallel-thread-execution, mma.m16n8k16, mma.m16n8k8
#pragma once
#include "common.h"

// Round to tf32, 10 bits of fraction: Dekker's split, doi:10.1007/BF01397083. An infinity becomes NaN.
inline float to_tf32(float x) {
    const float big = x * 8193.0f;
    return big - (big - x);
}
#ifdef MINFER_CUDA
inline void mma_16x8x8(thread float4 & d, float4 a, float2 b, uint) { msl_cuda::mma_tf32(d, a, b); }
inline void mma_16x8x16(thread float4 & d, uint4 a, uint2 b, uint) { msl_cuda::mma_f16(d, a, b); }
inline uint minus_halves(uint a, uint b) { return msl_cuda::minus_halves(a, b); }
inline uint fma_halves(uint a, uint b, uint c) { return msl_cuda::fma_halves(a, b, c); }
inline uint pack_halves(float low, float high) { return msl_cuda::pack_halves(low, high); }
inline float power_of_two(float x) { return msl_cuda::power_of_two(x); }  // off by up to 2^-22 of itself, 0 below 2^-126
#else
// d (16, 8) += a (16, 8) * b (8, 8) of tf32: a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b: (t, g), (t + 4, g).
inline void mma_16x8x8(thread float4 & d, float4 a, float2 b, uint lane) {
    const ushort g = ushort(lane / 4), t = ushort(lane & 3);
    for (ushort k = 0; k < 8; k++) {
        const ushort from = ushort(4 * g + (k & 3)), left = ushort(8 * t + (k & 3)), right = ushort(left + 4);
        const float low = simd_shuffle(k < 4 ? a.x : a.z, from), high = simd_shuffle(k < 4 ? a.y : a.w, from);
        const float p = simd_shuffle(k < 4 ? b.x : b.y, left), q = simd_shuffle(k < 4 ? b.x : b.y, right);
        d = fma(float4(low, low, high, high), float4(p, q, p, q), d);
    }
}
// d (16, 8) += a (16, 16) * b (16, 8). A word is two halves, the lower first: a: (g, 2t), (g + 8, 2t), (g, 2t + 8),
// (g + 8, 2t + 8) and the next of each; b: (2t, g), (2t + 8, g) and the next of each. Reached by the whole simdgroup.
inline void mma_16x8x16(thread float4 & d, uint4 a, uint2 b, uint lane) {
    const ushort g = ushort(lane / 4), t = ushort(lane & 3);
    for (ushort k = 0; k < 8; k++) {
        const ushort from = ushort(4 * g + (k & 3));
        const float2 low = float2(as_type<half2>(simd_shuffle(k < 4 ? a.x : a.z, from)));
        const float2 high = float2(as_type<half2>(simd_shuffle(k < 4 ? a.y : a.w, from)));
        const ushort left = ushort(8 * t + (k & 3)), right = ushort(left + 4);
        const float2 p = float2(as_type<half2>(simd_shuffle(k < 4 ? b.x : b.y, left)));
        const float2 q = float2(as_type<half2>(simd_shuffle(k < 4 ? b.x : b.y, right)));
        for (ushort i = 0; i < 2; i++) d = fma(float4(low[i], low[i], high[i], high[i]), float4(p[i], q[i], p[i], q[i]), d);
    }
}
inline uint minus_halves(uint a, uint b) { return as_type<uint>(as_type<half2>(a) - as_type<half2>(b)); }
inline uint fma_halves(uint a, uint b, uint c) {
    return as_type<uint>(fma(as_type<half2>(a), as_type<half2>(b), as_type<half2>(c)));
}
inline uint pack_halves(float low, float high) { return as_type<uint>(half2(half(low), half(high))); }
inline float power_of_two(float x) { return exp2(x); }
#endif
// The four bytes of a word as halves, less `offset`: bytes 0 and 2, bytes 1 and 3. A byte in the fraction of 2^10 is added.
inline uint2 byte_halves(uint word, uint offset) {
    const uint one = 0x64006400u, less = one + offset * 0x00010001u;
    return uint2(minus_halves((word & 0x00FF00FFu) | one, less), minus_halves((word >> 8 & 0x00FF00FFu) | one, less));
}
