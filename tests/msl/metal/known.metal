// Kernels with known answers: test_known.py computes every result another way.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

#define ROWS 4
#define APPLY(f, x) f(x)

constant bool has_bias [[function_constant(0)]];
constant int  repeat [[function_constant(1)]];
constant float factor [[function_constant(2)]];
constant int  twice = repeat * 2;
constant float table[4] = {0.5, 1.5, 2.5, 3.5};

struct norm_args { uint n; float eps; };
struct block_q4_1 { half d; half m; uchar qs[16]; };

// ---- the language

kernel void vectors(device const float4 * x [[buffer(0)]], device float * y [[buffer(1)]], device packed_float3 * p [[buffer(2)]],
                    uint i [[thread_position_in_grid]]) {
    float4 v = x[i];
    v.xy = v.yx;                       // swap two
    v.w += dot(v.xyz, float3(1, 2, 3));
    float2 lo = v.rg, hi = v.zw;
    float4 w(hi, lo);
    w.zw *= 2;
    const float3 q = p[i];
    p[i] = q.zyx + 1;
    for (int k = 0; k < 4; ++k) y[8*i + k] = w[k];
    const uint4 bits = as_type<uint4>(x[i]);
    y[8*i + 4] = float(bits.x >> 23);
    y[8*i + 5] = all(x[i] == x[i]) && !any(x[i] < -1e9f) ? 1 : 0;
    y[8*i + 6] = select(-1.0, 1.0, v.x > 0);
    y[8*i + 7] = float4(half4(x[i])).z;
}

kernel void literals(device float * y [[buffer(0)]], device half * h [[buffer(1)]]) {
    y[0] = 1.0 / 3;                    // a float, not a double that is rounded later
    y[1] = 16777217.0 - 16777216.0;    // 0: both are floats
    y[2] = sizeof(1.0) == 4 ? 1 : 0;
    y[3] = table[3];
    y[4] = numeric_limits<half>::max();
    y[5] = INT_MAX > 0 ? M_PI_F : 0;
    y[6] = APPLY(abs, -7);
    float a[ROWS] = {[0 ... ROWS - 1] = 2.5f};
    y[7] = a[0] + a[ROWS - 1];
    h[0] = .5h + 1.0h;
    h[1] = half(1) / 3;
}

kernel void rounding(device const half * a [[buffer(0)]], device const half * b [[buffer(1)]], device half * y [[buffer(2)]],
                     device bfloat * z [[buffer(3)]], device const float * f [[buffer(4)]], uint i [[thread_position_in_grid]]) {
    half t = a[i] * b[i];
    y[i] = t + a[i];                   // two roundings
    z[i] = bfloat(f[i]);
}

kernel void math(device const float * x [[buffer(0)]], device float * y [[buffer(1)]], constant uint & n [[buffer(2)]],
                 uint i [[thread_position_in_grid]]) {
    const float v = x[i], u = fabs(v) + 0.25;
    const float r[] = {exp(v), exp2(v), log(u), log2(u), sqrt(u), precise::rsqrt(u), sin(v), cos(v), tanh(v), floor(v), ceil(v), round(v), rint(v),
                       trunc(v), fract(v), saturate(v), sign(v), pow(u, 1.5f), fmod(v, 0.75f), fma(v, u, 1.0f), mix(v, u, 0.25f), clamp(v, -0.5f, 0.5f),
                       atan2(v, u), max(v, u), fmin(v, 0.0f), step(0.0f, v), copysign(u, v), smoothstep(-1.0f, 1.0f, v), length(float2(v, u)),
                       fast::exp(v), exp10(v), powr(u, 0.5f)};
    for (uint k = 0; k < sizeof(r)/sizeof(r[0]); k++) y[k*n + i] = r[k];
}

kernel void integers(device const uint * x [[buffer(0)]], device uint * y [[buffer(1)]], constant uint & n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    const uint v = x[i];
    const int s = int(v);
    const uint r[] = {popcount(v), clz(v), ctz(v), reverse_bits(v), rotate(v, 7u), mulhi(v, 0x9E3779B9u), uint(mulhi(s, 12345)), absdiff(v, 1000u),
                      addsat(v, 0x80000000u), uint(subsat(s, 0x7fffffff)), extract_bits(v, 5, 9), uint(extract_bits(s, 5, 9)),
                      insert_bits(v, 0x3u, 4, 6), hadd(v, 3u), uint(abs(s)), clamp(v, 10u, 2000u), max(v, 77u), min(v, 77u), mad24(v & 0xfff, 3u, 1u)};
    for (uint k = 0; k < sizeof(r)/sizeof(r[0]); k++) y[k*n + i] = r[k];
}

kernel void matrices(device const float * x [[buffer(0)]], device float * y [[buffer(1)]]) {
    float4x4 m = float4x4(float4(x[0], x[1], x[2], x[3]), float4(x[4], x[5], x[6], x[7]), float4(x[8], x[9], x[10], x[11]), float4(x[12], x[13], x[14], x[15]));
    float4 v = m * float4(1, 2, 3, 4);
    float4 u = float4(1, 2, 3, 4) * m;
    float4x4 p = m * transpose(m);
    for (int k = 0; k < 4; k++) { y[k] = v[k]; y[4 + k] = u[k]; y[8 + k] = p[k][0]; }
    y[12] = determinant(float2x2(float2(1, 2), float2(3, 4)));
}

template<typename T, T (*op)(T, T)>
T fold(device const T * x, int n) {
    T r = x[0];
    #pragma unroll
    for (int k = 1; k < 4; k++) r = op(r, x[k]);
    return r + T(n);
}
float add2(float a, float b) { return a + b; }
float mul2(float a, float b) { return a * b; }

template<int N, typename T>
kernel void templated(device const T * x [[buffer(0)]], device T * y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
    T s = 0;
    for (int k = 0; k < N; k++) s += x[i*N + k];
    y[i] = s;
}
typedef decltype(templated<2, float>) templated_t;
template [[host_name("sum2_f32")]] kernel templated_t templated<2, float>;
template [[host_name("sum3_i32")]] kernel void templated<3, int>(device const int *, device int *, uint);

kernel void pointers_to_functions(device const float * x [[buffer(0)]], device float * y [[buffer(1)]]) {
    y[0] = fold<float, add2>(x, 1);
    y[1] = fold<float, mul2>(x, 2);
}

kernel void specialized(device float * y [[buffer(0)]], device const float * bias [[buffer(1), function_constant(has_bias)]], uint i [[thread_position_in_grid]]) {
    float s = 0;
    for (int k = 0; k < twice; k++) s += 1;
    if (has_bias) s += bias[i];
    y[i] = s * (is_function_constant_defined(factor) ? factor : 1.0);
}

// ---- where a thread is

kernel void places(device uint * y [[buffer(0)]], uint3 g [[thread_position_in_grid]], uint3 size [[threads_per_grid]],
                   ushort3 t [[thread_position_in_threadgroup]], uint3 tg [[threadgroup_position_in_grid]], uint3 nt [[threads_per_threadgroup]],
                   uint3 dispatched [[dispatch_threads_per_threadgroup]], uint3 ng [[threadgroups_per_grid]], uint flat [[thread_index_in_threadgroup]],
                   ushort lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]], uint nsg [[simdgroups_per_threadgroup]]) {
    device uint * r = y + 8*(g.x + size.x*(g.y + size.y*g.z));
    r[0] = t.x + 100*t.y; r[1] = tg.x + 100*tg.y; r[2] = nt.x + 100*nt.y; r[3] = dispatched.x + 100*dispatched.y;
    r[4] = ng.x + 100*ng.y; r[5] = flat; r[6] = lane + 100*sg; r[7] = nsg;
}

// ---- threads together

kernel void reductions(device const float * x [[buffer(0)]], device const uint * u [[buffer(1)]], device float * y [[buffer(2)]], device uint * z [[buffer(3)]],
                       uint i [[thread_position_in_grid]], uint n [[threads_per_grid]], ushort lane [[thread_index_in_simdgroup]]) {
    const float v = x[i];
    const uint w = u[i];
    uint k = 0;
    #define F(e) y[n*k++ + i] = (e);
    F(simd_sum(v)) F(simd_max(v)) F(simd_min(v)) F(simd_product(v)) F(simd_prefix_inclusive_sum(v)) F(simd_prefix_exclusive_sum(v))
    F(simd_shuffle(v, ushort((lane*7 + 3)%32))) F(simd_shuffle_xor(v, 5)) F(simd_shuffle_up(v, 3)) F(simd_shuffle_down(v, 3))
    F(simd_broadcast(v, 9)) F(simd_broadcast_first(v)) F(simd_shuffle_rotate_up(v, 5)) F(simd_shuffle_and_fill_up(v, -v, 4)) F(simd_shuffle_and_fill_down(v, -v, 4))
    F(quad_sum(v)) F(quad_max(v)) F(quad_shuffle_xor(v, 2)) F(quad_broadcast(v, 1)) F(quad_prefix_exclusive_sum(v))
    F(simd_sum(float2(v, 1)).x + simd_sum(float2(v, 1)).y)
    k = 0;
    #define U(e) z[n*k++ + i] = (e);
    U(simd_and(w)) U(simd_or(w)) U(simd_xor(w)) U(uint(simd_vote::vote_t(simd_ballot(w & 1)))) U(simd_all(w > 0)) U(simd_any(w == 5)) U(simd_is_first())
    U(quad_any(w & 1)) U(quad_all(w & 1))
}

kernel void rms_norm(device const float * x [[buffer(0)]], device const float * w [[buffer(1)]], device float * y [[buffer(2)]], constant norm_args & a [[buffer(3)]],
                     uint row [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]], uint nt [[threads_per_threadgroup]], uint nsg [[simdgroups_per_threadgroup]]) {
    threadgroup float part[32], scale[1];
    device const float * xr = x + row*a.n;
    float s = 0;
    for (uint i = tid; i < a.n; i += nt) s += xr[i]*xr[i];
    s = simd_sum(s);
    if (lane == 0) part[sg] = s;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg == 0) {
        s = simd_sum(lane < nsg ? part[lane] : 0.0f);
        if (lane == 0) scale[0] = rsqrt(s/float(a.n) + a.eps);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < a.n; i += nt) y[row*a.n + i] = xr[i]*scale[0]*w[i];
}

kernel void transpose_tiles(device const float * x [[buffer(0)]], device float * y [[buffer(1)]], constant uint & n [[buffer(2)]], threadgroup float * dynamic [[threadgroup(1)]],
                            uint2 tg [[threadgroup_position_in_grid]], uint2 t [[thread_position_in_threadgroup]]) {
    threadgroup float tile[8][9];
    tile[t.y][t.x] = x[(tg.y*8 + t.y)*n + tg.x*8 + t.x];
    dynamic[t.y*8 + t.x] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[(tg.x*8 + t.y)*n + tg.y*8 + t.x] = tile[t.x][t.y] + dynamic[t.x*8 + t.y];
}

kernel void neighbours(device const float * x [[buffer(0)]], device float * y [[buffer(1)]], uint i [[thread_position_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
    threadgroup float s[64];
    s[i] = x[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float v = s[i ^ 1];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    s[i] = v + 1;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = s[(i & ~31) + 31 - lane];
}

kernel void histogram(device const uint * x [[buffer(0)]], device atomic_uint * counts [[buffer(1)]], device atomic_int * low [[buffer(2)]], device atomic_float * total [[buffer(3)]],
                      uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup atomic_uint local[8];
    if (t < 8) atomic_store_explicit(&local[t], 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&local[x[i] & 7], 1, memory_order_relaxed);
    atomic_fetch_min_explicit(low, int(x[i]), memory_order_relaxed);
    atomic_fetch_add_explicit(total, 0.5f, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t < 8) atomic_fetch_add_explicit(&counts[t], atomic_load_explicit(&local[t], memory_order_relaxed), memory_order_relaxed);
}

// ---- the work of a language model

kernel void matvec_q4_1(device const block_q4_1 * w [[buffer(0)]], device const float * x [[buffer(1)]], device float * y [[buffer(2)]], constant uint & rows [[buffer(3)]],
                        constant uint & cols [[buffer(4)]], uint tg [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]],
                        ushort sg [[simdgroup_index_in_threadgroup]], ushort nsg [[simdgroups_per_threadgroup]]) {
    const uint r0 = (tg*nsg + sg)*ROWS, nb = cols/32;
    const ushort il = (lane%2)*8;
    float acc[ROWS] = {0};
    for (uint ib = lane/2; ib < nb; ib += 16) {
        float lo[8], hi[8], sum = 0;
        for (short i = 0; i < 8; i++) { lo[i] = x[ib*32 + il + i]; hi[i] = x[ib*32 + il + 16 + i]; sum += lo[i] + hi[i]; }
        for (short r = 0; r < ROWS; r++) {
            if (r0 + r >= rows) continue;
            device const block_q4_1 & b = w[(r0 + r)*nb + ib];
            float s = 0;
            for (short i = 0; i < 8; i++) s += lo[i]*float(b.qs[il + i] & 15) + hi[i]*float(b.qs[il + i] >> 4);
            acc[r] += s*float(b.d) + sum*float(b.m);
        }
    }
    for (short r = 0; r < ROWS; r++) {
        const float t = simd_sum(acc[r]);
        if (lane == 0 && r0 + r < rows) y[r0 + r] = t;
    }
}

// C (M x N) = A (M x K) B (N x K)^T, in 8 x 8 tiles, one simdgroup a tile
template<typename T>
kernel void gemm(device const T * A [[buffer(0)]], device const T * B [[buffer(1)]], device float * C [[buffer(2)]], constant uint3 & size [[buffer(3)]], uint2 tg [[threadgroup_position_in_grid]]) {
    simdgroup_matrix<T, 8, 8> a, b;
    simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8>(0.0f);
    for (uint k = 0; k < size.z; k += 8) {
        simdgroup_load(a, A + tg.y*8*size.z + k, size.z);
        simdgroup_load(b, B + tg.x*8*size.z + k, size.z, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(c, a, b, c);
    }
    simdgroup_store(c, C + tg.y*8*size.y + tg.x*8, size.y);
}
typedef decltype(gemm<float>) gemm_t;
template [[host_name("gemm_f32")]] kernel gemm_t gemm<float>;
template [[host_name("gemm_f16")]] kernel void gemm<half>(device const half *, device const half *, device float *, constant uint3 &, uint2);
template [[host_name("gemm_bf16")]] kernel void gemm<bfloat>(device const bfloat *, device const bfloat *, device float *, constant uint3 &, uint2);

kernel void fragments(device float * y [[buffer(0)]], ushort lane [[thread_index_in_simdgroup]]) {
    threadgroup float m[64];
    simdgroup_float8x8 d(2.0f), a;
    for (short k = lane; k < 64; k += 32) m[k] = k;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(a, m, 8);
    simdgroup_multiply(a, a, d);
    a.thread_elements()[1] += 100*lane;
    simdgroup_store(a, y, 8);
}

// one threadgroup a head, four simdgroups share out the keys, online softmax
struct attn_args { uint n_kv; uint n_head; uint n_kv_head; float scale; };
kernel void attention(device const float * q [[buffer(0)]], device const half * K [[buffer(1)]], device const half * V [[buffer(2)]], device float * o [[buffer(3)]],
                      constant attn_args & a [[buffer(4)]], uint h [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]], ushort sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sO[4][64];
    threadgroup float sM[4], sS[4];
    const uint hk = h/(a.n_head/a.n_kv_head);
    const float2 qv = *(device const float2 *)(q + h*64 + lane*2)*a.scale;
    float m = -INFINITY, s = 0;
    float2 acc = 0;
    for (uint t = sg; t < a.n_kv; t += 4) {
        device const half2 * kr = (device const half2 *)(K + (t*a.n_kv_head + hk)*64);
        device const half2 * vr = (device const half2 *)(V + (t*a.n_kv_head + hk)*64);
        const float sc = simd_sum(dot(qv, float2(kr[lane])));
        const float top = max(m, sc), f = exp(m - top), p = exp(sc - top);
        s = s*f + p;
        acc = acc*f + float2(vr[lane])*p;
        m = top;
    }
    sO[sg][lane*2] = acc.x;
    sO[sg][lane*2 + 1] = acc.y;
    if (lane == 0) { sM[sg] = m; sS[sg] = s; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg == 0) {
        float M = -INFINITY, S = 0;
        float2 r = 0;
        for (short i = 0; i < 4; i++) M = max(M, sM[i]);
        for (short i = 0; i < 4; i++) {
            const float f = exp(sM[i] - M);
            S += sS[i]*f;
            r += float2(sO[i][lane*2], sO[i][lane*2 + 1])*f;
        }
        *(device float2 *)(o + h*64 + lane*2) = r/S;
    }
}
