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
  AttendMlaTilesFunction attend_mla_tiles;
  AttendMlaRowsFunction attend_mla_rows;
  SealSideFunction seal_side;
  GatherSideFunction gather_side;
  SealSideFunction seal_latents;  // SideOrder::kLatent; the others take the orders of K and V.
  GatherSideFunction gather_latents;
  ConvertRowsFunction convert_rows;
};

// The functions, by instruction set: Avx2 and Avx512 are defined on x86-64 only, Neon on little
// endian AArch64 only.
bool AttendTilesScalar(const AttendQuery& query, const AttendTiles& tiles);
void AttendRowsScalar(const AttendQuery& query, const AttendRows& part);
bool AttendMlaTilesScalar(const AttendQuery& query, const AttendMlaTiles& tiles);
void AttendMlaRowsScalar(const AttendQuery& query, const AttendMlaRows& part);
SealCounts SealSideScalar(const SealSide& side);
void GatherSideScalar(const GatherSide& side);
SealCounts ConvertRowsScalar(const ConvertRows& rows);
bool AttendTilesAvx2(const AttendQuery& query, const AttendTiles& tiles);
void AttendRowsAvx2(const AttendQuery& query, const AttendRows& part);
bool AttendMlaTilesAvx2(const AttendQuery& query, const AttendMlaTiles& tiles);
void AttendMlaRowsAvx2(const AttendQuery& query, const AttendMlaRows& part);
SealCounts SealSideAvx2(const SealSide& side);
void GatherSideAvx2(const GatherSide& side);
SealCounts ConvertRowsAvx2(const ConvertRows& rows);
bool AttendTilesAvx512(const AttendQuery& query, const AttendTiles& tiles);
void AttendRowsAvx512(const AttendQuery& query, const AttendRows& part);
bool AttendMlaTilesAvx512(const AttendQuery& query, const AttendMlaTiles& tiles);
void AttendMlaRowsAvx512(const AttendQuery& query, const AttendMlaRows& part);
SealCounts SealSideAvx512(const SealSide& side);
void GatherSideAvx512(const GatherSide& side);
SealCounts ConvertRowsAvx512(const ConvertRows& rows);
bool AttendTilesNeon(const AttendQuery& query, const AttendTiles& tiles);
void AttendRowsNeon(const AttendQuery& query, const AttendRows& part);
bool AttendMlaTilesNeon(const AttendQuery& query, const AttendMlaTiles& tiles);
void AttendMlaRowsNeon(const AttendQuery& query, const AttendMlaRows& part);
SealCounts SealSideNeon(const SealSide& side);
void GatherSideNeon(const GatherSide& side);

// Null if this build does not have it. Whether the processor can run it: IsaIsAvailable.
const KernelTable* KernelsOf(Isa isa);

}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_KERNEL_TABLE_H_
