// What the attention kernels share: their constants, and which rows of the KV region a query reads.
#pragma once
#include "kv.h"

constant uint head_dim [[function_constant(0)]];
constant uint kv_format [[function_constant(1)]];
constant uint layout [[function_constant(2)]];   // int32 values of the window a query: 0, 2, 8
constant bool is_split [[function_constant(3)]];
constant bool has_window = layout > 0;
constant bool is_whole = !is_split;

// The rows of a query, in position order, are numbered; [first, last) are those that it reads.
struct window_rows { int first, last; };

inline window_rows rows_of(device const int * positions, device const int * window, uint query, uint sliding) {
    window_rows w;
    int total = 0, base = 0;
    if (layout == 0) {
        total = positions[query] + 1;
    } else if (layout == 2) {
        base = window[2 * query];
        total = max(window[2 * query + 1] - base, 0);
    } else {
        for (uint r = 0; r < 4; r++) total += window[8 * query + 2 * r + 1];
    }
    w.first = sliding > 0 ? max(total - int(sliding), 0) : 0;
    w.last = total;
    return w;
}

// The cell of row i of a query.
inline uint cell_of(device const int * window, uint query, int i) {
    if (layout == 0) return uint(i);
    if (layout == 2) return uint(window[2 * query] + i);
    for (uint r = 0; r < 4; r++) {
        const int length = window[8 * query + 2 * r + 1];
        if (i < length) return uint(window[8 * query + 2 * r] + i);
        i -= length;
    }
    return 0;
}

// What the splits of a window leave: values (head_dim, n_splits, n_head, n), then pairs of maximum and sum for each part.
inline ulong part_of(constant attn_args & a, uint query, uint head, uint split) {
    return (ulong(query) * a.n_head + head) * a.n_splits + split;
}
inline ulong pairs_from(constant attn_args & a) { return ulong(a.n_queries) * a.n_head * a.n_splits * head_dim; }
