// A row of weights eight values a lane at a time: neighbouring lanes read neighbouring words, so that a simdgroup's loads
// are whole lines. Layouts and arithmetic are those of weights.h.
#pragma once
#include "weights.h"

// A simdgroup walks a row in steps of 256 values. Of each a lane has two runs of four: at place8 and `apart8` later.
//   plain           4 lane, 128 apart
//   blocks, IQ4_XS  four lanes a block of 32, j = lane % 4: word j, values 4 j and, in the high nibbles, 16 + 4 j
//   Q8_0            four lanes a block: values 8 j and 8 j + 4
//   super           a super-block of 256; g = lane / 8, j = lane % 8, as the layouts pair values in a word
inline uint place8(ushort type, uint lane) {
    const uint g = lane / 8, j = lane & 7;
    if (is_plain(type)) return 4 * lane;
    if (type == Q8_0) return 8 * lane;
    if (type == Q4_K || type == Q5_K) return 64 * g + 4 * j;
    if (type == Q6_K) return 128 * (g / 2) + 32 * (g & 1) + 4 * j;
    if (type == Q2_K || type == Q3_K) return 128 * (g / 2) + 64 * (g & 1) + 4 * j;
    return 32 * (lane / 4) + 4 * (lane & 3);
}
inline uint apart8(ushort type) {
    return is_plain(type) ? 128 : type == Q8_0 ? 4 : type == Q6_K ? 64 : is_super(type) && type != IQ4_XS ? 32 : 16;
}

inline float dot4(float4 a, float4 b, float s) { return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, s)))); }

inline float4 plain4(ushort type, device const uchar * row, uint i, uint n) {
    if (n % 4) {
        const uint last = n - 1;
        return float4(plain_value(type, row, min(i, last)), plain_value(type, row, min(i + 1, last)),
                      plain_value(type, row, min(i + 2, last)), plain_value(type, row, min(i + 3, last)));
    }
    i = min(i, n - 4);
    if (type == F32) return load4((device const float *)row + i);
    if (type == F16) return float4(*(device const half4 *)((device const half *)row + i));
    return as_type<float4>(uint4(*(device const ushort4 *)((device const ushort *)row + i)) << 16);
}

// The sum of a lane's eight weights of a step times their inputs xa (at place8) and xb (apart8 later), with sa and sb the
// sums of xa and of xb: codes are multiplied as they are, scale and offset come in once. Past the row's end some of its
// last weights are read: their inputs are zero (`input4`), and without a branch the loads of many rows are under way together.
inline float dot8(ushort type, device const uchar * row, uint n, uint step, uint lane, float4 xa, float4 xb, float sa, float sb) {
    if (is_plain(type)) {
        const uint at = 256 * step + place8(type, lane);
        return dot4(plain4(type, row, at, n), xa, dot4(plain4(type, row, at + 128, n), xb, 0.0f));
    }
    if (!is_super(type)) {
        const uint ib = min(8 * step + lane / 4, n / 32 - 1), j = lane & 3;
        if (type == Q8_0) {
            device const uchar * p = row + 34 * ib;
            return half_at(p) * dot4(signed4(u32_at(p + 2 + 8 * j)), xa, dot4(signed4(u32_at(p + 6 + 8 * j)), xb, 0.0f));
        }
        if (type == Q4_0) {
            device const uchar * p = row + 18 * ib;
            const uint q = u32_at(p + 2 + 4 * j);
            return half_at(p) * (dot4(low_nibbles(q), xa, dot4(high_nibbles(q), xb, 0.0f)) - 8.0f * (sa + sb));
        }
        if (type == Q4_1) {
            device const uchar * p = row + 20 * ib;
            const uint q = u32_aligned(p + 4 + 4 * j);
            const half2 dm = as_type<half2>(u32_aligned(p));
            return float(dm.x) * dot4(low_nibbles(q), xa, dot4(high_nibbles(q), xb, 0.0f)) + float(dm.y) * (sa + sb);
        }
        if (type == Q5_0 || type == Q5_1) {
            device const uchar * p = row + (type == Q5_0 ? 22 : 24) * ib, * at = p + (type == Q5_0 ? 2 : 4);
            const float d = half_at(p), m = type == Q5_1 ? half_at(p + 2) : -16.0f * d;
            const uint h = u32_at(at), q = u32_at(at + 4 + 4 * j);
            const float4 low = bytes4((q & 0x0F0F0F0Fu) | fifth_bits(h, 4 * j));
            const float4 high = bytes4((q >> 4 & 0x0F0F0F0Fu) | fifth_bits(h, 4 * j + 16));
            return d * dot4(low, xa, dot4(high, xb, 0.0f)) + m * (sa + sb);
        }
        const bool nl = type == IQ4_NL;  // else MXFP4
        device const uchar * p = row + (nl ? 18 : 17) * ib;
        const uint q = nl ? u32_at(p + 2 + 4 * j) : u32_bytes(p + 1 + 4 * j);
        constant const float * levels = nl ? IQ4_LEVELS : MXFP4_LEVELS;
        return (nl ? half_at(p) : mxfp4_scale(p[0])) * dot4(levels4(levels, q), xa, dot4(levels4(levels, q >> 4), xb, 0.0f));
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
        const float2 s = scale_min6(h.yzw, 2 * g), t = scale_min6(h.yzw, 2 * g + 1);
        return float(dm.x) * (s.x * dot4(bytes4(low), xa, 0.0f) + t.x * dot4(bytes4(high), xb, 0.0f)) - float(dm.y) * (s.y * sa + t.y * sb);
    }
    if (type == Q6_K) {
        device const uchar * p = row + 210 * step;
        const uint ql = u32_at(p + 4 * lane), qh = u32_at(p + 128 + 32 * half_ + 4 * j) >> (2 * odd), s = 8 * half_ + 2 * odd + j / 4;
        const uint low = (ql & 0x0F0F0F0Fu) | (qh & 0x03030303u) << 4, high = (ql >> 4 & 0x0F0F0F0Fu) | (qh & 0x30303030u);
        const float a = dot4(bytes4(low), xa, -32.0f * sa), b = dot4(bytes4(high), xb, -32.0f * sb);
        return half_at(p + 208) * (float(as_type<char>(p[192 + s])) * a + float(as_type<char>(p[192 + s + 4])) * b);
    }
    if (type == Q2_K) {
        device const uchar * p = row + 84 * step;
        const half2 dm = as_type<half2>(u32_aligned(p + 80));
        const uint q = u32_aligned(p + 16 + 32 * half_ + 4 * j) >> (4 * odd), s = 8 * half_ + 4 * odd + j / 4;
        const uint m = p[s], o = p[s + 2];
        const float a = float(m & 15) * dot4(bytes4(q & 0x03030303u), xa, 0.0f), b = float(o & 15) * dot4(bytes4(q >> 2 & 0x03030303u), xb, 0.0f);
        return float(dm.x) * (a + b) - float(dm.y) * (float(m >> 4) * sa + float(o >> 4) * sb);
    }
    if (type == Q3_K) {
        device const uchar * p = row + 110 * step;
        const uint3 h = uint3(u32_at(p + 96), u32_at(p + 100), u32_at(p + 104));
        const uint q = u32_at(p + 32 + 32 * half_ + 4 * j) >> (4 * odd), k = 4 * half_ + 2 * odd, mask = u32_at(p + 4 * j) >> k;
        const float a = dot4(bytes4((q & 0x03030303u) | (mask & 0x01010101u) << 2), xa, -4.0f * sa);
        const float b = dot4(bytes4((q >> 2 & 0x03030303u) | (mask >> 1 & 0x01010101u) << 2), xb, -4.0f * sb);
        return half_at(p + 108) * (scale_q3(h, 2 * k + j / 4) * a + scale_q3(h, 2 * k + 2 + j / 4) * b);
    }
    device const uchar * p = row + 136 * step;  // IQ4_XS
    const uint h = u32_aligned(p), q = u32_aligned(p + 8 + 4 * lane);
    const float d = float(as_type<half2>(h).x) * scale_iq4_xs(u32_aligned(p + 4), h >> 16, lane / 4);
    return d * dot4(levels4(IQ4_LEVELS, q), xa, dot4(levels4(IQ4_LEVELS, q >> 4), xb, 0.0f));
}

// Four values of a row of n; zero past its end. Rows of blocks are whole, so their runs of four are too. `P` is a pointer
// to float4 in device or threadgroup memory.
template <typename P> inline float4 input4(ushort type, P x, uint i, uint n) {
    if (!is_plain(type) || n % 4 == 0) return i < n ? x[i / 4] : float4(0.0f);
    float4 v = float4(0.0f);
    for (uint k = 0; k < 4; k++) if (i + k < n) v[k] = x[(i + k) / 4][(i + k) % 4];
    return v;
}
