// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/convert_steps.h"
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {

SealCounts ConvertRowsAvx2(const ConvertRows& rows) { return ConvertAll(rows); }

}  // namespace kvtier::kernels::cpu
