// Names and block sizes of the weight types, in the order of Type.
#pragma once

#include <cstring>

#include "types.h"

namespace minfer {

struct TypeLayout {
  const char* name;
  int block_size, block_bytes;
};

constexpr TypeLayout kLayouts[kTypes] = {
    {"F32", 1, 4},     {"F16", 1, 2},      {"BF16", 1, 2},     {"Q4_0", 32, 18},   {"Q4_1", 32, 20},  {"Q5_0", 32, 22},
    {"Q5_1", 32, 24},  {"Q8_0", 32, 34},   {"Q2_K", 256, 84},  {"Q3_K", 256, 110}, {"Q4_K", 256, 144}, {"Q5_K", 256, 176},
    {"Q6_K", 256, 210}, {"IQ4_NL", 32, 18}, {"IQ4_XS", 256, 136}, {"MXFP4", 32, 17},
};

// Index of a name, -1 for one that is not there.
inline int type_of_name(const char* name) {
  for (int i = 0; i < kTypes; ++i)
    if (std::strcmp(kLayouts[i].name, name) == 0) return i;
  return -1;
}

}  // namespace minfer
