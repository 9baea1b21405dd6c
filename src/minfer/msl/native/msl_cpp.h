// The C++ back end: what the shared language headers need (MSL_FN, half, math primitives), then what belongs to this
// device: barriers, simdgroup and quad functions, simdgroup matrices, atomics.
#pragma once

#define MSL_FN inline __attribute__((always_inline))
#define MSL_COPY __builtin_memcpy
#define MSL_HALF_CONSTEXPR constexpr
#if defined(__clang__)
#define MSL_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MSL_UNROLL _Pragma("GCC unroll 32")
#endif
#define MSL_ENTRY
typedef _Float16 half;

#include "msl_types.h"

namespace msl_prim {
#define MSL_PRIM1(name) MSL_FN float name(float x) { return __builtin_##name##f(x); }
MSL_PRIM1(acos) MSL_PRIM1(acosh) MSL_PRIM1(asin) MSL_PRIM1(asinh) MSL_PRIM1(atan) MSL_PRIM1(atanh) MSL_PRIM1(ceil)
MSL_PRIM1(cos) MSL_PRIM1(cosh) MSL_PRIM1(exp) MSL_PRIM1(exp2) MSL_PRIM1(fabs) MSL_PRIM1(floor) MSL_PRIM1(log)
MSL_PRIM1(log2) MSL_PRIM1(log10) MSL_PRIM1(rint) MSL_PRIM1(round) MSL_PRIM1(sin) MSL_PRIM1(sinh) MSL_PRIM1(sqrt)
MSL_PRIM1(tan) MSL_PRIM1(tanh) MSL_PRIM1(trunc)
#undef MSL_PRIM1
#define MSL_PRIM2(name) MSL_FN float name(float x, float y) { return __builtin_##name##f(x, y); }
MSL_PRIM2(atan2) MSL_PRIM2(copysign) MSL_PRIM2(fmod) MSL_PRIM2(pow) MSL_PRIM2(nextafter)
#undef MSL_PRIM2
MSL_FN float fmax(float x, float y) { return x > y || y != y ? x : y; }  // a NaN loses, as Metal says
MSL_FN float fmin(float x, float y) { return x < y || y != y ? x : y; }
MSL_FN float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
MSL_FN float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
MSL_FN float frexp(float x, int *e) { return __builtin_frexpf(x, e); }
MSL_FN float exp10(float x) { return __builtin_powf(10.0f, x); }
MSL_FN float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
MSL_FN float sinpi(float x) { return __builtin_sinf(__builtin_fmodf(x, 2.0f) * 3.14159265358979323846f); }
MSL_FN float cospi(float x) { return __builtin_cosf(__builtin_fmodf(x, 2.0f) * 3.14159265358979323846f); }
MSL_FN float tanpi(float x) { return __builtin_tanf(__builtin_fmodf(x, 1.0f) * 3.14159265358979323846f); }
MSL_FN int popcount(ulong x) { return __builtin_popcountl(x); }
MSL_FN int clz(ulong x) { return __builtin_clzl(x); }
MSL_FN int ctz(ulong x) { return __builtin_ctzl(x); }
MSL_FN ulong mulhi(ulong a, ulong b) { return (ulong)(((unsigned __int128)a * b) >> 64); }
MSL_FN long mulhi(long a, long b) { return (long)(((__int128)a * b) >> 64); }
}  // namespace msl_prim

#include "msl_math.h"
#include "msl_rt.h"

// The line of the .metal file where a collective is called: lanes that meet must have come from one place.
#define MSL_SITE msl_rt::Site site = msl_rt::here(__builtin_LINE())

namespace metal {

// ---- barriers

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8, mem_object_data = 16 };
MSL_FN mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
MSL_FN void threadgroup_barrier(mem_flags flags, MSL_SITE) { msl_rt::barrier(uint(flags), site); }
MSL_FN void simdgroup_barrier(mem_flags flags, MSL_SITE) {
    uint p;
    msl_rt::exchange(uint(flags), p, site, msl_rt::COUNT_SIMD_BARRIER, uint(flags));
}

// ---- simdgroup functions. The first lane that goes on computes a reduction, in the order of a butterfly.

// The halves of `v` meet, until one value is left. Trip counts are constants, so that compilers use vector code.
template <int O, class T, class F> MSL_RUNTIME inline void fold_(T *v, F f) {
    for (int i = 0; i < O; i++) v[i] = f(v[i], v[i + O]);
    if constexpr (O > 1) fold_<O / 2>(v, f);
}
// The same with lanes missing.
template <class T, class F> __attribute__((noinline)) MSL_NOT_CHECKED T fold_some_(const T *in, uint live, F f) {
    T v[32];
    for (int i = 0; i < 32; i++) v[i] = in[i];
    for (int o = 16; o; o >>= 1)
        for (int i = 0; i < o; i++) {
            if (!(live >> (i + o) & 1)) continue;
            v[i] = live >> i & 1 ? f(v[i], v[i + o]) : v[i + o];
            live |= 1u << i;
        }
    return v[0];
}
template <class T, class F> MSL_RUNTIME inline T simd_reduce_(T x, F f, msl_rt::Site site) {
    uint p;
    msl_rt::Simdgroup *g = msl_rt::exchange(x, p, site);
    T *result = (T *)g->result[p];
    if (!g->ready[p]) {
        const T *in = (const T *)g->value[p];
        if (g->mask[p] == 0xffffffffu) {
            T v[16];
            for (int i = 0; i < 16; i++) v[i] = f(in[i], in[i + 16]);
            fold_<8>(v, f);
            *result = v[0];
        } else {
            *result = fold_some_(in, g->mask[p], f);
        }
        g->ready[p] = 1;
    }
    return *result;
}
struct op_sum_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a + b); } };
struct op_product_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a * b); } };
struct op_max_ { template <class T> MSL_FN T operator()(T a, T b) const { return max(a, b); } };
struct op_min_ { template <class T> MSL_FN T operator()(T a, T b) const { return min(a, b); } };
struct op_and_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a & b); } };
struct op_or_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a | b); } };
struct op_xor_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a ^ b); } };

// Elements that make no difference to the other lanes' sum are the inactive ones; a quad is four neighbouring lanes.
template <class T, class F> MSL_RUNTIME inline T quad_reduce_(T x, F f, msl_rt::Site site) {
    uint p;
    msl_rt::Simdgroup *g = msl_rt::exchange(x, p, site);
    const uint base = msl_rt::current->lane & ~3u, live = g->mask[p];
    const T *in = (const T *)g->value[p] + base;
    bool some = false;
    T r = x;
    for (uint k = 0; k < 4; k++)
        if (live >> (base + k) & 1) {
            r = some ? f(r, in[k]) : in[k];
            some = true;
        }
    return r;
}
// f over the active lanes below this one (and this one, when inclusive), of a group of `width` lanes.
template <class T, class F> MSL_RUNTIME inline T prefix_(T x, F f, T identity, bool inclusive, uint width, msl_rt::Site site) {
    uint p;
    msl_rt::Simdgroup *g = msl_rt::exchange(x, p, site);
    const uint lane = msl_rt::current->lane, live = g->mask[p];
    T r = identity;
    bool some = false;
    for (uint i = lane & ~(width - 1); i < lane + (inclusive ? 1 : 0); i++)
        if (live >> i & 1) {
            const T v = msl_rt::lane_value<T>(g, p, i);
            r = some ? f(r, v) : v;
            some = true;
        }
    return r;
}
// The value of lane `from`, or `other` where it is outside 0..31 or not active.
template <class T> MSL_RUNTIME inline T take_(T x, int from, T other, msl_rt::Site site) {
    uint p;
    msl_rt::Simdgroup *g = msl_rt::exchange(x, p, site);
    return from >= 0 && from < 32 && (g->mask[p] >> from & 1) ? msl_rt::lane_value<T>(g, p, uint(from)) : other;
}
#define MSL_LANE int(msl_rt::lane_index())
#define MSL_GROUP_FUNCTIONS(group, width, reduce)                                                                       \
    template <class T> MSL_FN T group##_sum(T x, MSL_SITE) { return reduce(x, op_sum_(), site); }                        \
    template <class T> MSL_FN T group##_product(T x, MSL_SITE) { return reduce(x, op_product_(), site); }                \
    template <class T> MSL_FN T group##_max(T x, MSL_SITE) { return reduce(x, op_max_(), site); }                        \
    template <class T> MSL_FN T group##_min(T x, MSL_SITE) { return reduce(x, op_min_(), site); }                        \
    template <class T> MSL_FN T group##_and(T x, MSL_SITE) { return reduce(x, op_and_(), site); }                        \
    template <class T> MSL_FN T group##_or(T x, MSL_SITE) { return reduce(x, op_or_(), site); }                          \
    template <class T> MSL_FN T group##_xor(T x, MSL_SITE) { return reduce(x, op_xor_(), site); }                        \
    template <class T> MSL_FN T group##_prefix_inclusive_sum(T x, MSL_SITE) { return prefix_(x, op_sum_(), T(0), true, width, site); } \
    template <class T> MSL_FN T group##_prefix_exclusive_sum(T x, MSL_SITE) { return prefix_(x, op_sum_(), T(0), false, width, site); } \
    template <class T> MSL_FN T group##_prefix_inclusive_product(T x, MSL_SITE) { return prefix_(x, op_product_(), T(1), true, width, site); } \
    template <class T> MSL_FN T group##_prefix_exclusive_product(T x, MSL_SITE) { return prefix_(x, op_product_(), T(1), false, width, site); } \
    template <class T> MSL_FN T group##_broadcast(T x, ushort lane, MSL_SITE) { return take_(x, MSL_BASE(width) + lane, x, site); } \
    template <class T> MSL_FN T group##_shuffle(T x, ushort lane, MSL_SITE) { return take_(x, MSL_BASE(width) + lane, x, site); } \
    template <class T> MSL_FN T group##_shuffle_xor(T x, ushort mask, MSL_SITE) { return take_(x, MSL_LANE ^ mask, x, site); } \
    template <class T> MSL_FN T group##_shuffle_up(T x, ushort delta, MSL_SITE) {                                       \
        const int from = MSL_LANE - delta;                                                                              \
        return take_(x, from < MSL_BASE(width) ? -1 : from, x, site);                                                   \
    }                                                                                                                   \
    template <class T> MSL_FN T group##_shuffle_down(T x, ushort delta, MSL_SITE) {                                     \
        const int from = MSL_LANE + delta;                                                                              \
        return take_(x, from >= MSL_BASE(width) + width ? -1 : from, x, site);                                          \
    }                                                                                                                   \
    template <class T> MSL_FN T group##_shuffle_rotate_up(T x, ushort delta, MSL_SITE) {                                \
        return take_(x, MSL_BASE(width) + ((MSL_LANE - delta) & (width - 1)), x, site);                                 \
    }                                                                                                                   \
    template <class T> MSL_FN T group##_shuffle_rotate_down(T x, ushort delta, MSL_SITE) {                              \
        return take_(x, MSL_BASE(width) + ((MSL_LANE + delta) & (width - 1)), x, site);                                 \
    }                                                                                                                   \
    template <class T> MSL_RUNTIME inline T group##_shuffle_and_fill_up(T x, T fill, ushort delta, ushort modulo = width, MSL_SITE) { \
        const int lane = MSL_LANE % modulo, base = MSL_LANE - lane;                                                     \
        const T y = take_(x, lane >= delta ? base + lane - delta : -1, x, site);                                        \
        const T z = take_(fill, lane >= delta ? -1 : base + modulo + lane - delta, fill, site);                         \
        return lane >= delta ? y : z;                                                                                   \
    }                                                                                                                   \
    template <class T> MSL_RUNTIME inline T group##_shuffle_and_fill_down(T x, T fill, ushort delta, ushort modulo = width, MSL_SITE) { \
        const int lane = MSL_LANE % modulo, base = MSL_LANE - lane, from = lane + delta;                                \
        const T y = take_(x, from < modulo ? base + from : -1, x, site);                                                \
        const T z = take_(fill, from < modulo ? -1 : base + from - modulo, fill, site);                                 \
        return from < modulo ? y : z;                                                                                   \
    }
#define MSL_BASE(width) (MSL_LANE & ~((width) - 1))
MSL_GROUP_FUNCTIONS(simd, 32, simd_reduce_)
MSL_GROUP_FUNCTIONS(quad, 4, quad_reduce_)
#undef MSL_GROUP_FUNCTIONS

MSL_RUNTIME inline uint active_(msl_rt::Site site) {
    uint p;
    return msl_rt::exchange(uint(0), p, site)->mask[p];
}
template <class T> MSL_FN T simd_broadcast_first(T x, MSL_SITE) {
    const uint live = active_(site);
    return take_(x, __builtin_ctz(live), x, site);
}
template <class T> MSL_FN T quad_broadcast_first(T x, MSL_SITE) {
    const uint live = active_(site) >> MSL_BASE(4) & 15;
    return take_(x, MSL_BASE(4) + __builtin_ctz(live), x, site);
}
MSL_RUNTIME inline uint ballot_(bool vote, msl_rt::Site site) {
    uint p, bits = 0;
    msl_rt::Simdgroup *g = msl_rt::exchange(vote, p, site);
    for (uint i = 0; i < 32; i++) bits |= uint(g->mask[p] >> i & 1 && msl_rt::lane_value<bool>(g, p, i)) << i;
    return bits;
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
MSL_FN simd_vote simd_ballot(bool v, MSL_SITE) { return simd_vote(ballot_(v, site)); }
MSL_FN bool simd_all(bool v, MSL_SITE) { return ballot_(!v, site) == 0; }
MSL_FN bool simd_any(bool v, MSL_SITE) { return ballot_(v, site) != 0; }
MSL_FN simd_vote simd_active_threads_mask(MSL_SITE) { return simd_vote(active_(site)); }
MSL_FN bool simd_is_first(MSL_SITE) { return __builtin_ctz(active_(site)) == MSL_LANE; }
MSL_FN quad_vote quad_ballot(bool v, MSL_SITE) { return quad_vote(ballot_(v, site) >> MSL_BASE(4) & 15); }
MSL_FN bool quad_all(bool v, MSL_SITE) { return (ballot_(!v, site) >> MSL_BASE(4) & 15) == 0; }
MSL_FN bool quad_any(bool v, MSL_SITE) { return (ballot_(v, site) >> MSL_BASE(4) & 15) != 0; }
MSL_FN bool quad_is_first(MSL_SITE) { return __builtin_ctz(active_(site) >> MSL_BASE(4) & 15) == (MSL_LANE & 3); }

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
    const ulong r = simdgroup_matrix<T, 8, 8>::row(), c = simdgroup_matrix<T, 8, 8>::col() + k;
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
// The lanes bring their elements of a, b and c; the first that goes on computes all 64 results, in float, with k
// ascending; each lane then takes its own two.
struct fragments_ { float a[64], b[64], c[64]; };
typedef float row_ __attribute__((vector_size(32), aligned(32), may_alias));
MSL_RUNTIME inline void multiply_fragments_(fragments_ *m) {
    const row_ *b = (const row_ *)m->b;
    row_ *c = (row_ *)m->c;
    for (int i = 0; i < 8; i++) {
        row_ s = c[i];
        for (int k = 0; k < 8; k++) s += m->a[8 * i + k] * b[k];
        c[i] = s;
    }
}
template <class A, class B, class C> struct put_fragments_ {
    const vec<A, 2> &a;
    const vec<B, 2> &b;
    const vec<C, 2> &c;
    MSL_RUNTIME void operator()(uchar *area, uint l) const {
        fragments_ *m = (fragments_ *)area;
        const uint at = 8 * ((l >> 4) * 4 + (l >> 1) % 4) + (l >> 3) % 2 * 4 + l % 2 * 2;
        m->a[at] = float(a.x);
        m->a[at + 1] = float(a.y);
        m->b[at] = float(b.x);
        m->b[at + 1] = float(b.y);
        m->c[at] = float(c.x);
        m->c[at + 1] = float(c.y);
    }
};
template <class D, class A, class B, class C>
MSL_RUNTIME inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a,
                                                      const simdgroup_matrix<B, 8, 8> &b, const simdgroup_matrix<C, 8, 8> &c, MSL_SITE) {
    uint p;
    msl_rt::Simdgroup *g = msl_rt::meet(put_fragments_<A, B, C>{a.e, b.e, c.e}, p, site, msl_rt::COUNT_MATRIX, 0);
    fragments_ *m = (fragments_ *)g->value[p];
    if (!g->ready[p]) {
        if (g->mask[p] != 0xffffffffu) msl_rt::msl_fail(msl_rt::current, msl_rt::DIVERGENT_SIMD, msl_rt::line_of(site), msl_rt::line_of(site));
        multiply_fragments_(m);
        g->ready[p] = 1;
    }
    const uint l = msl_rt::current->lane, at = 8 * ((l >> 4) * 4 + (l >> 1) % 4) + (l >> 3) % 2 * 4 + l % 2 * 2;
    d.e = vec<D, 2>(D(m->c[at]), D(m->c[at + 1]));
}
template <class D, class A, class B>
MSL_FN void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b, MSL_SITE) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8>(D(0)), site);
}
template <class A, class B> MSL_FN auto operator*(const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b) {
    simdgroup_matrix<A, 8, 8> d;
    simdgroup_multiply(d, a, b, msl_rt::here(0));
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
template <class T> struct bits_of_ { typedef conditional_t<sizeof(T) == 8, ulong, conditional_t<sizeof(T) == 1, uchar, uint>> type; };
template <class T> MSL_RUNTIME inline T atomic_read_(const volatile T *p, uint kind, msl_rt::Site site) {
#if defined(MSL_INSTRUMENTED)
    msl_rt::msl_checked_atomic(p, sizeof(T), kind, site);
#else
    (void)kind;
    (void)site;
#endif
    typedef typename bits_of_<T>::type B;
    return as_type<T>(B(__atomic_load_n((const volatile B *)p, __ATOMIC_RELAXED)));
}
template <class T> MSL_RUNTIME inline bool atomic_swap_(volatile T *p, T &seen, T next) {
    typedef typename bits_of_<T>::type B;
    B old = as_type<B>(seen);
    const bool done = __atomic_compare_exchange_n((volatile B *)p, &old, as_type<B>(next), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    seen = as_type<T>(old);
    return done;
}
template <class T, class F> MSL_RUNTIME inline T atomic_update_(volatile T *p, T arg, F f, uint kind, msl_rt::Site site) {
    T old = atomic_read_(p, kind, site);
    while (!atomic_swap_(p, old, T(f(old, arg)))) {}
    return old;
}
struct op_sub_ { template <class T> MSL_FN T operator()(T a, T b) const { return T(a - b); } };
struct op_set_ { template <class T> MSL_FN T operator()(T, T b) const { return b; } };
#define MSL_ATOMIC(name, op)                                                                                            \
    template <class T, class S> MSL_FN T atomic_##name##_explicit(volatile atomic<T> *p, S v, memory_order, MSL_SITE) { \
        return atomic_update_(&p->value, T(v), op(), 1, site);                                                                   \
    }
MSL_ATOMIC(fetch_add, op_sum_) MSL_ATOMIC(fetch_sub, op_sub_) MSL_ATOMIC(fetch_min, op_min_) MSL_ATOMIC(fetch_max, op_max_)
MSL_ATOMIC(fetch_and, op_and_) MSL_ATOMIC(fetch_or, op_or_) MSL_ATOMIC(fetch_xor, op_xor_) MSL_ATOMIC(exchange, op_set_)
#undef MSL_ATOMIC
template <class T> MSL_FN T atomic_load_explicit(const volatile atomic<T> *p, memory_order, MSL_SITE) {
    return atomic_read_(&p->value, 0, site);
}
template <class T, class S> MSL_FN void atomic_store_explicit(volatile atomic<T> *p, S v, memory_order, MSL_SITE) {
    atomic_update_(&p->value, T(v), op_set_(), 2, site);
}
template <class T, class S>
MSL_RUNTIME inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T> *p, T *expected, S desired, memory_order, memory_order, MSL_SITE) {
    atomic_read_(&p->value, 1, site);
    return atomic_swap_(&p->value, *expected, T(desired));
}
MSL_FN void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}

}  // namespace metal
#undef MSL_LANE
#undef MSL_BASE
