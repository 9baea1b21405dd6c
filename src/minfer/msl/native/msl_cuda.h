// The CUDA back end, compiled by NVRTC: what the shared language headers need (MSL_FN, half, math primitives), then what
// belongs to this device: barriers, simdgroup and quad functions, simdgroup matrices, atomics, arguments. A simdgroup is a
// warp. The translated source stands in a namespace within metal, so Metal's names hide CUDA's (float4, exp, min, ...).
//
// Every sum has the order that the software device uses, so that the two differ only where their math functions do.
// Half is a class here, so `c ? a_half : a_float` is ambiguous; the translator then writes msl_cuda::arm (see below).
#pragma once

#define MSL_FN __device__ __forceinline__
#define MSL_COPY memcpy
#define MSL_HALF_CONSTEXPR constexpr
#define __extension__
#define __builtin_inff() __builtin_bit_cast(float, 0x7f800000u)
#define __builtin_nanf(text) __builtin_bit_cast(float, 0x7fc00000u)
#define __builtin_add_overflow(a, b, r) msl_prim::add_overflow(a, b, r)
#define __builtin_sub_overflow(a, b, r) msl_prim::sub_overflow(a, b, r)

// ---- half: IEEE binary16. Arithmetic is done in float and rounded, which for one operation is the same as in half.

namespace msl_cuda {
template <bool B, class T = void> struct when {};
template <class T> struct when<true, T> { typedef T type; };
template <class S> constexpr bool is_int = false;
#define MSL_INT(S) template <> inline constexpr bool is_int<S> = true;
MSL_INT(bool) MSL_INT(char) MSL_INT(signed char) MSL_INT(unsigned char) MSL_INT(short) MSL_INT(unsigned short) MSL_INT(int)
MSL_INT(unsigned int) MSL_INT(long) MSL_INT(unsigned long) MSL_INT(long long) MSL_INT(unsigned long long)
#undef MSL_INT
template <class S> constexpr bool is_float = false;
template <> inline constexpr bool is_float<float> = true;

MSL_FN unsigned short narrow(float x) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
MSL_FN float widen(unsigned short h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
// For constants, which a compiler evaluates: round to nearest even by hand.
MSL_FN constexpr unsigned short narrow_constant(float x) {
    const unsigned int u = __builtin_bit_cast(unsigned int, x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (unsigned short)(sign | 0x7fffu);
    if (a >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
    const bool normal = a >= 0x38800000u;
    const unsigned int shift = normal ? 13u : a < 0x33000000u ? 31u : 126u - (a >> 23);
    const unsigned int m = normal ? a - 0x38000000u : a < 0x33000000u ? 0u : (a & 0x7fffffu) | 0x800000u;
    const unsigned int kept = m >> shift, rest = m & ((1u << shift) - 1), middle = 1u << (shift - 1);
    return (unsigned short)(sign | (kept + (rest > middle || (rest == middle && (kept & 1)) ? 1u : 0u)));
}
}  // namespace msl_cuda

struct half {
    unsigned short bits;
    half() = default;
    template <class S, class = typename msl_cuda::when<msl_cuda::is_int<S> || msl_cuda::is_float<S>>::type>
    MSL_FN constexpr half(S x) : bits(__builtin_is_constant_evaluated() ? msl_cuda::narrow_constant(float(x)) : msl_cuda::narrow(float(x))) {}
    MSL_FN float wide() const { return msl_cuda::widen(bits); }
    template <class F, class = typename msl_cuda::when<msl_cuda::is_float<F>>::type> MSL_FN operator F() const { return wide(); }
    template <class S, class = typename msl_cuda::when<msl_cuda::is_int<S>>::type, class = void>
    MSL_FN explicit operator S() const { return S(wide()); }
};
#define MSL_INT_RESULT(S, R) template <class S> MSL_FN typename msl_cuda::when<msl_cuda::is_int<S>, R>::type
#define MSL_HALF(op)                                                                          \
    MSL_FN half operator op(half a, half b) { return half(a.wide() op b.wide()); }            \
    MSL_FN float operator op(half a, float b) { return a.wide() op b; }                       \
    MSL_FN float operator op(float a, half b) { return a op b.wide(); }                       \
    MSL_INT_RESULT(S, half) operator op(half a, S b) { return half(a.wide() op half(b).wide()); } \
    MSL_INT_RESULT(S, half) operator op(S a, half b) { return half(half(a).wide() op b.wide()); } \
    template <class S> MSL_FN half &operator op##=(half &a, S b) { return a = half(a op b); } \
    MSL_FN float &operator op##=(float &a, half b) { return a = a op b.wide(); }
MSL_HALF(+) MSL_HALF(-) MSL_HALF(*) MSL_HALF(/)
#undef MSL_HALF
#define MSL_HALF(op)                                                                          \
    MSL_FN bool operator op(half a, half b) { return a.wide() op b.wide(); }                  \
    MSL_FN bool operator op(half a, float b) { return a.wide() op b; }                        \
    MSL_FN bool operator op(float a, half b) { return a op b.wide(); }                        \
    MSL_INT_RESULT(S, bool) operator op(half a, S b) { return a.wide() op half(b).wide(); }   \
    MSL_INT_RESULT(S, bool) operator op(S a, half b) { return half(a).wide() op b.wide(); }
MSL_HALF(==) MSL_HALF(!=) MSL_HALF(<) MSL_HALF(>) MSL_HALF(<=) MSL_HALF(>=)
#undef MSL_HALF
#undef MSL_INT_RESULT
MSL_FN half operator-(half a) { a.bits ^= 0x8000; return a; }
MSL_FN half operator+(half a) { return a; }
MSL_FN half &operator++(half &a) { return a = half(a.wide() + 1.0f); }
MSL_FN half &operator--(half &a) { return a = half(a.wide() - 1.0f); }
MSL_FN half operator++(half &a, int) { const half old = a; ++a; return old; }
MSL_FN half operator--(half &a, int) { const half old = a; --a; return old; }

#include "msl_types.h"

namespace msl_prim {
#define MSL_PRIM1(name) MSL_FN float name(float x) { return ::name##f(x); }
MSL_PRIM1(acos) MSL_PRIM1(acosh) MSL_PRIM1(asin) MSL_PRIM1(asinh) MSL_PRIM1(atan) MSL_PRIM1(atanh) MSL_PRIM1(ceil)
MSL_PRIM1(cos) MSL_PRIM1(cosh) MSL_PRIM1(exp) MSL_PRIM1(exp2) MSL_PRIM1(exp10) MSL_PRIM1(fabs) MSL_PRIM1(floor) MSL_PRIM1(log)
MSL_PRIM1(log2) MSL_PRIM1(log10) MSL_PRIM1(rint) MSL_PRIM1(round) MSL_PRIM1(sin) MSL_PRIM1(sinh) MSL_PRIM1(sqrt)
MSL_PRIM1(tan) MSL_PRIM1(tanh) MSL_PRIM1(trunc) MSL_PRIM1(sinpi) MSL_PRIM1(cospi)
#undef MSL_PRIM1
#define MSL_PRIM2(name) MSL_FN float name(float x, float y) { return ::name##f(x, y); }
MSL_PRIM2(atan2) MSL_PRIM2(copysign) MSL_PRIM2(fmod) MSL_PRIM2(pow) MSL_PRIM2(nextafter) MSL_PRIM2(fmax) MSL_PRIM2(fmin)
#undef MSL_PRIM2
MSL_FN float fma(float x, float y, float z) { return ::__fmaf_rn(x, y, z); }
MSL_FN float ldexp(float x, int k) { return ::ldexpf(x, k); }
MSL_FN float frexp(float x, int *e) { return ::frexpf(x, e); }
MSL_FN float rsqrt(float x) { return 1.0f / ::sqrtf(x); }  // rsqrtf is off by up to 2 ulp
MSL_FN float tanpi(float x) { return ::sinpif(x) / ::cospif(x); }
MSL_FN int popcount(ulong x) { return ::__popcll(x); }
MSL_FN int clz(ulong x) { return ::__clzll((long long)x); }
MSL_FN int ctz(ulong x) { return ::__ffsll((long long)x) - 1; }
MSL_FN ulong mulhi(ulong a, ulong b) { return ::__umul64hi(a, b); }
MSL_FN long mulhi(long a, long b) { return ::__mul64hi(a, b); }
template <class T> MSL_FN bool add_overflow(T a, T b, T *r) {
    typedef metal::make_unsigned_t<T> U;
    *r = T(U(U(a) + U(b)));
    return metal::is_signed_v<T> ? T((a ^ *r) & (b ^ *r)) < 0 : *r < a;
}
template <class T> MSL_FN bool sub_overflow(T a, T b, T *r) {
    typedef metal::make_unsigned_t<T> U;
    *r = T(U(U(a) - U(b)));
    return metal::is_signed_v<T> ? T((a ^ b) & (a ^ *r)) < 0 : a < b;
}
}  // namespace msl_prim

#include "msl_math.h"

namespace metal {

template <> struct common<half, float> { typedef float type; };
template <> struct common<float, half> { typedef float type; };

// ---- barriers

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8, mem_object_data = 16 };
MSL_FN mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
MSL_FN void threadgroup_barrier(mem_flags) { __syncthreads(); }
MSL_FN void simdgroup_barrier(mem_flags) { __syncwarp(); }

// ---- simdgroup functions. Lanes that have left the kernel (or never were) do not take part, as on the software device.

constexpr uint ALL_ = 0xffffffffu;
MSL_FN uint thread_index_() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
MSL_FN int lane_() { return int(thread_index_() & 31); }
MSL_FN uint live_() { return __ballot_sync(ALL_, 1); }

// Any type, word by word.
template <class T> MSL_FN T exchange_(T x, int from) {
    uint words[(sizeof(T) + 3) / 4] = {};
    MSL_COPY(words, &x, sizeof(T));
    for (uint i = 0; i < (sizeof(T) + 3) / 4; i++) words[i] = __shfl_sync(ALL_, words[i], from);
    T y;
    MSL_COPY(&y, words, sizeof(T));
    return y;
}
struct op_sum_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a + b); } };
struct op_product_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a * b); } };
struct op_max_ { template <class T> MSL_FN T operator()(T a, T b) const { return max(a, b); } };
struct op_min_ { template <class T> MSL_FN T operator()(T a, T b) const { return min(a, b); } };
struct op_and_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a & b); } };
struct op_or_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a | b); } };
struct op_xor_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a ^ b); } };

// The butterfly's tree over the live lanes, which every lane works out by itself.
template <class T, class F> __device__ __noinline__ T reduce_some_(T x, F f, uint live) {
    T v[32];
    for (int i = 0; i < 32; i++) v[i] = exchange_(x, i);
    for (int o = 16; o; o >>= 1)
        for (int i = 0; i < o; i++) {
            if (!(live >> (i + o) & 1)) continue;
            v[i] = live >> i & 1 ? f(v[i], v[i + o]) : v[i + o];
            live |= 1u << i;
        }
    return v[0];
}
template <class T, class F> MSL_FN T simd_reduce_(T x, F f) {
    const uint live = live_();
    if (live != ALL_) return reduce_some_(x, f, live);
    const int lane = lane_();
    for (int o = 16; o; o >>= 1) {
        const T y = exchange_(x, lane ^ o);
        x = lane & o ? f(y, x) : f(x, y);
    }
    return x;
}
template <class T, class F> MSL_FN T quad_reduce_(T x, F f) {
    const uint live = live_(), base = uint(lane_()) & ~3u;
    bool some = false;
    T r = x;
    for (uint k = 0; k < 4; k++) {
        const T y = exchange_(x, int(base + k));
        if (live >> (base + k) & 1) {
            r = some ? f(r, y) : y;
            some = true;
        }
    }
    return r;
}
// f over the live lanes below this one (and this one, when inclusive), of a group of `width` lanes.
template <class T, class F> MSL_FN T prefix_(T x, F f, T identity, bool inclusive, int width) {
    const uint live = live_();
    const int lane = lane_(), base = lane & ~(width - 1);
    T r = identity;
    bool some = false;
    for (int i = 0; i < width; i++) {
        const T y = exchange_(x, base + i);
        if ((live >> (base + i) & 1) && base + i < lane + (inclusive ? 1 : 0)) {
            r = some ? f(r, y) : y;
            some = true;
        }
    }
    return r;
}
// The value of lane `from`, or `other` where it is outside 0..31.
template <class T> MSL_FN T take_(T x, int from, T other) {
    const T y = exchange_(x, from & 31);
    return from >= 0 && from < 32 ? y : other;
}
#define MSL_LANE lane_()
#define MSL_BASE(width) (MSL_LANE & ~((width) - 1))
#define MSL_GROUP_FUNCTIONS(group, width, reduce)                                                                       \
    template <class T> MSL_FN T group##_sum(T x) { return reduce(x, op_sum_()); }                                        \
    template <class T> MSL_FN T group##_product(T x) { return reduce(x, op_product_()); }                                \
    template <class T> MSL_FN T group##_max(T x) { return reduce(x, op_max_()); }                                        \
    template <class T> MSL_FN T group##_min(T x) { return reduce(x, op_min_()); }                                        \
    template <class T> MSL_FN T group##_and(T x) { return reduce(x, op_and_()); }                                        \
    template <class T> MSL_FN T group##_or(T x) { return reduce(x, op_or_()); }                                          \
    template <class T> MSL_FN T group##_xor(T x) { return reduce(x, op_xor_()); }                                        \
    template <class T> MSL_FN T group##_prefix_inclusive_sum(T x) { return prefix_(x, op_sum_(), T(0), true, width); }    \
    template <class T> MSL_FN T group##_prefix_exclusive_sum(T x) { return prefix_(x, op_sum_(), T(0), false, width); }   \
    template <class T> MSL_FN T group##_prefix_inclusive_product(T x) { return prefix_(x, op_product_(), T(1), true, width); } \
    template <class T> MSL_FN T group##_prefix_exclusive_product(T x) { return prefix_(x, op_product_(), T(1), false, width); } \
    template <class T> MSL_FN T group##_broadcast(T x, ushort lane) { return take_(x, MSL_BASE(width) + lane, x); }       \
    template <class T> MSL_FN T group##_shuffle(T x, ushort lane) { return take_(x, MSL_BASE(width) + lane, x); }         \
    template <class T> MSL_FN T group##_shuffle_xor(T x, ushort mask) { return take_(x, MSL_LANE ^ mask, x); }            \
    template <class T> MSL_FN T group##_shuffle_up(T x, ushort delta) {                                                 \
        const int from = MSL_LANE - delta;                                                                              \
        return take_(x, from < MSL_BASE(width) ? -1 : from, x);                                                         \
    }                                                                                                                   \
    template <class T> MSL_FN T group##_shuffle_down(T x, ushort delta) {                                               \
        const int from = MSL_LANE + delta;                                                                              \
        return take_(x, from >= MSL_BASE(width) + width ? -1 : from, x);                                                \
    }                                                                                                                   \
    template <class T> MSL_FN T group##_shuffle_rotate_up(T x, ushort delta) {                                          \
        return take_(x, MSL_BASE(width) + ((MSL_LANE - delta) & (width - 1)), x);                                       \
    }                                                                                                                   \
    template <class T> MSL_FN T group##_shuffle_rotate_down(T x, ushort delta) {                                        \
        return take_(x, MSL_BASE(width) + ((MSL_LANE + delta) & (width - 1)), x);                                       \
    }                                                                                                                   \
    template <class T> MSL_FN T group##_shuffle_and_fill_up(T x, T fill, ushort delta, ushort modulo = width) {         \
        const int lane = MSL_LANE % modulo, base = MSL_LANE - lane;                                                     \
        const T y = take_(x, lane >= delta ? base + lane - delta : -1, x);                                              \
        const T z = take_(fill, lane >= delta ? -1 : base + modulo + lane - delta, fill);                               \
        return lane >= delta ? y : z;                                                                                   \
    }                                                                                                                   \
    template <class T> MSL_FN T group##_shuffle_and_fill_down(T x, T fill, ushort delta, ushort modulo = width) {       \
        const int lane = MSL_LANE % modulo, base = MSL_LANE - lane, from = lane + delta;                                \
        const T y = take_(x, from < modulo ? base + from : -1, x);                                                      \
        const T z = take_(fill, from < modulo ? -1 : base + from - modulo, fill);                                       \
        return from < modulo ? y : z;                                                                                   \
    }
MSL_GROUP_FUNCTIONS(simd, 32, simd_reduce_)
MSL_GROUP_FUNCTIONS(quad, 4, quad_reduce_)
#undef MSL_GROUP_FUNCTIONS
template <class T> MSL_FN T simd_broadcast_first(T x) { return exchange_(x, msl_prim::ctz(live_())); }
template <class T> MSL_FN T quad_broadcast_first(T x) {
    const uint live = live_() >> MSL_BASE(4) & 15;
    return exchange_(x, MSL_BASE(4) + msl_prim::ctz(live));
}
struct simd_vote {
    typedef ulong vote_t;
    vote_t bits;
    MSL_FN explicit simd_vote(vote_t v = 0) : bits(v) {}
    MSL_FN explicit operator vote_t() const { return bits; }
    MSL_FN bool all() const { return bits == 0xffffffffu; }
    MSL_FN bool any() const { return bits != 0; }
};
struct quad_vote {
    typedef uint vote_t;
    vote_t bits;
    MSL_FN explicit quad_vote(vote_t v = 0) : bits(v) {}
    MSL_FN explicit operator vote_t() const { return bits; }
    MSL_FN bool all() const { return bits == 15; }
    MSL_FN bool any() const { return bits != 0; }
};
MSL_FN simd_vote simd_ballot(bool v) { return simd_vote(__ballot_sync(ALL_, v)); }
MSL_FN bool simd_all(bool v) { return __ballot_sync(ALL_, !v) == 0; }
MSL_FN bool simd_any(bool v) { return __ballot_sync(ALL_, v) != 0; }
MSL_FN simd_vote simd_active_threads_mask() { return simd_vote(live_()); }
MSL_FN bool simd_is_first() { return msl_prim::ctz(live_()) == MSL_LANE; }
MSL_FN quad_vote quad_ballot(bool v) { return quad_vote(__ballot_sync(ALL_, v) >> MSL_BASE(4) & 15); }
MSL_FN bool quad_all(bool v) { return (__ballot_sync(ALL_, !v) >> MSL_BASE(4) & 15) == 0; }
MSL_FN bool quad_any(bool v) { return (__ballot_sync(ALL_, v) >> MSL_BASE(4) & 15) != 0; }
MSL_FN bool quad_is_first() { return msl_prim::ctz(live_() >> MSL_BASE(4) & 15) == (MSL_LANE & 3); }

// ---- simdgroup matrices. A lane holds two neighbouring elements of a row, in Apple's order of fragments.

template <class T, int C, int R = C> struct simdgroup_matrix {
    static_assert(C == 8 && R == 8, "simdgroup matrices are 8 x 8");
    typedef vec<T, 2> storage_type;
    storage_type e;
    simdgroup_matrix() = default;
    MSL_FN explicit simdgroup_matrix(T diagonal) { e = storage_type(row() == col() ? diagonal : T(0), row() == col() + 1 ? diagonal : T(0)); }
    MSL_FN storage_type &thread_elements() { return e; }
    MSL_FN const storage_type &thread_elements() const { return e; }
    static MSL_FN int row() { const int l = MSL_LANE; return (l >> 4) * 4 + (l >> 1) % 4; }
    static MSL_FN int col() { const int l = MSL_LANE; return (l >> 3) % 2 * 4 + l % 2 * 2; }
};
template <class T, int C, int R = C> MSL_FN simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, C, R> m;
    m.e = vec<T, 2>(value);
    return m;
}
template <class T> MSL_FN T *element_(T *p, ulong stride, ulong2 origin, bool transposed, int k) {
    const ulong r = simdgroup_matrix<remove_cv_t<T>, 8, 8>::row(), c = simdgroup_matrix<remove_cv_t<T>, 8, 8>::col() + k;
    return p + (transposed ? (c + origin.y) * stride + r + origin.x : (r + origin.y) * stride + c + origin.x);
}
template <class T, class P>
MSL_FN void simdgroup_load(simdgroup_matrix<T, 8, 8> &d, P *p, ulong stride = 8, ulong2 origin = ulong2(0), bool transposed = false) {
    d.e = vec<T, 2>(*element_(p, stride, origin, transposed, 0), *element_(p, stride, origin, transposed, 1));
}
template <class T>
MSL_FN void simdgroup_store(simdgroup_matrix<T, 8, 8> a, T *p, ulong stride = 8, ulong2 origin = ulong2(0), bool transposed = false) {
    *element_(p, stride, origin, transposed, 0) = a.e.x;
    *element_(p, stride, origin, transposed, 1) = a.e.y;
}
// In float, with k ascending. The lane of row r and column c is that of row() and col(), turned round.
template <class D, class A, class B, class C>
MSL_FN void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b,
                                          const simdgroup_matrix<C, 8, 8> &c) {
    const int lane = MSL_LANE, row = lane & 0x16, col = lane & 0x09;  // bits of a lane: row.2 col.2 row.1 row.0 col.1
    const float ax = float(a.e.x), ay = float(a.e.y), bx = float(b.e.x), by = float(b.e.y);
    float x = float(c.e.x), y = float(c.e.y);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float s = __shfl_sync(ALL_, k & 1 ? ay : ax, row | (k & 4) << 1 | (k & 2) >> 1);
        const int from = col | (k & 4) << 2 | (k & 3) << 1;
        x += s * __shfl_sync(ALL_, bx, from);
        y += s * __shfl_sync(ALL_, by, from);
    }
    d.e = vec<D, 2>(D(x), D(y));
}
template <class D, class A, class B>
MSL_FN void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8>(D(0)));
}
template <class A, class B> MSL_FN auto operator*(const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b) {
    simdgroup_matrix<A, 8, 8> d;
    simdgroup_multiply(d, a, b);
    return d;
}
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

// ---- atomics: relaxed ones, as in Metal

enum memory_order { memory_order_relaxed = 0 };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
template <class T> struct atomic { T value; };
template <class T> using _atomic = atomic<T>;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
template <class T> struct word_ { typedef conditional_t<sizeof(T) == 8, unsigned long long, uint> type; };
template <class T> MSL_FN bool atomic_swap_(volatile T *p, T &seen, T next) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA has no atomic operations on this type but load and store");
    typedef typename word_<T>::type W;
    const W was = as_type<W>(seen), old = ::atomicCAS((W *)p, was, as_type<W>(next));
    seen = as_type<T>(old);
    return old == was;
}
template <class T, class F> MSL_FN T atomic_update_(volatile T *p, T arg, F f) {
    T old = *p;
    while (!atomic_swap_(p, old, T(f(old, arg)))) {}
    return old;
}
struct op_sub_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a - b); } };
struct op_set_ { template <class T> MSL_FN T operator()(T, T b) const { return b; } };
template <class T> constexpr bool native_ = is_same_v<T, int> || is_same_v<T, uint>;
#define MSL_ATOMIC(name, op, NATIVE, call)                                                                              \
    template <class T, class S> MSL_FN T atomic_##name##_explicit(volatile atomic<T> *p, S v, memory_order) {           \
        if constexpr (NATIVE) return ::call((T *)&p->value, T(v));                                                      \
        else return atomic_update_(&p->value, T(v), op());                                                              \
    }
// atomicAdd on a float is left out: in device memory it takes subnormal numbers for zero.
MSL_ATOMIC(fetch_add, op_sum_, native_<T>, atomicAdd) MSL_ATOMIC(fetch_sub, op_sub_, native_<T>, atomicSub)
MSL_ATOMIC(fetch_min, op_min_, native_<T>, atomicMin) MSL_ATOMIC(fetch_max, op_max_, native_<T>, atomicMax)
MSL_ATOMIC(fetch_and, op_and_, native_<T>, atomicAnd) MSL_ATOMIC(fetch_or, op_or_, native_<T>, atomicOr)
MSL_ATOMIC(fetch_xor, op_xor_, native_<T>, atomicXor) MSL_ATOMIC(exchange, op_set_, native_<T>, atomicExch)
#undef MSL_ATOMIC
template <class T> MSL_FN T atomic_load_explicit(const volatile atomic<T> *p, memory_order) { return p->value; }
template <class T, class S> MSL_FN void atomic_store_explicit(volatile atomic<T> *p, S v, memory_order) { p->value = T(v); }
template <class T, class S>
MSL_FN bool atomic_compare_exchange_weak_explicit(volatile atomic<T> *p, T *expected, S desired, memory_order, memory_order) {
    return atomic_swap_(&p->value, *expected, T(desired));
}
MSL_FN void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) { __threadfence(); }

}  // namespace metal
#undef MSL_LANE
#undef MSL_BASE

// ---- kernel arguments: conversions, so that an entry point need not know a parameter's (perhaps dependent) type

namespace msl_cuda {
template <class T> constexpr bool is_narrow = metal::is_same_v<T, half> || metal::is_same_v<T, bfloat>;
template <class T> using plain = metal::remove_cv_t<metal::remove_reference_t<T>>;
// An arm of a conditional: a half or bfloat beside a float becomes one, anything else is itself.
template <class Other, class T> MSL_FN constexpr decltype(auto) arm(T &&x) {
    if constexpr (is_narrow<plain<T>> && metal::is_same_v<plain<Other>, float>) return x.wide();
    else return static_cast<T &&>(x);
}
extern __shared__ __align__(16) unsigned char dynamic_memory[];
struct Pointer {
    void *at;
    template <class T> MSL_FN operator T *() const { return (T *)at; }
};
struct Reference {
    void *at;
    template <class T> MSL_FN operator T &() const { return *(T *)at; }
};
MSL_FN void *threadgroup(uint offset) { return dynamic_memory + offset; }
// For kernels written with this device in mind: 2^23 + each byte of a word.
MSL_FN metal::vec<float, 4> bytes(uint q) {
    const uint one = 0x4b000000u;
    return metal::vec<float, 4>(__uint_as_float(__byte_perm(q, one, 0x7440)), __uint_as_float(__byte_perm(q, one, 0x7441)),
                                __uint_as_float(__byte_perm(q, one, 0x7442)), __uint_as_float(__byte_perm(q, one, 0x7443)));
}
MSL_FN int dot_bytes(uint a, uint b, int sum) { return __dp4a(int(a), int(b), sum); }
MSL_FN uint funnel(uint low, uint high, uint by) { return __funnelshift_rc(low, high, by); }
MSL_FN uint permute(uint a, uint b, uint which) { return __byte_perm(a, b, which); }
// For kernels that ask for the tensor cores by name; the lanes' shares are those of PTX's mma.m16n8k8 for tf32.
MSL_FN void mma_tf32(metal::vec<float, 4> &d, metal::vec<float, 4> a, metal::vec<float, 2> b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
        : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)), "r"(__float_as_uint(a.w)),
          "r"(__float_as_uint(b.x)), "r"(__float_as_uint(b.y)));
}
MSL_FN void mma_f16(metal::vec<float, 4> &d, metal::vec<uint, 4> a, metal::vec<uint, 2> b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
MSL_FN uint minus_halves(uint a, uint b) {  // two halves in a word
    uint d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
MSL_FN uint fma_halves(uint a, uint b, uint c) {
    uint d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
MSL_FN uint pack_halves(float low, float high) {
    uint both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
MSL_FN float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Copies into shared memory while the kernel goes on, whole or n bytes filled up with zeros; groups of them end in order.
MSL_FN void copy16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
MSL_FN void copy16(void *to, const void *from, uint n) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint)__cvta_generic_to_shared(to)), "l"(from), "r"(n) : "memory");
}
MSL_FN void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <uint N> MSL_FN void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// Programmatic dependent launch: the next kernel may be placed while this one runs (`chain`); memory that kernels before
// wrote is touched after `wait`.
MSL_FN void chain() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
MSL_FN void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
MSL_FN void touch(const void *p) {
    uint unused;
    asm volatile("ld.global.ca.u8 %0, [%1];" : "=r"(unused) : "l"(p));
}
MSL_FN void prefetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
struct Id {
    uint x, y, z;
    MSL_FN operator uint() const { return x; }
    MSL_FN operator ushort() const { return (ushort)x; }
    MSL_FN operator metal::vec<uint, 2>() const { return metal::vec<uint, 2>(x, y); }
    MSL_FN operator metal::vec<ushort, 2>() const { return metal::vec<ushort, 2>(x, y); }
    MSL_FN operator metal::vec<uint, 3>() const { return metal::vec<uint, 3>(x, y, z); }
    MSL_FN operator metal::vec<ushort, 3>() const { return metal::vec<ushort, 3>(x, y, z); }
};
MSL_FN uint threads() { return blockDim.x * blockDim.y * blockDim.z; }
#define MSL_ID(name, X, Y, Z) MSL_FN Id name() { return Id{X, Y, Z}; }
MSL_ID(thread_position_in_grid, blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z)
MSL_ID(threadgroup_position_in_grid, blockIdx.x, blockIdx.y, blockIdx.z)
MSL_ID(thread_position_in_threadgroup, threadIdx.x, threadIdx.y, threadIdx.z)
MSL_ID(threads_per_threadgroup, blockDim.x, blockDim.y, blockDim.z)
MSL_ID(dispatch_threads_per_threadgroup, blockDim.x, blockDim.y, blockDim.z)
MSL_ID(threads_per_grid, gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z)
MSL_ID(threadgroups_per_grid, gridDim.x, gridDim.y, gridDim.z)
#undef MSL_ID
#define MSL_ID(name, X) MSL_FN uint name() { return X; }
MSL_ID(thread_index_in_threadgroup, metal::thread_index_())
MSL_ID(thread_index_in_simdgroup, metal::thread_index_() % 32)
MSL_ID(simdgroup_index_in_threadgroup, metal::thread_index_() / 32)
MSL_ID(simdgroups_per_threadgroup, (threads() + 31) / 32)
MSL_ID(dispatch_simdgroups_per_threadgroup, (threads() + 31) / 32)
MSL_ID(threads_per_simdgroup, 32)
MSL_ID(thread_execution_width, 32)
MSL_ID(thread_index_in_quadgroup, metal::thread_index_() % 4)
MSL_ID(quadgroup_index_in_threadgroup, metal::thread_index_() / 4)
MSL_ID(quadgroups_per_threadgroup, (threads() + 3) / 4)
MSL_ID(dispatch_quadgroups_per_threadgroup, (threads() + 3) / 4)
#undef MSL_ID
}  // namespace msl_cuda
