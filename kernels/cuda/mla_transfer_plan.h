// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_MLA_TRANSFER_PLAN_H_
#define KVTIER_KERNELS_CUDA_MLA_TRANSFER_PLAN_H_

#include "kernels/cuda/mla_transfer.h"
#include "kernels/cuda/transfer_params.h"
#include "kernels/status.h"

// Internal: the plans of transfer_params.h for latents (as K) and ropes (as V). Of TileParams the
// V scales are not used; v_data_offset is where the ropes begin.

namespace kvtier::kernels::cuda {

// Checks the arguments and plans the launch. Pure. Errors: kInvalidArgument.
Status PlanSealMla(const SealMlaBlocksArgs& args, SealPlan* plan);
Status PlanGatherMla(const GatherMlaBlocksArgs& args, GatherPlan* plan);

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_MLA_TRANSFER_PLAN_H_
