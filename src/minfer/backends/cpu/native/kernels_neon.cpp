#define MINFER_ISA neon
#define MINFER_NAME "neon"
#define MINFER_TABLE kNeon
#define MINFER_SIMD "simd_neon.h"
#define MINFER_GEMM_TOKENS 5
#include "kernels.inc"
