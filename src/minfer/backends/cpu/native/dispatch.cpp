// Which instruction set runs here.
#include <cstring>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace minfer {

namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
bool has_dot_product() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
  return true;  // every 64-bit Apple chip that runs a supported macOS
#endif
}
#endif

}  // namespace

const Kernels* pick_kernels(const char* name, const char** why) {
  const bool any = name == nullptr || *name == '\0';
  const auto is = [&](const char* which) { return !any && std::strcmp(name, which) == 0; };
  if (is("portable")) return &kPortable;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (has_avx512() && (any || is("avx512"))) return &kAvx512;
  if (has_avx2() && (any || is("avx2"))) return &kAvx2;
  const bool known = is("avx2") || is("avx512");
#elif defined(__aarch64__)
  if (has_dot_product() && (any || is("neon"))) return &kNeon;
  const bool known = is("neon");
#else
  const bool known = false;
#endif
  if (any) return &kPortable;
  *why = known ? "this processor does not have it" : "expected one of portable, avx2, avx512 (x86-64), neon (arm64)";
  return nullptr;
}

}  // namespace minfer
