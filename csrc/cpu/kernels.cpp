#include "kernels.h"

#include <cstdlib>
#include <string_view>

namespace megatron_probes::cpu {

static const Kernels& choose() {
#if defined(__x86_64__)
  const char* wanted = std::getenv("MEGATRON_PROBES_CPU");
  const bool plain = wanted && std::string_view(wanted) == "baseline";
  if (!plain && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return avx2::kernels;
#endif
  return baseline::kernels;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace megatron_probes::cpu
