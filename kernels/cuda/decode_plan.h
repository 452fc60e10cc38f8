// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_PLAN_H_
#define KVTIER_KERNELS_CUDA_DECODE_PLAN_H_

#include <cstdint>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/decode_params.h"
#include "kernels/status.h"

// DecodeBatch's arguments checked and laid out for a card; shared by the launch and the tests.

namespace kvtier::kernels::cuda {

struct DecodePlan {
  DecodeParams params;
  uint32_t tiles_n = 1;  // Of 8 query rows: the kernel's template argument.
  uint32_t grid_size = 0;
  uint32_t warp_count = 0;
  uint32_t shared_bytes = 0;
};

// Errors: kInvalidArgument as DecodeBatch; also if the card has too little shared memory.
Status PlanDecode(const DecodeBatchArgs& args, const DeviceLimits& limits, DecodePlan* plan);

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_DECODE_PLAN_H_
