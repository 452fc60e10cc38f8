// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_WORKSPACE_H_
#define KVTIER_KERNELS_WORKSPACE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/element.h"
#include "kernels/executor.h"
#include "kernels/isa.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

// A sealed prefix as plain rows, for attention kernels that cannot read tiles: chunked prefill and
// extend. One workspace serves all layers in turn. docs/engine-flows.md shows the use.

namespace kvtier::kernels {

// K and V of one layer in the engine's layout, dense or in pages: row (token, kv head) of K begins
// as MutableRows says, head * head_stride elements after that of head 0. Does not own the memory.
struct WorkspaceRows {
  ElementType type = ElementType::kFp8E4m3;  // Any.
  void* k = nullptr;                         // Needs no alignment.
  void* v = nullptr;
  uint64_t token_stride = 0;  // In elements, >= head_dim.
  uint64_t head_stride = 0;   // In elements, >= head_dim when there are two kv heads or more.
  // FP8 only: multiplies the stored values. Finite, above 0, with a finite reciprocal.
  float k_scale = 1.0F;
  float v_scale = 1.0F;
  Paging paging = {};  // Of K and of V.
};

// Bytes of a dense workspace for K and V of token_count tokens of one layer. 0 if the shape is not
// valid, token_count is above 2^32 - 1 or the type is unknown.
uint64_t WorkspaceBytes(const BlockShape& shape, uint64_t token_count, ElementType type);

// The rows of a dense workspace [K, V][token_capacity][kv head][head_dim] that begins at `data` and
// is WorkspaceBytes(shape, token_capacity, type) long. The scales are the caller's to set. Requires
// a shape that Validate accepts.
WorkspaceRows DenseWorkspace(const BlockShape& shape, uint64_t token_capacity, ElementType type,
                             void* data);

// Fields without a comment are those of DecodeArgs.
struct GatherPrefixArgs {
  BlockShape block_shape;
  uint32_t layer_idx = 0;
  std::span<const std::byte* const> block_table;
  uint64_t sealed_token_count = 0;  // At most 2^32 - 1.
  std::span<const float> g_k;       // [kv_head_count]
  std::span<const float> g_v;       // [kv_head_count]
  std::span<const LayerFormat> layer_formats = {};

  // The transform the blocks were sealed with; it is undone. [kv_head_count][head_dim] or empty.
  std::span<const float> k_mean = {};
  std::span<const float> k_smooth = {};

  WorkspaceRows target;    // Has room for sealed_token_count tokens.
  bool streaming = false;  // As GatherOptions.
  Isa isa = BestIsa();
  const Executor* executor = nullptr;  // A task is a block; null: the caller's thread does all.
};

// Writes tokens [0, sealed_token_count) of all kv heads of a layer to the target, rounded as
// GatherTile says; elements between rows are untouched. The bits do not depend on the executor.
// Allocates nothing, does not block. Thread-safe for disjoint targets. Uses 70 KiB of stack.
// Errors: kInvalidArgument when a requirement above is not met, before anything is written;
// kDataLoss if a tile holds a byte that is never written: the target is unspecified then.
Status GatherPrefix(const GatherPrefixArgs& args);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_WORKSPACE_H_
