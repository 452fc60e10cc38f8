// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_ROW_TYPE_H_
#define KVTIER_KERNELS_CPU_ROW_TYPE_H_

#include "kernels/cpu/transfer.h"
#include "kernels/element.h"

// Internal to kernels/; not for *_avx2.cc or *_avx512.cc, see attend.h.

namespace kvtier::kernels::cpu {

// Requires: a value inside the enum.
constexpr RowType RowTypeOf(ElementType type) {
  switch (type) {
    case ElementType::kBf16:
      return RowType::kBf16;
    case ElementType::kFp16:
      return RowType::kFp16;
    case ElementType::kFp32:
      return RowType::kFp32;
    case ElementType::kFp8E4m3:
      return RowType::kFp8;
  }
  return RowType::kBf16;
}

}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_ROW_TYPE_H_
