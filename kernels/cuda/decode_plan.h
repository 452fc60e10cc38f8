// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_PLAN_H_
#define KVTIER_KERNELS_CUDA_DECODE_PLAN_H_

#include <cstdint>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/decode_params.h"
#include "kernels/status.h"

// Arguments of decode checked and laid out for a card; shared by the launches and the tests.

namespace kvtier::kernels::cuda {

struct DecodePlan {
  DecodeParams params;
  // Template arguments of the kernel.
  uint32_t head_dim = 0;
  uint32_t tiles_n = 1;      // Of 8 query rows.
  uint32_t query_parts = 1;  // FP16 numbers whose sum is a query's value.
  uint32_t grid_size = 0;
  uint32_t warp_count = 0;
  uint32_t shared_bytes = 0;
};

// Limits that refuse nothing: a plan for them says whether the arguments are right, before a device
// is asked.
inline constexpr DeviceLimits kAnyDevice{.multiprocessor_count = 1,
                                         .shared_bytes_per_block = UINT32_MAX};

// Errors: kInvalidArgument as DecodeBatch; also if the card has too little shared memory.
Status PlanDecode(const DecodeBatchArgs& args, const DeviceLimits& limits, DecodePlan* plan);

template <uint32_t kHeadDim, uint32_t kTilesN, uint32_t kParts>
struct DecodeShape {};

// choose(DecodeShape) with the template arguments of a plan.
template <uint32_t kParts, typename Choose>
auto ChooseDecodeOfParts(const DecodePlan& plan, const Choose& choose) {
  const bool two = plan.tiles_n == 2;
  switch (plan.head_dim) {
    case 64:
      return two ? choose(DecodeShape<64, 2, kParts>()) : choose(DecodeShape<64, 1, kParts>());
    case 96:
      return two ? choose(DecodeShape<96, 2, kParts>()) : choose(DecodeShape<96, 1, kParts>());
    case 128:
      return two ? choose(DecodeShape<128, 2, kParts>()) : choose(DecodeShape<128, 1, kParts>());
    case 192:
      return choose(DecodeShape<192, 1, kParts>());
    default:
      return choose(DecodeShape<256, 1, kParts>());
  }
}
template <typename Choose>
auto ChooseDecode(const DecodePlan& plan, const Choose& choose) {
  return plan.query_parts == 2 ? ChooseDecodeOfParts<2>(plan, choose)
                               : ChooseDecodeOfParts<1>(plan, choose);
}

// Of DecodeBatch and DecodeMlaBatch alike: batch, table, queries, scores and results. Of
// block_shape only kv_head_count and block_tokens are read.
Status ValidateBatch(const DecodeBatchArgs& args);
void LayOutBatch(const DecodeBatchArgs& args, uint32_t pass_rows, DecodeParams* params);

// What a launch needs between its blocks: counters, then partial results of partial_floats each.
struct DecodeWorkspace {
  uint32_t split_slots = 0;
  uint64_t arrival_bytes = 0;
  uint64_t bytes = 0;  // Of all; 0: more items than a launch, which counts in 32 bits, can have.

  // Of parameters whose shapes, counts of heads and passes, and table are set.
  DecodeWorkspace(const DecodeParams& params, uint32_t partial_floats);

  // Errors: kInvalidArgument if there is no memory or it is not aligned to 256 bytes, or if there
  // are more items than a launch can have.
  Status Place(void* memory, DecodeParams* params) const;
};

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_DECODE_PLAN_H_
