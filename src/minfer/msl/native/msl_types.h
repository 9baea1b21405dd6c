// The types of the Metal Shading Language: scalars, vectors with constructors and swizzles, packed vectors, matrices.
// Shared by every back end: no C or C++ library header may be included here (they put exp, abs, ... into the global
// namespace). A back-end header comes first and defines MSL_FN (qualifier of every function), `half` and MSL_COPY.
//
// A swizzle is no member: the translator prints `v.xy` as `v.template sw<0, 1>()` and `v.xy = e` as
// `v.template ref<0, 1>() = e`, so a vector stays trivial and may live in unions and in packed structs.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef decltype(sizeof(0)) size_t;
typedef long ptrdiff_t;

namespace metal {

// ---- traits

template <class T, T V> struct integral_constant { static constexpr T value = V; typedef T value_type; };
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class A, class C> struct conditional { typedef A type; };
template <class A, class C> struct conditional<false, A, C> { typedef C type; };
template <bool B, class A, class C> using conditional_t = typename conditional<B, A, C>::type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <class T> struct remove_const { typedef T type; };
template <class T> struct remove_const<const T> { typedef T type; };
template <class T> struct remove_volatile { typedef T type; };
template <class T> struct remove_volatile<volatile T> { typedef T type; };
template <class T> struct remove_cv { typedef typename remove_volatile<typename remove_const<T>::type>::type type; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> struct remove_reference { typedef T type; };
template <class T> struct remove_reference<T &> { typedef T type; };
template <class T> struct remove_reference<T &&> { typedef T type; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> struct remove_pointer { typedef T type; };
template <class T> struct remove_pointer<T *> { typedef T type; };
template <class T> using remove_pointer_t = typename remove_pointer<T>::type;
template <class T> struct is_pointer : false_type {};
template <class T> struct is_pointer<T *> : true_type {};
template <class T> constexpr bool is_pointer_v = is_pointer<T>::value;

struct bfloat;
template <class T> struct is_integral : false_type {};
#define MSL_INTEGRAL(T) template <> struct is_integral<T> : true_type {};
MSL_INTEGRAL(bool) MSL_INTEGRAL(char) MSL_INTEGRAL(int8_t) MSL_INTEGRAL(uchar) MSL_INTEGRAL(short) MSL_INTEGRAL(ushort)
MSL_INTEGRAL(int) MSL_INTEGRAL(uint) MSL_INTEGRAL(long) MSL_INTEGRAL(ulong) MSL_INTEGRAL(long long) MSL_INTEGRAL(unsigned long long)
#undef MSL_INTEGRAL
template <class T> constexpr bool is_integral_v = is_integral<T>::value;
template <class T> struct is_floating_point : false_type {};
template <> struct is_floating_point<float> : true_type {};
template <> struct is_floating_point<half> : true_type {};
template <> struct is_floating_point<bfloat> : true_type {};
template <class T> constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T> constexpr bool is_scalar_v = is_integral_v<T> || is_floating_point_v<T> || __is_enum(T);
template <class T> struct is_arithmetic : integral_constant<bool, is_integral_v<T> || is_floating_point_v<T>> {};
template <class T> constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T> struct is_signed : integral_constant<bool, is_floating_point_v<T>> {};
template <> struct is_signed<char> : integral_constant<bool, (char(-1) < 0)> {};
template <> struct is_signed<int8_t> : true_type {};
template <> struct is_signed<short> : true_type {};
template <> struct is_signed<int> : true_type {};
template <> struct is_signed<long> : true_type {};
template <class T> constexpr bool is_signed_v = is_signed<T>::value;
template <class T> constexpr bool is_unsigned_v = is_integral_v<T> && !is_signed_v<T>;
template <class T> struct make_unsigned { typedef T type; };
template <> struct make_unsigned<char> { typedef uchar type; };
template <> struct make_unsigned<int8_t> { typedef uchar type; };
template <> struct make_unsigned<short> { typedef ushort type; };
template <> struct make_unsigned<int> { typedef uint type; };
template <> struct make_unsigned<long> { typedef ulong type; };
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> T &&declval();

template <class To, class From> MSL_FN To as_type(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "as_type between types of different size");
    To to;
    MSL_COPY(&to, &from, sizeof(To));
    return to;
}

// ---- bfloat: the upper half of a float, rounded to nearest even

struct bfloat {
    ushort bits;
    bfloat() = default;
    template <class S, class = enable_if_t<is_integral_v<S> || is_same_v<S, float> || is_same_v<S, half>>>
    MSL_FN bfloat(S value) : bits(round_bits(float(value))) {}
    MSL_FN float wide() const { return as_type<float>(uint(bits) << 16); }
    // Templates, because an implicit way to int as well as from int would make `c ? x : 0` ambiguous.
    template <class F, class = enable_if_t<is_same_v<F, float>>> MSL_FN operator F() const { return wide(); }
    template <class S, class = enable_if_t<is_integral_v<S> || is_same_v<S, half>>, class = void>
    MSL_FN explicit operator S() const { return S(wide()); }
    static MSL_FN ushort round_bits(float value) {
        uint u = as_type<uint>(value);
        if ((u & 0x7fffffffu) > 0x7f800000u) return ushort(u >> 16 | 0x40);  // a NaN stays one
        return ushort((u + 0x7fffu + (u >> 16 & 1)) >> 16);
    }
};
#define MSL_BF(op)                                                                                              \
    MSL_FN bfloat operator op(bfloat a, bfloat b) { return a.wide() op b.wide(); }                              \
    MSL_FN float operator op(bfloat a, float b) { return a.wide() op b; }                                       \
    MSL_FN float operator op(float a, bfloat b) { return a op b.wide(); }                                       \
    template <class S> MSL_FN enable_if_t<is_integral_v<S>, bfloat> operator op(bfloat a, S b) { return a.wide() op float(b); } \
    template <class S> MSL_FN enable_if_t<is_integral_v<S>, bfloat> operator op(S a, bfloat b) { return float(a) op b.wide(); } \
    template <class S> MSL_FN bfloat &operator op##=(bfloat & a, S b) { a = a.wide() op float(b); return a; }     \
    MSL_FN float &operator op##=(float &a, bfloat b) { return a = a op b.wide(); }
MSL_BF(+) MSL_BF(-) MSL_BF(*) MSL_BF(/)
#undef MSL_BF
#define MSL_BF(op)                                                                        \
    MSL_FN bool operator op(bfloat a, bfloat b) { return a.wide() op b.wide(); }          \
    MSL_FN bool operator op(bfloat a, float b) { return a.wide() op b; }                  \
    MSL_FN bool operator op(float a, bfloat b) { return a op b.wide(); }                  \
    template <class S> MSL_FN enable_if_t<is_integral_v<S>, bool> operator op(bfloat a, S b) { return a.wide() op float(b); }
MSL_BF(==) MSL_BF(!=) MSL_BF(<) MSL_BF(>) MSL_BF(<=) MSL_BF(>=)
#undef MSL_BF
MSL_FN bfloat operator-(bfloat a) { a.bits ^= 0x8000; return a; }
MSL_FN bfloat operator+(bfloat a) { return a; }

// ---- vectors

template <class T, int N> struct vec;
template <class T, int N> struct packed_vec;

// What `v.xy = e` and `v.xy += e` assign through.
template <class T, int... I> struct swizzle_ref {
    T *at;
    MSL_FN vec<T, sizeof...(I)> get() const { return vec<T, sizeof...(I)>(at[I]...); }
    MSL_FN void set(vec<T, sizeof...(I)> v) {
        int k = 0;
        ((at[I] = v[k++]), ...);
    }
    template <class V> MSL_FN swizzle_ref &operator=(const V &v) { set(vec<T, sizeof...(I)>(v)); return *this; }
    template <class V> MSL_FN swizzle_ref &operator+=(const V &v) { set(get() + v); return *this; }
    template <class V> MSL_FN swizzle_ref &operator-=(const V &v) { set(get() - v); return *this; }
    template <class V> MSL_FN swizzle_ref &operator*=(const V &v) { set(get() * v); return *this; }
    template <class V> MSL_FN swizzle_ref &operator/=(const V &v) { set(get() / v); return *this; }
    template <class V> MSL_FN swizzle_ref &operator&=(const V &v) { set(get() & v); return *this; }
    template <class V> MSL_FN swizzle_ref &operator|=(const V &v) { set(get() | v); return *this; }
};

#define MSL_VEC_COMMON(N)                                                                                  \
    typedef T value_type;                                                                                  \
    vec() = default;                                                                                       \
    MSL_FN T &operator[](int i) { return (&x)[i]; }                                                        \
    MSL_FN const T &operator[](int i) const { return (&x)[i]; }                                            \
    template <int... I> MSL_FN vec<T, sizeof...(I)> sw() const { return vec<T, sizeof...(I)>((&x)[I]...); } \
    template <int... I> MSL_FN swizzle_ref<T, I...> ref() { return swizzle_ref<T, I...>{&x}; }
#define MSL_SCALAR(S) template <class S, class = enable_if_t<is_scalar_v<S>>>

template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
    T x, y;
    MSL_VEC_COMMON(2)
    MSL_SCALAR(S) MSL_FN constexpr vec(S s) : x(T(s)), y(T(s)) {}
    template <class A, class B> MSL_FN constexpr vec(A a, B b) : x(T(a)), y(T(b)) {}
    template <class U> MSL_FN explicit vec(vec<U, 2> v) : x(T(v.x)), y(T(v.y)) {}
    MSL_FN vec(packed_vec<T, 2> v) : x(v.x), y(v.y) {}
    template <class U> MSL_FN explicit vec(packed_vec<U, 2> v) : x(T(v.x)), y(T(v.y)) {}
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
    T x, y, z;
    MSL_VEC_COMMON(3)
    MSL_SCALAR(S) MSL_FN constexpr vec(S s) : x(T(s)), y(T(s)), z(T(s)) {}
    template <class A, class B, class C> MSL_FN constexpr vec(A a, B b, C c) : x(T(a)), y(T(b)), z(T(c)) {}
    MSL_SCALAR(S) MSL_FN vec(vec<T, 2> v, S c) : x(v.x), y(v.y), z(T(c)) {}
    MSL_SCALAR(S) MSL_FN vec(S a, vec<T, 2> v) : x(T(a)), y(v.x), z(v.y) {}
    template <class U> MSL_FN explicit vec(vec<U, 3> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
    MSL_FN vec(packed_vec<T, 3> v) : x(v.x), y(v.y), z(v.z) {}
    template <class U> MSL_FN explicit vec(packed_vec<U, 3> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
    T x, y, z, w;
    MSL_VEC_COMMON(4)
    MSL_SCALAR(S) MSL_FN constexpr vec(S s) : x(T(s)), y(T(s)), z(T(s)), w(T(s)) {}
    template <class A, class B, class C, class D, class = enable_if_t<is_scalar_v<A> && is_scalar_v<D>>>
    MSL_FN constexpr vec(A a, B b, C c, D d) : x(T(a)), y(T(b)), z(T(c)), w(T(d)) {}
    MSL_FN vec(vec<T, 2> v, vec<T, 2> u) : x(v.x), y(v.y), z(u.x), w(u.y) {}
    MSL_SCALAR(S) MSL_FN vec(vec<T, 3> v, S d) : x(v.x), y(v.y), z(v.z), w(T(d)) {}
    MSL_SCALAR(S) MSL_FN vec(S a, vec<T, 3> v) : x(T(a)), y(v.x), z(v.y), w(v.z) {}
    template <class C, class D> MSL_FN vec(vec<T, 2> v, C c, D d) : x(v.x), y(v.y), z(T(c)), w(T(d)) {}
    template <class A, class D> MSL_FN vec(A a, vec<T, 2> v, D d) : x(T(a)), y(v.x), z(v.y), w(T(d)) {}
    template <class A, class B> MSL_FN vec(A a, B b, vec<T, 2> v) : x(T(a)), y(T(b)), z(v.x), w(v.y) {}
    template <class U> MSL_FN explicit vec(vec<U, 4> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
    MSL_FN vec(packed_vec<T, 4> v) : x(v.x), y(v.y), z(v.z), w(v.w) {}
    template <class U> MSL_FN explicit vec(packed_vec<U, 4> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
};

template <class T> struct packed_vec<T, 2> {
    T x, y;
    packed_vec() = default;
    MSL_FN packed_vec(vec<T, 2> v) : x(v.x), y(v.y) {}
    template <class A, class B> MSL_FN packed_vec(A a, B b) : x(T(a)), y(T(b)) {}
    MSL_SCALAR(S) MSL_FN packed_vec(S s) : x(T(s)), y(T(s)) {}
    MSL_FN T &operator[](int i) { return (&x)[i]; }
    MSL_FN const T &operator[](int i) const { return (&x)[i]; }
    template <int... I> MSL_FN vec<T, sizeof...(I)> sw() const { return vec<T, sizeof...(I)>((&x)[I]...); }
    template <int... I> MSL_FN swizzle_ref<T, I...> ref() { return swizzle_ref<T, I...>{&x}; }
};
template <class T> struct packed_vec<T, 3> {
    T x, y, z;
    packed_vec() = default;
    MSL_FN packed_vec(vec<T, 3> v) : x(v.x), y(v.y), z(v.z) {}
    template <class A, class B, class C> MSL_FN packed_vec(A a, B b, C c) : x(T(a)), y(T(b)), z(T(c)) {}
    MSL_SCALAR(S) MSL_FN packed_vec(S s) : x(T(s)), y(T(s)), z(T(s)) {}
    MSL_FN T &operator[](int i) { return (&x)[i]; }
    MSL_FN const T &operator[](int i) const { return (&x)[i]; }
    template <int... I> MSL_FN vec<T, sizeof...(I)> sw() const { return vec<T, sizeof...(I)>((&x)[I]...); }
    template <int... I> MSL_FN swizzle_ref<T, I...> ref() { return swizzle_ref<T, I...>{&x}; }
};
template <class T> struct packed_vec<T, 4> {
    T x, y, z, w;
    packed_vec() = default;
    MSL_FN packed_vec(vec<T, 4> v) : x(v.x), y(v.y), z(v.z), w(v.w) {}
    template <class A, class B, class C, class D>
    MSL_FN packed_vec(A a, B b, C c, D d) : x(T(a)), y(T(b)), z(T(c)), w(T(d)) {}
    MSL_SCALAR(S) MSL_FN packed_vec(S s) : x(T(s)), y(T(s)), z(T(s)), w(T(s)) {}
    MSL_FN T &operator[](int i) { return (&x)[i]; }
    MSL_FN const T &operator[](int i) const { return (&x)[i]; }
    template <int... I> MSL_FN vec<T, sizeof...(I)> sw() const { return vec<T, sizeof...(I)>((&x)[I]...); }
    template <int... I> MSL_FN swizzle_ref<T, I...> ref() { return swizzle_ref<T, I...>{&x}; }
};

// Operators: spelled out by element (-O2 need not unroll a loop); a scalar becomes a vector, a packed vector a plain one.
#define MSL_MIXED(op)                                                                                                   \
    template <class T, int N, class S, class = enable_if_t<is_scalar_v<S>>>                                             \
    MSL_FN auto operator op(vec<T, N> a, S s) { return a op vec<T, N>(s); }                                              \
    template <class T, int N, class S, class = enable_if_t<is_scalar_v<S>>>                                             \
    MSL_FN auto operator op(S s, vec<T, N> b) { return vec<T, N>(s) op b; }                                              \
    template <class T, int N> MSL_FN auto operator op(packed_vec<T, N> a, packed_vec<T, N> b) { return vec<T, N>(a) op vec<T, N>(b); } \
    template <class T, int N> MSL_FN auto operator op(vec<T, N> a, packed_vec<T, N> b) { return a op vec<T, N>(b); }     \
    template <class T, int N> MSL_FN auto operator op(packed_vec<T, N> a, vec<T, N> b) { return vec<T, N>(a) op b; }     \
    template <class T, int N, class S, class = enable_if_t<is_scalar_v<S>>>                                             \
    MSL_FN auto operator op(packed_vec<T, N> a, S s) { return vec<T, N>(a) op vec<T, N>(s); }                            \
    template <class T, int N, class S, class = enable_if_t<is_scalar_v<S>>>                                             \
    MSL_FN auto operator op(S s, packed_vec<T, N> b) { return vec<T, N>(s) op vec<T, N>(b); }
#define MSL_BINARY(op, R)                                                                                               \
    template <class T> MSL_FN vec<R, 2> operator op(vec<T, 2> a, vec<T, 2> b) { return vec<R, 2>(R(a.x op b.x), R(a.y op b.y)); } \
    template <class T> MSL_FN vec<R, 3> operator op(vec<T, 3> a, vec<T, 3> b) {                                         \
        return vec<R, 3>(R(a.x op b.x), R(a.y op b.y), R(a.z op b.z));                                                  \
    }                                                                                                                   \
    template <class T> MSL_FN vec<R, 4> operator op(vec<T, 4> a, vec<T, 4> b) {                                         \
        return vec<R, 4>(R(a.x op b.x), R(a.y op b.y), R(a.z op b.z), R(a.w op b.w));                                   \
    }                                                                                                                   \
    MSL_MIXED(op)
#define MSL_ARITHMETIC(op)                                                                                              \
    MSL_BINARY(op, T)                                                                                                   \
    template <class T, int N, class B> MSL_FN vec<T, N> &operator op##=(vec<T, N> &a, const B &b) { return a = a op b; }   \
    template <class T, int N, class B> MSL_FN packed_vec<T, N> &operator op##=(packed_vec<T, N> &a, const B &b) {          \
        return a = packed_vec<T, N>(a op b);                                                                            \
    }
MSL_ARITHMETIC(+) MSL_ARITHMETIC(-) MSL_ARITHMETIC(*) MSL_ARITHMETIC(/) MSL_ARITHMETIC(%)
MSL_ARITHMETIC(&) MSL_ARITHMETIC(|) MSL_ARITHMETIC(^) MSL_ARITHMETIC(<<) MSL_ARITHMETIC(>>)
MSL_BINARY(==, bool) MSL_BINARY(!=, bool) MSL_BINARY(<, bool) MSL_BINARY(>, bool) MSL_BINARY(<=, bool) MSL_BINARY(>=, bool)
MSL_BINARY(&&, bool) MSL_BINARY(||, bool)
#undef MSL_ARITHMETIC
#undef MSL_BINARY
#undef MSL_MIXED
#define MSL_UNARY(op, R)                                                                                                \
    template <class T> MSL_FN vec<R, 2> operator op(vec<T, 2> a) { return vec<R, 2>(R(op a.x), R(op a.y)); }             \
    template <class T> MSL_FN vec<R, 3> operator op(vec<T, 3> a) { return vec<R, 3>(R(op a.x), R(op a.y), R(op a.z)); }  \
    template <class T> MSL_FN vec<R, 4> operator op(vec<T, 4> a) { return vec<R, 4>(R(op a.x), R(op a.y), R(op a.z), R(op a.w)); } \
    template <class T, int N> MSL_FN vec<R, N> operator op(packed_vec<T, N> a) { return op vec<T, N>(a); }
MSL_UNARY(+, T) MSL_UNARY(-, T) MSL_UNARY(~, T) MSL_UNARY(!, bool)
#undef MSL_UNARY
template <class T, int N> MSL_FN vec<T, N> &operator++(vec<T, N> &a) { return a += T(1); }
template <class T, int N> MSL_FN vec<T, N> &operator--(vec<T, N> &a) { return a -= T(1); }
template <class T, int N> MSL_FN vec<T, N> operator++(vec<T, N> &a, int) { vec<T, N> old = a; a += T(1); return old; }
template <class T, int N> MSL_FN vec<T, N> operator--(vec<T, N> &a, int) { vec<T, N> old = a; a -= T(1); return old; }
#undef MSL_VEC_COMMON

// ---- matrices: C columns of R rows, column by column in memory

template <class T, int C, int R> struct matrix {
    vec<T, R> columns[C];
    matrix() = default;
    MSL_SCALAR(S) MSL_FN explicit matrix(S s) {
        for (int c = 0; c < C; c++)
            for (int r = 0; r < R; r++) columns[c][r] = c == r ? T(s) : T(0);
    }
    template <class... V, class = enable_if_t<(sizeof...(V) + 1 == C)>>
    MSL_FN matrix(vec<T, R> first, V... rest) : columns{first, vec<T, R>(rest)...} {}
    template <class... S, class = enable_if_t<(sizeof...(S) == C * R) && (is_scalar_v<S> && ...)>, class = void>
    MSL_FN matrix(S... s) {
        const T all[] = {T(s)...};
        for (int c = 0; c < C; c++)
            for (int r = 0; r < R; r++) columns[c][r] = all[c * R + r];
    }
    template <class U> MSL_FN explicit matrix(const matrix<U, C, R> &m) {
        for (int c = 0; c < C; c++) columns[c] = vec<T, R>(m.columns[c]);
    }
    MSL_FN vec<T, R> &operator[](int c) { return columns[c]; }
    MSL_FN const vec<T, R> &operator[](int c) const { return columns[c]; }
};
#undef MSL_SCALAR
template <class T, int C, int R> MSL_FN matrix<T, C, R> operator+(matrix<T, C, R> a, const matrix<T, C, R> &b) {
    for (int c = 0; c < C; c++) a[c] += b[c];
    return a;
}
template <class T, int C, int R> MSL_FN matrix<T, C, R> operator-(matrix<T, C, R> a, const matrix<T, C, R> &b) {
    for (int c = 0; c < C; c++) a[c] -= b[c];
    return a;
}
template <class T, int C, int R> MSL_FN matrix<T, C, R> operator-(matrix<T, C, R> a) {
    for (int c = 0; c < C; c++) a[c] = -a[c];
    return a;
}
template <class T, int C, int R, class S, class = enable_if_t<is_scalar_v<S>>>
MSL_FN matrix<T, C, R> operator*(matrix<T, C, R> a, S s) {
    for (int c = 0; c < C; c++) a[c] *= T(s);
    return a;
}
template <class T, int C, int R, class S, class = enable_if_t<is_scalar_v<S>>>
MSL_FN matrix<T, C, R> operator*(S s, matrix<T, C, R> a) { return a * s; }
template <class T, int C, int R> MSL_FN vec<T, R> operator*(const matrix<T, C, R> &m, vec<T, C> v) {
    vec<T, R> r = m[0] * v[0];
    for (int c = 1; c < C; c++) r += m[c] * v[c];
    return r;
}
template <class T, int C, int R> MSL_FN vec<T, C> operator*(vec<T, R> v, const matrix<T, C, R> &m) {
    vec<T, C> out(T(0));
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) out[c] += m[c][r] * v[r];
    return out;
}
template <class T, int C, int R, int K> MSL_FN matrix<T, C, R> operator*(const matrix<T, K, R> &a, const matrix<T, C, K> &b) {
    matrix<T, C, R> out;
    for (int c = 0; c < C; c++) out[c] = a * b[c];
    return out;
}
template <class T, int C, int R> MSL_FN matrix<T, C, R> &operator+=(matrix<T, C, R> &a, const matrix<T, C, R> &b) { return a = a + b; }
template <class T, int C, int R> MSL_FN matrix<T, C, R> &operator-=(matrix<T, C, R> &a, const matrix<T, C, R> &b) { return a = a - b; }
template <class T, int C, int R, class B> MSL_FN matrix<T, C, R> &operator*=(matrix<T, C, R> &a, const B &b) { return a = a * b; }
template <class T, int C, int R> MSL_FN matrix<T, R, C> transpose(const matrix<T, C, R> &m) {
    matrix<T, R, C> out;
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) out[r][c] = m[c][r];
    return out;
}
template <class T> MSL_FN T determinant(const matrix<T, 2, 2> &m) { return m[0][0] * m[1][1] - m[1][0] * m[0][1]; }
template <class T> MSL_FN T determinant(const matrix<T, 3, 3> &m) {
    return m[0][0] * (m[1][1] * m[2][2] - m[2][1] * m[1][2]) - m[1][0] * (m[0][1] * m[2][2] - m[2][1] * m[0][2]) +
           m[2][0] * (m[0][1] * m[1][2] - m[1][1] * m[0][2]);
}

template <class T, size_t N> struct array {
    T elements[N];
    MSL_FN T &operator[](size_t i) { return elements[i]; }
    MSL_FN const T &operator[](size_t i) const { return elements[i]; }
    MSL_FN constexpr size_t size() const { return N; }
    MSL_FN T *begin() { return elements; }
    MSL_FN T *end() { return elements + N; }
};

#define MSL_NAMES(T)                                                                                                    \
    typedef vec<T, 2> T##2; typedef vec<T, 3> T##3; typedef vec<T, 4> T##4;                                              \
    typedef packed_vec<T, 2> packed_##T##2; typedef packed_vec<T, 3> packed_##T##3; typedef packed_vec<T, 4> packed_##T##4;
MSL_NAMES(bool) MSL_NAMES(char) MSL_NAMES(uchar) MSL_NAMES(short) MSL_NAMES(ushort) MSL_NAMES(int) MSL_NAMES(uint)
MSL_NAMES(long) MSL_NAMES(ulong) MSL_NAMES(half) MSL_NAMES(bfloat) MSL_NAMES(float)
#undef MSL_NAMES
#define MSL_NAMES(T)                                                                                                    \
    typedef matrix<T, 2, 2> T##2x2; typedef matrix<T, 2, 3> T##2x3; typedef matrix<T, 2, 4> T##2x4;                      \
    typedef matrix<T, 3, 2> T##3x2; typedef matrix<T, 3, 3> T##3x3; typedef matrix<T, 3, 4> T##3x4;                      \
    typedef matrix<T, 4, 2> T##4x2; typedef matrix<T, 4, 3> T##4x3; typedef matrix<T, 4, 4> T##4x4;
MSL_NAMES(half) MSL_NAMES(float)
#undef MSL_NAMES

}  // namespace metal
using metal::bfloat;
using metal::as_type;
