// Products of weight codes with inputs in whole numbers, eight values a lane at a time: a byte product adds four values in
// one instruction where floats take sixteen. Neighbouring lanes read neighbouring words. Layouts are those of weights.h.
#pragma once
#include "weights.h"

// An input block of 32 is v * step with v = 2^16 h + 2^8 m + l in 24 bits, h, m and l in -128 ... 127: what is lost is less
// than a float's rounding of the block's largest value. Of four values: their bytes h, m and l, and the sum of v * step.
struct input4 {
    uint h, m, l;
    float sum;
};
constant constexpr float LARGEST = 8323072.0f;  // 127 * 2^16: rounding up does not carry h past 127

#ifdef MINFER_CUDA
inline int dot_bytes(uint a, uint b, int sum) { return msl_cuda::dot_bytes(a, b, sum); }
#else
inline int dot_bytes(uint a, uint b, int sum) {  // signed bytes
    const char4 x = as_type<char4>(a), y = as_type<char4>(b);
    return sum + int(x.x) * int(y.x) + int(x.y) * int(y.y) + int(x.z) * int(y.z) + int(x.w) * int(y.w);
}
#endif
// Sums of products of signed bytes with v, in its three parts.
inline int3 dot_parts(uint codes, input4 x, int3 sum) {
    return int3(dot_bytes(codes, x.h, sum.x), dot_bytes(codes, x.m, sum.y), dot_bytes(codes, x.l, sum.z));
}
inline float joined(int3 sum) { return fma(float(sum.x), 65536.0f, float(sum.y * 256 + sum.z)); }

// Four values of a block, whose v are x * inverse.
inline input4 pack4(float4 x, float inverse, float step) {
    const int4 v = int4(rint(x * inverse));
    const int4 l = as_type<int4>(as_type<uint4>(v) << 24) >> 24, rest = (v - l) >> 8;
    const int4 m = as_type<int4>(as_type<uint4>(rest) << 24) >> 24, h = (rest - m) >> 8;
    input4 out;
    out.h = as_type<uint>(uchar4(as_type<uint4>(h) & 255));
    out.m = as_type<uint>(uchar4(as_type<uint4>(m) & 255));
    out.l = as_type<uint>(uchar4(as_type<uint4>(l) & 255));
    out.sum = float(v.x + v.y + v.z + v.w) * step;
    return out;
}

// A simdgroup walks a row in steps of 256 values. Of each a lane has two runs of four: at place8 and `apart8` later.
//   blocks, IQ4_XS  four lanes a block of 32, j = lane % 4: word j, values 4 j and, in the high nibbles, 16 + 4 j
//   Q8_0            four lanes a block: values 8 j and 8 j + 4
//   super           a super-block of 256; g = lane / 8, j = lane % 8, as the layouts pair values in a word
inline uint place8(ushort type, uint lane) {
    const uint g = lane / 8, j = lane & 7;
    if (type == Q8_0) return 8 * lane;
    if (type == Q4_K || type == Q5_K) return 64 * g + 4 * j;
    if (type == Q6_K) return 128 * (g / 2) + 32 * (g & 1) + 4 * j;
    if (type == Q2_K || type == Q3_K) return 128 * (g / 2) + 64 * (g & 1) + 4 * j;
    return 32 * (lane / 4) + 4 * (lane & 3);
}
inline uint apart8(ushort type) { return type == Q8_0 ? 4 : type == Q6_K ? 64 : is_super(type) && type != IQ4_XS ? 32 : 16; }

inline uint level_bytes(constant const float * levels, uint nibbles) {  // one code a byte
    return as_type<uint>(char4(levels4(levels, nibbles)));
}

// The sum of a lane's eight weights of a step times their inputs a (at place8) and b (apart8 later) of blocks with steps
// sa and sb. Past the row's end some of its last weights are read: their inputs are zero, and without a branch the loads of
// many rows are under way together. Plain types have no codes.
inline float dot8(ushort type, device const uchar * row, uint n, uint step, uint lane, input4 a, input4 b, float sa, float sb) {
    const int3 zero = int3(0);
    if (!is_super(type)) {
        const uint ib = min(8 * step + lane / 4, n / 32 - 1), j = lane & 3;
        if (type == Q8_0) {
            device const uchar * p = row + 34 * ib;
            return half_at(p) * sa * joined(dot_parts(u32_at(p + 2 + 8 * j), a, dot_parts(u32_at(p + 6 + 8 * j), b, zero)));
        }
        if (type == Q4_0 || type == Q4_1) {
            device const uchar * p = row + (type == Q4_0 ? 18 : 20) * ib;
            const uint q = type == Q4_0 ? u32_at(p + 2 + 4 * j) : u32_aligned(p + 4 + 4 * j);
            const float d = half_at(p), m = type == Q4_0 ? -8.0f * d : half_at(p + 2);
            const int3 sum = dot_parts(q & 0x0F0F0F0Fu, a, dot_parts(q >> 4 & 0x0F0F0F0Fu, b, zero));
            return d * sa * joined(sum) + m * (a.sum + b.sum);
        }
        if (type == Q5_0 || type == Q5_1) {
            device const uchar * p = row + (type == Q5_0 ? 22 : 24) * ib, * at = p + (type == Q5_0 ? 2 : 4);
            const float d = half_at(p), m = type == Q5_0 ? -16.0f * d : half_at(p + 2);
            const uint h = u32_at(at), q = u32_at(at + 4 + 4 * j);
            const uint low = (q & 0x0F0F0F0Fu) | fifth_bits(h, 4 * j), high = (q >> 4 & 0x0F0F0F0Fu) | fifth_bits(h, 4 * j + 16);
            return d * sa * joined(dot_parts(low, a, dot_parts(high, b, zero))) + m * (a.sum + b.sum);
        }
        const bool nl = type == IQ4_NL;  // else MXFP4
        device const uchar * p = row + (nl ? 18 : 17) * ib;
        const uint q = nl ? u32_at(p + 2 + 4 * j) : u32_bytes(p + 1 + 4 * j);
        constant const float * levels = nl ? IQ4_LEVELS : MXFP4_LEVELS;
        const int3 sum = dot_parts(level_bytes(levels, q), a, dot_parts(level_bytes(levels, q >> 4), b, zero));
        return (nl ? half_at(p) : mxfp4_scale(p[0])) * sa * joined(sum);
    }
    step = min(step, n / 256 - 1);
    const uint g = lane / 8, j = lane & 7, half_ = g / 2, odd = g & 1;
    if (type == Q4_K || type == Q5_K) {
        device const uchar * p = row + (type == Q4_K ? 144 : 176) * step;
        const uint4 h = *(device const uint4 *)p;
        const half2 dm = as_type<half2>(h.x);
        const uint q = u32_aligned(p + (type == Q4_K ? 16 : 48) + 4 * lane);
        uint low = q & 0x0F0F0F0Fu, high = q >> 4 & 0x0F0F0F0Fu;
        if (type == Q5_K) {
            const uint bits = u32_aligned(p + 16 + 4 * j);
            low |= (bits >> (2 * g) & 0x01010101u) << 4;
            high |= (bits >> (2 * g + 1) & 0x01010101u) << 4;
        }
        // The 6-bit scales and minima of sub-blocks 2 g and 2 g + 1, two bytes each; as scale_min6 (weights.h).
        const uint s = h.y >> (16 * odd), m = h.z >> (16 * odd), more = h.w >> (16 * odd);
        const uint scales = half_ ? (more & 0x0F0Fu) | (s >> 2 & 0x3030u) : s & 0x3F3Fu;
        const uint minima = half_ ? (more >> 4 & 0x0F0Fu) | (m >> 2 & 0x3030u) : m & 0x3F3Fu;
        const float x = float(scales & 255) * sa * joined(dot_parts(low, a, zero)) + float(scales >> 8) * sb * joined(dot_parts(high, b, zero));
        return float(dm.x) * x - float(dm.y) * (float(minima & 255) * a.sum + float(minima >> 8) * b.sum);
    }
    if (type == Q6_K) {
        device const uchar * p = row + 210 * step;
        const uint ql = u32_at(p + 4 * lane), qh = u32_at(p + 128 + 32 * half_ + 4 * j) >> (2 * odd), s = 8 * half_ + 2 * odd + j / 4;
        const uint low = (ql & 0x0F0F0F0Fu) | (qh & 0x03030303u) << 4, high = (ql >> 4 & 0x0F0F0F0Fu) | (qh & 0x30303030u);
        const float x = sa * joined(dot_parts(low, a, zero)) - 32.0f * a.sum, y = sb * joined(dot_parts(high, b, zero)) - 32.0f * b.sum;
        return half_at(p + 208) * (float(as_type<char>(p[192 + s])) * x + float(as_type<char>(p[192 + s + 4])) * y);
    }
    if (type == Q2_K) {
        device const uchar * p = row + 84 * step;
        const half2 dm = as_type<half2>(u32_aligned(p + 80));
        const uint q = u32_aligned(p + 16 + 32 * half_ + 4 * j) >> (4 * odd), s = 8 * half_ + 4 * odd + j / 4;
        const uint m = p[s], o = p[s + 2];
        const float x = float(m & 15) * sa * joined(dot_parts(q & 0x03030303u, a, zero));
        const float y = float(o & 15) * sb * joined(dot_parts(q >> 2 & 0x03030303u, b, zero));
        return float(dm.x) * (x + y) - float(dm.y) * (float(m >> 4) * a.sum + float(o >> 4) * b.sum);
    }
    if (type == Q3_K) {
        device const uchar * p = row + 110 * step;
        const uint3 h = uint3(u32_at(p + 96), u32_at(p + 100), u32_at(p + 104));
        const uint q = u32_at(p + 32 + 32 * half_ + 4 * j) >> (4 * odd), k = 4 * half_ + 2 * odd, mask = u32_at(p + 4 * j) >> k;
        const uint low = (q & 0x03030303u) | (mask & 0x01010101u) << 2, high = (q >> 2 & 0x03030303u) | (mask >> 1 & 0x01010101u) << 2;
        const float x = sa * joined(dot_parts(low, a, zero)) - 4.0f * a.sum, y = sb * joined(dot_parts(high, b, zero)) - 4.0f * b.sum;
        return half_at(p + 108) * (scale_q3(h, 2 * k + j / 4) * x + scale_q3(h, 2 * k + 2 + j / 4) * y);
    }
    device const uchar * p = row + 136 * step;  // IQ4_XS
    const uint h = u32_aligned(p), q = u32_aligned(p + 8 + 4 * lane);
    const float d = float(as_type<half2>(h).x) * scale_iq4_xs(u32_aligned(p + 4), h >> 16, lane / 4);
    return d * sa * joined(dot_parts(level_bytes(IQ4_LEVELS, q), a, dot_parts(level_bytes(IQ4_LEVELS, q >> 4), b, zero)));
}
