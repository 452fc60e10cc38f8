// SPDX-License-Identifier: Apache-2.0
//
// The kernels on the slots of fills and leases, wherever these are: one code path for an engine
// whose KV is in the memory of a GPU, and for one that runs on the CPU (hbm on the cpu device).
// Links with kvtier::client_kernels.
//
//   auto kernels = kvtier::client::DeviceKernels::Create(layout, ns);
//   kernels->Seal(fill->blocks, first_slots, rows, scales, counters, stream, workspace);
//   client->Commit(ns, *fill, stream);
//   kernels->Decode({.layer_idx = layer, .sequences = sequences, ...}, stream, workspace);
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/seal.h"
#include "kernels/element.h"
#include "kernels/tile_layout.h"
#include "kvtier/client.h"
#include "proto/base/layout.h"

namespace kvtier::client {

// Below, "device memory" is memory of the GPU that the blocks are on; on the cpu device it is any
// memory of this process.

// The engine's K and V, all layers and kv heads, in device memory. The row of slot s of (layer,
// head) begins layer * layer_stride + head * head_stride + s * token_stride elements after k (or
// v); with pages, page_table[s / page_tokens] * page_stride + s % page_tokens * token_stride takes
// the place of the last. Slots are below 2^31. On a GPU, addresses and strides are multiples of 16
// bytes.
struct KvRows {
  kernels::ElementType type = kernels::ElementType::kBf16;
  void* k = nullptr;  // Seal only reads them.
  void* v = nullptr;
  uint64_t layer_stride = 0;
  uint64_t head_stride = 0;
  uint64_t token_stride = 0;
  uint64_t page_stride = 0;
  const uint32_t* page_table = nullptr;
  uint32_t page_table_count = 0;
  uint32_t page_tokens = 0;  // 0: no pages.
  // [layer_count][kv_head_count] or null, which is 1: what FP8 values are multiplied with. Not read
  // for other types.
  const float* k_scales = nullptr;
  const float* v_scales = nullptr;
};

// Global scales, [layer_count][kv_head_count] in device memory. Layouts that are sealed with a
// transform of K call the kernels themselves (kernels/seal.h, kernels/cuda/seal.h).
struct GlobalScales {
  const float* g_k = nullptr;
  const float* g_v = nullptr;
};

// The caller's memory for the tables of one call. `host` is not changed until the stream has done
// the call; pinned, so that the call does not wait for its copy. `device` is as large, and null on
// the cpu device: it says where the pointers of the call point. Multiples of 16 bytes.
struct TableSpace {
  std::span<std::byte> host = {};
  void* device = nullptr;
  uint64_t device_bytes = 0;
};

// One sequence: its sealed blocks, in order, and its unsealed tokens, the tail, in device memory.
// Token t of the tail, kv head h begins t * tail_token_stride + h * tail_head_stride elements after
// tail_k (or tail_v).
struct DecodeSequence {
  std::span<const MappedBlock> blocks = {};
  const void* tail_k = nullptr;
  const void* tail_v = nullptr;
  uint32_t tail_token_count = 0;
};

// One decode step of a batch for one layer. Pointers are to device memory. What is not said here is
// as in kernels/decode.h and kernels/cuda/decode.h.
struct DecodeStep {
  uint32_t layer_idx = 0;
  std::span<const DecodeSequence> sequences = {};
  uint64_t tail_token_stride = 0;
  uint64_t tail_head_stride = 0;
  kernels::ElementType tail_type = kernels::ElementType::kBf16;
  float tail_k_scale = 1.0F;  // FP8 only.
  float tail_v_scale = 1.0F;
  // [batch][query_len][query_head_count][head_dim]
  kernels::ElementType query_type = kernels::ElementType::kBf16;
  const void* query = nullptr;
  uint32_t query_head_count = 0;
  uint32_t query_len = 1;
  float softmax_scale = 0.0F;
  float soft_cap = 0.0F;
  uint32_t window = 0;
  GlobalScales scales = {};
  const float* sinks = nullptr;  // [query_head_count] or null
  float* out = nullptr;          // as query
  float* lse = nullptr;          // [batch][query_len][query_head_count]
  // GPU only: DecodeScratchBytes, zeroed once before its first use; and a count of damaged tiles
  // that grows, or null. The cpu device answers DATA_LOSS.
  void* scratch = nullptr;
  uint32_t* damage_count = nullptr;
};

// For one layout. A plain value; thread-safe for disjoint outputs, tables and scratch.
//
// On a GPU, calls enqueue on `stream` and return: no allocation, no wait. The calling thread's
// current device is that of the blocks. On the cpu device the work is done, in the calling thread,
// when they return: to use more, split the blocks or the batch.
//
// Errors of all: INVALID_ARGUMENT (a block without a slot, or, not on a GPU, one of another size;
// slots beyond the page table; TableSpace too small; what the kernels refuse), FAILED_PRECONDITION
// (blocks on two devices, or on host while space.device says that the engine is on a GPU: when hbm
// is full, fills and leases are on host; Prefetch and acquire again), UNIMPLEMENTED (blocks on a
// GPU, and kvtier was built without CUDA kernels): nothing was begun then, but that the cpu device
// finds what its kernels refuse of a tile or a sequence when it comes there, the ones before it
// being done. UNAVAILABLE: the launch failed; the copy of the tables may be under way.
class DeviceKernels {
 public:
  // Errors: INVALID_ARGUMENT: `ns` was not opened with `layout`, or its codec is not nvfp4.
  static absl::StatusOr<DeviceKernels> Create(const Layout& layout, const Namespace& ns);

  const kernels::BlockShape& shape() const { return shape_; }

  // Seals into the blocks whose status is kOk; the others have no slot. Block i takes the
  // block_tokens slots from first_slots[i] on. `counters` is in device memory; sealing adds to it.
  absl::Status Seal(std::span<const MappedBlock> blocks, std::span<const uint32_t> first_slots,
                    const KvRows& rows, const GlobalScales& scales,
                    kernels::cuda::SealCounters* counters, DeviceStream stream,
                    const TableSpace& space) const;
  // Dequantizes leased blocks into the rows. Requires: all are kOk. DATA_LOSS on the cpu device for
  // bytes that are no tile; on a GPU `counters` tells.
  absl::Status Gather(std::span<const MappedBlock> blocks, std::span<const uint32_t> first_slots,
                      const KvRows& rows, const GlobalScales& scales,
                      kernels::cuda::GatherCounters* counters, DeviceStream stream,
                      const TableSpace& space) const;
  // Attends over leased blocks in place, and the tails. Requires: all are kOk. A step of tails
  // alone runs on a GPU if `space` has memory there.
  absl::Status Decode(const DecodeStep& step, DeviceStream stream, const TableSpace& space) const;

  // Bytes of TableSpace for a Seal or Gather of that many blocks, and for a Decode of sequences of
  // at most that many blocks.
  static uint64_t TransferTableBytes(size_t block_count);
  static uint64_t DecodeTableBytes(size_t sequence_count, size_t block_count_max);
  // 0 for a step that the GPU's kernel refuses. Sequences may be shorter.
  uint64_t DecodeScratchBytes(const DecodeStep& step, size_t block_count_max) const;

 private:
  explicit DeviceKernels(const kernels::BlockShape& shape) : shape_(shape) {}

  kernels::BlockShape shape_;
};

}  // namespace kvtier::client
