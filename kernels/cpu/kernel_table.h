// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_KERNEL_TABLE_H_
#define KVTIER_KERNELS_CPU_KERNEL_TABLE_H_

#include "kernels/cpu/attend.h"
#include "kernels/isa.h"

namespace kvtier::kernels::cpu {

// The functions of one instruction set. Arguments are validated by the callers.
struct KernelTable {
  AttendTilesFunction attend_tiles;
  AttendRowsFunction attend_rows;
};

extern const KernelTable kScalarKernels;
extern const KernelTable kAvx2Kernels;  // Defined on x86-64 only, as the next.
extern const KernelTable kAvx512Kernels;

// Null if this build does not have it. Whether the processor can run it: IsaIsAvailable.
const KernelTable* KernelsOf(Isa isa);

}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_KERNEL_TABLE_H_
