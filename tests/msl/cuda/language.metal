// Types, expressions and program-scope declarations, each against numpy (see cuda_cases.py).
#include <metal_stdlib>
using namespace metal;

// One thread a float4.
kernel void swizzles(device const float4 * in [[buffer(0)]], device float4 * out [[buffer(1)]],
                     device packed_float3 * packed [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    float4 v = in[i];
    v.xy = v.yx;
    v.zw += v.xx * 2;
    v.y -= 1;
    packed[i] = packed_float3(v.bgr);
    float3 q = packed[i];
    out[i] = float4(q, v[3]);
    out[i].xz *= float2(0.5h, 2);
}

// Sixteen results a thread.
kernel void integers(device const int * a [[buffer(0)]], device const int * b [[buffer(1)]], device long * out [[buffer(2)]],
                     uint i [[thread_position_in_grid]]) {
    const int x = a[i], y = b[i];
    const uint u = uint(x), v = uint(y);
    device long * o = out + i * 24;
    o[0] = popcount(u);
    o[1] = clz(u);
    o[2] = ctz(ushort(u));
    o[3] = reverse_bits(u);
    o[4] = rotate(u, v);
    o[5] = mulhi(x, y);
    o[6] = mulhi(u, v);
    o[7] = absdiff(x, y);
    o[8] = addsat(x, y);
    o[9] = subsat(u, v);
    o[10] = extract_bits(x, 5, 9);
    o[11] = insert_bits(u, v, 3, 7);
    o[12] = hadd(x, y);
    o[13] = select(x, y, x < y);
    o[14] = clamp(x, -5000, 70000);
    o[15] = abs(short(x));
    o[16] = mulhi(long(x) * 7919, long(y) * 104729);
    o[17] = addsat(char(x), char(y));
    o[18] = as_type<uint>(char4(x, y, x >> 8, y >> 8));
    o[19] = as_type<int>(ushort2(u, v)) >> (v & 15);
    o[20] = dot(float3(x & 255, y & 255, 1), float3(y & 255, 2, 3));
    o[21] = all(int2(x, y) > int2(0)) + 2 * any(int4(x, y, x, y) < 0);
    o[22] = long(ulong(u) << 20 ^ ulong(v)) % 1000003;
    uchar3 c = uchar3(x, y, x + y);
    c <<= uchar(1);
    o[23] = c.x | c.y << 8 | c.z << 16;
}

// half and bfloat round after every operation.
kernel void halves(device const half * a [[buffer(0)]], device const float * b [[buffer(1)]], device half * h [[buffer(2)]],
                   device bfloat * g [[buffer(3)]], device float * f [[buffer(4)]], uint i [[thread_position_in_grid]]) {
    const half x = a[i], y = half(b[i]);
    half p = x * y;
    h[i * 6] = p;
    p += y;
    h[i * 6 + 1] = p;
    h[i * 6 + 2] = half(x / (y + 2));
    h[i * 6 + 3] = as_type<half>(ushort(as_type<ushort>(x) ^ 0x8000));
    half2 w = half2(x, y);
    w *= 0.5h;
    h[i * 6 + 4] = w.x - w.y;
    h[i * 6 + 5] = max(x, y);
    const bfloat s = bfloat(b[i]);
    bfloat t = s * bfloat(float(x));
    g[i * 3] = t;
    t -= s;
    g[i * 3 + 1] = t;
    g[i * 3 + 2] = bfloat(1) / s;
    f[i * 4] = x * 2 + b[i];
    f[i * 4 + 1] = float(s) + (b[i] > 0 ? x : b[i]);
    f[i * 4 + 2] = x < y ? 1 : x == y ? 0 : -1;
    f[i * 4 + 3] = dot(half4(x, y, 1, x), half4(1, 2, y, 0));
}

// What must not differ by a bit.
kernel void exact_math(device const float * a [[buffer(0)]], device const float * b [[buffer(1)]], device float * out [[buffer(2)]],
                       constant uint & n [[buffer(3)]], uint i [[thread_position_in_grid]]) {
    const float x = a[i], y = b[i];
    int e;
    float whole;
    device float * o = out + i;
    o[0 * n] = sqrt(fabs(x));
    o[1 * n] = rint(x);
    o[2 * n] = floor(x) + 2 * ceil(y) + 4 * trunc(x);
    o[3 * n] = round(x);
    o[4 * n] = fma(x, y, 1.5f);
    o[5 * n] = x * y + 1.5f;
    o[6 * n] = x / y;
    o[7 * n] = fmod(x, y);
    o[8 * n] = ldexp(x, 3) + frexp(y, e);
    o[9 * n] = e;
    o[10 * n] = copysign(x, y) + sign(y);
    o[11 * n] = mix(x, y, 0.25f);
    o[12 * n] = clamp(x, -1.0f, 1.0f) + saturate(y);
    o[13 * n] = fmax(x, NAN) + min(x, y);
    o[14 * n] = modf(x, whole);
    o[15 * n] = whole + step(0.0f, x);
    o[16 * n] = isnan(x / 0.0f) + 2 * isinf(y / 0.0f) + 4 * isfinite(x);
    o[17 * n] = fract(x) + fdim(x, y);
    o[18 * n] = rsqrt(fabs(y));
    o[19 * n] = length(float2(3 * x, 4 * x));
}

// What may differ by a few units in the last place.
kernel void near_math(device const float * a [[buffer(0)]], device float * out [[buffer(1)]], constant uint & n [[buffer(2)]],
                      uint i [[thread_position_in_grid]]) {
    const float x = a[i], p = fabs(x) + 0.01f, u = x / 8.0f;
    float c;
    device float * o = out + i;
    o[0 * n] = exp(x);
    o[1 * n] = exp2(x);
    o[2 * n] = log(p);
    o[3 * n] = log2(p);
    o[4 * n] = sin(x);
    o[5 * n] = cos(x);
    o[6 * n] = tan(u);
    o[7 * n] = tanh(x);
    o[8 * n] = pow(p, x);
    o[9 * n] = asin(u);
    o[10 * n] = atan2(x, p);
    o[11 * n] = sincos(x, c) * c;
    o[12 * n] = sinh(x);
    o[13 * n] = exp10(u);
    o[14 * n] = precise::exp(u) * fast::log(p);
    o[15 * n] = log10(p);
}

// ---- function constants, tables, unions, templates, function pointers

constant bool FLAG [[function_constant(0)]];
constant int COUNT [[function_constant(1)]];
constant float SCALE [[function_constant(2)]];
constant uint EXTRA [[function_constant(3)]];
constant int TWICE = COUNT * 2;
constant bool HAS_EXTRA = is_function_constant_defined(EXTRA);
constant float table[4] = {1.5f, -2.0f, 0.25f, 1e3f};
constant half halves_table[3] = {0.5h, 65504.0h, 6e-8h};
constant char signs[8] = {-1, 1, -1, 1, 1, -1, 1, -1};
constant ulong wide[2] = {0x123456789abcdef0ul, 1};
constant float4 rows[2] = {float4(1, 2, 3, 4), float4(5)};

typedef union {
    struct { half d, m; } s;
    half2 dm;
    uint bits;
} pair;

template <typename T> T square(T x) { return x * x; }
template <typename T> T negate(T x) { return -x; }
template <typename T> struct traits { static constant constexpr int size = sizeof(T); };
template <> struct traits<half> { static constant constexpr int size = 20; };
struct args { int n; float factor; packed_float3 v; };

template <typename T, float (*F)(float), int N>
kernel void declarations(constant args & a [[buffer(0)]], device const float * in [[buffer(1), function_constant(HAS_EXTRA)]],
                         device float * out [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i >= uint(a.n)) return;
    float many[N] = {[0 ... N - 1] = 0.5f};
    float sum = 0;
    #pragma unroll
    for (int k = 0; k < N; k++) sum += many[k] * table[k % 4];
    for (int k = 0; k < TWICE; k++) sum += 1;
    pair p;
    p.s.d = half(i);
    p.s.m = halves_table[i % 3];
    const uint bits = p.bits;
    p.bits = bits;
    device float * o = out + i * 8;
    o[0] = sum;
    o[1] = FLAG ? F(SCALE) : -1.0f;
    o[2] = float(p.dm.x) + float(p.dm.y) * 4;
    o[3] = traits<T>::size;
    o[4] = signs[i % 8] * rows[i % 2].z;
    o[5] = uint(wide[i % 2] >> 32);
    o[6] = HAS_EXTRA ? in[i] + EXTRA : a.factor;
    o[7] = a.v[i % 3];
}
template [[host_name("declarations_float")]] kernel void declarations<float, square<float>, 4>(constant args &, device const float *, device float *, uint);
template [[host_name("declarations_half")]] kernel void declarations<half, negate<float>, 5>(constant args &, device const float *, device float *, uint);

// Every builtin, one row of 32 a thread.
kernel void builtins(device uint * out [[buffer(0)]], uint3 gid [[thread_position_in_grid]], ushort3 tgid [[threadgroup_position_in_grid]],
                     uint3 tid [[thread_position_in_threadgroup]], ushort3 tptg [[threads_per_threadgroup]],
                     uint2 dtptg [[dispatch_threads_per_threadgroup]], uint3 tpg [[threads_per_grid]], uint3 gpg [[threadgroups_per_grid]],
                     uint index [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
                     ushort sg [[simdgroup_index_in_threadgroup]], uint sgs [[simdgroups_per_threadgroup]],
                     uint width [[threads_per_simdgroup]], uint quad [[quadgroup_index_in_threadgroup]],
                     uint in_quad [[thread_index_in_quadgroup]]) {
    device uint * o = out + 24 * (gid.x + tpg.x * (gid.y + tpg.y * gid.z));
    o[0] = gid.x; o[1] = gid.y; o[2] = gid.z;
    o[3] = tgid.x; o[4] = tgid.y; o[5] = tgid.z;
    o[6] = tid.x; o[7] = tid.y; o[8] = tid.z;
    o[9] = tptg.x; o[10] = tptg.y; o[11] = tptg.z;
    o[12] = dtptg.y; o[13] = tpg.z; o[14] = gpg.x; o[15] = gpg.y;
    o[16] = index; o[17] = lane; o[18] = sg; o[19] = sgs; o[20] = width; o[21] = quad; o[22] = in_quad; o[23] = gpg.z;
}
