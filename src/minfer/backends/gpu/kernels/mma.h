// The tensor cores' products of 16x8 and 8x8 values (tf32) and of 16x16 and 16x8 (f16), as NVIDIA's `mma` has them. Elsewhere
// the same by the lanes of a simdgroup, so that a kernel made for them is checked where there is no tensor core.
#pragma once
#include "common.h"

// Round to 10 bits of fraction: Dekker's split, doi:10.1007/BF01397083. An infinity becomes NaN.
inline float to_tf32(float x) {
    const float big = x * 8193.0f;
    return big - (big - x);
}
#ifdef MINFER_CUDA
inline void mma_16x8x8(thread float4 & d, float4 a, float2 b, uint) { msl_cuda::mma_tf32(d, a, b); }
inline void mma_16x8x16(thread float4 & d, uint4 a, uint2 b, uint) { msl_cuda::mma_f16(d, a, b); }
inline uint pack_half(float x, float y) { return msl_cuda::pack_half(x, y); }
inline float power_of_two(float x) { return msl_cuda::power_of_two(x); }  // off by up to 2^-22 of itself
#else
inline uint pack_half(float x, float y) { return as_type<uint>(half2(half(x), half(y))); }
inline float power_of_two(float x) { return exp2(x); }
// d (16, 8) += a (16, 8) * b (8, 8), operands rounded by to_tf32. With g = lane / 4 and t = lane % 4 a lane has
// d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1); a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b: (t, g),
// (t + 4, g). Reached by the whole simdgroup. https://docs.nvidia.com/cuda/parallel-thread-execution, mma.m16n8k8
inline void mma_16x8x8(thread float4 & d, float4 a, float2 b, uint lane) {
    const ushort g = ushort(lane / 4), t = ushort(lane & 3);
    for (ushort k = 0; k < 8; k++) {
        const ushort from = ushort(4 * g + (k & 3));
        const float low = simd_shuffle(k < 4 ? a.x : a.z, from), high = simd_shuffle(k < 4 ? a.y : a.w, from);
        const ushort left = ushort(4 * (2 * t) + (k & 3)), right = ushort(left + 4);
        const float p = simd_shuffle(k < 4 ? b.x : b.y, left), q = simd_shuffle(k < 4 ? b.x : b.y, right);
        d = fma(float4(low, low, high, high), float4(p, q, p, q), d);
    }
}
// d (16, 8) += a (16, 16) * b (16, 8) of halves, two a word. d as above; a: (g, 2t) and (g, 2t + 1), the same of row g + 8,
// (g, 2t + 8) and (g, 2t + 9), the same of row g + 8; b: (2t, g) and (2t + 1, g), (2t + 8, g) and (2t + 9, g). mma.m16n8k16
inline void mma_16x8x16(thread float4 & d, uint4 a, uint2 b, uint lane) {
    const ushort g = ushort(lane / 4), t = ushort(lane & 3);
    for (ushort k = 0; k < 8; k++) {
        const ushort from = ushort(4 * g + (k & 3)), left = ushort(4 * (2 * t) + (k & 3)), right = ushort(left + 4);
        const half2 low = as_type<half2>(simd_shuffle(k < 4 ? a.x : a.z, from));
        const half2 high = as_type<half2>(simd_shuffle(k < 4 ? a.y : a.w, from));
        const half2 p = as_type<half2>(simd_shuffle(k < 4 ? b.x : b.y, left));
        const half2 q = as_type<half2>(simd_shuffle(k < 4 ? b.x : b.y, right));
        for (ushort i = 0; i < 2; i++) {
            const float x = float(low[i]), z = float(high[i]), u = float(p[i]), v = float(q[i]);
            d = fma(float4(x, x, z, z), float4(u, v, u, v), d);
        }
    }
}
#endif
