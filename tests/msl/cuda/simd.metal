// Simdgroup and quad functions, simdgroup matrices, atomics, threadgroup memory.
#include <metal_stdlib>
using namespace metal;

// Works with whole and with partial simdgroups; `skip` lanes leave before the functions are reached.
kernel void reductions(device const float * in [[buffer(0)]], device float * f [[buffer(1)]], device int * n [[buffer(2)]],
                       constant uint & skip [[buffer(3)]], uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
    if (lane % 8 < skip) return;
    const float x = in[i];
    const int k = as_type<int>(x);
    f[i * 5] = simd_sum(x);
    f[i * 5 + 1] = simd_max(x);
    f[i * 5 + 2] = simd_min(x);
    f[i * 5 + 3] = simd_product(x);
    f[i * 5 + 4] = float(simd_sum(half(x)));
    n[i * 8] = simd_and(k);
    n[i * 8 + 1] = simd_or(k);
    n[i * 8 + 2] = simd_xor(k);
    n[i * 8 + 3] = simd_sum(k & 1023);
    n[i * 8 + 4] = int(simd_vote::vote_t(simd_ballot(x > 0)));
    n[i * 8 + 5] = simd_all(x > -9) + 2 * simd_any(x > 1) + 4 * simd_is_first();
    n[i * 8 + 6] = simd_broadcast_first(k);
    n[i * 8 + 7] = simd_prefix_inclusive_sum(k & 255) * 65536 + simd_prefix_exclusive_sum(k & 255);
}

kernel void shuffles(device const int * in [[buffer(0)]], device int * out [[buffer(1)]], uint i [[thread_position_in_grid]],
                     ushort lane [[thread_index_in_simdgroup]]) {
    const int x = in[i];
    device int * o = out + i * 16;
    o[0] = simd_shuffle(x, 31 - lane);
    o[1] = simd_shuffle_xor(x, 5);
    o[2] = lane >= 3 ? simd_shuffle_up(x, 3) : (simd_shuffle_up(x, 3), 0);
    o[3] = lane < 28 ? simd_shuffle_down(x, 4) : (simd_shuffle_down(x, 4), 0);
    o[4] = simd_shuffle_rotate_up(x, 7);
    o[5] = simd_shuffle_rotate_down(x, 9);
    o[6] = simd_broadcast(x, 11);
    const float4 v = simd_shuffle_xor(float4(x, x + 1, x + 2, x + 3), 1);
    o[7] = int(v.x + v.y + v.z + v.w);
    o[8] = int(simd_shuffle(half(lane), 2) * 2);
    o[9] = quad_sum(x);
    o[10] = quad_shuffle_xor(x, 2);
    o[11] = quad_broadcast(x, 1);
    o[12] = quad_prefix_exclusive_sum(x & 7);
    o[13] = simd_shuffle_and_fill_up(x, -x, 5);
    o[14] = simd_shuffle_and_fill_down(x, -x, 5);
    o[15] = quad_max(x) + simd_shuffle(char(lane), 20);
}

// c = a x b on 8 x 8 tiles taken from larger matrices; ta and tb: stored transposed.
template <typename T>
kernel void tiles(device const T * a [[buffer(0)]], device const T * b [[buffer(1)]], device float * c [[buffer(2)]],
                  device T * scaled [[buffer(3)]], uint lane [[thread_index_in_simdgroup]]) {
    simdgroup_matrix<T, 8, 8> ma, mb, one(T(1.0f));
    simdgroup_float8x8 acc = make_filled_simdgroup_matrix<float, 8>(0.0f), first;
    simdgroup_load(ma, a, 24, ulong2(3, 2));
    simdgroup_load(mb, b + 5, 16, 0, true);
    simdgroup_multiply(first, ma, one);
    simdgroup_multiply_accumulate(acc, ma, mb, first);
    simdgroup_multiply_accumulate(acc, mb, ma, acc);
    simdgroup_store(acc, c, 10, ulong2(1, 1));
    ma.thread_elements() *= T(2.0f);
    ma.thread_elements()[0] = T(float(lane));
    simdgroup_store(ma, scaled, 8, 0, true);
}
template [[host_name("tiles_float")]] kernel void tiles<float>(device const float *, device const float *, device float *, device float *, uint);
template [[host_name("tiles_half")]] kernel void tiles<half>(device const half *, device const half *, device float *, device half *, uint);
template [[host_name("tiles_bfloat")]] kernel void tiles<bfloat>(device const bfloat *, device const bfloat *, device float *, device bfloat *, uint);

// A histogram in threadgroup memory, added to one in device memory; other atomics on out.
kernel void atomics(device const uint * in [[buffer(0)]], device atomic_uint * bins [[buffer(1)]], device atomic_int * out [[buffer(2)]],
                    device atomic_float * total [[buffer(3)]], volatile device atomic_uint * lock [[buffer(4)]],
                    uint i [[thread_position_in_grid]], uint tid [[thread_index_in_threadgroup]], uint size [[threads_per_threadgroup]]) {
    threadgroup atomic_uint local[16];
    if (tid < 16) atomic_store_explicit(&local[tid], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint x = in[i];
    atomic_fetch_add_explicit(&local[x % 16], 1u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < 16) atomic_fetch_add_explicit(&bins[tid], atomic_load_explicit(&local[tid], memory_order_relaxed), memory_order_relaxed);
    atomic_fetch_min_explicit(&out[0], int(x) - 500, memory_order_relaxed);
    atomic_fetch_max_explicit(&out[1], int(x), memory_order_relaxed);
    atomic_fetch_and_explicit(&out[2], int(x | 0xff00), memory_order_relaxed);
    atomic_fetch_or_explicit(&out[3], int(x), memory_order_relaxed);
    atomic_fetch_xor_explicit(&out[4], int(x * 7919), memory_order_relaxed);
    atomic_fetch_sub_explicit(&out[5], 2, memory_order_relaxed);
    atomic_fetch_add_explicit(total, float(x), memory_order_relaxed);
    uint seen = atomic_load_explicit(lock, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(lock, &seen, seen * 2 > 1000000 ? seen : seen + 3, memory_order_relaxed, memory_order_relaxed)) {}
    if (tid == size - 1) atomic_exchange_explicit(&out[6], 77, memory_order_relaxed);
}

// Rows of 32: transposed through static memory, summed through the launch's memory.
kernel void memories(device const float * in [[buffer(0)]], device float * out [[buffer(1)]], threadgroup float * sums [[threadgroup(1)]],
                     threadgroup float4 * quads [[threadgroup(0)]], ushort2 t [[thread_position_in_threadgroup]],
                     ushort g [[threadgroup_position_in_grid]]) {
    threadgroup float tile[8][33], unused_[3];
    threadgroup half small[4];
    tile[t.y][t.x] = in[(g * 8 + t.y) * 32 + t.x];
    if (t.x == 0 && t.y < 4) small[t.y] = half(t.y);
    if (t.x == 0 && t.y < 3) unused_[t.y] = t.y;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t.x < 8) quads[t.y * 8 + t.x] = float4(tile[t.x][t.y], tile[t.x][t.y + 8], tile[t.x][t.y + 16], tile[t.x][t.y + 24]);
    const float s = simd_sum(tile[t.y][t.x]);
    if (t.x == 0) sums[t.y] = s;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float4 q = quads[t.x];
    out[(g * 8 + t.y) * 32 + t.x] = q[t.y % 4] + sums[(t.x + t.y) % 8] + float(small[t.x % 4]) + unused_[t.x % 3];
}
