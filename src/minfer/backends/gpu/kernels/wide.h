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

// A lane's 32 inputs, as eight words of four in each plane: h, m, l; `sum` is that of the values of a part.
struct inputs32 {
    uint plane[3][8];
    float step, sum[4];
};
inline float joined(int3 sum) { return fma(float(sum.x), 65536.0f, float(sum.y * 256 + sum.z)); }
inline int3 dot_planes(uint codes, thread const inputs32 & x, uint word, int3 sum) {
    return int3(dot_bytes(codes, x.plane[0][word], sum.x), dot_bytes(codes, x.plane[1][word], sum.y),
                dot_bytes(codes, x.plane[2][word], sum.z));
}

// ---- a lane's part of a slice of 1024 values ---------------------------------------------------------------------------
//
//   blocks, IQ4_XS     one block of 32
//   Q4_K, Q5_K         u = lane % 8 of a super-block: 16 values from 64 (u / 2) + 16 (u % 2) and the 16 that are 32 further
//   Q2_K, Q3_K, Q6_K   four times 8 values, 32 apart, from 128 (u / 4) + 8 (u % 4)
// so that a lane's codes lie side by side, and each of its parts has one scale.
inline uint parts_of(ushort type) { return !is_super(type) || type == IQ4_XS ? 1 : type == Q4_K || type == Q5_K ? 2 : 4; }
inline uint first_of(ushort type, uint lane) {
    const uint parts = parts_of(type), u = lane & 7;
    if (parts == 1) return 32 * lane;
    return 256 * (lane / 8) + (parts == 2 ? 64 * (u / 2) + 16 * (u & 1) : 128 * (u / 4) + 8 * (u & 3));
}
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
inline uint slice_bytes(ushort type) { return (is_super(type) ? 4 : 32) * block_bytes(type); }
// Of a slice in threadgroup memory: its start is up to 15 bytes into the first 16.
inline uint slot_bytes(ushort type) { return (slice_bytes(type) + 30) / 16 * 16; }

// The inputs at a lane's places of a slice: `planes` are three of `stride` pairs of words, `steps` one a block of 256.
inline void load_inputs(ushort type, threadgroup const uint2 * planes, uint stride, threadgroup const float * steps, uint lane,
                        thread inputs32 & x) {
    const uint parts = parts_of(type), first = first_of(type, lane), words = 8 / parts;
#pragma unroll
    for (uint p = 0; p < 3; p++)
#pragma unroll
        for (uint k = 0; k < 8; k += 2) {
            const uint at = first + 32 * (k / words) + 4 * (k % words);
            const uint2 two = planes[p * stride + at / 8];
            x.plane[p][k] = two.x, x.plane[p][k + 1] = two.y;
        }
    x.step = steps[lane / 8];
#pragma unroll
    for (uint part = 0; part < parts; part++) {
        int3 sum = int3(0);
#pragma unroll
        for (uint k = 0; k < words; k++) sum = dot_planes(0x01010101u, x, words * part + k, sum);
        x.sum[part] = joined(sum) * x.step;
    }
}

// ---- products ----------------------------------------------------------------------------------------------------------

inline uint level_bytes(constant const float * levels, uint nibbles) {  // one code a byte
    return as_type<uint>(char4(levels4(levels, nibbles)));
}
inline uint half_word(threadgroup const uint * s, uint at) { return s[at / 4] >> (8 * (at & 2)) & 0xFFFFu; }  // `at` is even
inline uint2 pair_at(threadgroup const uint * s, uint at) {  // 8 bytes from any place
    const uint a = s[at / 4], b = s[at / 4 + 1], c = s[at / 4 + 2], by = 8 * (at & 3);
    return uint2(funnel(a, b, by), funnel(b, c, by));
}
inline float half_of(uint bits) { return float(as_type<half2>(bits).x); }

// The sum of a lane's weights times its inputs. In words s, its block or super-block begins at byte `at`, a multiple of what
// the block's size is a multiple of.
inline float dot32(ushort type, threadgroup const uint * s, uint at, uint lane, thread const inputs32 & x) {
    const uint u = lane & 7;
    float total = 0;
    if (!is_super(type)) {
        // The block as words from the aligned place before it: byte f of it is at bit 8 * (f + odd).
        const bool aligned = type == Q4_1 || type == Q5_1;
        const uint odd = aligned ? 0 : at & 3, n = (block_bytes(type) + 5) / 4;
        uint w[9];
#pragma unroll
        for (uint k = 0; k < n; k++) w[k] = s[at / 4 + k];
        int3 sum = int3(0);
        if (type == Q8_0) {
#pragma unroll
            for (uint k = 0; k < 8; k++) sum = dot_planes(funnel(w[k], w[k + 1], 16 + 8 * odd), x, k, sum);
            return half_of(w[0] >> (8 * odd)) * x.step * joined(sum);
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
            sum = dot_planes(high, x, k + 4, dot_planes(low, x, k, sum));
        }
        if (type == MXFP4) return mxfp4_scale(uchar(w[0] >> (8 * odd))) * x.step * joined(sum);
        const half2 dm = as_type<half2>(w[0] >> (8 * odd));
        total = float(dm.x) * x.step * joined(sum);
        if (levels) return total;
        return total + (aligned ? float(dm.y) : (type == Q4_0 ? -8.0f : -16.0f) * float(dm.x)) * x.sum[0];
    }
    int3 sums[4] = {int3(0), int3(0), int3(0), int3(0)};
    if (type == Q4_K || type == Q5_K || type == IQ4_XS) {
        const bool levels = type == IQ4_XS;
        uint4 h = uint4(0), q, more = uint4(0);
        if (levels) {
            const uint2 a = *(threadgroup const uint2 *)(s + at / 4 + 2 + 4 * u), b = *(threadgroup const uint2 *)(s + at / 4 + 4 + 4 * u);
            h.xy = *(threadgroup const uint2 *)(s + at / 4), q = uint4(a, b);
        } else {
            h = *(threadgroup const uint4 *)(s + at / 4), q = *(threadgroup const uint4 *)(s + at / 4 + (type == Q4_K ? 4 : 12) + 4 * u);
            if (type == Q5_K) more = *(threadgroup const uint4 *)(s + at / 4 + 4 + 4 * (u & 1)) >> (u / 2 * 2);
        }
#pragma unroll
        for (uint k = 0; k < 4; k++) {
            uint low = levels ? level_bytes(IQ4_LEVELS, q[k]) : q[k] & 0x0F0F0F0Fu;
            uint high = levels ? level_bytes(IQ4_LEVELS, q[k] >> 4) : q[k] >> 4 & 0x0F0F0F0Fu;
            if (type == Q5_K) low |= (more[k] & 0x01010101u) << 4, high |= (more[k] & 0x02020202u) << 3;
            sums[0] = dot_planes(low, x, k, sums[0]);
            sums[levels ? 0 : 1] = dot_planes(high, x, k + 4, sums[levels ? 0 : 1]);
        }
        const half2 dm = as_type<half2>(h.x);
        if (levels) return float(dm.x) * scale_iq4_xs(h.y, h.x >> 16, u) * x.step * joined(sums[0]);
        // The 6-bit scales and minima of sub-blocks u / 2 * 2 and one more, two bytes each; as scale_min6 (weights.h).
        const uint by = 16 * (u / 2 & 1), a = h.y >> by, b = h.z >> by, c = h.w >> by;
        const uint scales = u < 4 ? a & 0x3F3Fu : (c & 0x0F0Fu) | (a >> 2 & 0x3030u);
        const uint minima = u < 4 ? b & 0x3F3Fu : (c >> 4 & 0x0F0Fu) | (b >> 2 & 0x3030u);
        const float4 f = bytes4((scales & 0xFFFFu) | minima << 16);
        return float(dm.x) * x.step * (f.x * joined(sums[0]) + f.y * joined(sums[1])) -
               float(dm.y) * (f.z * x.sum[0] + f.w * x.sum[1]);
    }
    // Q6_K, Q2_K, Q3_K. Scale 8 half_ + 2 part + j / 2 is a part's.
    const uint half_ = u / 4, j = u & 3;
    uint2 q, b = uint2(0), more = uint2(0), scales = uint2(0);
    if (type == Q6_K) {
        q = pair_at(s, at + 64 * half_ + 8 * j), b = pair_at(s, at + 64 * half_ + 32 + 8 * j);
        more = pair_at(s, at + 128 + 32 * half_ + 8 * j), scales = pair_at(s, at + 192 + 8 * half_);
    } else if (type == Q2_K) {
        const uint i = at / 4;
        q = uint2(s[i + 4 + 8 * half_ + 2 * j], s[i + 5 + 8 * half_ + 2 * j]), scales = uint2(s[i + 2 * half_], s[i + 2 * half_ + 1]);
    } else {
        q = pair_at(s, at + 32 + 32 * half_ + 8 * j), more = pair_at(s, at + 8 * j) >> (4 * half_);
    }
#pragma unroll
    for (uint k = 0; k < 2; k++) {
        const uint m = more[k];
        uint4 c;
        if (type == Q6_K) {
            c = uint4(q[k], b[k], q[k] >> 4, b[k] >> 4) & 0x0F0F0F0Fu;
            c |= uint4(m << 4, m << 2, m, m >> 2) & 0x30303030u;
        } else {
            c = uint4(q[k], q[k] >> 2, q[k] >> 4, q[k] >> 6) & 0x03030303u;
            if (type == Q3_K) c |= uint4(m << 2, m << 1, m, m >> 1) & 0x04040404u;
        }
#pragma unroll
        for (uint part = 0; part < 4; part++) sums[part] = dot_planes(c[part], x, 2 * part + k, sums[part]);
    }
    float4 y, sum;
#pragma unroll
    for (uint part = 0; part < 4; part++) y[part] = x.step * joined(sums[part]), sum[part] = x.sum[part];
    if (type == Q3_K) {
        const uint2 low = pair_at(s, at + 96);
        const uint3 packed = uint3(low, pair_at(s, at + 104).x);
        const uint i = 8 * half_ + j / 2;
        const float4 f = float4(scale_q3(packed, i), scale_q3(packed, i + 2), scale_q3(packed, i + 4), scale_q3(packed, i + 6));
        y = f * (y - 4.0f * sum);
        return half_of(half_word(s, at + 108)) * ((y.x + y.y) + (y.z + y.w));
    }
    // One byte of each two, in the order of parts 0, 2, 1, 3.
    const uint some = (scales.x >> (j / 2 * 8) & 0x00FF00FFu) | (scales.y >> (j / 2 * 8) & 0x00FF00FFu) << 8;
    if (type == Q6_K) {
        y = signed4(some).xzyw * (y - 32.0f * sum);
        return half_of(half_word(s, at + 208)) * ((y.x + y.y) + (y.z + y.w));
    }
    y = low_nibbles(some).xzyw * y, sum = high_nibbles(some).xzyw * sum;
    const half2 dm = as_type<half2>(s[at / 4 + 20]);
    return float(dm.x) * ((y.x + y.y) + (y.z + y.w)) - float(dm.y) * ((sum.x + sum.y) + (sum.z + sum.w));
}
