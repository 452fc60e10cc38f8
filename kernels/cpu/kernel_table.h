// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_KERNEL_TABLE_H_
#define KVTIER_KERNELS_CPU_KERNEL_TABLE_H_

#include "kernels/cpu/attend.h"
#include "kernels/cpu/transfer.h"
#include "kernels/isa.h"

namespace kvtier::kernels::cpu {

// The functions of one instruction set. Arguments are validated by the callers.
struct KernelTable {
  AttendTilesFunction attend_tiles;
  AttendRowsFunction attend_rows;
  SealSideFunction seal_side;
  GatherSideFunction gather_side;
};

// The functions, by instruction set; the SIMD ones are defined on x86-64 only.
bool AttendTilesScalar(const AttendQuery& query, const AttendTiles& tiles);
void AttendRowsScalar(const AttendQuery& query, const AttendRows& part);
SealCounts SealSideScalar(const SealSide& side);
void GatherSideScalar(const GatherSide& side);
bool AttendTilesAvx2(const AttendQuery& query, const AttendTiles& tiles);
void AttendRowsAvx2(const AttendQuery& query, const AttendRows& part);
SealCounts SealSideAvx2(const SealSide& side);
void GatherSideAvx2(const GatherSide& side);
bool AttendTilesAvx512(const AttendQuery& query, const AttendTiles& tiles);
void AttendRowsAvx512(const AttendQuery& query, const AttendRows& part);
SealCounts SealSideAvx512(const SealSide& side);
void GatherSideAvx512(const GatherSide& side);

// Null if this build does not have it. Whether the processor can run it: IsaIsAvailable.
const KernelTable* KernelsOf(Isa isa);

}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_KERNEL_TABLE_H_
