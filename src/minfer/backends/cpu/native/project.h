// Matrix products: one activation, normed if asked, times up to three weights, with what follows each product.
#pragma once

#include "program.h"

namespace minfer {

enum class Epilogue : int { None, Bias, Add, SwiGLU, GeGLU };

struct ProjectArgs {
  const float* x;
  int64_t n_in, n_tokens;
  const float* gain;  // null: no norm
  float eps;
  std::vector<Matrix> segments;
  std::vector<const float*> biases;  // with Bias: one a segment
  const float* residual;             // with Add
  Epilogue epilogue;
  float* out;
  int64_t top_k;    // not 0: of one segment without an epilogue, only the `top_k` largest of each token
  int32_t* ranked;  // are written, here, as make_top_k does
};

std::unique_ptr<Operation> make_project(const ProjectArgs& args);

}  // namespace minfer
