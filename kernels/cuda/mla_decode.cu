// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode_launch.h"
#include "kernels/cuda/decode_plan.h"
#include "kernels/cuda/mla_decode.h"
#include "kernels/cuda/mla_decode_kernel.h"
#include "kernels/cuda/mla_decode_plan.h"

namespace kvtier::kernels::cuda {
namespace {

__global__ void __launch_bounds__(32 * kMlaWarps, kMlaBlocksPerMultiprocessor)
    MlaDecodeKernel(const __grid_constant__ MlaDecodeParams params) {
  MlaDecodeBody<CurrentArch>(params);
}

}  // namespace

Status DecodeMlaBatch(const DecodeMlaBatchArgs& args, Stream stream) {
  MlaDecodePlan plan;
  if (const Status status = PlanDecodeMla(args, kAnyDevice, &plan); !status.ok()) return status;
  DeviceLimits limits;
  if (const Status status = ReadLimits(&limits); !status.ok()) return status;
  if (const Status status = PlanDecodeMla(args, limits, &plan); !status.ok()) return status;
  return LaunchDecode(MlaDecodeKernel, plan.params, {plan.grid_size, kMlaWarps, plan.shared_bytes},
                      stream);
}

}  // namespace kvtier::kernels::cuda
