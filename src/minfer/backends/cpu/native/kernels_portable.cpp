#define MINFER_ISA portable
#define MINFER_NAME "portable"
#define MINFER_TABLE kPortable
#define MINFER_SIMD "simd_portable.h"
#define MINFER_GEMM_TOKENS 5
#include "kernels.inc"
