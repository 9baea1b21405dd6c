// The kernels of one instruction set, as a table of functions. Programs call through it and know no instruction set.
#pragma once

#include "types.h"

namespace minfer {

constexpr int kAttendBlock = 32;   // cells a step of the online softmax
constexpr int kAttendQueries = 16; // most queries in a tile

struct AttendTile {
  const KvRows* kv;
  int first_kv_head, n_kv_heads;
  const float* q;  // of the first query's head 0
  float* out;      // likewise
  int64_t q_stride;  // between queries
  const Window* windows;
  int n_queries, group, head_dim;
  float scale, softcap;  // softcap 0: none
  float* partial;        // not null: of one query, write (largest score, weight, sums) of head h at h * partial_stride
  int64_t partial_stride;
};

constexpr int64_t attend_scratch_floats(int64_t rows, int64_t head_dim) {
  const int64_t width = round_up(head_dim, 16);
  return 2 * rows * width + (2 * kAttendBlock + 8) * width + kAttendBlock + 8 + 2 * rows;
}

struct Kernels {
  const char* name;
  int few_tokens;   // most tokens that `matvec` takes
  int gemm_tokens;  // fewest tokens from which `gemm` is used
  int panel_rows;   // rows that `gemm` unpacks at a time

  void (*quantize_row)(const float* x, int64_t n, uint8_t* out);
  // The product of token t with row i of run s goes to out[t * stride + s * apart + i].
  void (*matvec)(const Matrix& w, const RowRuns& rows, const Activations& a, int64_t n_tokens, float* out, int64_t apart,
                 int64_t stride);
  void (*gemm)(const Matrix& w, int64_t r0, int64_t r1, const Activations& a, int64_t n_tokens, float* out, int64_t stride,
               uint8_t* scratch);
  int64_t (*gemm_scratch)(int64_t n_in);
  void (*matmul_float)(const Matrix& w, int64_t r0, int64_t r1, const Activations& a, int64_t n_tokens, float* out,
                       int64_t stride, float* scratch);
  void (*rms_norm)(const float* x, const float* gain, int64_t n, float eps, float* out);
  void (*unary)(Unary kind, const float* x, float value, int64_t n, float* out);
  void (*binary)(Binary kind, const float* x, const float* y, int64_t n, float* out);
  void (*softmax)(const float* x, int64_t n, float* out);
  int64_t (*next_above)(const float* x, int64_t i, int64_t n, float bound);  // first from i on that is not a number <= bound; n: none
  float (*exp_sum)(const float* x, int64_t n, float* most);                  // of exp(x - most), the largest
  void (*rotate)(float* head, const float* cos, const float* sin, int n_dims, bool neox);
  bool (*pack_kv)(KvFormat format, const float* x, int64_t n, uint8_t* row, int64_t row_bytes);
  void (*attend)(const AttendTile& tile, float* scratch);
  void (*join_partials)(const float* parts, int64_t n, int64_t stride, int head_dim, float* out);
};

extern const Kernels kPortable;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kAvx2, kAvx512;
#elif defined(__aarch64__)
extern const Kernels kNeon;
#endif

// The best set that this machine has, or the one that MINFER_CPU names; null with `why` set where that cannot be had.
const Kernels* pick_kernels(const char* name, const char** why);

// A row of any weight type to floats, each step rounded as minfer.quants does it. The same on every machine.
void dequantize_row(Type type, const uint8_t* row, int64_t n, float* out);

}  // namespace minfer
