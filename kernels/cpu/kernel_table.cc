// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {
namespace {

constexpr KernelTable kScalar = {.attend_tiles = AttendTilesScalar,
                                 .attend_rows = AttendRowsScalar,
                                 .attend_mla_tiles = AttendMlaTilesScalar,
                                 .attend_mla_rows = AttendMlaRowsScalar,
                                 .seal_side = SealSideScalar,
                                 .gather_side = GatherSideScalar,
                                 .seal_latents = SealSideScalar,
                                 .gather_latents = GatherSideScalar,
                                 .convert_rows = ConvertRowsScalar};
#if defined(__x86_64__)
constexpr KernelTable kAvx2 = {.attend_tiles = AttendTilesAvx2,
                               .attend_rows = AttendRowsAvx2,
                               .attend_mla_tiles = AttendMlaTilesAvx2,
                               .attend_mla_rows = AttendMlaRowsAvx2,
                               .seal_side = SealSideAvx2,
                               .gather_side = GatherSideAvx2,
                               .seal_latents = SealSideAvx2,
                               .gather_latents = GatherSideAvx2,
                               .convert_rows = ConvertRowsAvx2};
constexpr KernelTable kAvx512 = {.attend_tiles = AttendTilesAvx512,
                                 .attend_rows = AttendRowsAvx512,
                                 .attend_mla_tiles = AttendMlaTilesAvx512,
                                 .attend_mla_rows = AttendMlaRowsAvx512,
                                 .seal_side = SealSideAvx512,
                                 .gather_side = GatherSideAvx512,
                                 .seal_latents = SealSideAvx512,
                                 .gather_latents = GatherSideAvx512,
                                 .convert_rows = ConvertRowsAvx512};
#elif defined(__AARCH64EL__)
constexpr KernelTable kNeon = {.attend_tiles = AttendTilesNeon,
                               .attend_rows = AttendRowsNeon,
                               .attend_mla_tiles = AttendMlaTilesNeon,
                               .attend_mla_rows = AttendMlaRowsNeon,
                               .seal_side = SealSideNeon,
                               .gather_side = GatherSideNeon,
                               .seal_latents = SealSideNeon,
                               .gather_latents = GatherSideNeon,
                               // Compiled from loops: NEON by the flags of the whole build.
                               .convert_rows = ConvertRowsScalar};
#endif

}  // namespace

const KernelTable* KernelsOf(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return &kScalar;
#if defined(__x86_64__)
    case Isa::kAvx2:
      return &kAvx2;
    case Isa::kAvx512:
      return &kAvx512;
#elif defined(__AARCH64EL__)
    case Isa::kNeon:
      return &kNeon;
#endif
    default:
      break;
  }
  return nullptr;
}

}  // namespace kvtier::kernels::cpu
