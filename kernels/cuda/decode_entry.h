// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_ENTRY_H_
#define KVTIER_KERNELS_CUDA_DECODE_ENTRY_H_

#include <cstdint>

#include "kernels/cuda/decode_kernel.h"
#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/decode_plan.h"

// The decode kernels as the device enters them. Only nvcc reads this, which takes seconds for each
// kernel and architecture: those of one and of two query parts are compiled side by side.

namespace kvtier::kernels::cuda {

using DecodeEntry = void (*)(DecodeParams);

template <uint32_t kHeadDim, uint32_t kTilesN, uint32_t kParts>
__global__ void __launch_bounds__(32 * kDecodeWarpsMax,
                                  1)  // One block: it takes all shared memory.
    DecodeKernel(const __grid_constant__ DecodeParams params) {
  DecodeBody<CurrentArch, kHeadDim, kTilesN, kParts>(params);
}

template <uint32_t kParts>
DecodeEntry EntryOfParts(const DecodePlan& plan) {
  return ChooseDecodeOfParts<kParts>(
      plan, []<uint32_t kHeadDim, uint32_t kTilesN>(DecodeShape<kHeadDim, kTilesN, kParts>) {
        return DecodeEntry{DecodeKernel<kHeadDim, kTilesN, kParts>};
      });
}

// decode_two_parts.cu: of a plan with two query parts.
DecodeEntry TwoPartsEntryOf(const DecodePlan& plan);

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_DECODE_ENTRY_H_
