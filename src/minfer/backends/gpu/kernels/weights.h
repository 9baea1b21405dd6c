// Weight formats: a lane's share of a row for matrix-vector products, and any 16 values for everything else.
// The layouts are those of minfer/quants (legacy.py, kquants.py, iquants.py, mx.py), whose arithmetic is followed step
// by step: a value here has the bits that the reference decodes. A type is its GGUF number.
#pragma once
#include "common.h"

enum weight_type : ushort {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39
};

constant float IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constant float MXFP4_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

inline bool is_plain(ushort type) { return type == F32 || type == F16 || type == BF16; }
inline bool is_super(ushort type) { return (type >= Q2_K && type <= Q6_K) || type == IQ4_XS; }

// Bytes of a super-block of 256 values, of other types' 32.
inline uint block_bytes(ushort type) {
    switch (type) {
        case F32: return 128;
        case F16: case BF16: return 64;
        case Q4_0: case IQ4_NL: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        case Q2_K: return 84;
        case Q3_K: return 110;
        case Q4_K: return 144;
        case Q5_K: return 176;
        case Q6_K: return 210;
        case IQ4_XS: return 136;
        default: return 17;  // MXFP4
    }
}

inline float plain_value(ushort type, device const uchar * row, uint i) {
    if (type == F32) return ((device const float *)row)[i];
    if (type == F16) return float(((device const half *)row)[i]);
    return as_type<float>(uint(((device const ushort *)row)[i]) << 16);
}
inline float4 levels4(constant const float * levels, uint nibbles) {  // one code a byte
    return float4(levels[nibbles & 15], levels[nibbles >> 8 & 15], levels[nibbles >> 16 & 15], levels[nibbles >> 24 & 15]);
}
inline float mxfp4_scale(uchar e) {  // 2^(e - 128); the lowest two are subnormal
    return e > 1 ? as_type<float>(uint(e - 1) << 23) : as_type<float>(e == 1 ? 0x00400000u : 0x00200000u);
}
// The 6-bit scale and minimum of sub-block s (Q4_K, Q5_K) from the 12 bytes as three words.
inline float2 scale_min6(uint3 packed, uint s) {
    const uint shift = 8 * (s & 3);
    const uint a = packed.x >> shift & 255, b = packed.y >> shift & 255, c = packed.z >> shift & 255;
    if (s < 4) return float2(float(a & 63), float(b & 63));
    return float2(float((c & 15) | (a >> 6) << 4), float((c >> 4) | (b >> 6) << 4));
}
// The 6-bit scale of sub-block s (Q3_K), less 32.
inline float scale_q3(uint3 packed, uint s) {
    const uint low = (s & 7) < 4 ? packed.x : packed.y;
    const uint nibble = low >> (8 * (s & 3) + 4 * (s >> 3)) & 15;
    const uint high = packed.z >> (8 * (s & 3) + 2 * (s >> 2)) & 3;
    return float(int(nibble | high << 4) - 32);
}
inline float scale_iq4_xs(uint low, uint high, uint s) {
    return float(int((low >> (8 * (s >> 1) + 4 * (s & 1)) & 15) | (high >> (2 * s) & 3) << 4) - 32);
}
inline uint word_of(uint4 h, uint i) { return i == 0 ? h.x : i == 1 ? h.y : i == 2 ? h.z : h.w; }
inline float signed_byte(uint4 h, uint i) { return float(as_type<char4>(word_of(h, i >> 2))[i & 3]); }

// ---- a lane's share of 1024 values -----------------------------------------------------------------------------
//
// A simdgroup walks a row in steps of 1024 values, 32 a lane, as eight float4 w[k]. Which values a lane has:
//   plain       1024 step + 128 k + 32 i + lane  for element i of w[k]: neighbouring lanes read neighbouring values
//   blocks      block 32 step + lane, values 4 k + i: a lane reads one block, its scale once
//   super       super-block 4 step + lane / 8; lane j = lane % 8 has values 32 k + 4 j + i: eight lanes read
//               neighbouring words; the header is read by the first of them and passed on
//   IQ4_XS      super-block as above; lane j has sub-block j, values 32 j + 4 k + i
// Every weight byte is read once. Values past the row's end are zero and nothing of them is loaded. All lanes call
// these together (the header is shared by simd_shuffle).

inline uint share_start(ushort type, uint step, uint lane) {
    if (is_plain(type)) return 1024 * step + lane;
    if (is_super(type)) return 256 * (4 * step + lane / 8) + (type == IQ4_XS ? 32 : 4) * (lane & 7);
    return 32 * (32 * step + lane);
}
inline uint share_stride(ushort type) { return is_plain(type) ? 128 : is_super(type) && type != IQ4_XS ? 32 : 4; }

// x at the places of a lane's share; zero past n.
inline void load_share(ushort type, device const float * x, uint n, uint step, uint lane, thread float4 (&out)[8]) {
    const uint start = share_start(type, step, lane), stride = share_stride(type);
    if (is_plain(type)) {
        for (uint k = 0; k < 8; k++)
            for (uint i = 0; i < 4; i++) {
                const uint at = start + stride * k + 32 * i;
                out[k][i] = at < n ? x[at] : 0.0f;
            }
        return;
    }
    for (uint k = 0; k < 8; k++) out[k] = start < n ? load4(x + start + stride * k) : float4(0.0f);
}

inline void blocks_share(ushort type, device const uchar * row, uint ib, thread float4 (&w)[8]) {
    if (type == Q8_0) {
        device const uchar * p = row + 34 * ib;
        const float d = half_at(p);
        for (uint k = 0; k < 8; k++) w[k] = signed4(u32_at(p + 2 + 4 * k)) * d;
    } else if (type == Q4_0) {
        device const uchar * p = row + 18 * ib;
        const float d = half_at(p);
        for (uint k = 0; k < 4; k++) {
            const uint q = u32_at(p + 2 + 4 * k);
            w[k] = (low_nibbles(q) - 8.0f) * d;
            w[k + 4] = (high_nibbles(q) - 8.0f) * d;
        }
    } else if (type == Q4_1) {
        device const uchar * p = row + 20 * ib;
        const float d = half_at(p), m = half_at(p + 2);
        for (uint k = 0; k < 4; k++) {
            const uint q = u32_aligned(p + 4 + 4 * k);
            w[k] = low_nibbles(q) * d + m;
            w[k + 4] = high_nibbles(q) * d + m;
        }
    } else if (type == Q5_0 || type == Q5_1) {
        device const uchar * p = row + (type == Q5_0 ? 22 : 24) * ib;
        const float d = half_at(p), m = type == Q5_1 ? half_at(p + 2) : 0.0f;
        if (type == Q5_1) p += 2;
        const uint h = u32_at(p + 2);
        for (uint k = 0; k < 4; k++) {
            const uint q = u32_at(p + 6 + 4 * k);
            const float4 low = bytes4((q & 0x0F0F0F0Fu) | fifth_bits(h, 4 * k));
            const float4 high = bytes4((q >> 4 & 0x0F0F0F0Fu) | fifth_bits(h, 4 * k + 16));
            w[k] = type == Q5_0 ? (low - 16.0f) * d : low * d + m;
            w[k + 4] = type == Q5_0 ? (high - 16.0f) * d : high * d + m;
        }
    } else if (type == IQ4_NL) {
        device const uchar * p = row + 18 * ib;
        const float d = half_at(p);
        for (uint k = 0; k < 4; k++) {
            const uint q = u32_at(p + 2 + 4 * k);
            w[k] = levels4(IQ4_LEVELS, q) * d;
            w[k + 4] = levels4(IQ4_LEVELS, q >> 4) * d;
        }
    } else {  // MXFP4
        device const uchar * p = row + 17 * ib;
        const float d = mxfp4_scale(p[0]);
        for (uint k = 0; k < 4; k++) {
            const uint q = u32_bytes(p + 1 + 4 * k);
            w[k] = levels4(MXFP4_LEVELS, q) * d;
            w[k + 4] = levels4(MXFP4_LEVELS, q >> 4) * d;
        }
    }
}

// Twelve or sixteen header bytes as words.
inline uint4 header16(device const uchar * p) { return uint4(u32_at(p), u32_at(p + 4), u32_at(p + 8), u32_at(p + 12)); }

inline void super_share(ushort type, device const uchar * row, uint ib, bool live, uint lane, thread float4 (&w)[8]) {
    const uint j = lane & 7, first = lane & 24;
    const bool head = live && j == 0;
    if (type == Q4_K || type == Q5_K) {
        device const uchar * p = row + (type == Q4_K ? 144 : 176) * ib;
        const uint4 h = simd_shuffle(head ? header16(p) : uint4(0), ushort(first));
        const float d = float(as_type<half2>(h.x).x), dmin = float(as_type<half2>(h.x).y);
        const uint bits = live && type == Q5_K ? u32_aligned(p + 16 + 4 * j) : 0;
        device const uchar * qs = p + (type == Q4_K ? 16 : 48) + 4 * j;
        for (uint g = 0; g < 4; g++) {
            const uint q = live ? u32_aligned(qs + 32 * g) : 0;
            const float2 a = scale_min6(h.yzw, 2 * g), b = scale_min6(h.yzw, 2 * g + 1);
            uint low = q & 0x0F0F0F0Fu, high = q >> 4 & 0x0F0F0F0Fu;
            if (type == Q5_K) {
                low |= (bits >> (2 * g) & 0x01010101u) << 4;
                high |= (bits >> (2 * g + 1) & 0x01010101u) << 4;
            }
            w[2 * g] = bytes4(low) * (d * a.x) - dmin * a.y;
            w[2 * g + 1] = bytes4(high) * (d * b.x) - dmin * b.y;
        }
    } else if (type == Q6_K) {
        device const uchar * p = row + 210 * ib;
        const uint4 h = simd_shuffle(head ? header16(p + 192) : uint4(0), ushort(first));
        const float d = float(as_type<half2>(simd_shuffle(head ? u16_at(p + 208) : 0u, ushort(first))).x);
        for (uint half_ = 0; half_ < 2; half_++) {
            const uint qh = live ? u32_at(p + 128 + 32 * half_ + 4 * j) : 0;
            for (uint c = 0; c < 2; c++) {  // ql byte 64 half + 32 c + l: low nibble quarter c, high nibble quarter c + 2
                const uint ql = live ? u32_at(p + 64 * half_ + 32 * c + 4 * j) : 0;
                for (uint n = 0; n < 2; n++) {
                    const uint quarter = c + 2 * n, k = 4 * half_ + quarter;
                    const uint q = (ql >> (4 * n) & 0x0F0F0F0Fu) | (qh >> (2 * quarter) & 0x03030303u) << 4;
                    w[k] = (bytes4(q) - 32.0f) * (d * signed_byte(h, 2 * k + j / 4));
                }
            }
        }
    } else if (type == Q2_K) {
        device const uchar * p = row + 84 * ib;
        const uint4 h = simd_shuffle(head ? header16(p) : uint4(0), ushort(first));
        const half2 dm = as_type<half2>(simd_shuffle(head ? u32_aligned(p + 80) : 0u, ushort(first)));
        for (uint half_ = 0; half_ < 2; half_++) {
            const uint q = live ? u32_aligned(p + 16 + 32 * half_ + 4 * j) : 0;
            for (uint n = 0; n < 4; n++) {
                const uint k = 4 * half_ + n, s = 2 * k + j / 4;
                const uint sc = word_of(h, s >> 2) >> (8 * (s & 3)) & 255;
                w[k] = bytes4(q >> (2 * n) & 0x03030303u) * (float(dm.x) * float(sc & 15)) - float(dm.y) * float(sc >> 4);
            }
        }
    } else if (type == Q3_K) {
        device const uchar * p = row + 110 * ib;
        const uint4 mine = head ? uint4(u32_at(p + 96), u32_at(p + 100), u32_at(p + 104), u16_at(p + 108)) : uint4(0);
        const uint4 h = simd_shuffle(mine, ushort(first));
        const float d = float(as_type<half2>(h.w).x);
        const uint mask = live ? u32_at(p + 4 * j) : 0;
        for (uint half_ = 0; half_ < 2; half_++) {
            const uint q = live ? u32_at(p + 32 + 32 * half_ + 4 * j) : 0;
            for (uint n = 0; n < 4; n++) {
                const uint k = 4 * half_ + n;
                const uint code = (q >> (2 * n) & 0x03030303u) | (mask >> k & 0x01010101u) << 2;
                w[k] = (bytes4(code) - 4.0f) * (d * scale_q3(h.xyz, 2 * k + j / 4));
            }
        }
    } else {  // IQ4_XS
        device const uchar * p = row + 136 * ib;
        const uint2 h = simd_shuffle(head ? uint2(u32_aligned(p), u32_aligned(p + 4)) : uint2(0), ushort(first));
        const float d = float(as_type<half2>(h.x).x) * scale_iq4_xs(h.y, h.x >> 16, j);
        for (uint k = 0; k < 4; k++) {
            const uint q = live ? u32_aligned(p + 8 + 16 * j + 4 * k) : 0;
            w[k] = levels4(IQ4_LEVELS, q) * d;
            w[k + 4] = levels4(IQ4_LEVELS, q >> 4) * d;
        }
    }
}

// A lane's share of a row of n weights. A lane without one, or with `live` false, gets zeros.
inline void weight_share(ushort type, device const uchar * row, uint n, uint step, uint lane, bool live, thread float4 (&w)[8]) {
    const uint start = share_start(type, step, lane);
    const bool mine = live && start < n;
    if (is_plain(type)) {
        for (uint k = 0; k < 8; k++)
            for (uint i = 0; i < 4; i++) {
                const uint at = start + 128 * k + 32 * i;
                w[k][i] = live && at < n ? plain_value(type, row, at) : 0.0f;
            }
    } else if (is_super(type)) {
        super_share(type, row, 4 * step + lane / 8, mine, lane, w);
        if (!mine) for (uint k = 0; k < 8; k++) w[k] = float4(0.0f);
    } else if (mine) {
        blocks_share(type, row, 32 * step + lane, w);
    } else {
        for (uint k = 0; k < 8; k++) w[k] = float4(0.0f);
    }
}

// ---- sixteen values at any place ------------------------------------------------------------------------------

// w = values 16 unit ... 16 unit + 15 of a row of n; zero past its end (which only plain types can have there).
inline void weight16(ushort type, device const uchar * row, uint n, uint unit, thread float4 (&w)[4]) {
    if (is_plain(type)) {
        for (uint i = 0; i < 16; i++) w[i / 4][i % 4] = 16 * unit + i < n ? plain_value(type, row, 16 * unit + i) : 0.0f;
        return;
    }
    if (16 * unit >= n) {
        for (uint k = 0; k < 4; k++) w[k] = float4(0.0f);
        return;
    }
    if (!is_super(type)) {
        const uint ib = unit / 2, shift = 4 * (unit & 1);  // the second half of a block is its high nibbles
        if (type == Q8_0) {
            device const uchar * p = row + 34 * ib;
            for (uint k = 0; k < 4; k++) w[k] = signed4(u32_at(p + 2 + 16 * (unit & 1) + 4 * k)) * half_at(p);
        } else if (type == Q4_0) {
            device const uchar * p = row + 18 * ib;
            for (uint k = 0; k < 4; k++) w[k] = (low_nibbles(u32_at(p + 2 + 4 * k) >> shift) - 8.0f) * half_at(p);
        } else if (type == Q4_1) {
            device const uchar * p = row + 20 * ib;
            for (uint k = 0; k < 4; k++) w[k] = low_nibbles(u32_aligned(p + 4 + 4 * k) >> shift) * half_at(p) + half_at(p + 2);
        } else if (type == Q5_0 || type == Q5_1) {
            device const uchar * p = row + (type == Q5_0 ? 22 : 24) * ib;
            const float d = half_at(p), m = type == Q5_1 ? half_at(p + 2) : 0.0f;
            if (type == Q5_1) p += 2;
            const uint h = u32_at(p + 2);
            for (uint k = 0; k < 4; k++) {
                const float4 q = bytes4((u32_at(p + 6 + 4 * k) >> shift & 0x0F0F0F0Fu) | fifth_bits(h, 4 * k + 4 * shift));
                w[k] = type == Q5_0 ? (q - 16.0f) * d : q * d + m;
            }
        } else if (type == IQ4_NL) {
            device const uchar * p = row + 18 * ib;
            for (uint k = 0; k < 4; k++) w[k] = levels4(IQ4_LEVELS, u32_at(p + 2 + 4 * k) >> shift) * half_at(p);
        } else {
            device const uchar * p = row + 17 * ib;
            for (uint k = 0; k < 4; k++) w[k] = levels4(MXFP4_LEVELS, u32_bytes(p + 1 + 4 * k) >> shift) * mxfp4_scale(p[0]);
        }
        return;
    }
    const uint ib = unit / 16, s = unit & 15, k32 = s / 2, l = 16 * (s & 1);  // values 32 k32 + l ... of the super-block
    if (type == Q4_K || type == Q5_K) {
        device const uchar * p = row + (type == Q4_K ? 144 : 176) * ib;
        const float2 a = scale_min6(uint3(u32_at(p + 4), u32_at(p + 8), u32_at(p + 12)), k32);
        const float d = half_at(p) * a.x, m = half_at(p + 2) * a.y;
        for (uint k = 0; k < 4; k++) {
            uint q = u32_at(p + (type == Q4_K ? 16 : 48) + 32 * (k32 / 2) + l + 4 * k) >> (4 * (k32 & 1)) & 0x0F0F0F0Fu;
            if (type == Q5_K) q |= (u32_at(p + 16 + l + 4 * k) >> k32 & 0x01010101u) << 4;
            w[k] = bytes4(q) * d - m;
        }
    } else if (type == Q6_K) {
        device const uchar * p = row + 210 * ib;
        const uint half_ = k32 / 4, quarter = k32 & 3;
        const float d = half_at(p + 208) * float(as_type<char>(p[192 + s]));
        for (uint k = 0; k < 4; k++) {
            const uint ql = u32_at(p + 64 * half_ + 32 * (quarter & 1) + l + 4 * k) >> (4 * (quarter / 2)) & 0x0F0F0F0Fu;
            w[k] = (bytes4(ql | (u32_at(p + 128 + 32 * half_ + l + 4 * k) >> (2 * quarter) & 0x03030303u) << 4) - 32.0f) * d;
        }
    } else if (type == Q2_K) {
        device const uchar * p = row + 84 * ib;
        const float d = half_at(p + 80) * float(p[s] & 15), m = half_at(p + 82) * float(p[s] >> 4);
        for (uint k = 0; k < 4; k++) w[k] = bytes4(u32_at(p + 16 + 32 * (k32 / 4) + l + 4 * k) >> (2 * (k32 & 3)) & 0x03030303u) * d - m;
    } else if (type == Q3_K) {
        device const uchar * p = row + 110 * ib;
        const float d = half_at(p + 108) * scale_q3(uint3(u32_at(p + 96), u32_at(p + 100), u32_at(p + 104)), s);
        for (uint k = 0; k < 4; k++) {
            const uint q = u32_at(p + 32 + 32 * (k32 / 4) + l + 4 * k) >> (2 * (k32 & 3)) & 0x03030303u;
            w[k] = (bytes4(q | (u32_at(p + l + 4 * k) >> k32 & 0x01010101u) << 2) - 4.0f) * d;
        }
    } else {  // IQ4_XS
        device const uchar * p = row + 136 * ib;
        const float d = half_at(p) * scale_iq4_xs(u32_at(p + 4), u16_at(p + 2), k32);
        for (uint k = 0; k < 4; k++) w[k] = levels4(IQ4_LEVELS, u32_at(p + 8 + 16 * k32 + 4 * k) >> (4 * (s & 1))) * d;
    }
}
