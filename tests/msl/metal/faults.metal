// Planted faults; the kernel named `x_ok` is the clean twin of `x`. The faulty statements of a kernel carry `// HERE`.
#include <metal_stdlib>
using namespace metal;
#define IO device const float * x [[buffer(0)]], device float * y [[buffer(1)]], uint i [[thread_position_in_threadgroup]], \
           uint g [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]], constant uint & zero [[buffer(2)]]

kernel void device_read_overrun(IO) {
    y[64*g + i] = x[64*g + i + 1];  // HERE
}
kernel void device_read_overrun_ok(IO) {
    y[64*g + i] = 64*g + i + 1 < 128 ? x[64*g + i + 1] : 0;
}
kernel void device_write_overrun(IO) {
    y[2*i] = x[i];  // HERE
}
kernel void device_write_overrun_ok(IO) {
    if (g == 0) y[2*i] = x[i];
}
kernel void device_read_before(IO) {
    y[64*g + i] = x[int(64*g + i) - 1];  // HERE
}
kernel void device_read_before_ok(IO) {
    y[64*g + i] = x[max(int(64*g + i) - 1, 0)];
}
kernel void threadgroup_write_overrun(IO) {
    threadgroup float s[60];
    threadgroup float * p = s;
    p[i] = x[i];  // HERE
    y[64*g + i] = p[i];
}
kernel void threadgroup_write_overrun_ok(IO) {
    threadgroup float s[64];
    threadgroup float * p = s;
    p[i] = x[i];
    y[64*g + i] = p[i];
}
kernel void threadgroup_read_overrun(IO, threadgroup float * d [[threadgroup(0)]]) {
    d[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[64*g + i] = d[i + 1];  // HERE
}
kernel void threadgroup_read_overrun_ok(IO, threadgroup float * d [[threadgroup(0)]]) {
    d[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[64*g + i] = d[(i + 1)%64];
}
kernel void uninitialised_threadgroup(IO) {
    threadgroup float s[64];
    if (i < 32) s[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[64*g + i] = s[63 - i];  // HERE
}
kernel void uninitialised_threadgroup_ok(IO) {
    threadgroup float s[64];
    s[i] = i < 32 ? x[i] : 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[64*g + i] = s[63 - i];
}
kernel void missing_barrier_after_write(IO) {
    threadgroup float s[64];
    s[i] = x[i];  // HERE
    y[64*g + i] = s[i ^ 32];  // HERE
}
kernel void missing_barrier_after_write_ok(IO) {
    threadgroup float s[64];
    s[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[64*g + i] = s[i ^ 32];
}
kernel void missing_barrier_before_overwrite(IO) {
    threadgroup float s[64];
    s[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float t = s[63 - i];  // HERE
    s[i] = t + 1;  // HERE
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[64*g + i] = s[63 - i];
}
kernel void missing_barrier_before_overwrite_ok(IO) {
    threadgroup float s[64];
    s[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float t = s[63 - i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s[i] = t + 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[64*g + i] = s[63 - i];
}
// a collective is no barrier: what lane 0 writes the others may not yet see
kernel void lockstep_assumed(IO) {
    threadgroup float s[2];
    const float t = simd_sum(x[64*g + i]);
    if (lane == 0) s[i/32] = t;  // HERE
    y[64*g + i] = s[i/32];  // HERE
}
kernel void lockstep_assumed_ok(IO) {
    threadgroup float s[2];
    const float t = simd_sum(x[64*g + i]);
    if (lane == 0) s[i/32] = t;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    y[64*g + i] = s[i/32];
}
// a barrier for threadgroup memory does not order device memory
kernel void wrong_kind_of_barrier(IO) {
    y[64*g + i] = x[64*g + i];  // HERE
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float t = y[64*g + 63 - i];  // HERE
    threadgroup_barrier(mem_flags::mem_device);
    y[64*g + i] += t;
}
kernel void wrong_kind_of_barrier_ok(IO) {
    y[64*g + i] = x[64*g + i];
    threadgroup_barrier(mem_flags::mem_device);
    const float t = y[64*g + 63 - i];
    threadgroup_barrier(mem_flags::mem_device);
    y[64*g + i] += t;
}
kernel void two_writers(IO) {
    threadgroup float s[1];
    s[0] = x[i];  // HERE
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[64*g + i] = s[0];
}
kernel void two_writers_ok(IO) {
    threadgroup float s[1];
    if (i == 0) s[0] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[64*g + i] = s[0];
}
kernel void early_return(IO) {
    threadgroup float s[64];
    if (i >= 40) return;
    s[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);  // HERE
    y[64*g + i] = s[39 - i];
}
kernel void early_return_ok(IO) {
    threadgroup float s[64];
    s[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i >= 40) return;
    y[64*g + i] = s[39 - i];
}
kernel void divergent_barrier(IO) {
    if (i < 32) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // HERE
        y[64*g + i] = 1;
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // HERE
        y[64*g + i] = x[i];
    }
}
kernel void divergent_barrier_ok(IO) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[64*g + i] = i < 32 ? 1 : x[i];
}
kernel void divergent_collective(IO) {
    float v = x[i];
    if (i & 1) {
        v = simd_sum(v);  // HERE
    } else {
        v = simd_max(v);  // HERE
    }
    y[64*g + i] = v;
}
kernel void divergent_collective_ok(IO) {
    const float v = x[i], s = simd_sum(v), m = simd_max(v);
    y[64*g + i] = i & 1 ? s : m;
}
kernel void collective_after_return(IO) {
    if (lane > 20) return;
    y[64*g + i] = simd_sum(x[i]);  // HERE
}
kernel void collective_after_return_ok(IO) {
    const float s = simd_sum(lane > 20 ? 0 : x[i]);
    if (lane > 20) return;
    y[64*g + i] = s;
}
kernel void unbound(IO, device float * z [[buffer(3)]]) {
    y[64*g + i] = z[i];  // HERE
}
kernel void unbound_ok(IO, device float * z [[buffer(3)]]) {
    y[64*g + i] = x[i];
}
kernel void misaligned(IO) {
    const float4 v = *(device const float4 *)(x + 1);  // HERE
    y[64*g + i] = v.x;
}
kernel void misaligned_ok(IO) {
    const packed_float4 v = *(device const packed_float4 *)(x + 1);
    y[64*g + i] = v[0];
}
kernel void two_threadgroups_write(IO) {
    y[i] = x[i];  // HERE
}
kernel void two_threadgroups_write_ok(IO) {
    if (g == 0) y[i] = x[i];
}
kernel void read_what_another_threadgroup_writes(IO) {
    if (g == 0) y[i] = x[i];  // HERE
    else y[64*g + i] = y[i];  // HERE
}
kernel void read_what_another_threadgroup_writes_ok(IO) {
    if (g == 0) y[i] = x[i];
    else y[64*g + i] = x[i];
}
kernel void atomic_and_plain(IO, device atomic_uint * n [[buffer(3)]]) {
    atomic_fetch_add_explicit(n, 1, memory_order_relaxed);  // HERE
    y[64*g + i] = *(device uint *)n;  // HERE
}
kernel void atomic_and_plain_ok(IO, device atomic_uint * n [[buffer(3)]]) {
    atomic_fetch_add_explicit(n, 1, memory_order_relaxed);
    y[64*g + i] = atomic_load_explicit(n, memory_order_relaxed);
}
kernel void array_index(IO) {
    float a[4] = {1, 2, 3, 4};
    y[64*g + i] = a[zero + (i & 7)];  // HERE
}
kernel void array_index_ok(IO) {
    float a[4] = {1, 2, 3, 4};
    y[64*g + i] = a[zero + (i & 3)];
}
kernel void division(IO) {
    y[64*g + i] = i/zero;  // HERE
}
kernel void division_ok(IO) {
    y[64*g + i] = i/(zero + 1);
}
kernel void undeclared_write(IO) {
    y[64*g + i] = x[i];  // HERE
}
kernel void undeclared_write_ok(IO) {
    if (g == 0) y[i] = x[i];
}
kernel void undeclared_read(IO) {
    y[64*g + i] = x[64*g + i];  // HERE
}
kernel void undeclared_read_ok(IO) {
    y[64*g + i] = x[i];
}
kernel void write_through_const(IO) {
    ((device float *)x)[64*g + i] = 1;  // HERE
    y[64*g + i] = 1;
}
kernel void write_through_const_ok(IO) {
    y[64*g + i] = x[i];
}
kernel void uninitialised_device(IO) {
    y[64*g + i] += x[i];  // HERE
}
kernel void uninitialised_device_ok(IO) {
    y[64*g + i] = x[i];
    y[64*g + i] += x[i];
}
// the fault is in a function that the kernel calls
float third(device const float * p, uint k) {
    return p[3*k];  // HERE
}
kernel void in_a_function(IO) {
    y[64*g + i] = third(x, i);
}
kernel void in_a_function_ok(IO) {
    y[64*g + i] = third(x, i/3);
}
