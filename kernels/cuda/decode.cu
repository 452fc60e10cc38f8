// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode.h"
#include "kernels/cuda/decode_entry.h"
#include "kernels/cuda/decode_launch.h"
#include "kernels/cuda/decode_plan.h"

namespace kvtier::kernels::cuda {

Status DecodeBatch(const DecodeBatchArgs& args, Stream stream) {
  DecodePlan plan;
  if (const Status status = PlanDecode(args, kAnyDevice, &plan); !status.ok()) return status;
  DeviceLimits limits;
  if (const Status status = ReadLimits(&limits); !status.ok()) return status;
  if (const Status status = PlanDecode(args, limits, &plan); !status.ok()) return status;
  return LaunchDecode(plan.query_parts == 2 ? TwoPartsEntryOf(plan) : EntryOfParts<1>(plan),
                      plan.params, {plan.grid_size, plan.warp_count, plan.shared_bytes}, stream);
}

}  // namespace kvtier::kernels::cuda
