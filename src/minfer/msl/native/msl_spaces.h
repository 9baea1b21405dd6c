// The address-space back end: C++ for OpenCL, which clang looks at and nothing ever runs. What belongs to the device is
// declared, not defined; pointers that Metal wants in device or threadgroup memory are declared so.
#pragma once

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
// Two parts of the global space: each is a pointer of its own, and both are generic to a class's own functions.
#define MSL_DEVICE __attribute__((opencl_global_device))
#define MSL_CONSTANT __attribute__((opencl_global_host))
// Names to Metal's sources, words to OpenCL.
#define global msl_global_
#define local msl_local_
#define generic msl_generic_
#define uniform msl_uniform_
#define atomic_int msl_atomic_int
#define atomic_uint msl_atomic_uint
#define atomic_ulong msl_atomic_ulong
#define atomic_float msl_atomic_float

#define MSL_FN inline
#define MSL_COPY(to, from, n) ((void)(to), (void)(from))
#define MSL_HALF_CONSTEXPR constexpr

#include "msl_types.h"

namespace msl_prim {
#define MSL_PRIM1(name) float name(float x);
MSL_PRIM1(acos) MSL_PRIM1(acosh) MSL_PRIM1(asin) MSL_PRIM1(asinh) MSL_PRIM1(atan) MSL_PRIM1(atanh) MSL_PRIM1(ceil)
MSL_PRIM1(cos) MSL_PRIM1(cosh) MSL_PRIM1(cospi) MSL_PRIM1(exp) MSL_PRIM1(exp2) MSL_PRIM1(exp10) MSL_PRIM1(fabs)
MSL_PRIM1(floor) MSL_PRIM1(log) MSL_PRIM1(log2) MSL_PRIM1(log10) MSL_PRIM1(rint) MSL_PRIM1(round) MSL_PRIM1(rsqrt)
MSL_PRIM1(sin) MSL_PRIM1(sinh) MSL_PRIM1(sinpi) MSL_PRIM1(sqrt) MSL_PRIM1(tan) MSL_PRIM1(tanh) MSL_PRIM1(tanpi)
MSL_PRIM1(trunc)
#undef MSL_PRIM1
#define MSL_PRIM2(name) float name(float x, float y);
MSL_PRIM2(atan2) MSL_PRIM2(copysign) MSL_PRIM2(fmod) MSL_PRIM2(pow) MSL_PRIM2(nextafter) MSL_PRIM2(fmax) MSL_PRIM2(fmin)
#undef MSL_PRIM2
float fma(float x, float y, float z);
float ldexp(float x, int k);
float frexp(float x, int *e);
int popcount(ulong x);
int clz(ulong x);
int ctz(ulong x);
ulong mulhi(ulong a, ulong b);
long mulhi(long a, long b);
}  // namespace msl_prim

#include "msl_math.h"

namespace metal {

// A table at program scope as what it is in Metal: constant memory. Anything else of its name is itself.
template <class T> const MSL_CONSTANT T &in_constant(const __global T &x);
template <class T> T &&in_constant(T &&x);

template <class T> T value(T x);

// Results through a reference: a local variable's type is not that of the value beside it.
template <class T> T modf(T x, __private T &whole);
template <class T> T frexp(T x, __private int &e);
template <class T> T sincos(T x, __private T &c);

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8, mem_object_data = 16 };
mem_flags operator|(mem_flags a, mem_flags b);
void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

#define MSL_GROUP_FUNCTIONS(group)                                                                                      \
    template <class T> T group##_sum(T x);                                                                              \
    template <class T> T group##_product(T x);                                                                          \
    template <class T> T group##_max(T x);                                                                              \
    template <class T> T group##_min(T x);                                                                              \
    template <class T> T group##_and(T x);                                                                              \
    template <class T> T group##_or(T x);                                                                               \
    template <class T> T group##_xor(T x);                                                                              \
    template <class T> T group##_prefix_inclusive_sum(T x);                                                             \
    template <class T> T group##_prefix_exclusive_sum(T x);                                                             \
    template <class T> T group##_prefix_inclusive_product(T x);                                                         \
    template <class T> T group##_prefix_exclusive_product(T x);                                                         \
    template <class T> T group##_broadcast(T x, ushort lane);                                                           \
    template <class T> T group##_broadcast_first(T x);                                                                  \
    template <class T> T group##_shuffle(T x, ushort lane);                                                             \
    template <class T> T group##_shuffle_xor(T x, ushort mask);                                                         \
    template <class T> T group##_shuffle_up(T x, ushort delta);                                                         \
    template <class T> T group##_shuffle_down(T x, ushort delta);                                                       \
    template <class T> T group##_shuffle_rotate_up(T x, ushort delta);                                                  \
    template <class T> T group##_shuffle_rotate_down(T x, ushort delta);                                                \
    template <class T> T group##_shuffle_and_fill_up(T x, T fill, ushort delta, ushort modulo = 0);                     \
    template <class T> T group##_shuffle_and_fill_down(T x, T fill, ushort delta, ushort modulo = 0);                   \
    struct group##_vote {                                                                                               \
        typedef ulong vote_t;                                                                                           \
        explicit group##_vote(vote_t v = 0);                                                                            \
        explicit operator vote_t() const;                                                                               \
        bool all() const;                                                                                               \
        bool any() const;                                                                                               \
    };                                                                                                                  \
    group##_vote group##_ballot(bool v);                                                                                \
    bool group##_all(bool v);                                                                                           \
    bool group##_any(bool v);                                                                                           \
    bool group##_is_first();                                                                                            \
    group##_vote group##_active_threads_mask();
MSL_GROUP_FUNCTIONS(simd)
MSL_GROUP_FUNCTIONS(quad)
#undef MSL_GROUP_FUNCTIONS

template <class T, int C, int R = C> struct simdgroup_matrix {
    typedef vec<T, 2> storage_type;
    storage_type e;
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T diagonal);
    storage_type &thread_elements();
    const storage_type &thread_elements() const;
};
template <class T, int C, int R = C> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value);
#define MSL_MATRIX(space)                                                                                               \
    template <class T>                                                                                                  \
    void simdgroup_load(simdgroup_matrix<T, 8, 8> &d, const space T *p, ulong stride = 8, ulong2 origin = ulong2(0), bool transposed = false); \
    template <class T>                                                                                                  \
    void simdgroup_store(simdgroup_matrix<T, 8, 8> a, space T *p, ulong stride = 8, ulong2 origin = ulong2(0), bool transposed = false);
MSL_MATRIX(MSL_DEVICE) MSL_MATRIX(__local)
#undef MSL_MATRIX
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b,
                                   const simdgroup_matrix<C, 8, 8> &c);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b);
template <class A, class B> simdgroup_matrix<A, 8, 8> operator*(const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b);
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

enum memory_order { memory_order_relaxed = 0 };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
template <class T> struct atomic { T value; };
template <class T> using _atomic = atomic<T>;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
#define MSL_ATOMICS(space)                                                                                              \
    template <class T, class S> T atomic_fetch_add_explicit(volatile space atomic<T> *p, S v, memory_order);            \
    template <class T, class S> T atomic_fetch_sub_explicit(volatile space atomic<T> *p, S v, memory_order);            \
    template <class T, class S> T atomic_fetch_min_explicit(volatile space atomic<T> *p, S v, memory_order);            \
    template <class T, class S> T atomic_fetch_max_explicit(volatile space atomic<T> *p, S v, memory_order);            \
    template <class T, class S> T atomic_fetch_and_explicit(volatile space atomic<T> *p, S v, memory_order);            \
    template <class T, class S> T atomic_fetch_or_explicit(volatile space atomic<T> *p, S v, memory_order);             \
    template <class T, class S> T atomic_fetch_xor_explicit(volatile space atomic<T> *p, S v, memory_order);            \
    template <class T, class S> T atomic_exchange_explicit(volatile space atomic<T> *p, S v, memory_order);             \
    template <class T> T atomic_load_explicit(const volatile space atomic<T> *p, memory_order);                         \
    template <class T, class S> void atomic_store_explicit(volatile space atomic<T> *p, S v, memory_order);             \
    template <class T, class S>                                                                                         \
    bool atomic_compare_exchange_weak_explicit(volatile space atomic<T> *p, __private T *expected, S desired, memory_order, memory_order);
MSL_ATOMICS(MSL_DEVICE) MSL_ATOMICS(__local)
#undef MSL_ATOMICS
void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device);

}  // namespace metal
