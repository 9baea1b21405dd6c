// Products of weight codes with inputs in whole numbers, eight values a lane at a time: a byte product adds four values in
// one instruction where floats take twelve. Neighbouring lanes read neighbouring words. Layouts are those of weights.h.
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

// What a lane reads for its eight weights of a step: words of codes, and whatever scales them.
struct codes8 {
    uint a, b;
    uint4 h;
};

// Past the row's end some of its last codes are read: their inputs are zero, and without a branch the loads of many rows
// are under way together. Plain types have no codes.
inline codes8 load8(ushort type, device const uchar * row, uint n, uint step, uint lane) {
    codes8 c;
    c.b = 0;
    c.h = uint4(0);
    if (!is_super(type)) {
        const uint ib = min(8 * step + lane / 4, n / 32 - 1), j = lane & 3;
        if (type == Q8_0) {
            device const uchar * p = row + 34 * ib;
            c.a = u32_at(p + 2 + 8 * j), c.b = u32_at(p + 6 + 8 * j), c.h.x = u16_at(p);
        } else if (type == Q4_0 || type == IQ4_NL) {
            device const uchar * p = row + 18 * ib;
            c.a = u32_at(p + 2 + 4 * j), c.h.x = u16_at(p);
        } else if (type == Q4_1) {
            device const uchar * p = row + 20 * ib;
            c.a = u32_aligned(p + 4 + 4 * j), c.h.x = u32_aligned(p);
        } else if (type == Q5_0 || type == Q5_1) {
            device const uchar * p = row + (type == Q5_0 ? 22 : 24) * ib, * at = p + (type == Q5_0 ? 2 : 4);
            c.a = u32_at(at + 4 + 4 * j), c.b = u32_at(at), c.h.x = type == Q5_0 ? u16_at(p) : u32_at(p);
        } else {  // MXFP4
            device const uchar * p = row + 17 * ib;
            c.a = u32_bytes(p + 1 + 4 * j), c.h.x = p[0];
        }
        return c;
    }
    step = min(step, n / 256 - 1);
    const uint g = lane / 8, j = lane & 7, half_ = g / 2, odd = g & 1;
    if (type == Q4_K || type == Q5_K) {
        device const uchar * p = row + (type == Q4_K ? 144 : 176) * step;
        c.h = *(device const uint4 *)p;
        c.a = u32_aligned(p + (type == Q4_K ? 16 : 48) + 4 * lane);
        if (type == Q5_K) c.b = u32_aligned(p + 16 + 4 * j);
    } else if (type == Q6_K) {
        device const uchar * p = row + 210 * step, * scales = p + 192 + 8 * half_ + 2 * odd + j / 4;
        c.a = u32_at(p + 4 * lane), c.b = u32_at(p + 128 + 32 * half_ + 4 * j), c.h = uint4(u16_at(p + 208), scales[0], scales[4], 0);
    } else if (type == Q2_K) {
        device const uchar * p = row + 84 * step, * scales = p + 8 * half_ + 4 * odd + j / 4;
        c.a = u32_aligned(p + 16 + 32 * half_ + 4 * j), c.h = uint4(u32_aligned(p + 80), scales[0], scales[2], 0);
    } else if (type == Q3_K) {
        device const uchar * p = row + 110 * step;
        c.a = u32_at(p + 32 + 32 * half_ + 4 * j), c.b = u32_at(p + 4 * j);
        c.h = uint4(u32_at(p + 96), u32_at(p + 100), u32_at(p + 104), u16_at(p + 108));
    } else {  // IQ4_XS
        device const uchar * p = row + 136 * step;
        c.a = u32_aligned(p + 8 + 4 * lane), c.h.x = u32_aligned(p), c.h.y = u32_aligned(p + 4);
    }
    return c;
}

// The sum of the eight weights times their inputs a (at place8) and b (apart8 later) of blocks with steps sa and sb.
inline float dot8(ushort type, codes8 c, uint lane, input4 a, input4 b, float sa, float sb) {
    const int3 zero = int3(0);
    const half2 dm = as_type<half2>(c.h.x);
    const float d = float(dm.x);
    const uint low = c.a & 0x0F0F0F0Fu, high = c.a >> 4 & 0x0F0F0F0Fu;
    if (!is_super(type)) {
        const uint j = lane & 3;
        if (type == Q8_0) return d * sa * joined(dot_parts(c.a, a, dot_parts(c.b, b, zero)));
        if (type == IQ4_NL || type == MXFP4) {
            constant const float * levels = type == IQ4_NL ? IQ4_LEVELS : MXFP4_LEVELS;
            const int3 sum = dot_parts(level_bytes(levels, c.a), a, dot_parts(level_bytes(levels, c.a >> 4), b, zero));
            return (type == IQ4_NL ? d : mxfp4_scale(uchar(c.h.x))) * sa * joined(sum);
        }
        const bool fifth = type == Q5_0 || type == Q5_1;
        const uint more_low = fifth ? fifth_bits(c.b, 4 * j) : 0, more_high = fifth ? fifth_bits(c.b, 4 * j + 16) : 0;
        const float m = type == Q4_0 ? -8.0f * d : type == Q5_0 ? -16.0f * d : float(dm.y);
        return d * sa * joined(dot_parts(low | more_low, a, dot_parts(high | more_high, b, zero))) + m * (a.sum + b.sum);
    }
    const uint g = lane / 8, j = lane & 7, half_ = g / 2, odd = g & 1;
    if (type == Q4_K || type == Q5_K) {
        const uint more_low = (c.b >> (2 * g) & 0x01010101u) << 4, more_high = (c.b >> (2 * g + 1) & 0x01010101u) << 4;
        // The 6-bit scales and minima of sub-blocks 2 g and 2 g + 1, two bytes each; as scale_min6 (weights.h).
        const uint s = c.h.y >> (16 * odd), m = c.h.z >> (16 * odd), more = c.h.w >> (16 * odd);
        const uint scales = half_ ? (more & 0x0F0Fu) | (s >> 2 & 0x3030u) : s & 0x3F3Fu;
        const uint minima = half_ ? (more >> 4 & 0x0F0Fu) | (m >> 2 & 0x3030u) : m & 0x3F3Fu;
        const float x = joined(dot_parts(low | more_low, a, zero)), y = joined(dot_parts(high | more_high, b, zero));
        return d * (float(scales & 255) * sa * x + float(scales >> 8) * sb * y) -
               float(dm.y) * (float(minima & 255) * a.sum + float(minima >> 8) * b.sum);
    }
    if (type == Q6_K) {
        const uint more = c.b >> (2 * odd);
        const float x = sa * joined(dot_parts(low | (more & 0x03030303u) << 4, a, zero)) - 32.0f * a.sum;
        const float y = sb * joined(dot_parts(high | (more & 0x30303030u), b, zero)) - 32.0f * b.sum;
        return d * (float(as_type<char>(uchar(c.h.y))) * x + float(as_type<char>(uchar(c.h.z))) * y);
    }
    if (type == Q2_K) {
        const uint q = c.a >> (4 * odd);
        const float x = float(c.h.y & 15) * sa * joined(dot_parts(q & 0x03030303u, a, zero));
        const float y = float(c.h.z & 15) * sb * joined(dot_parts(q >> 2 & 0x03030303u, b, zero));
        return d * (x + y) - float(dm.y) * (float(c.h.y >> 4) * a.sum + float(c.h.z >> 4) * b.sum);
    }
    if (type == Q3_K) {
        const uint q = c.a >> (4 * odd), k = 4 * half_ + 2 * odd, mask = c.b >> k;
        const float x = sa * joined(dot_parts((q & 0x03030303u) | (mask & 0x01010101u) << 2, a, zero)) - 4.0f * a.sum;
        const float y = sb * joined(dot_parts((q >> 2 & 0x03030303u) | (mask >> 1 & 0x01010101u) << 2, b, zero)) - 4.0f * b.sum;
        const float scale = float(as_type<half2>(c.h.w).x);
        return scale * (scale_q3(c.h.xyz, 2 * k + j / 4) * x + scale_q3(c.h.xyz, 2 * k + 2 + j / 4) * y);
    }
    const int3 sum = dot_parts(level_bytes(IQ4_LEVELS, c.a), a, dot_parts(level_bytes(IQ4_LEVELS, c.a >> 4), b, zero));
    return d * scale_iq4_xs(c.h.y, c.h.x >> 16, lane / 4) * sa * joined(sum);  // IQ4_XS
}
