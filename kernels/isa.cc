// SPDX-License-Identifier: Apache-2.0
#include "kernels/isa.h"

#include <cstdlib>
#include <cstring>

#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels {
namespace {

bool CpuHas(Isa isa) {
#if defined(__x86_64__)
  // The builtins also check that the operating system saves the registers.
  const bool has_avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
                        __builtin_cpu_supports("f16c") != 0;
  const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") != 0 &&
      __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
      __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512vbmi") != 0 &&
      __builtin_cpu_supports("avx512vbmi2") != 0 && __builtin_cpu_supports("avx512vnni") != 0 &&
      __builtin_cpu_supports("avx512bf16") != 0;
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return has_avx2;
    case Isa::kAvx512:
      return has_avx512;
    case Isa::kNeon:
      return false;
  }
  return false;
#else
  // NEON is part of every AArch64 processor.
  return isa == Isa::kScalar || isa == Isa::kNeon;
#endif
}

Isa ChooseIsa() {
  const char* wanted = std::getenv("KVTIER_KERNELS_ISA");
  Isa best = Isa::kScalar;
  for (const Isa isa : kAllIsas) {
    if (!IsaIsAvailable(isa)) continue;
    best = isa;
    if (wanted != nullptr && std::strcmp(wanted, IsaName(isa)) == 0) return isa;
  }
  return best;
}

}  // namespace

bool IsaIsAvailable(Isa isa) { return cpu::KernelsOf(isa) != nullptr && CpuHas(isa); }

Isa BestIsa() {
  static const Isa best = ChooseIsa();
  return best;
}

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kNeon:
      return "neon";
  }
  return "unknown";
}

}  // namespace kvtier::kernels
