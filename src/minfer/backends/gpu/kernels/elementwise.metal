// One value a thread.
#include "common.h"

constant uint operation [[function_constant(0)]];  // in the order of lower/simple.py
constant bool is_binary [[function_constant(1)]];

// z = f(x) or f(x, y), n values; z may be x or y. Grid: a value a thread.
kernel void elementwise(constant elementwise_args & a [[buffer(0)]], device const float * x [[buffer(1)]],
                        device const float * y [[buffer(2), function_constant(is_binary)]], device float * z [[buffer(3)]],
                        uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    const float u = x[i], v = is_binary ? y[i] : 0.0f;
    float r = 0;
    switch (operation) {
        case 0: r = silu(u); break;
        case 1: r = gelu(u); break;
        case 2: r = u * a.factor; break;
        case 3: r = soft_cap(u, a.factor); break;
        case 4: r = u + v; break;
        case 5: r = u * v; break;
        case 6: r = silu(u) * v; break;
        case 7: r = gelu(u) * v; break;
    }
    z[i] = r;
}
