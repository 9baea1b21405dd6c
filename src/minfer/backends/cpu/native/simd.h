// Vectors that every instruction set shares, as the compilers' own vector types: operators work on all of them.
// One of simd_<isa>.h adds what has no operator. Included once per instruction set, each in its own namespace, by a
// source file compiled for that set; nothing here may be called from another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "types.h"

#define MINFER_INLINE inline __attribute__((always_inline))

namespace minfer::MINFER_ISA {

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t W8 __attribute__((vector_size(32)));
typedef uint8_t U8x32 __attribute__((vector_size(32)));
typedef int8_t S8x32 __attribute__((vector_size(32)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));

// The widest float vector of the instruction set, and the bytes (four a lane) and integers of the same size.
#if defined(MINFER_AVX512)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float VF __attribute__((vector_size(4 * kLanes)));
typedef int32_t VI __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VW __attribute__((vector_size(4 * kLanes)));
typedef uint8_t VB __attribute__((vector_size(4 * kLanes)));

template <class V>
MINFER_INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
MINFER_INLINE void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

template <class To, class From>
MINFER_INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class V>
MINFER_INLINE V splat(float x) {
  return x - V{};  // folds to a broadcast, which 0 + x (that loses -0) would not
}

// The first n < lanes values, the rest zero; and the store that leaves the rest alone.
MINFER_INLINE VF load_part(const float* p, int64_t n) {
  VF v{};
  std::memcpy(&v, p, 4 * n);
  return v;
}
MINFER_INLINE void store_part(float* p, VF v, int64_t n) { std::memcpy(p, &v, 4 * n); }

MINFER_INLINE F8 to_float(I8 v) { return __builtin_convertvector(v, F8); }
#if defined(MINFER_AVX512)
MINFER_INLINE VF to_float(VI v) { return __builtin_convertvector(v, VF); }
#endif

template <class V>
MINFER_INLINE V vmax(V a, V b) {
  return a > b ? a : b;
}

MINFER_INLINE VF vabs(VF v) { return bits<VF>(bits<VW>(v) & 0x7fffffffu); }

}  // namespace minfer::MINFER_ISA
