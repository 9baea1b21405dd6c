// What every kernel file starts with. Shapes are written (features, tokens), features fastest, as in the graph.
#pragma once
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
#include "args.h"

// The second is the spelling of clang, on which Metal's compiler is built; a compiler ignores what it does not know.
#pragma METAL fp contract(off)
#pragma clang fp contract(off)

constant constexpr uint SIMD = 32;  // lanes of a simdgroup; a warp on NVIDIA

// Four consecutive values of one row at an offset that is a multiple of four.
inline float4 load4(device const float * x) { return *(device const float4 *)x; }

inline float half_at(device const uchar * p) { return float(*(device const half *)p); }  // p is 2-byte aligned
inline uint u16_at(device const uchar * p) { return *(device const ushort *)p; }          // p is 2-byte aligned
inline uint u32_at(device const uchar * p) { return u16_at(p) | u16_at(p + 2) << 16; }    // p is 2-byte aligned
inline uint u32_aligned(device const uchar * p) { return *(device const uint *)p; }       // p is 4-byte aligned
inline uint u32_bytes(device const uchar * p) { return uint(p[0]) | uint(p[1]) << 8 | uint(p[2]) << 16 | uint(p[3]) << 24; }

// Where launches may overlap, a kernel that calls this touches what others write only after it; elsewhere all is there.
// What is asked for by `prefetch` may be read sooner then. Threadgroups of the next launch take room where they wait, so a
// kernel whose own fill the GPU unevenly calls `next_may_be_placed` late.
#ifdef MINFER_CUDA
inline void wait_for_those_before() { msl_cuda::wait(); }
inline void next_may_be_placed() { msl_cuda::chain(); }
inline void prefetch(device const uchar * p) { msl_cuda::prefetch(p); }  // into L2
inline void touch(device const uchar * p) { msl_cuda::touch(p); }        // into L1
#else
inline void wait_for_those_before() {}
inline void next_may_be_placed() {}
inline void prefetch(device const uchar *) {}
inline void touch(device const uchar *) {}
#endif

// The four bytes of a word as numbers, lowest first.
#ifdef MINFER_CUDA  // a permute puts a byte into 2^23's fraction: fewer instructions than to extract and convert it
inline float4 bytes4(uint q) { return msl_cuda::bytes(q) - 8388608.0f; }
inline float4 signed4(uint q) { return msl_cuda::bytes(q ^ 0x80808080u) - 8388736.0f; }
#else
inline float4 bytes4(uint q) { return float4(as_type<uchar4>(q)); }
inline float4 signed4(uint q) { return float4(as_type<char4>(q)); }
#endif
inline float4 low_nibbles(uint q) { return bytes4(q & 0x0F0F0F0Fu); }
inline float4 high_nibbles(uint q) { return bytes4(q >> 4 & 0x0F0F0F0Fu); }
// Bit k, k + 1, k + 2, k + 3 of h as bit 4 of byte 0, 1, 2, 3.
inline uint fifth_bits(uint h, uint k) {
    const uint b = h >> k;
    return (b & 1) << 4 | (b & 2) << 11 | (b & 4) << 18 | (b & 8) << 25;
}

inline float silu(float x) { return x / (1.0f + exp(-x)); }
// tanh form, arXiv:1606.08415; the constants are sqrt(2 / pi) and 0.044715
inline float gelu(float x) { return 0.5f * x * (1.0f + precise::tanh(0.7978845608028654f * (x + 0.044715f * x * x * x))); }
inline float soft_cap(float x, float cap) { return cap * precise::tanh(x / cap); }

// Sum of squares of a row of n values. Eight chains a lane: chain c of lane l adds i = 32 c + l, then each 256 further, in
// order; a lane adds its chains in order, then the lanes' sums are added by simd_sum. Every kernel that needs a row's norm
// has this order, so fused and unfused kernels agree. `P` is a pointer to device or threadgroup memory.
constant constexpr uint CHAINS = 8;
template <typename P> inline float squares_chain(P x, uint n, uint lane, uint chain) {
    float s = 0;
    for (uint i = SIMD * chain + lane; i < n; i += SIMD * CHAINS) s = fma(x[i], x[i], s);
    return s;
}
template <typename P> inline float sum_of_squares(P x, uint n, uint lane) {  // reached by the whole simdgroup
    float s = squares_chain(x, n, lane, 0);
    for (uint c = 1; c < CHAINS; c++) s += squares_chain(x, n, lane, c);
    return simd_sum(s);
}
inline float norm_scale(float squares, uint n, float eps) { return 1.0f / precise::sqrt(squares / float(n) + eps); }
