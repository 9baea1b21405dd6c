// KV rows: the formats of minfer/quants/kv.py. 0 f32, 1 f16, 2 q8_0 (blocks of d f16, 32 int8; 34 bytes).
#pragma once
#include "common.h"

enum kv_type : uint { KV_F32 = 0, KV_F16 = 1, KV_Q8_0 = 2 };

// Values v ... v + 7 of a row; v is a multiple of 8. `d` keeps a q8_0 block's scale while `v` walks on: it is read at a
// block's start and wherever `fresh` is set.
inline void kv_load8(uint format, device const uchar * row, uint v, bool fresh, thread float & d, thread float4 & a, thread float4 & b) {
    if (format == KV_F32) {
        a = load4((device const float *)row + v);
        b = load4((device const float *)row + v + 4);
    } else if (format == KV_F16) {
        a = float4(*(device const half4 *)(row + 2 * v));
        b = float4(*(device const half4 *)(row + 2 * v + 8));
    } else {
        device const uchar * p = row + 34 * (v / 32);
        if (fresh || (v & 31) == 0) d = half_at(p);
        a = signed4(u32_at(p + 2 + (v & 31))) * d;
        b = signed4(u32_at(p + 6 + (v & 31))) * d;
    }
}
// Values v ... v + 3 of a row; v is a multiple of 4.
inline float4 kv_load4(uint format, device const uchar * row, uint v) {
    if (format == KV_F32) return load4((device const float *)row + v);
    if (format == KV_F16) return float4(*(device const half4 *)(row + 2 * v));
    device const uchar * p = row + 34 * (v / 32);
    return signed4(u32_at(p + 2 + (v & 31))) * half_at(p);
}

// Values v ... v + 3 of a row as they lie there, and made numbers: what is read early can be converted late. v is a multiple
// of 4.
inline uint4 kv_raw4(uint format, device const uchar * row, uint v) {
    if (format == KV_F32) return *(device const uint4 *)(row + 4 * v);
    if (format == KV_F16) return uint4(*(device const uint2 *)(row + 2 * v), 0, 0);
    device const uchar * p = row + 34 * (v / 32);
    return uint4(u16_at(p + 2 + (v & 31)), u16_at(p + 4 + (v & 31)), u16_at(p), 0);
}
inline float4 kv_floats(uint format, uint4 raw) {
    if (format == KV_F32) return as_type<float4>(raw);
    if (format == KV_F16) return float4(as_type<half4>(raw.xy));
    return signed4(raw.x | raw.y << 16) * float(as_type<half2>(raw.z).x);
}
// Bytes of n values of a row; in q8_0 n is a multiple of 32, or rounded down.
inline uint kv_bytes(uint format, uint n) { return format == KV_F32 ? 4 * n : format == KV_F16 ? 2 * n : 34 * (n / 32); }

// A simdgroup stores value v = 32 block + lane of a row of n values. In q8_0 all 32 are there (n is whole blocks):
// d = max|x| / 127, codes x * (1 / d) half to even. Reached by the whole simdgroup.
inline void kv_store32(uint format, device uchar * row, uint block, uint n, float x, uint lane) {
    const uint v = 32 * block + lane;
    if (format == KV_F32) {
        if (v < n) ((device float *)row)[v] = x;
    } else if (format == KV_F16) {
        if (v < n) ((device half *)row)[v] = half(x);
    } else {
        // Codes cannot hold a NaN or Inf: the scale becomes NaN, and so does every value read back.
        const float d = simd_all(isfinite(x)) ? simd_max(fabs(x)) / 127.0f : NAN;
        const float inverse = 1.0f / d;
        const float code = isfinite(inverse) ? rint(x * inverse) : 0.0f;
        device uchar * p = row + 34 * block;
        if (v < n) {
            if (lane == 0) *(device half *)p = half(d);
            p[2 + lane] = as_type<uchar>(char(code));
        }
    }
}
