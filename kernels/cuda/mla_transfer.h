// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_MLA_TRANSFER_H_
#define KVTIER_KERNELS_CUDA_MLA_TRANSFER_H_

#include <cstdint>

#include "kernels/cuda/blocks.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/seal.h"
#include "kernels/mla_layout.h"
#include "kernels/nvfp4.h"
#include "kernels/status.h"

namespace kvtier::kernels::cuda {

// The blocks of a call and the engine's rows: latents of 512 dims and ropes of 64. Of a cache with
// rows [latent | rope] of 576, both have the same strides. Fields are those of DeviceBlocks and of
// SealBlocksArgs; a latent stands for K, a rope for V, and there is one head.
struct MlaDeviceBlocks {
  const BlockEntry* entries = nullptr;  // [entry_count_max]
  uint32_t entry_count_max = 0;
  const uint32_t* entry_count = nullptr;
  MlaBlockShape shape;  // layer_count layers are done.
  uint64_t first_layer_offset = 0;
  DeviceRows latent;  // Both of one type. head_stride is not read, scales are [layer_count].
  DeviceRows rope;
  DevicePages pages;
  const float* g = nullptr;  // [layer_count], of the latents.
};

// Seals many blocks, all layers, on `stream`: the bytes that SealMlaTile writes. The rest is as for
// SealBlocks.
struct SealMlaBlocksArgs {
  MlaDeviceBlocks blocks;
  ScaleSearch search = ScaleSearch::kAmax6;
  SealCounters* counters = nullptr;  // One, or with counters_per_block [entry_count_max].
  bool counters_per_block = false;
};
Status SealMlaBlocks(const SealMlaBlocksArgs& args, Stream stream);

// Dequantizes many blocks: the bytes that GatherMlaTile writes. The rest is as for GatherBlocks.
struct GatherMlaBlocksArgs {
  MlaDeviceBlocks blocks;
  GatherCounters* counters = nullptr;
  bool counters_per_block = false;
};
Status GatherMlaBlocks(const GatherMlaBlocksArgs& args, Stream stream);

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_MLA_TRANSFER_H_
