// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {
namespace {

constexpr KernelTable kScalar = {.attend_tiles = AttendTilesScalar,
                                 .attend_rows = AttendRowsScalar,
                                 .seal_side = SealSideScalar,
                                 .gather_side = GatherSideScalar};
#if defined(__x86_64__)
constexpr KernelTable kAvx2 = {.attend_tiles = AttendTilesAvx2,
                               .attend_rows = AttendRowsAvx2,
                               .seal_side = SealSideAvx2,
                               .gather_side = GatherSideAvx2};
constexpr KernelTable kAvx512 = {.attend_tiles = AttendTilesAvx512,
                                 .attend_rows = AttendRowsAvx512,
                                 .seal_side = SealSideAvx512,
                                 .gather_side = GatherSideAvx512};
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
#else
    case Isa::kAvx2:
    case Isa::kAvx512:
      return nullptr;
#endif
  }
  return nullptr;
}

}  // namespace kvtier::kernels::cpu
