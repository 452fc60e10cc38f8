// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {

const KernelTable* KernelsOf(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return &kScalarKernels;
#if defined(__x86_64__)
    case Isa::kAvx2:
      return nullptr;
    case Isa::kAvx512:
      return &kAvx512Kernels;
#else
    case Isa::kAvx2:
    case Isa::kAvx512:
      return nullptr;
#endif
  }
  return nullptr;
}

}  // namespace kvtier::kernels::cpu
