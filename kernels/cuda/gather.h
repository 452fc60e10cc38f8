// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_GATHER_H_
#define KVTIER_KERNELS_CUDA_GATHER_H_

#include <cstdint>

#include "kernels/cuda/blocks.h"
#include "kernels/status.h"

namespace kvtier::kernels::cuda {

// In device memory; gathering adds to it.
struct GatherCounters {
  // Scale bytes above 0x7E and NaNs of FP8 sides, counted once for each 16-byte store that needed
  // one: the bytes are no tile (kDataLoss). Their values come out as zeros.
  uint32_t invalid_count = 0;
  uint32_t refused_count = 0;  // Tiles that were not read: a scale is not valid.
};
static_assert(sizeof(GatherCounters) == 8);

struct GatherBlocksArgs {
  DeviceBlocks blocks;
  DeviceRows k;  // Written. Both of one type.
  DeviceRows v;
  DevicePages pages;
  const float* g_k = nullptr;  // What was sealed with: see SealBlocksArgs.
  const float* g_v = nullptr;
  GatherCounters* counters = nullptr;  // One, or with counters_per_block [entry_count_max].
  bool counters_per_block = false;
};

// Dequantizes many blocks, K and V of every layer and kv head, on `stream`: the bytes that
// GatherTile writes, in every format. Only the rows' elements are written. The rest is as for
// SealBlocks.
Status GatherBlocks(const GatherBlocksArgs& args, Stream stream);

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_GATHER_H_
