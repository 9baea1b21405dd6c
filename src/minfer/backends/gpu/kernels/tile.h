// A weight row as halves, for the tensor cores: a row is copied as it lies, in chunks, and each lane takes its own codes out
// of threadgroup memory. Codes are whole numbers that a half holds exactly, scales and minima are halves too; all of a row
// share a power of two, so that none leaves a half's range. Layouts are those of weights.h.
#pragma once
#include "copies.h"
#include "mma.h"
#include "weights.h"

// Values of a row in a chunk: 256, or fewer of wide types; bytes of it; bytes between rows of a chunk in threadgroup memory,
// which begin where 16 bytes of the row do: 16 more than a multiple of 32, so that eight rows' words lie in different banks.
// project.py has the same numbers.
inline uint chunk_values(ushort type) { return type == F32 ? 64 : is_plain(type) || type == Q8_0 ? 128 : 256; }
inline uint chunk_bytes(ushort type) { return is_super(type) ? block_bytes(type) : block_bytes(type) * (chunk_values(type) / 32); }
inline bool may_shift(ushort type) { return is_plain(type) || block_bytes(type) % 16 != 0; }  // a row may begin within 16 bytes
inline uint chunk_pieces(ushort type) { return (chunk_bytes(type) + (may_shift(type) ? 15 : 0) + 15) / 16; }
inline uint chunk_stride(ushort type) { return 16 * (chunk_pieces(type) | 1); }
// Whether a scale is for 16 values, not 32; whether there is a minimum beside it; whether a value is not a code, and is
// divided by the row's power of two.
inline bool has_16(ushort type) { return type == Q2_K || type == Q3_K || type == Q6_K; }
inline bool has_minimum(ushort type) { return type == Q4_1 || type == Q5_1 || type == Q2_K || type == Q4_K || type == Q5_K; }
inline bool is_divided(ushort type) { return type == F32 || type == BF16; }
inline uint n_scales(ushort type) { return chunk_values(type) / (has_16(type) ? 16 : 32); }

inline uint near16(threadgroup const uchar * p) { return *(threadgroup const ushort *)p; }  // p is 2-byte aligned
inline uint near32(threadgroup const uchar * p, bool aligned) {
    return aligned ? *(threadgroup const uint *)p : near16(p) | near16(p + 2) << 16;
}
inline uint near_bytes(threadgroup const uchar * p) { return uint(p[0]) | uint(p[1]) << 8 | uint(p[2]) << 16 | uint(p[3]) << 24; }
inline float near_half(threadgroup const uchar * p) { return float(as_type<half>(ushort(near16(p)))); }
inline float near_plain(ushort type, threadgroup const uchar * p, uint i) {
    return type == F32 ? ((threadgroup const float *)p)[i] : as_type<float>(uint(((threadgroup const ushort *)p)[i]) << 16);
}
// 2^k of the largest power of two up to |x|, less 14: what makes x up to 2^15, which a half holds; at least 2^-126.
inline float power_below(float x) { return as_type<float>(max((as_type<uint>(x) >> 23 & 255u), 15u) - 14u << 23); }

// Its inverse.
inline float inverse_power(float x) { return as_type<float>(0x7F000000u - as_type<uint>(x)); }

// Scale `i` of a chunk at p, and the minimum; of values that are not codes the largest, and 0.
inline float2 chunk_scale(ushort type, threadgroup const uchar * p, uint i) {
    if (is_divided(type)) {
        float most = 0.0f;
        for (uint k = 0; k < 32; k++) most = max(most, fabs(near_plain(type, p, 32 * i + k)));
        return float2(most, 0.0f);
    }
    if (!is_super(type)) {
        threadgroup const uchar * q = p + block_bytes(type) * i;
        if (type == MXFP4) return float2(mxfp4_scale(q[0]), 0.0f);
        return float2(near_half(q), has_minimum(type) ? near_half(q + 2) : 0.0f);
    }
    if (type == Q4_K || type == Q5_K) {
        const float2 s = scale_min6(uint3(near32(p + 4, true), near32(p + 8, true), near32(p + 12, true)), i);
        return float2(near_half(p) * s.x, -(near_half(p + 2) * s.y));
    }
    if (type == Q2_K) return float2(near_half(p + 80) * float(p[i] & 15), -(near_half(p + 82) * float(p[i] >> 4)));
    if (type == Q3_K) return float2(near_half(p + 108) * scale_q3(uint3(near32(p + 96, false), near32(p + 100, false), near32(p + 104, false)), i), 0.0f);
    if (type == Q6_K) return float2(near_half(p + 208) * float(as_type<char>(p[192 + i])), 0.0f);
    return float2(near_half(p) * scale_iq4_xs(near32(p + 4, true), near16(p + 2), i), 0.0f);  // IQ4_XS
}

// Codes of block `b` (32 values) of a chunk at p: values 4t ... 4t + 3 and 16 later, as halves in the order 0, 2, 1, 3.
inline uint4 chunk_codes(ushort type, threadgroup const uchar * p, uint b, uint t, float inverse) {
    if (type == F16) {
        threadgroup const uchar * q = p + 64 * b + 8 * t;
        const uint u = near32(q, false), v = near32(q + 4, false), w = near32(q + 32, false), x = near32(q + 36, false);
        return uint4((u & 65535u) | v << 16, u >> 16 | (v & 0xFFFF0000u), (w & 65535u) | x << 16, w >> 16 | (x & 0xFFFF0000u));
    }
    if (is_divided(type)) {
        uint4 out;
        for (uint k = 0; k < 4; k++) {
            const uint at = 32 * b + 16 * (k / 2) + 4 * t + k % 2;
            out[k] = as_type<uint>(half2(float2(near_plain(type, p, at), near_plain(type, p, at + 2)) * inverse));
        }
        return out;
    }
    uint low, high, offset = 0;
    if (!is_super(type) || type == IQ4_XS) {
        threadgroup const uchar * q = type == IQ4_XS ? p + 8 + 16 * b : p + block_bytes(type) * b;
        if (type == Q8_0) {
            low = near32(q + 2 + 4 * t, false) ^ 0x80808080u, high = near32(q + 18 + 4 * t, false) ^ 0x80808080u;
            offset = 128;
        } else {
            const bool fifth = type == Q5_0 || type == Q5_1;
            const uint word = type == MXFP4    ? near_bytes(q + 1 + 4 * t)
                              : type == IQ4_XS ? near32(q + 4 * t, true)
                              : type == Q4_1   ? near32(q + 4 + 4 * t, true)
                              : type == Q5_1   ? near32(q + 8 + 4 * t, true)
                              : type == Q5_0   ? near32(q + 6 + 4 * t, false)
                                               : near32(q + 2 + 4 * t, false);
            low = word & 0x0F0F0F0Fu, high = word >> 4 & 0x0F0F0F0Fu;
            if (fifth) {
                const uint h = near32(q + (type == Q5_0 ? 2 : 4), type == Q5_1);
                low |= fifth_bits(h, 4 * t), high |= fifth_bits(h, 16 + 4 * t);
            }
            offset = type == Q4_0 ? 8 : type == Q5_0 ? 16 : 0;
            if (type == IQ4_NL || type == IQ4_XS || type == MXFP4) {
                constant const float * levels = type == MXFP4 ? MXFP4_LEVELS : IQ4_LEVELS;
                low = as_type<uint>(char4(levels4(levels, low))) ^ 0x80808080u;
                high = as_type<uint>(char4(levels4(levels, high))) ^ 0x80808080u;
                offset = 128;
            }
        }
    } else if (type == Q4_K || type == Q5_K) {
        threadgroup const uchar * q = p + (type == Q4_K ? 16 : 48) + 32 * (b / 2) + 4 * t;
        const uint shift = 4 * (b & 1);
        low = near32(q, true) >> shift & 0x0F0F0F0Fu, high = near32(q + 16, true) >> shift & 0x0F0F0F0Fu;
        if (type == Q5_K) {
            low |= (near32(p + 16 + 4 * t, true) >> b & 0x01010101u) << 4;
            high |= (near32(p + 32 + 4 * t, true) >> b & 0x01010101u) << 4;
        }
    } else {
        const uint half_ = b / 4, n = b & 3;
        if (type == Q6_K) {
            threadgroup const uchar * ql = p + 64 * half_ + 32 * (n & 1) + 4 * t, * qh = p + 128 + 32 * half_ + 4 * t;
            const uint shift = 4 * (n / 2);
            low = (near32(ql, false) >> shift & 0x0F0F0F0Fu) | (near32(qh, false) >> (2 * n) & 0x03030303u) << 4;
            high = (near32(ql + 16, false) >> shift & 0x0F0F0F0Fu) | (near32(qh + 16, false) >> (2 * n) & 0x03030303u) << 4;
            offset = 32;
        } else {
            threadgroup const uchar * q = p + (type == Q2_K ? 16 : 32) + 32 * half_ + 4 * t;
            low = near32(q, type == Q2_K) >> (2 * n) & 0x03030303u, high = near32(q + 16, type == Q2_K) >> (2 * n) & 0x03030303u;
            if (type == Q3_K) {
                low |= (near32(p + 4 * t, false) >> b & 0x01010101u) << 2;
                high |= (near32(p + 16 + 4 * t, false) >> b & 0x01010101u) << 2;
                offset = 4;
            }
        }
    }
    return uint4(byte_halves(low, offset), byte_halves(high, offset));
}
