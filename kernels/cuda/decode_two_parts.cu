// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode_entry.h"

namespace kvtier::kernels::cuda {

DecodeEntry TwoPartsEntryOf(const DecodePlan& plan) { return EntryOfParts<2>(plan); }

}  // namespace kvtier::kernels::cuda
