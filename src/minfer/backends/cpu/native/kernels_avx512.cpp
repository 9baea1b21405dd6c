#define MINFER_AVX512 1
#define MINFER_ISA avx512
#define MINFER_NAME "avx512"
#define MINFER_TABLE kAvx512
#define MINFER_SIMD "simd_avx512.h"
#define MINFER_GEMM_TOKENS 5
#include "kernels.inc"
