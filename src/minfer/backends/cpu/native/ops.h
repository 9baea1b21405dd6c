// Every operation but products and attention. Rows are tokens: `n` of them, `d` floats each.
#pragma once

#include "program.h"

namespace minfer {

std::unique_ptr<Operation> make_embed(const int32_t* ids, int64_t n, const Matrix& w, float* out);
std::unique_ptr<Operation> make_get_rows(const float* x, int64_t n_rows, int64_t d, const int32_t* ids, int64_t n, float* out);
// Of each `d` floats: a token's features, or a head's.
std::unique_ptr<Operation> make_rms_norm(const float* x, const float* gain, int64_t d, int64_t n, float eps, float* out);
std::unique_ptr<Operation> make_unary(Unary kind, const float* x, float value, int64_t n, float* out);
std::unique_ptr<Operation> make_binary(Binary kind, const float* x, const float* y, int64_t n, float* out);
std::unique_ptr<Operation> make_softmax(const float* x, int64_t d, int64_t n, float* out);
// The k largest of each row, as minfer.graph.ir.TopK says: k indices, k values, the logarithm of the sum of exponentials.
std::unique_ptr<Operation> make_top_k(const float* x, int64_t d, int64_t n, int64_t k, int32_t* out);
// out[i][j] = x[i * stride + start + j], n rows of `size`.
std::unique_ptr<Operation> make_view(const float* x, int64_t stride, int64_t start, int64_t size, int64_t n, float* out);
// out is filled in order of its own index; strides of x are given for each of its axes, slowest first.
std::unique_ptr<Operation> make_permute(const float* x, std::vector<int64_t> extents, std::vector<int64_t> strides, float* out);

// cos and sin of every position and pair, computed once a run and read by each layer's rope.
struct RopeTable {
  const int32_t* positions;
  int64_t n;
  std::vector<double> inverse;  // radians a position, one a pair
  double magnitude;
  std::vector<float> cos, sin;  // [n][pairs]
};
std::unique_ptr<Operation> make_rope_table(std::shared_ptr<RopeTable> table);

struct RopeArgs {
  std::shared_ptr<RopeTable> table;
  int64_t head_dim;
  bool neox;
};
std::unique_ptr<Operation> make_rope(const RopeArgs& rope, const float* x, int64_t n_heads, float* out);

std::unique_ptr<Operation> make_kv_store(const float* k, const float* v, const int32_t* cells, int64_t n, const KvRows& kv,
                                         int layer);

struct HeadRopeStoreArgs {
  const float* qkv;
  const int32_t* cells;
  int64_t n, n_head, n_kv_head;
  RopeArgs rope;
  const float *q_bias, *k_bias, *v_bias;  // null: none
  const float *q_gain, *k_gain;           // null: none
  float q_eps, k_eps;
  KvRows kv;
  int layer;
  float* q_out;
};
std::unique_ptr<Operation> make_head_rope_store(const HeadRopeStoreArgs& args);

struct AttnArgs {
  const float* q;
  const int32_t *positions, *window;
  int64_t n, n_head, n_kv_head, head_dim;
  int layout;  // int32 values a query has in `window`: 0, 2 or 8
  float scale, softcap;
  int64_t sliding;  // 0: none
  KvRows kv;
  int layer;
  float* out;
};
std::unique_ptr<Operation> make_attn(const AttnArgs& args);

}  // namespace minfer
