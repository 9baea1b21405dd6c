// What a language model needs, in the shape our own kernels will have.
#include <metal_stdlib>
using namespace metal;

// y[r, :] = x[r, :] / rms(x[r, :]) * g. One threadgroup a row of d.
kernel void rms_norm(device const float * x [[buffer(0)]], device const float * g [[buffer(1)]], device float * y [[buffer(2)]],
                     constant int & d [[buffer(3)]], constant float & eps [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
                     uint tid [[thread_position_in_threadgroup]], uint size [[threads_per_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float part[32];
    float s = 0;
    for (uint i = tid; i < uint(d); i += size) s = fma(x[row * d + i], x[row * d + i], s);
    s = simd_sum(s);
    if (lane == 0) part[sg] = s;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s = simd_sum(lane < size / 32 ? part[lane] : 0.0f);
    const float scale = rsqrt(s / d + eps);
    for (uint i = tid; i < uint(d); i += size) y[row * d + i] = x[row * d + i] * scale * g[i];
}

struct block_q4_1 { half d, m; uchar qs[16]; };

// y[r] = dot(w[r, :], x), w in rows of k / 32 blocks. NSG simdgroups a threadgroup, NR rows a simdgroup, a block a lane.
template <int NR, int NSG>
kernel void mul_mv_q4_1(device const block_q4_1 * w [[buffer(0)]], device const float4 * x [[buffer(1)]], device float * y [[buffer(2)]],
                        constant int & k [[buffer(3)]], constant int & n [[buffer(4)]], uint tg [[threadgroup_position_in_grid]],
                        ushort lane [[thread_index_in_simdgroup]], ushort sg [[simdgroup_index_in_threadgroup]]) {
    const int blocks = k / 32, row0 = (tg * NSG + sg) * NR;
    float acc[NR] = {};
    for (int b = lane; b < blocks; b += 32) {
        float4 v[8];
        for (int j = 0; j < 8; j++) v[j] = x[b * 8 + j];
        #pragma unroll
        for (int r = 0; r < NR; r++) {
            device const block_q4_1 & q = w[min(row0 + r, n - 1) * blocks + b];
            float4 s = 0, t = 0;
            for (int j = 0; j < 4; j++) {
                const uchar4 c = uchar4(q.qs[4 * j], q.qs[4 * j + 1], q.qs[4 * j + 2], q.qs[4 * j + 3]);
                s = fma(float4(c & 15), v[j], s);
                s = fma(float4(c >> 4), v[j + 4], s);
                t += v[j] + v[j + 4];
            }
            acc[r] += float(q.d) * (s.x + s.y + s.z + s.w) + float(q.m) * (t.x + t.y + t.z + t.w);
        }
    }
    for (int r = 0; r < NR; r++) {
        const float total = simd_sum(acc[r]);
        if (lane == 0 && row0 + r < n) y[row0 + r] = total;
    }
}
template [[host_name("mul_mv_q4_1_2_2")]] kernel void mul_mv_q4_1<2, 2>(device const block_q4_1 *, device const float4 *, device float *, constant int &, constant int &, uint, ushort, ushort);
template [[host_name("mul_mv_q4_1_1_4")]] kernel void mul_mv_q4_1<1, 4>(device const block_q4_1 *, device const float4 *, device float *, constant int &, constant int &, uint, ushort, ushort);

constant bool RAGGED [[function_constant(7)]];

// c[m, n] = a[m, k] x b[n, k]^T in tiles of 32 x 32, 4 simdgroups, half operands, float accumulators.
kernel void mul_mm_f16(device const half * a [[buffer(0)]], device const float * b [[buffer(1)]], device float * c [[buffer(2)]],
                       constant int3 & mnk [[buffer(3)]], uint2 tg [[threadgroup_position_in_grid]],
                       ushort tid [[thread_index_in_threadgroup]], ushort sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup half ta[32 * 32], tb[32 * 32];
    threadgroup float tc[32 * 32];
    const int m0 = tg.y * 32, n0 = tg.x * 32, M = mnk.x, N = mnk.y, K = mnk.z;
    simdgroup_float8x8 acc[4];
    for (int j = 0; j < 4; j++) acc[j] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    for (int k0 = 0; k0 < K; k0 += 32) {
        for (int e = tid; e < 1024; e += 128) {
            const int r = e / 32, q = e % 32;
            const bool ina = !RAGGED || (m0 + r < M && k0 + q < K), inb = !RAGGED || (n0 + r < N && k0 + q < K);
            ta[e] = ina ? a[(m0 + r) * K + k0 + q] : half(0);
            tb[e] = inb ? half(b[(n0 + r) * K + k0 + q]) : half(0);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int q = 0; q < 32; q += 8) {
            simdgroup_half8x8 x, y;
            simdgroup_load(x, ta + sg * 8 * 32 + q, 32);
            for (int j = 0; j < 4; j++) {
                simdgroup_load(y, tb + j * 8 * 32 + q, 32, 0, true);
                simdgroup_multiply_accumulate(acc[j], x, y, acc[j]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int j = 0; j < 4; j++) simdgroup_store(acc[j], tc + sg * 8 * 32 + j * 8, 32);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = tid; e < 1024; e += 128)
        if (m0 + e / 32 < M && n0 + e % 32 < N) c[(m0 + e / 32) * N + n0 + e % 32] = tc[e];
}

// One query head a threadgroup of one simdgroup, head dim 64, online softmax over n keys, f16 keys and values.
kernel void attention(device const float * q [[buffer(0)]], device const half * k [[buffer(1)]], device const half * v [[buffer(2)]],
                      device float * out [[buffer(3)]], constant int & n [[buffer(4)]], uint head [[threadgroup_position_in_grid]],
                      ushort lane [[thread_index_in_simdgroup]]) {
    const float2 query = ((device const float2 *)(q + head * 64))[lane];
    float top = -INFINITY, sum = 0;
    float2 acc = 0;
    for (int i = 0; i < n; i++) {
        const float2 key = float2(((device const half2 *)(k + (head * n + i) * 64))[lane]);
        const float s = simd_sum(dot(query, key)) * 0.125f, next = max(top, s);
        const float keep = exp(top - next), p = exp(s - next);
        sum = sum * keep + p;
        acc = acc * keep + p * float2(((device const half2 *)(v + (head * n + i) * 64))[lane]);
        top = next;
    }
    ((device float2 *)(out + head * 64))[lane] = sum > 0 ? acc / sum : float2(0);
}

// Rotates pairs (i, i + d / 2) of every row by position * base^(-2 i / d).
kernel void rope(device float * x [[buffer(0)]], device const int * position [[buffer(1)]], constant float & base [[buffer(2)]],
                 constant int & d [[buffer(3)]], uint2 g [[thread_position_in_grid]]) {
    device float * row = x + g.y * d;
    const float angle = position[g.y] * pow(base, -2.0f * int(g.x) / d);
    const float a = row[g.x], b = row[g.x + d / 2];
    float c;
    const float s = sincos(angle, c);
    row[g.x] = a * c - b * s;
    row[g.x + d / 2] = a * s + b * c;
}

// The largest of each row and where it first stands.
kernel void arg_max(device const float * x [[buffer(0)]], device int * at [[buffer(1)]], constant int & d [[buffer(2)]],
                    uint row [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    float best = -INFINITY;
    int where = d;
    for (int i = lane; i < d; i += 32)
        if (x[row * d + i] > best) { best = x[row * d + i]; where = i; }
    const float top = simd_max(best);
    where = simd_min(best == top ? where : d);
    if (lane == 0) at[row] = where;
}
