// Metal's math, integer, relational and geometric functions, over the primitives of the back end (namespace msl_prim).
// Every function is a template, so a plain one of the same name in the global namespace is preferred, never ambiguous.
#pragma once

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF (__builtin_inff())
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define MAXFLOAT FLT_MAX
#define HALF_MAX ((half)65504.0f)
#define HALF_MIN ((half)6.103515625e-05f)
#define HALF_EPSILON ((half)0.0009765625f)
#define MAXHALF HALF_MAX
#define CHAR_BIT 8
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-9223372036854775807l - 1)
#define ULONG_MAX 18446744073709551615ul
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_PI_H ((half)M_PI_F)

namespace metal {

#define MSL_IF_FLOAT(T) class = enable_if_t<is_floating_point_v<T>>
#define MSL_IF_INT(T) class = enable_if_t<is_integral_v<T>>

// f(x) on every element of a vector; f(x, y) likewise.
#define MSL_LIFT1(f)                                                                                                    \
    template <class T> MSL_FN auto f(vec<T, 2> a) { return vec<decltype(f(a.x)), 2>(f(a.x), f(a.y)); }                   \
    template <class T> MSL_FN auto f(vec<T, 3> a) { return vec<decltype(f(a.x)), 3>(f(a.x), f(a.y), f(a.z)); }           \
    template <class T> MSL_FN auto f(vec<T, 4> a) { return vec<decltype(f(a.x)), 4>(f(a.x), f(a.y), f(a.z), f(a.w)); }
#define MSL_LIFT2_SAME(f)                                                                                               \
    template <class T> MSL_FN auto f(vec<T, 2> a, vec<T, 2> b) { return vec<decltype(f(a.x, b.x)), 2>(f(a.x, b.x), f(a.y, b.y)); } \
    template <class T> MSL_FN auto f(vec<T, 3> a, vec<T, 3> b) {                                                        \
        return vec<decltype(f(a.x, b.x)), 3>(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z));                                    \
    }                                                                                                                   \
    template <class T> MSL_FN auto f(vec<T, 4> a, vec<T, 4> b) {                                                        \
        return vec<decltype(f(a.x, b.x)), 4>(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w));                       \
    }
#define MSL_LIFT2(f)                                                                                                    \
    MSL_LIFT2_SAME(f)                                                                                                   \
    template <class T, int N, class S, class = enable_if_t<is_scalar_v<S>>>                                             \
    MSL_FN auto f(vec<T, N> a, S b) { return f(a, vec<T, N>(b)); }                                                       \
    template <class T, int N, class S, class = enable_if_t<is_scalar_v<S>>>                                             \
    MSL_FN auto f(S a, vec<T, N> b) { return f(vec<T, N>(a), b); }
#define MSL_LIFT3(f)                                                                                                    \
    template <class T, int N> MSL_FN vec<T, N> f(vec<T, N> a, vec<T, N> b, vec<T, N> c) {                                \
        vec<T, N> r;                                                                                                    \
        for (int i = 0; i < N; i++) r[i] = f(a[i], b[i], c[i]);                                                         \
        return r;                                                                                                       \
    }                                                                                                                   \
    template <class T, int N, class S, class = enable_if_t<is_scalar_v<S>>>                                             \
    MSL_FN vec<T, N> f(vec<T, N> a, S b, S c) { return f(a, vec<T, N>(b), vec<T, N>(c)); }                               \
    template <class T, int N, class S, class = enable_if_t<is_scalar_v<S>>>                                             \
    MSL_FN vec<T, N> f(vec<T, N> a, vec<T, N> b, S c) { return f(a, b, vec<T, N>(c)); }

// ---- floating point, one argument: computed in float, rounded to the argument's type (float for an integer)

template <class T> using float_of = conditional_t<is_floating_point_v<T>, T, float>;
#define MSL_MATH1(f)                                                                                                    \
    template <class T, class = enable_if_t<is_scalar_v<T>>> MSL_FN float_of<T> f(T x) { return float_of<T>(msl_prim::f(float(x))); } \
    MSL_LIFT1(f)
MSL_MATH1(acos) MSL_MATH1(acosh) MSL_MATH1(asin) MSL_MATH1(asinh) MSL_MATH1(atan) MSL_MATH1(atanh) MSL_MATH1(ceil)
MSL_MATH1(cos) MSL_MATH1(cosh) MSL_MATH1(cospi) MSL_MATH1(exp) MSL_MATH1(exp2) MSL_MATH1(exp10) MSL_MATH1(fabs)
MSL_MATH1(floor) MSL_MATH1(log) MSL_MATH1(log2) MSL_MATH1(log10) MSL_MATH1(rint) MSL_MATH1(round) MSL_MATH1(rsqrt)
MSL_MATH1(sin) MSL_MATH1(sinh) MSL_MATH1(sinpi) MSL_MATH1(sqrt) MSL_MATH1(tan) MSL_MATH1(tanh) MSL_MATH1(tanpi) MSL_MATH1(trunc)
#undef MSL_MATH1
template <class T, MSL_IF_FLOAT(T)> MSL_FN T fract(T x) { return T(msl_prim::fmin(float(x) - msl_prim::floor(float(x)), 0.99999994f)); }
MSL_LIFT1(fract)
template <class T, MSL_IF_FLOAT(T)> MSL_FN T saturate(T x) { return T(msl_prim::fmin(msl_prim::fmax(float(x), 0.0f), 1.0f)); }
MSL_LIFT1(saturate)
template <class T, MSL_IF_FLOAT(T)> MSL_FN T sign(T x) { return float(x) > 0 ? T(1.0f) : float(x) < 0 ? T(-1.0f) : float(x) == 0 ? x : T(0.0f); }
MSL_LIFT1(sign)
template <class T, MSL_IF_FLOAT(T)> MSL_FN bool isnan(T x) { return float(x) != float(x); }
template <class T, MSL_IF_FLOAT(T)> MSL_FN bool isinf(T x) { return msl_prim::fabs(float(x)) == INFINITY; }
template <class T, MSL_IF_FLOAT(T)> MSL_FN bool isfinite(T x) { return msl_prim::fabs(float(x)) < INFINITY; }
template <class T, MSL_IF_FLOAT(T)> MSL_FN bool isnormal(T x) {
    return isfinite(x) && msl_prim::fabs(float(x)) >= (is_same_v<T, half> ? 6.103515625e-05f : FLT_MIN);
}
template <class T, MSL_IF_FLOAT(T)> MSL_FN bool signbit(T x) { return as_type<uint>(float(x)) >> 31; }
MSL_LIFT1(isnan) MSL_LIFT1(isinf) MSL_LIFT1(isfinite) MSL_LIFT1(isnormal) MSL_LIFT1(signbit)

// ---- two and three arguments; mixed scalar types meet in their common type

template <class A, class B> struct common { typedef decltype(true ? declval<A>() : declval<B>()) type; };
template <class A> struct common<A, A> { typedef A type; };
template <class A, class B> using common_t = remove_cv_t<remove_reference_t<typename common<A, B>::type>>;
#define MSL_MATH2(f)                                                                                                    \
    template <class A, class B, class = enable_if_t<is_scalar_v<A> && is_scalar_v<B>>>                                  \
    MSL_FN float_of<common_t<A, B>> f(A a, B b) { return float_of<common_t<A, B>>(msl_prim::f(float(a), float(b))); }    \
    MSL_LIFT2(f)
MSL_MATH2(atan2) MSL_MATH2(copysign) MSL_MATH2(fmax) MSL_MATH2(fmin) MSL_MATH2(fmod) MSL_MATH2(pow)
#undef MSL_MATH2
template <class T, MSL_IF_FLOAT(T)> MSL_FN T powr(T a, T b) { return pow(a, b); }
template <class T, MSL_IF_FLOAT(T)> MSL_FN T fdim(T a, T b) { return a > b ? T(a - b) : T(0.0f); }
template <class T, MSL_IF_FLOAT(T)> MSL_FN T step(T edge, T x) { return x < edge ? T(0.0f) : T(1.0f); }
template <class T, class I, class = enable_if_t<is_floating_point_v<T> && is_integral_v<I>>>
MSL_FN T ldexp(T x, I k) { return T(msl_prim::ldexp(float(x), int(k))); }
MSL_LIFT2(powr) MSL_LIFT2(fdim) MSL_LIFT2(step)
template <class T, int N> MSL_FN vec<T, N> ldexp(vec<T, N> x, vec<int, N> k) {
    for (int i = 0; i < N; i++) x[i] = ldexp(x[i], k[i]);
    return x;
}
template <class A, class B, class = enable_if_t<is_scalar_v<A> && is_scalar_v<B>>>
MSL_FN common_t<A, B> max(A a, B b) {
    typedef common_t<A, B> T;
    if constexpr (is_floating_point_v<T>) return T(msl_prim::fmax(float(a), float(b)));
    else return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B, class = enable_if_t<is_scalar_v<A> && is_scalar_v<B>>>
MSL_FN common_t<A, B> min(A a, B b) {
    typedef common_t<A, B> T;
    if constexpr (is_floating_point_v<T>) return T(msl_prim::fmin(float(a), float(b)));
    else return T(b) < T(a) ? T(b) : T(a);
}
MSL_LIFT2(max) MSL_LIFT2(min)
template <class T> MSL_FN T max3(T a, T b, T c) { return max(a, max(b, c)); }
template <class T> MSL_FN T min3(T a, T b, T c) { return min(a, min(b, c)); }
template <class T> MSL_FN T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }
template <class T> MSL_FN T fmax3(T a, T b, T c) { return fmax(a, fmax(b, c)); }
template <class T> MSL_FN T fmin3(T a, T b, T c) { return fmin(a, fmin(b, c)); }
template <class T> MSL_FN T fmedian3(T a, T b, T c) { return fmax(fmin(a, b), fmin(fmax(a, b), c)); }

template <class A, class B, class C, class = enable_if_t<is_scalar_v<A> && is_scalar_v<B> && is_scalar_v<C>>>
MSL_FN auto clamp(A x, B lo, C hi) { return min(max(x, lo), hi); }
template <class A, class B, class C, class = enable_if_t<is_scalar_v<A> && is_scalar_v<B> && is_scalar_v<C>>>
MSL_FN float_of<common_t<common_t<A, B>, C>> fma(A a, B b, C c) {
    return float_of<common_t<common_t<A, B>, C>>(msl_prim::fma(float(a), float(b), float(c)));
}
template <class T, class U, class = enable_if_t<is_floating_point_v<T> && is_scalar_v<U>>>
MSL_FN T mix(T a, T b, U t) { return T(a + T(T(b - a) * T(t))); }
template <class T, MSL_IF_FLOAT(T)> MSL_FN T smoothstep(T e0, T e1, T x) {
    T t = clamp(T((x - e0) / (e1 - e0)), T(0.0f), T(1.0f));
    return T(t * t * (T(3.0f) - T(2.0f) * t));
}
MSL_LIFT3(clamp) MSL_LIFT3(fma) MSL_LIFT3(mix) MSL_LIFT3(smoothstep)
template <class T, MSL_IF_FLOAT(T)> MSL_FN T modf(T x, T &whole) { whole = trunc(x); return T(x - whole); }
template <class T, MSL_IF_FLOAT(T)> MSL_FN T frexp(T x, int &e) { return T(msl_prim::frexp(float(x), &e)); }
template <class T, MSL_IF_FLOAT(T)> MSL_FN T sincos(T x, T &c) { c = cos(x); return sin(x); }
template <class T> MSL_FN T nextafter(T a, T b) { return T(msl_prim::nextafter(float(a), float(b))); }
template <class T, MSL_IF_FLOAT(T)> MSL_FN T divide(T a, T b) { return T(a / b); }

// ---- integers

template <class T, class = enable_if_t<is_scalar_v<T>>> MSL_FN T abs(T x) {
    if constexpr (is_floating_point_v<T>) return fabs(x);
    else return T(x < 0 ? -x : x);
}
MSL_LIFT1(abs)
template <class T, MSL_IF_INT(T)> MSL_FN make_unsigned_t<T> absdiff(T a, T b) {
    typedef make_unsigned_t<T> U;
    return a < b ? U(U(b) - U(a)) : U(U(a) - U(b));
}
template <class T, MSL_IF_INT(T)> MSL_FN T popcount(T x) { return T(msl_prim::popcount(ulong(make_unsigned_t<T>(x)))); }
template <class T, MSL_IF_INT(T)> MSL_FN T clz(T x) {
    return x == 0 ? T(8 * sizeof(T)) : T(msl_prim::clz(ulong(make_unsigned_t<T>(x))) - int(64 - 8 * sizeof(T)));
}
template <class T, MSL_IF_INT(T)> MSL_FN T ctz(T x) { return x == 0 ? T(8 * sizeof(T)) : T(msl_prim::ctz(ulong(make_unsigned_t<T>(x)))); }
template <class T, MSL_IF_INT(T)> MSL_FN T reverse_bits(T x) {
    make_unsigned_t<T> u = x, r = 0;
    for (uint i = 0; i < 8 * sizeof(T); i++) { r = make_unsigned_t<T>(r << 1 | (u & 1)); u >>= 1; }
    return T(r);
}
MSL_LIFT1(popcount) MSL_LIFT1(clz) MSL_LIFT1(ctz) MSL_LIFT1(reverse_bits)
template <class T, MSL_IF_INT(T)> MSL_FN T rotate(T x, T n) {
    typedef make_unsigned_t<T> U;
    const uint bits = 8 * sizeof(T), k = uint(n) % bits;
    return k == 0 ? x : T(U(U(x) << k) | U(U(x) >> (bits - k)));
}
template <class T, MSL_IF_INT(T)> MSL_FN T mulhi(T a, T b) {
    if constexpr (sizeof(T) == 8) return T(msl_prim::mulhi(a, b));
    else return T((conditional_t<is_signed_v<T>, long, ulong>(a) * b) >> (8 * sizeof(T)));
}
template <class T, MSL_IF_INT(T)> MSL_FN T madhi(T a, T b, T c) { return T(mulhi(a, b) + c); }
template <class T, MSL_IF_INT(T)> MSL_FN T mul24(T a, T b) { return T(a * b); }
template <class T, MSL_IF_INT(T)> MSL_FN T mad24(T a, T b, T c) { return T(a * b + c); }
template <class T, MSL_IF_INT(T)> MSL_FN T hadd(T a, T b) { return T((a & b) + ((a ^ b) >> 1)); }
template <class T, MSL_IF_INT(T)> MSL_FN T rhadd(T a, T b) { return T((a | b) - ((a ^ b) >> 1)); }
template <class T, MSL_IF_INT(T)> MSL_FN T addsat(T a, T b) {
    T r;
    if (!__builtin_add_overflow(a, b, &r)) return r;
    if constexpr (is_signed_v<T>) return a < 0 ? T(T(1) << (8 * sizeof(T) - 1)) : T(~(T(1) << (8 * sizeof(T) - 1)));
    else return T(~T(0));
}
template <class T, MSL_IF_INT(T)> MSL_FN T subsat(T a, T b) {
    T r;
    if (!__builtin_sub_overflow(a, b, &r)) return r;
    if constexpr (is_signed_v<T>) return a < 0 ? T(T(1) << (8 * sizeof(T) - 1)) : T(~(T(1) << (8 * sizeof(T) - 1)));
    else return T(0);
}
template <class T, MSL_IF_INT(T)> MSL_FN T extract_bits(T x, uint offset, uint bits) {
    if (bits == 0) return T(0);
    const uint width = 8 * sizeof(T);
    typedef make_unsigned_t<T> U;
    return T(T(U(U(x) << (width - bits - offset))) >> (width - bits));  // arithmetic for a signed T
}
template <class T, MSL_IF_INT(T)> MSL_FN T insert_bits(T base, T insert, uint offset, uint bits) {
    typedef make_unsigned_t<T> U;
    const U mask = bits >= 8 * sizeof(T) ? U(~U(0)) : U(U((U(1) << bits) - 1) << offset);
    return T((U(base) & U(~mask)) | (U(U(insert) << offset) & mask));
}
MSL_LIFT2_SAME(absdiff) MSL_LIFT2_SAME(rotate) MSL_LIFT2_SAME(mulhi) MSL_LIFT2_SAME(hadd) MSL_LIFT2_SAME(rhadd)
MSL_LIFT2_SAME(addsat) MSL_LIFT2_SAME(subsat)

// ---- relational

template <class T> MSL_FN T select(T no, T yes, bool pick) { return pick ? yes : no; }
template <class A, class B, class = enable_if_t<is_scalar_v<A> && is_scalar_v<B> && !is_same_v<A, B>>>
MSL_FN common_t<A, B> select(A no, B yes, bool pick) { return pick ? yes : no; }
template <class T, int N> MSL_FN vec<T, N> select(vec<T, N> no, vec<T, N> yes, vec<bool, N> pick) {
    for (int i = 0; i < N; i++) no[i] = pick[i] ? yes[i] : no[i];
    return no;
}
MSL_FN bool all(bool v) { return v; }
MSL_FN bool any(bool v) { return v; }
template <class T> MSL_FN bool all(vec<T, 2> v) { return v.x && v.y; }
template <class T> MSL_FN bool all(vec<T, 3> v) { return v.x && v.y && v.z; }
template <class T> MSL_FN bool all(vec<T, 4> v) { return v.x && v.y && v.z && v.w; }
template <class T> MSL_FN bool any(vec<T, 2> v) { return v.x || v.y; }
template <class T> MSL_FN bool any(vec<T, 3> v) { return v.x || v.y || v.z; }
template <class T> MSL_FN bool any(vec<T, 4> v) { return v.x || v.y || v.z || v.w; }

// ---- geometry

template <class T> MSL_FN T dot(vec<T, 2> a, vec<T, 2> b) { return T(a.x * b.x + a.y * b.y); }
template <class T> MSL_FN T dot(vec<T, 3> a, vec<T, 3> b) { return T(a.x * b.x + a.y * b.y + a.z * b.z); }
template <class T> MSL_FN T dot(vec<T, 4> a, vec<T, 4> b) { return T(a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w); }
template <class T, int N> MSL_FN T dot(packed_vec<T, N> a, packed_vec<T, N> b) { return dot(vec<T, N>(a), vec<T, N>(b)); }
template <class T, int N> MSL_FN T length_squared(vec<T, N> a) { return dot(a, a); }
template <class T, int N> MSL_FN T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <class T, int N> MSL_FN T distance_squared(vec<T, N> a, vec<T, N> b) { return length_squared(a - b); }
template <class T, int N> MSL_FN T distance(vec<T, N> a, vec<T, N> b) { return length(a - b); }
template <class T, int N> MSL_FN vec<T, N> normalize(vec<T, N> a) { return a * rsqrt(dot(a, a)); }
template <class T> MSL_FN vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
    return vec<T, 3>(a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x);
}
template <class T, int N> MSL_FN vec<T, N> reflect(vec<T, N> i, vec<T, N> n) { return i - n * (T(2.0f) * dot(n, i)); }

// ---- packing

MSL_FN float unorm_(uint v, float top) { return float(v) / top; }
MSL_FN float4 unpack_unorm4x8_to_float(uint v) {
    return float4(unorm_(v & 255, 255.0f), unorm_(v >> 8 & 255, 255.0f), unorm_(v >> 16 & 255, 255.0f), unorm_(v >> 24, 255.0f));
}
MSL_FN float4 unpack_snorm4x8_to_float(uint v) {
    return max(float4(float(char(v)), float(char(v >> 8)), float(char(v >> 16)), float(char(v >> 24))) / 127.0f, float4(-1.0f));
}
MSL_FN float2 unpack_unorm2x16_to_float(uint v) { return float2(unorm_(v & 65535, 65535.0f), unorm_(v >> 16, 65535.0f)); }
MSL_FN uint pack_float_to_unorm4x8(float4 v) {
    v = rint(clamp(v, 0.0f, 1.0f) * 255.0f);
    return uint(v.x) | uint(v.y) << 8 | uint(v.z) << 16 | uint(v.w) << 24;
}

template <class T> struct numeric_limits {
    static constexpr bool is_integer = is_integral_v<T>, is_signed = is_signed_v<T>, is_specialized = is_arithmetic_v<T>;
    static constexpr int digits = 8 * sizeof(T) - (is_signed ? 1 : 0);
    static MSL_FN constexpr T min() { return is_signed ? T(make_unsigned_t<T>(1) << (8 * sizeof(T) - 1)) : T(0); }
    static MSL_FN constexpr T max() { return T(~make_unsigned_t<T>(is_signed ? make_unsigned_t<T>(1) << (8 * sizeof(T) - 1) : 0)); }
    static MSL_FN constexpr T lowest() { return min(); }
};
#define MSL_LIMITS(T, MAX, MIN, EPS, DIG, INF)                                                                          \
    template <> struct numeric_limits<T> {                                                                              \
        static constexpr bool is_integer = false, is_signed = true, is_specialized = true, has_infinity = true;         \
        static constexpr int digits = DIG;                                                                              \
        static MSL_FN MSL_CONSTEXPR_##INF T max() { return T(MAX); }                                                    \
        static MSL_FN MSL_CONSTEXPR_##INF T min() { return T(MIN); }                                                    \
        static MSL_FN MSL_CONSTEXPR_##INF T lowest() { return T(-(MAX)); }                                              \
        static MSL_FN MSL_CONSTEXPR_##INF T epsilon() { return T(EPS); }                                                \
        static MSL_FN MSL_CONSTEXPR_##INF T infinity() { return T(INFINITY); }                                          \
        static MSL_FN MSL_CONSTEXPR_##INF T quiet_NaN() { return T(NAN); }                                              \
    };
#define MSL_CONSTEXPR_2
#define MSL_CONSTEXPR_1 constexpr
#define MSL_CONSTEXPR_0 MSL_HALF_CONSTEXPR
MSL_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON, 24, 1)
MSL_LIMITS(half, 65504.0f, 6.103515625e-05f, 0.0009765625f, 11, 0)
MSL_LIMITS(bfloat, 3.38953139e+38f, FLT_MIN, 0.0078125f, 8, 2)
#undef MSL_LIMITS

// Both are the plain functions: fast math is off here, and the precise ones are what a test can compare with.
#define MSL_SAME                                                                                                        \
    using metal::acos; using metal::acosh; using metal::asin; using metal::asinh; using metal::atan; using metal::atan2; \
    using metal::atanh; using metal::ceil; using metal::copysign; using metal::cos; using metal::cosh; using metal::cospi; \
    using metal::divide; using metal::exp; using metal::exp10; using metal::exp2; using metal::fabs; using metal::abs;   \
    using metal::floor; using metal::fma; using metal::fmax; using metal::fmin; using metal::fmod; using metal::fract;   \
    using metal::frexp; using metal::ldexp; using metal::log; using metal::log10; using metal::log2; using metal::max;   \
    using metal::min; using metal::mix; using metal::modf; using metal::pow; using metal::powr; using metal::rint;       \
    using metal::round; using metal::rsqrt; using metal::saturate; using metal::sign; using metal::sin; using metal::sincos; \
    using metal::sinh; using metal::sinpi; using metal::sqrt; using metal::step; using metal::smoothstep; using metal::tan; \
    using metal::tanh; using metal::tanpi; using metal::trunc; using metal::clamp; using metal::length; using metal::normalize; \
    using metal::distance; using metal::isnan; using metal::isinf; using metal::isfinite;
namespace precise { MSL_SAME }
namespace fast { MSL_SAME }
#undef MSL_SAME

}  // namespace metal
