// Moving rows: token embedding, chosen rows, strided copies (view, reshape, permute), and KV rows between cells.
#include "weights.h"

constant ushort type_0 [[function_constant(0)]];

// y (n_in, n_tokens) = rows of w (n_in values each) by id. Grid: x, 16 values a thread; y, a token. Ids are checked on
// the host.
kernel void embed(constant embed_args & a [[buffer(0)]], device const int * ids [[buffer(1)]], device const uchar * w [[buffer(2)]],
                  device float * y [[buffer(3)]], uint2 at [[thread_position_in_grid]]) {
    if (16 * at.x >= a.n_in) return;
    float4 v[4];
    weight16(type_0, w + ulong(uint(ids[at.y])) * a.row_bytes, a.n_in, at.x, v);
    for (uint i = 0; i < 16 && 16 * at.x + i < a.n_in; i++) y[ulong(at.y) * a.n_in + 16 * at.x + i] = v[i / 4][i % 4];
}

// y (d, m): row i is row ids[i] of x (d, n). Grid: x, a feature a thread; y, a row. Ids are checked on the host.
kernel void get_rows(constant copy_args & a [[buffer(0)]], device const float * x [[buffer(1)]], device const int * ids [[buffer(2)]],
                     device float * y [[buffer(3)]], uint2 at [[thread_position_in_grid]]) {
    if (at.x < a.extent[0]) y[ulong(at.y) * a.extent[0] + at.x] = x[ulong(uint(ids[at.y])) * a.extent[0] + at.x];
}

// y, dense with extents (e0, e1, e2, e3), e0 fastest, from x at start + sum of index * stride. Grid: a value a thread.
kernel void copy_strided(constant copy_args & a [[buffer(0)]], device const float * x [[buffer(1)]], device float * y [[buffer(2)]],
                         uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    uint rest = i, from = a.start;
    for (uint k = 0; k < 4; k++) {
        from += rest % a.extent[k] * a.stride[k];
        rest /= a.extent[k];
    }
    y[i] = x[from];
}

// Rows source ... source + count - 1 of a region to target ..., verbatim; the two may overlap. A row is `words` words.
// A row that is written over is read by the row that is |target - source| before or after it in the move, and by no other:
// rows of one remainder by that distance are a strand, moved by one thread a word from the end where nothing is lost.
// Grid: x, a word a thread; y, strands.
kernel void move_rows(constant move_args & a [[buffer(0)]], device uint * rows [[buffer(1)]], uint2 at [[thread_position_in_grid]]) {
    if (at.x >= a.words) return;
    for (uint i = at.y; i < a.count; i += a.strands) {
        const uint r = a.target < a.source ? i : a.count - 1 - i;
        rows[ulong(a.target + r) * a.words + at.x] = rows[ulong(a.source + r) * a.words + at.x];
    }
}
