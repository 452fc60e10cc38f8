// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_BLOCKS_H_
#define KVTIER_KERNELS_CUDA_BLOCKS_H_

#include <cstdint>

#include "kernels/element.h"
#include "kernels/tile_layout.h"

struct CUstream_st;

// What seal.h and gather.h have in common: views of device memory that hold many blocks' rows.

namespace kvtier::kernels::cuda {

using Stream = CUstream_st*;  // cudaStream_t.

// One block to seal or gather. In device memory.
struct BlockEntry {
  void* block = nullptr;    // First byte of the block; a multiple of 16.
  uint32_t first_slot = 0;  // Of the block's first token in the rows, below 2^31 - block_tokens.
  uint32_t reserved = 0;
};
static_assert(sizeof(BlockEntry) == 16);

// Rows of K or of V, of all layers and kv heads of a call, in device memory. With pages (below),
// the row of slot s of (layer, head) begins at element
//   layer * layer_stride + head * head_stride + page * page_stride + (s % page_tokens) *
//   token_stride
// with page = page_table[s / page_tokens]; without, at
//   layer * layer_stride + head * head_stride + s * token_stride.
// vLLM and FlashInfer, NHD: token_stride = kv_heads * head_dim, head_stride = head_dim; HND:
// token_stride = head_dim, head_stride = page_tokens * head_dim. `data` and all strides are
// multiples of 16 bytes.
struct DeviceRows {
  ElementType type = ElementType::kBf16;
  void* data = nullptr;  // Only read by sealing.
  uint64_t layer_stride = 0;
  uint64_t head_stride = 0;
  uint64_t token_stride = 0;
  uint64_t page_stride = 0;
  // [layer_count] or null: the rows of each layer lie at an address of their own (a multiple of 16
  // bytes); `data` and layer_stride are not read then.
  void* const* layer_data = nullptr;
  // [layer_count][kv_head_count] or null, which is 1: what FP8 values are multiplied with. Finite,
  // above 0; to gather, with a finite reciprocal.
  const float* scales = nullptr;
};

// The engine's pages, for K and V alike. page_tokens 0: no pages.
struct DevicePages {
  // Slots of several sequences in one flat table: first_slot = row * row_entries * page_tokens +
  // token.
  const uint32_t* page_table = nullptr;
  uint32_t page_tokens = 0;  // At most 65536.
};

// The blocks of a call. The grid is made for entry_count_max; what the device finds in
// *entry_count, if not null, says how many are done. So a captured graph can be replayed with other
// tables and counts.
struct DeviceBlocks {
  const BlockEntry* entries = nullptr;  // [entry_count_max], a multiple of 16 bytes.
  uint32_t entry_count_max = 0;
  const uint32_t* entry_count = nullptr;
  // Layers and heads of this call. shape.layer_count layers are done, all of one format; the first
  // of them begins first_layer_offset bytes after the block (LayerOffset of it). A model of several
  // formats takes a call for each run of layers that agree.
  BlockShape shape;
  LayerFormat format = {};
  uint64_t first_layer_offset = 0;
};

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_BLOCKS_H_
