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

// The lane's eight weights of a step: a at place8, b at place8 + apart8. Past the row's end some of its last ones: their
// inputs are zero (`input4`), and without a branch the loads of many rows are under way together.
inline void weight8(ushort type, device const uchar * row, uint n, uint step, uint lane, thread float4 & a, thread float4 & b) {
    if (is_plain(type)) {
        const uint at = 256 * step + place8(type, lane);
        a = plain4(type, row, at, n);
        b = plain4(type, row, at + 128, n);
        return;
    }
    if (!is_super(type)) {
        const uint ib = min(8 * step + lane / 4, n / 32 - 1), j = lane & 3;
        if (type == Q8_0) {
            device const uchar * p = row + 34 * ib;
            const float d = half_at(p);
            a = signed4(u32_at(p + 2 + 8 * j)) * d;
            b = signed4(u32_at(p + 6 + 8 * j)) * d;
        } else if (type == Q4_0) {
            device const uchar * p = row + 18 * ib;
            const float d = half_at(p);
            const uint q = u32_at(p + 2 + 4 * j);
            a = (low_nibbles(q) - 8.0f) * d;
            b = (high_nibbles(q) - 8.0f) * d;
        } else if (type == Q4_1) {
            device const uchar * p = row + 20 * ib;
            const float d = half_at(p), m = half_at(p + 2);
            const uint q = u32_aligned(p + 4 + 4 * j);
            a = low_nibbles(q) * d + m;
            b = high_nibbles(q) * d + m;
        } else if (type == Q5_0 || type == Q5_1) {
            device const uchar * p = row + (type == Q5_0 ? 22 : 24) * ib;
            const float d = half_at(p), m = type == Q5_1 ? half_at(p + 2) : 0.0f;
            if (type == Q5_1) p += 2;
            const uint h = u32_at(p + 2), q = u32_at(p + 6 + 4 * j);
            const float4 low = bytes4((q & 0x0F0F0F0Fu) | fifth_bits(h, 4 * j));
            const float4 high = bytes4((q >> 4 & 0x0F0F0F0Fu) | fifth_bits(h, 4 * j + 16));
            a = type == Q5_0 ? (low - 16.0f) * d : low * d + m;
            b = type == Q5_0 ? (high - 16.0f) * d : high * d + m;
        } else if (type == IQ4_NL) {
            device const uchar * p = row + 18 * ib;
            const float d = half_at(p);
            const uint q = u32_at(p + 2 + 4 * j);
            a = levels4(IQ4_LEVELS, q) * d;
            b = levels4(IQ4_LEVELS, q >> 4) * d;
        } else {  // MXFP4
            device const uchar * p = row + 17 * ib;
            const float d = mxfp4_scale(p[0]);
            const uint q = u32_bytes(p + 1 + 4 * j);
            a = levels4(MXFP4_LEVELS, q) * d;
            b = levels4(MXFP4_LEVELS, q >> 4) * d;
        }
        return;
    }
    const uint g = lane / 8, j = lane & 7, half_ = g / 2, odd = g & 1;
    if (type == Q4_K || type == Q5_K) {
        device const uchar * p = row + (type == Q4_K ? 144 : 176) * step;
        const uint4 h = *(device const uint4 *)p;
        const float d = float(as_type<half2>(h.x).x), dmin = float(as_type<half2>(h.x).y);
        const uint q = u32_aligned(p + (type == Q4_K ? 16 : 48) + 4 * lane);
        uint low = q & 0x0F0F0F0Fu, high = q >> 4 & 0x0F0F0F0Fu;
        if (type == Q5_K) {
            const uint bits = u32_aligned(p + 16 + 4 * j);
            low |= (bits >> (2 * g) & 0x01010101u) << 4;
            high |= (bits >> (2 * g + 1) & 0x01010101u) << 4;
        }
        const float2 s = scale_min6(h.yzw, 2 * g), t = scale_min6(h.yzw, 2 * g + 1);
        a = bytes4(low) * (d * s.x) - dmin * s.y;
        b = bytes4(high) * (d * t.x) - dmin * t.y;
    } else if (type == Q6_K) {
        device const uchar * p = row + 210 * step;
        const float d = half_at(p + 208);
        const uint ql = u32_at(p + 4 * lane), qh = u32_at(p + 128 + 32 * half_ + 4 * j), s = 8 * half_ + 2 * odd + j / 4;
        const uint low = (ql & 0x0F0F0F0Fu) | (qh >> (2 * odd) & 0x03030303u) << 4;
        const uint high = (ql >> 4 & 0x0F0F0F0Fu) | (qh >> (2 * odd + 4) & 0x03030303u) << 4;
        a = (bytes4(low) - 32.0f) * (d * float(as_type<char>(p[192 + s])));
        b = (bytes4(high) - 32.0f) * (d * float(as_type<char>(p[192 + s + 4])));
    } else if (type == Q2_K) {
        device const uchar * p = row + 84 * step;
        const half2 dm = as_type<half2>(u32_aligned(p + 80));
        const uint q = u32_aligned(p + 16 + 32 * half_ + 4 * j) >> (4 * odd), s = 8 * half_ + 4 * odd + j / 4;
        const uint m = p[s], n_ = p[s + 2];
        a = bytes4(q & 0x03030303u) * (float(dm.x) * float(m & 15)) - float(dm.y) * float(m >> 4);
        b = bytes4(q >> 2 & 0x03030303u) * (float(dm.x) * float(n_ & 15)) - float(dm.y) * float(n_ >> 4);
    } else if (type == Q3_K) {
        device const uchar * p = row + 110 * step;
        const uint3 h = uint3(u32_at(p + 96), u32_at(p + 100), u32_at(p + 104));
        const float d = half_at(p + 108);
        const uint q = u32_at(p + 32 + 32 * half_ + 4 * j) >> (4 * odd), k = 4 * half_ + 2 * odd, mask = u32_at(p + 4 * j) >> k;
        a = (bytes4((q & 0x03030303u) | (mask & 0x01010101u) << 2) - 4.0f) * (d * scale_q3(h, 2 * k + j / 4));
        b = (bytes4((q >> 2 & 0x03030303u) | (mask >> 1 & 0x01010101u) << 2) - 4.0f) * (d * scale_q3(h, 2 * k + 2 + j / 4));
    } else {  // IQ4_XS
        device const uchar * p = row + 136 * step;
        const uint h = u32_aligned(p), s = lane / 4;
        const float d = float(as_type<half2>(h).x) * scale_iq4_xs(u32_aligned(p + 4), h >> 16, s);
        const uint q = u32_aligned(p + 8 + 4 * lane);
        a = levels4(IQ4_LEVELS, q) * d;
        b = levels4(IQ4_LEVELS, q >> 4) * d;
    }
}

// Four values of a row of n; zero past its end. Rows of blocks are whole, so their runs of four are too.
inline float4 input4(ushort type, device const float * x, uint i, uint n) {
    if (!is_plain(type) || n % 4 == 0) return i < n ? load4(x + i) : float4(0.0f);
    return float4(i < n ? x[i] : 0.0f, i + 1 < n ? x[i + 1] : 0.0f, i + 2 < n ? x[i + 2] : 0.0f, i + 3 < n ? x[i + 3] : 0.0f);
}
