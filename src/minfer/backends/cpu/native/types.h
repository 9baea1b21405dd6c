// What the native core is made of: weight types, matrices, activations, KV rows. Plain data, no behaviour.
#pragma once

#include <cstddef>
#include <cstdint>

namespace minfer {

// In the order of TYPES in layout.h, which has the names and block sizes.
enum class Type : int {
  F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
};
constexpr int kTypes = 16;

constexpr bool is_float(Type type) { return type <= Type::BF16; }

// A weight in place in the mapped file: n_out rows of n_in values.
struct Matrix {
  Type type;
  const uint8_t* data;
  int64_t n_in, n_out, row_bytes;
};

// Rows that are multiplied side by side: kStreams runs of `count` rows, the first from row `first`, the next ones `apart` rows
// from each other; rows from `end` on are not there. Memory gives more to a thread that reads several streams.
constexpr int kStreams = 4;
struct RowRuns {
  int64_t first, count, apart, end;
};

// Activations are multiplied in two forms. Float weights take `f32`, rows of `f32_stride` floats. Block formats take
// `q8`, rows of `q8_stride` bytes that Q8Row describes.
struct Activations {
  const float* f32;
  int64_t f32_stride;
  const uint8_t* q8;
  int64_t q8_stride;
};

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// One quantized row: x is about d * code, with one d for 32 values. The row is padded with zeros to a multiple of 256.
struct Q8Row {
  int8_t* codes;
  float* d;       // a block of 32
  float* sums;    // d times the sum of its codes: what a block's minimum is multiplied with
  float* d_half;  // the same two for each 16 values, for formats with a scale for every 16
  float* sums_half;
};

constexpr int64_t q8_row_bytes(int64_t n_in) {
  const int64_t k = round_up(n_in, 256);
  return k + 4 * (2 * (k / 32) + 2 * (k / 16));
}

static inline Q8Row q8_row(uint8_t* base, int64_t n_in) {
  const int64_t k = round_up(n_in, 256);
  float* d = reinterpret_cast<float*>(base + k);
  return {reinterpret_cast<int8_t*>(base), d, d + k / 32, d + k / 16, d + k / 8};
}

static inline Q8Row q8_row(const uint8_t* base, int64_t n_in) { return q8_row(const_cast<uint8_t*>(base), n_in); }

enum class KvFormat : int { F32, F16, Q8_0 };

// K or V rows of one layer.
struct KvRows {
  KvFormat format;
  int64_t n_cells, n_values, row_bytes;
  uint8_t *k, *v;
};

// Cells [begin, end) that a query reads.
struct Run {
  int32_t begin, end;
};
constexpr int kRuns = 4;
struct Window {
  Run runs[kRuns];
};

enum class Unary : int { Silu, Gelu, Scale, SoftCap };
enum class Binary : int { Add, Mul, SwiGLU, GeGLU };

}  // namespace minfer
