// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_SEAL_H_
#define KVTIER_KERNELS_CUDA_SEAL_H_

#include <cstdint>

#include "kernels/cuda/blocks.h"
#include "kernels/nvfp4.h"
#include "kernels/status.h"

namespace kvtier::kernels::cuda {

// In device memory; sealing adds to it.
struct SealCounters {
  uint32_t nonfinite_count = 0;  // Vectors, as SealStats.
  uint32_t saturated_count = 0;
  uint32_t refused_count = 0;  // Tiles that were not written: a scale is not valid.
  uint32_t reserved = 0;
};
static_assert(sizeof(SealCounters) == 16);

struct SealBlocksArgs {
  DeviceBlocks blocks;
  DeviceRows k;  // Both of one type.
  DeviceRows v;
  DevicePages pages;
  // [layer_count][kv_head_count], as SealOptions::g_k: of NVFP4 sides powers of two in [2^-100,
  // 2^100], of FP8 sides above 0 with a finite reciprocal. Not read for BF16 sides.
  const float* g_k = nullptr;
  const float* g_v = nullptr;
  // [layer_count][kv_head_count][head_dim] or null: x = bf16((k - mean) * inverse_smooth), where
  // inverse_smooth is 1 / k_smooth as SealTile rounds it. Both or none; multiples of 16 bytes.
  const float* k_mean = nullptr;
  const float* k_inverse_smooth = nullptr;
  ScaleSearch search = ScaleSearch::kAmax6;
  SealCounters* counters = nullptr;  // One, or with counters_per_block [entry_count_max].
  bool counters_per_block = false;
};

// Seals many blocks, K and V of every layer and kv head, on `stream`: the bytes that SealTile
// writes, in every format. All pointers are to device memory, which must stay as it is until the
// work is done. Allocates nothing, does not wait, reads nothing from the device: can be captured in
// a graph. No workspace. Thread-safe for disjoint blocks and counters. Errors: kInvalidArgument for
// what the host can see, before anything is launched; kUnavailable if the launch fails.
Status SealBlocks(const SealBlocksArgs& args, Stream stream);

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_SEAL_H_
