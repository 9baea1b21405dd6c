// Products of weight codes with inputs in whole numbers, 32 values a lane: a byte product adds four values in one
// instruction where floats take twelve. Rows come into threadgroup memory by copies that run beside the arithmetic, many
// under way at a time, whatever a format's alignment. Layouts are those of weights.h.
#pragma once
#include "weights.h"

#ifdef MINFER_CUDA
inline int dot_bytes(uint a, uint b, int sum) { return msl_cuda::dot_bytes(a, b, sum); }
inline uint funnel(uint low, uint high, uint by) { return msl_cuda::funnel(low, high, by); }
inline uint permute(uint a, uint b, uint which) { return msl_cuda::permute(a, b, which); }
// A copy of 16 aligned bytes that has ended after `copies_wait` and a barrier; `left` groups of copies may be under way then.
inline void copy16(threadgroup uint4 * to, device const uint4 * from) { msl_cuda::copy16(to, from); }
inline void copies_end_group() { msl_cuda::copies_end_group(); }
template <uint left> inline void copies_wait() { msl_cuda::copies_wait<left>(); }
#else
inline int dot_bytes(uint a, uint b, int sum) {  // signed bytes
    const char4 x = as_type<char4>(a), y = as_type<char4>(b);
    return sum + int(x.x) * int(y.x) + int(x.y) * int(y.y) + int(x.z) * int(y.z) + int(x.w) * int(y.w);
}
inline uint funnel(uint low, uint high, uint by) { return uint((ulong(high) << 32 | low) >> by); }  // by 0 ... 32 bits
inline uint permute(uint a, uint b, uint which) {  // byte i is byte `which >> 4 i & 7` of a and b
    const ulong both = ulong(b) << 32 | a;
    uint out = 0;
    for (uint i = 0; i < 4; i++) out |= uint(both >> (8 * (which >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}
inline void copy16(threadgroup uint4 * to, device const uint4 * from) { *to = *from; }
inline void copies_end_group() {}
template <uint left> inline void copies_wait() {}
#endif

// ---- inputs as whole numbers ---------------------------------------------------------------------------------------

// A block of 256 inputs is v * step with v = 2^16 h + 2^8 m + l, h in -64 ... 63, m and l in -128 ... 127: v is rounded to
// 1 / LARGEST of the block's largest value, about a float's last bit. What is less than TINY is nothing.
constant constexpr float LARGEST = 4161000.0f;  // v + BIAS fits 23 bits
constant constexpr float TINY = 1e-30f;
constant constexpr uint BIAS = 0x408080;  // makes the bytes of v + BIAS those of h + 64, m + 128, l + 128

// Bytes h, m and l of four values whose v are x * inverse. To add 2^23 leaves v + BIAS, rounded, in a float's fraction.
inline uint3 pack4(float4 x, float inverse) {
    const uint4 v = as_type<uint4>(fma(x, float4(inverse), float4(8388608.0f + float(BIAS))));
    const uint ab = permute(v.x, v.y, 0x5140), cd = permute(v.z, v.w, 0x5140);
    const uint h = permute(permute(v.x, v.y, 0x0062), permute(v.z, v.w, 0x0062), 0x5410);
    return uint3((h + 0x40404040u) ^ 0x80808080u, permute(ab, cd, 0x7632) ^ 0x80808080u, permute(ab, cd, 0x5410) ^ 0x80808080u);
}

// A lane's inputs: `words` words of four in each plane, h, m and l, and the sums of the values of its parts.
struct lane_inputs {
    uint plane[3][16];
    float sum[4];
};
inline float joined(int3 sum) { return fma(float(sum.x), 65536.0f, float(sum.y * 256 + sum.z)); }
inline int3 dot_planes(uint codes, thread const lane_inputs & x, uint word, int3 sum) {
    return int3(dot_bytes(codes, x.plane[0][word], sum.x), dot_bytes(codes, x.plane[1][word], sum.y),
                dot_bytes(codes, x.plane[2][word], sum.z));
}

// ---- a lane's part of a slice --------------------------------------------------------------------------------------------
//
// A simdgroup takes slices of a row: 2048 values, 64 a lane, where any of its types has super-blocks; else 1024, 32 a lane.
//   blocks, IQ4_XS   whole blocks of 32, side by side; each is a part
//   super-blocks     four parts of 16, 32 apart, from 128 (u / 2) + 16 (u % 2), u = lane % 4: their codes lie side by side
// so that each part has one scale.
inline bool is_quartered(ushort type) { return is_super(type) && type != IQ4_XS; }
inline uint block_bytes(ushort type) {
    switch (type) {
        case Q8_0: return 34;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case MXFP4: return 17;
        case Q2_K: return 84;
        case Q3_K: return 110;
        case Q4_K: return 144;
        case Q5_K: return 176;
        case Q6_K: return 210;
        case IQ4_XS: return 136;
        default: return 18;  // Q4_0, IQ4_NL
    }
}
inline uint slice_bytes(ushort type, uint slice) { return slice / (is_super(type) ? 256 : 32) * block_bytes(type); }

// The inputs at a lane's places of a slice: `planes` are three of `stride` times four words.
inline void load_inputs(bool quartered, uint words, threadgroup const uint4 * planes, uint stride, uint lane, thread lane_inputs & x) {
    const uint first = quartered ? 256 * (lane / 4) + 128 * (lane / 2 & 1) + 16 * (lane & 1) : 4 * words * lane;
#pragma unroll
    for (uint p = 0; p < 3; p++)
#pragma unroll
        for (uint k = 0; k < words; k += 4) {
            const uint4 four = planes[p * stride + (first + (quartered ? 8 : 4) * k) / 16];
            for (uint i = 0; i < 4; i++) x.plane[p][k + i] = four[i];
        }
    const uint of_part = quartered ? 4 : 8;
#pragma unroll
    for (uint part = 0; part < words / of_part; part++) {
        int3 sum = int3(0);
#pragma unroll
        for (uint k = 0; k < of_part; k++) sum = dot_planes(0x01010101u, x, of_part * part + k, sum);
        x.sum[part] = joined(sum);
    }
}

// ---- products ------------------------------------------------------------------------------------------------------------

inline uint level_bytes(constant const float * levels, uint nibbles) {  // one code a byte
    return as_type<uint>(char4(levels4(levels, nibbles)));
}
inline float added(float4 x) { return (x.x + x.y) + (x.z + x.w); }
inline float half_of(uint bits) { return float(as_type<half2>(bits).x); }
inline float half_word(threadgroup const uint * s, uint at) { return half_of(s[at / 4] >> (8 * (at & 2))); }  // `at` is even
inline uint2 pair_at(threadgroup const uint * s, uint at) {  // 8 bytes from any place
    const uint a = s[at / 4], b = s[at / 4 + 1], c = s[at / 4 + 2], by = 8 * (at & 3);
    return uint2(funnel(a, b, by), funnel(b, c, by));
}
inline uint4 quad_at(threadgroup const uint * s, uint at) {  // 16 bytes from any place
    const uint a = s[at / 4], b = s[at / 4 + 1], c = s[at / 4 + 2], d = s[at / 4 + 3], e = s[at / 4 + 4], by = 8 * (at & 3);
    return uint4(funnel(a, b, by), funnel(b, c, by), funnel(c, d, by), funnel(d, e, by));
}

// The sum of a block's weights times its inputs' whole numbers, part `part`. In words s, the block begins at byte `at`, a multiple of what
// the block's size is a multiple of.
inline float block_product(ushort type, threadgroup const uint * s, uint at, uint part, thread const lane_inputs & x) {
    // The block as words from the aligned place before it: byte f of it is at bit 8 * (f + odd).
    const bool aligned = type == Q4_1 || type == Q5_1;
    const uint odd = aligned ? 0 : at & 3, n = (block_bytes(type) + (aligned ? 0 : 3)) / 4;
    uint w[9];
#pragma unroll
    for (uint k = 0; k < n; k++) w[k] = s[at / 4 + k];
    int3 sum = int3(0);
    if (type == Q8_0) {
#pragma unroll
        for (uint k = 0; k < 8; k++) sum = dot_planes(funnel(w[k], w[k + 1], 16 + 8 * odd), x, 8 * part + k, sum);
        return half_of(w[0] >> (8 * odd)) * joined(sum);
    }
    const uint codes = type == Q5_0 ? 6 : type == Q5_1 ? 8 : type == Q4_1 ? 4 : type == MXFP4 ? 1 : 2;  // where they begin
    const bool fifth = type == Q5_0 || type == Q5_1, levels = type == IQ4_NL || type == MXFP4;
    constant const float * table = type == IQ4_NL ? IQ4_LEVELS : MXFP4_LEVELS;
    const uint more = type == Q5_0 ? funnel(w[0], w[1], 16 + 8 * odd) : w[1];
#pragma unroll
    for (uint k = 0; k < 4; k++) {
        const uint i = codes / 4 + k;
        const uint q = aligned ? w[i] : funnel(w[i], w[i + 1], 8 * (codes & 3) + 8 * odd);
        const uint low = levels ? level_bytes(table, q) : (q & 0x0F0F0F0Fu) | (fifth ? fifth_bits(more, 4 * k) : 0);
        const uint high = levels ? level_bytes(table, q >> 4) : (q >> 4 & 0x0F0F0F0Fu) | (fifth ? fifth_bits(more, 4 * k + 16) : 0);
        sum = dot_planes(high, x, 8 * part + k + 4, dot_planes(low, x, 8 * part + k, sum));
    }
    if (type == MXFP4) return mxfp4_scale(uchar(w[0] >> (8 * odd))) * joined(sum);
    const half2 dm = as_type<half2>(w[0] >> (8 * odd));
    const float total = float(dm.x) * joined(sum);
    if (levels) return total;
    return total + (aligned ? float(dm.y) : (type == Q4_0 ? -8.0f : -16.0f) * float(dm.x)) * x.sum[part];
}

// The same of a lane's 64 values of a super-block that begins at byte `at`.
inline float super_product(ushort type, threadgroup const uint * s, uint at, uint lane, thread const lane_inputs & x) {
    const uint u = lane & 3, half_ = u / 2, odd = u & 1, i = at / 4;
    if (type == IQ4_XS) {
        const uint2 h = *(threadgroup const uint2 *)(s + i);
        float total = 0;
#pragma unroll
        for (uint part = 0; part < 2; part++) {
            int3 sum = int3(0);
#pragma unroll
            for (uint k = 0; k < 4; k++) {
                const uint q = s[i + 2 + 8 * u + 4 * part + k];
                sum = dot_planes(level_bytes(IQ4_LEVELS, q), x, 8 * part + k, sum);
                sum = dot_planes(level_bytes(IQ4_LEVELS, q >> 4), x, 8 * part + k + 4, sum);
            }
            total += scale_iq4_xs(h.y, h.x >> 16, 2 * u + part) * joined(sum);
        }
        return half_of(h.x) * total;
    }
    uint4 h = uint4(0), a, b = uint4(0), more = uint4(0);
    uint2 scales = uint2(0);
    if (type == Q4_K || type == Q5_K) {
        threadgroup const uint4 * fours = (threadgroup const uint4 *)(s + i);
        const uint codes = (type == Q4_K ? 1 : 3) + 4 * half_ + odd;
        h = fours[0], a = fours[codes], b = fours[codes + 2];
        if (type == Q5_K) more = fours[1 + odd] >> (4 * half_);
    } else if (type == Q6_K) {
        a = quad_at(s, at + 64 * half_ + 16 * odd), b = quad_at(s, at + 64 * half_ + 32 + 16 * odd);
        more = quad_at(s, at + 128 + 32 * half_ + 16 * odd), scales = pair_at(s, at + 192 + 8 * half_);
    } else if (type == Q2_K) {
        for (uint k = 0; k < 4; k++) a[k] = s[i + 4 + 8 * half_ + 4 * odd + k];
        scales = uint2(s[i + 2 * half_], s[i + 2 * half_ + 1]);
    } else {
        a = quad_at(s, at + 32 + 32 * half_ + 16 * odd), more = quad_at(s, at + 16 * odd) >> (4 * half_);
    }
    int3 sums[4] = {int3(0), int3(0), int3(0), int3(0)};
#pragma unroll
    for (uint k = 0; k < 4; k++) {
        const uint q = a[k], m = more[k];
        uint4 c;  // a code of each part
        if (type == Q4_K || type == Q5_K) {
            c = uint4(q, q >> 4, b[k], b[k] >> 4) & 0x0F0F0F0Fu;
            if (type == Q5_K) c |= uint4(m << 4, m << 3, m << 2, m << 1) & 0x10101010u;
        } else if (type == Q6_K) {
            c = (uint4(q, b[k], q >> 4, b[k] >> 4) & 0x0F0F0F0Fu) | (uint4(m << 4, m << 2, m, m >> 2) & 0x30303030u);
        } else {
            c = uint4(q, q >> 2, q >> 4, q >> 6) & 0x03030303u;
            if (type == Q3_K) c |= uint4(m << 2, m << 1, m, m >> 1) & 0x04040404u;
        }
#pragma unroll
        for (uint part = 0; part < 4; part++) sums[part] = dot_planes(c[part], x, 4 * part + k, sums[part]);
    }
    const float4 y = float4(joined(sums[0]), joined(sums[1]), joined(sums[2]), joined(sums[3]));
    const float4 sum = float4(x.sum[0], x.sum[1], x.sum[2], x.sum[3]);
    if (type == Q4_K || type == Q5_K) {  // 6-bit scales and minima, a byte each; as scale_min6 (weights.h)
        const uint scale = half_ ? (h.w & 0x0F0F0F0Fu) | (h.y >> 2 & 0x30303030u) : h.y & 0x3F3F3F3Fu;
        const uint low = half_ ? (h.w >> 4 & 0x0F0F0F0Fu) | (h.z >> 2 & 0x30303030u) : h.z & 0x3F3F3F3Fu;
        const half2 dm = as_type<half2>(h.x);
        return float(dm.x) * added(bytes4(scale) * y) - float(dm.y) * added(bytes4(low) * sum);
    }
    if (type == Q3_K) {
        const uint3 packed = uint3(pair_at(s, at + 96), funnel(s[i + 26], s[i + 27], 8 * (at & 3)));
        const uint k = 8 * half_ + odd;
        const float4 f = float4(scale_q3(packed, k), scale_q3(packed, k + 2), scale_q3(packed, k + 4), scale_q3(packed, k + 6));
        return half_word(s, at + 108) * added(f * (y - 4.0f * sum));
    }
    // One byte of each two, in the order of parts 0, 2, 1, 3.
    const uint some = (scales.x >> (8 * odd) & 0x00FF00FFu) | (scales.y >> (8 * odd) & 0x00FF00FFu) << 8;
    if (type == Q6_K) return half_word(s, at + 208) * added(signed4(some).xzyw * (y - 32.0f * sum));
    const half2 dm = as_type<half2>(s[i + 20]);
    return float(dm.x) * added(low_nibbles(some).xzyw * y) - float(dm.y) * added(high_nibbles(some).xzyw * sum);
}
