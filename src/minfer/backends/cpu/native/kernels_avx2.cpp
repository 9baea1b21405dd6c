#define MINFER_ISA avx2
#define MINFER_NAME "avx2"
#define MINFER_TABLE kAvx2
#define MINFER_SIMD "simd_avx2.h"
#define MINFER_GEMM_TOKENS 5
#include "kernels.inc"
