"""What Apple's compiler refuses is refused here, each for its own reason, with the line."""

from __future__ import annotations

import pytest

from minfer.msl import Library, SourceError

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def kernel(body: str, params: str = "device float * x [[buffer(0)]], uint i [[thread_position_in_grid]]") -> str:
    return f"kernel void k({params}) {{ {body} }}\n"


# (source after HEAD, line of the fault counted from the source's first, part of the reason)
ILLEGAL = {
    "kernel pointer without a space": (kernel("", "float * x [[buffer(0)]]"), 1, "without an address space"),
    "parameter without a space": (
        "void f(float * p) { p[0] = 1; }\n" + kernel(""),
        1,
        "parameter of 'f' is a pointer without an address space",
    ),
    "reference without a space": (
        "void f(float & p) { p = 1; }\n" + kernel(""),
        1,
        "is a reference without an address space",
    ),
    "local pointer without a space": (kernel("float * p = x;"), 1, "'p' is a pointer without an address space"),
    "cast without a space": (kernel("x[0] = *((float *) x);"), 1, "cast to a pointer without an address space"),
    "member without a space": (
        "struct S { float * p; };\n" + kernel(""),
        1,
        "'p' is a pointer without an address space",
    ),
    "wrong space in a declaration": (kernel("threadgroup float * p = x;"), 1, "'x' points to device memory"),
    "wrong space in a cast": (
        kernel("threadgroup float * p = (threadgroup float *) x;"),
        1,
        "'x' points to device memory",
    ),
    "wrong space passed on": (
        "float f(threadgroup float * p) { return p[0]; }\n" + kernel("\nx[0] = f(x);"),
        3,
        "takes a pointer to threadgroup memory",
    ),
    "double": (kernel("double d = 1; x[0] = d;"), 1, "no double"),
    "long double literal": (kernel("x[0] = 1.0L;"), 1, "no double"),
    "long long": (kernel("long long n = 1;"), 1, "long long"),
    "recursion": ("int f(int n) { return n < 2 ? n : f(n - 1); }\n" + kernel("x[i] = f(3);"), 1, "'f' calls itself"),
    "mutual recursion": (
        "int g(int n);\nint f(int n) { return g(n); }\nint g(int n) { return f(n); }\n" + kernel(""),
        2,
        "calls itself",
    ),
    "mutable program-scope data": ("int counter = 0;\n" + kernel(""), 1, "not in the constant address space"),
    "const program-scope data without a space": (
        "const float scale = 2;\n" + kernel(""),
        1,
        "not in the constant address space",
    ),
    "static local": (kernel("static int n = 0; x[0] = n++;"), 1, "static variable in a function"),
    "device variable": (kernel("device float v = 1; x[0] = v;"), 1, "which only the host can make"),
    "constant as array size": (
        "constant int N [[function_constant(0)]];\n" + kernel("float a[N]; x[0] = a[0];"),
        2,
        "cannot be an array size",
    ),
    "constant as threadgroup array size": (
        "constant int N [[function_constant(0)]];\n" + kernel("threadgroup float a[N];"),
        2,
        "cannot be an array size",
    ),
    "constant as template argument": (
        "constant int N [[function_constant(0)]];\ntemplate<int K> float f() { return K; }\n"
        + kernel("x[0] = f<N>();"),
        3,
        "cannot be a template argument",
    ),
    "constant as case label": (
        "constant int N [[function_constant(0)]];\n" + kernel("switch (i) { case N: x[0] = 1; }"),
        2,
        "cannot be a case label",
    ),
    "constant in constexpr": (
        "constant int N [[function_constant(0)]];\n" + kernel("constexpr int n = N; x[0] = n;"),
        2,
        "constexpr variable",
    ),
    "constant with an initializer": (
        "constant int N [[function_constant(0)]] = 3;\n" + kernel(""),
        1,
        "has an initializer",
    ),
    "constants that share an index": (
        "constant int A [[function_constant(1)]];\nconstant int B [[function_constant(1)]];\n" + kernel(""),
        2,
        "share index 1",
    ),
    "buffer index twice": (
        kernel("", "device float * x [[buffer(0)]], device float * y [[buffer(0)]]"),
        1,
        "share buffer(0)",
    ),
    "buffer index 31": (kernel("", "device float * x [[buffer(31)]]"), 1, "a kernel has 31 of them"),
    "no attribute": (
        kernel("", "device float * x [[buffer(0)]], uint i"),
        1,
        "no attribute that says where it comes from",
    ),
    "unknown attribute": (kernel("", "device float * x [[buffr(0)]]"), 1, "unknown attribute 'buffr'"),
    "texture": (kernel("", "device float * t [[texture(0)]]"), 1, "unknown attribute 'texture'"),
    "two attributes": (kernel("", "device float * x [[buffer(0)]] [[threadgroup(0)]]"), 1, "two binding attributes"),
    "thread pointer parameter": (kernel("", "thread float * x [[buffer(0)]]"), 1, "points to thread memory"),
    "pointer to pointer": (kernel("", "device float ** x [[buffer(0)]]"), 1, "pointer to a pointer"),
    "float builtin": (
        kernel("", "device float * x [[buffer(0)]], float i [[thread_position_in_grid]]"),
        1,
        "must be uint or ushort",
    ),
    "vector for a scalar builtin": (
        kernel("", "device float * x [[buffer(0)]], uint2 i [[thread_index_in_simdgroup]]"),
        1,
        "which is a scalar",
    ),
    "threadgroup memory in a function": (
        "void f() { threadgroup float a[4]; }\n" + kernel(""),
        1,
        "in a function that is no kernel",
    ),
    "threadgroup memory at program scope": ("threadgroup float a[4];\n" + kernel(""), 1, "declare it in a kernel"),
    "threadgroup initializer": (kernel("threadgroup int n = 0;"), 1, "has an initializer"),
    "too much threadgroup memory": (
        kernel("threadgroup float a[8193]; a[i] = 0;"),
        1,
        "32772 bytes of threadgroup memory",
    ),
    "kernel that returns": ("kernel float k(device float * x [[buffer(0)]]) { return 1; }\n", 1, "must return void"),
    "kernel named main": ("kernel void main(device float * x [[buffer(0)]]) {}\n", 1, "named main"),
    "kernel called": (kernel("") + "kernel void m(device float * x [[buffer(0)]]) { k(x, 0); }\n", 2, "'k' is called"),
    "kernel twice": (kernel("") + kernel(""), 2, "defined twice"),
    "virtual": ("struct S { virtual int f() { return 1; } };\n" + kernel(""), 1, "virtual functions"),
    "goto": (kernel("again: goto again;"), 1, "goto"),
    "exceptions": (kernel("try { x[0] = 1; } catch (...) {}"), 1, "exceptions"),
    "new": (kernel("auto p = new float;"), 1, "new is not part"),
    "delete": (kernel("delete x;"), 1, "delete is not part"),
    "dynamic_cast": ("struct A {};\n" + kernel("auto p = dynamic_cast<thread A *>(x);"), 2, "dynamic_cast"),
    "standard library": (kernel("x[0] = std::max(1, 2);"), 1, "standard library"),
    "include of a C++ header": ("#include <vector>\n" + kernel(""), 1, "none of the include directories"),
    "include by path": ('#include "/etc/hostname"\n' + kernel(""), 1, "only names below an include directory"),
    "include that climbs": ('#include "../secret.h"\n' + kernel(""), 1, "only names below an include directory"),
    "variable arguments": ("void f(int n, ...) {}\n" + kernel(""), 1, "variable arguments"),
    "hidden function constant": (
        "constant int N [[function_constant(0)]];\n" + kernel("x[0] = N;") + "int f() { int N = 3; return N; }\n",
        3,
        "hides a function constant",
    ),
}


def translate(source: str) -> None:
    """Some faults show only when the kernel is translated."""
    Library(source, name="bad.metal").translate("k", {})


@pytest.mark.parametrize("name", ILLEGAL)
def test_refused_for_its_reason(name: str) -> None:
    text, line, reason = ILLEGAL[name]
    with pytest.raises(SourceError) as caught:
        translate(HEAD + text)
    assert reason in caught.value.reason
    assert (caught.value.file, caught.value.line) == ("bad.metal", line + 2)


LEGAL = {
    "spaces given": "float f(device const float * p, thread float & r) { r = 1; return p[0]; }\n"
    + kernel("float r; x[i] = f(x + 1, r);"),
    "pointer arithmetic is no declaration": kernel("uint a = 2, b = 3; x[i] = a * b; x[i] = (a * b) & 7;"),
    "a constant as a loop bound": "constant int N [[function_constant(0)]];\n"
    + kernel("for (int j = 0; j < N; j++) x[j] = N > 2 ? 1 : 0;"),
    "a derived constant": "constant int N [[function_constant(0)]];\nconstant int M = N * 2;\n" + kernel("x[i] = M;"),
    "overloads may call each other": "float f(float v) { return v; }\nfloat f(int v) { return f(float(v)); }\n"
    + kernel("x[i] = f(1);"),
    "templates may recurse": "template<int N> int f() { return N + f<N - 1>(); }\ntemplate<> int f<0>() { return 0; }\n"
    + kernel("x[i] = f<3>();"),
    "a deleted function": "struct S { S(int) = delete; S() = default; int v; };\n" + kernel("x[i] = 1;"),
    "exactly 32 KiB": kernel("threadgroup float a[8192]; a[i] = 0;"),
    "constant tables": "constant float table[2] = {1, 2};\n"
    "constexpr constant int n = 2;\nconstant static const int m = 3;\n" + kernel("x[i] = table[i % n] + m;"),
    "address space of a template argument": "template<typename T> T first(device const T * p) { return *p; }\n"
    + kernel("x[i] = first<float>(x);"),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_twin_is_taken(name: str) -> None:
    library = Library(HEAD + LEGAL[name])
    assert "msl_k" in library.translate("k", dict.fromkeys(library.unit.constants, 1))
