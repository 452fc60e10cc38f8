// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_MLA_DECODE_PLAN_H_
#define KVTIER_KERNELS_CUDA_MLA_DECODE_PLAN_H_

#include <cstdint>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/mla_decode.h"
#include "kernels/mla_layout.h"
#include "kernels/status.h"

// DecodeMlaBatch's arguments checked and laid out for a card; shared by the launch and the tests.

namespace kvtier::kernels::cuda {

inline constexpr uint32_t kMlaKeyDim = kMlaLatentDim + kMlaRopeDim;
inline constexpr uint32_t kMlaPassRows = 8;
// A warp's accumulators are half of the registers it can have; more warps would only grow the
// shared memory, and two blocks fit on a multiprocessor as it is.
inline constexpr uint32_t kMlaWarps = kDecodeWarpsMin;
inline constexpr uint32_t kMlaBlocksPerMultiprocessor = 2;
// Of a warp: its queries, then its part of the results.
inline constexpr uint32_t kMlaBufferBytes = kMlaPassRows * kMlaKeyDim * sizeof(float);

// Unsealed rows of one kind.
struct MlaTailSide {
  Global<const uint64_t> addresses = {};  // [batch_size]
  uint64_t token_stride = 0;              // Bytes.
  bool is_fp8 = false;                    // Else BF16.
  float scale = 1.0F;
};

struct MlaDecodeParams {
  // As for one kv head whose group is all heads. k_format is kBf16, which says that keys are not in
  // units of g_k: the reader applies g, because ropes have none.
  DecodeParams base;
  MlaTailSide latent;
  MlaTailSide rope;
};

struct MlaDecodePlan {
  MlaDecodeParams params;
  uint32_t grid_size = 0;
  uint32_t shared_bytes = 0;
};

// Errors: kInvalidArgument as DecodeMlaBatch; also if the card has too little shared memory.
Status PlanDecodeMla(const DecodeMlaBatchArgs& args, const DeviceLimits& limits,
                     MlaDecodePlan* plan);

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_MLA_DECODE_PLAN_H_
