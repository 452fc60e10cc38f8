// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_RING_H_
#define KVTIER_KERNELS_CUDA_DECODE_RING_H_

#include <cstdint>

#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/primitives.h"

// How a warp's tokens come into shared memory. The work of a launch is a list of items; a block
// takes every GridX-th, and its warps share the stages of an item. A warp copies into a ring of its
// own, across the ends of items, so that memory stays busy while an item is merged.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// What one block does at a time: a split of a sequence, or its tail, for one kv head and pass.
struct DecodeItem {
  uint32_t sequence;
  uint32_t split;
  uint32_t item_count;  // Of this (sequence, kv head, pass).
  uint32_t kv_head;
  uint32_t pass;
  uint32_t sealed_tokens;
  uint32_t tail_tokens;
  uint32_t begin_token;  // Sealed tokens of the split; none for a tail.
  uint32_t end_token;
  bool is_tail;
};

KVTIER_DEVICE uint32_t MinU32(uint32_t a, uint32_t b) { return a < b ? a : b; }
KVTIER_DEVICE uint32_t FloorSub(uint32_t a, uint32_t b) { return a > b ? a - b : 0; }

// Sealed tokens of a sequence, never more than its row of the table holds.
KVTIER_DEVICE uint32_t SealedTokens(const DecodeParams& params, uint32_t sequence) {
  const uint32_t stored = LoadConstant(params.sealed_token_counts + sequence);
  return MinU32(stored / params.block_tokens, params.table_stride) * params.block_tokens;
}
KVTIER_DEVICE uint32_t TailTokens(const DecodeParams& params, uint32_t sequence) {
  return params.tail_token_counts.is_null() ? 0 : LoadConstant(params.tail_token_counts + sequence);
}
// First sealed token that a query sees, rounded down to a stage.
KVTIER_DEVICE uint32_t FirstSealedToken(const DecodeParams& params, uint32_t sealed, uint32_t tail,
                                        uint32_t stage_tokens) {
  if (params.window == 0) return 0;
  const uint32_t first_end = FloorSub(sealed + tail, params.query_len - 1);
  return MinU32(FloorSub(first_end, params.window), sealed) / stage_tokens * stage_tokens;
}

// Splits of a sequence, and one more item for its tail; at least one, which writes the result.
KVTIER_DEVICE uint32_t ItemCount(const DecodeParams& params, uint32_t sequence,
                                 uint32_t stage_tokens) {
  const uint32_t sealed = SealedTokens(params, sequence);
  const uint32_t tail = TailTokens(params, sequence);
  const uint32_t first = FirstSealedToken(params, sealed, tail, stage_tokens);
  const uint32_t count =
      (sealed == first ? 0 : SplitCount(sealed - first, params.split_heads)) + (tail != 0 ? 1 : 0);
  return count == 0 ? 1 : count;
}

// Into shared memory, for ItemAt: items of sequences 0 to i, for one kv head and pass. All threads
// of the block.
KVTIER_DEVICE void CountItems(const DecodeParams& params, uint32_t stage_tokens) {
  const SharedAddress ends = SharedBegin() + params.shared.splits;
  for (uint32_t i = ThreadX(); i < params.batch_size; i += BlockSizeX()) {
    StoreShared(ends + 4 * i, ItemCount(params, i, stage_tokens));
  }
  SyncThreads();
  // A scan in place: every thread adds what lies `step` before its entries.
  constexpr uint32_t kEntriesMax = kDecodeBatchMax / (32 * kDecodeWarpsMin);
  for (uint32_t step = 1; step < params.batch_size; step *= 2) {
    uint32_t sums[kEntriesMax];
    KVTIER_UNROLL
    for (uint32_t e = 0; e < kEntriesMax; ++e) {
      const uint32_t i = ThreadX() + e * BlockSizeX();
      if (i >= params.batch_size) continue;
      sums[e] = LoadShared<uint32_t>(ends + 4 * i);
      if (i >= step) sums[e] += LoadShared<uint32_t>(ends + 4 * (i - step));
    }
    SyncThreads();
    KVTIER_UNROLL
    for (uint32_t e = 0; e < kEntriesMax; ++e) {
      const uint32_t i = ThreadX() + e * BlockSizeX();
      if (i < params.batch_size) StoreShared(ends + 4 * i, sums[e]);
    }
    SyncThreads();
  }
}

// Items of the launch, once CountItems was here.
KVTIER_DEVICE uint32_t TotalItems(const DecodeParams& params) {
  return LoadShared<uint32_t>(SharedBegin() + params.shared.splits + 4 * (params.batch_size - 1)) *
         params.kv_head_count * params.pass_count;
}

// Item `index` of the launch, once CountItems was here.
KVTIER_DEVICE DecodeItem ItemAt(const DecodeParams& params, uint32_t index, uint32_t stage_tokens) {
  const SharedAddress ends = SharedBegin() + params.shared.splits;
  const uint32_t streams = params.kv_head_count * params.pass_count;
  const uint32_t work = index / streams;
  const uint32_t stream = index % streams;
  uint32_t low = 0;
  uint32_t high = params.batch_size - 1;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (LoadShared<uint32_t>(ends + 4 * middle) > work) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const uint32_t before = low == 0 ? 0 : LoadShared<uint32_t>(ends + 4 * (low - 1));
  DecodeItem item;
  item.sequence = low;
  item.split = work - before;
  item.item_count = LoadShared<uint32_t>(ends + 4 * low) - before;
  item.kv_head = stream / params.pass_count;
  item.pass = stream % params.pass_count;
  item.sealed_tokens = SealedTokens(params, low);
  item.tail_tokens = TailTokens(params, low);
  const uint32_t first =
      FirstSealedToken(params, item.sealed_tokens, item.tail_tokens, stage_tokens);
  const uint32_t split_tokens = SplitTokens(item.sealed_tokens - first, params.split_heads);
  item.is_tail = item.tail_tokens != 0 && item.split + 1 == item.item_count;
  item.begin_token = MinU32(first + item.split * split_tokens, item.sealed_tokens);
  item.end_token =
      item.is_tail ? item.begin_token : MinU32(item.begin_token + split_tokens, item.sealed_tokens);
  return item;
}

// The tile of the item's kv head in a block.
KVTIER_DEVICE Global<const std::byte> TileOf(const DecodeParams& params, const DecodeItem& item,
                                             uint64_t block) {
  return Global<const std::byte>{}.At<const std::byte>(block + params.layer_offset +
                                                       item.kv_head * params.tile_bytes);
}

// The stages that one warp reads, in order, over all items of its block.
template <typename Arch, uint32_t kHeadDim>
class StageStream {
 public:
  static constexpr uint32_t kStageTokens = StageTokens(kHeadDim);

  KVTIER_DEVICE StageStream(const DecodeParams& params, uint32_t item_end)
      : params_(params), item_end_(item_end), item_index_(BlockX()) {
    if (item_index_ < item_end_) EnterItem();
    FindStage();
  }

  KVTIER_DEVICE bool done() const { return item_index_ >= item_end_; }

  // Starts the copy of the next stage into `target`. Returns at once. Afterwards `barrier` (bulk
  // copies) or one more committed group of every lane (the others) tells that it is there.
  KVTIER_DEVICE void Issue(SharedAddress target, SharedAddress barrier, uint32_t lane) {
    if (done()) {
      if constexpr (!Arch::kCopiesBulk) CommitCopies();
      return;
    }
    const uint32_t token_count = MinU32(kStageTokens, end_token_ - token_);
    const uint32_t piece_tokens = MinU32(params_.block_tokens, kStageTokens);
    const uint32_t piece_count = token_count / piece_tokens;
    if constexpr (Arch::kCopiesBulk) {
      if (lane == 0) MbarrierArriveExpect(barrier, token_count * kHeadDim * 9 / 8);
      SyncWarp();
      if (lane < piece_count) CopyPieceBulk(target, lane, piece_tokens, barrier);
    } else {
      for (uint32_t i = 0; i < piece_count; ++i) CopyPieceAsync(target, i, piece_tokens, lane);
      CommitCopies();
    }
    token_ += kStageTokens * (BlockSizeX() / 32);
    FindStage();
  }

 private:
  // One run of bytes that lies in one piece both in the tile and in the stage.
  struct Run {
    uint64_t source;
    uint32_t target;
    uint32_t bytes;
  };
  static constexpr uint32_t kPanels = (kHeadDim + 127) / 128;
  static constexpr uint32_t kRuns = kPanels + 3;

  // Run `i` of the tokens [first, first + count) of a tile, to tokens [at, at + count) of a stage.
  KVTIER_DEVICE Run RunOf(uint32_t i, uint32_t first, uint32_t at, uint32_t count) const {
    const uint32_t tile_tokens = params_.block_tokens;
    const uint32_t tile_side = tile_tokens * kHeadDim * 9 / 16;
    constexpr uint32_t kStageSide = kStageTokens * kHeadDim * 9 / 16;
    if (i < kPanels) {
      const uint32_t dims = kHeadDim - 128 * i < 128 ? kHeadDim - 128 * i : 128;
      return {uint64_t{i} * tile_tokens * 64 + first * (dims / 2),
              i * kStageTokens * 64 + at * (dims / 2), count * (dims / 2)};
    }
    const bool is_v = i > kPanels;
    const bool is_scales = i != kPanels + 1;
    const uint32_t per_token = is_scales ? kHeadDim / 16 : kHeadDim / 2;
    const uint32_t source = (is_v ? tile_side : 0) + (is_scales ? tile_tokens * kHeadDim / 2 : 0);
    const uint32_t target = (is_v ? kStageSide : 0) + (is_scales ? kStageTokens * kHeadDim / 2 : 0);
    return {source + uint64_t{first} * per_token, target + at * per_token, count * per_token};
  }

  // The tile that holds a token of the sequence.
  KVTIER_DEVICE Global<const std::byte> Tile(uint32_t token) const {
    const uint64_t entry =
        uint64_t{item_.sequence} * params_.table_stride + token / params_.block_tokens;
    return TileOf(params_, item_, LoadConstant(params_.block_table + static_cast<int64_t>(entry)));
  }

  KVTIER_DEVICE void CopyPieceBulk(SharedAddress target, uint32_t piece, uint32_t piece_tokens,
                                   SharedAddress barrier) const {
    const uint32_t token = token_ + piece * piece_tokens;
    const Global<const std::byte> tile = Tile(token);
    if (params_.block_tokens == kStageTokens) {
      CopyBulk(target, tile, StageBytes(kHeadDim), barrier);
      return;
    }
    KVTIER_NO_UNROLL
    for (uint32_t i = 0; i < kRuns; ++i) {
      const Run run = RunOf(i, token % params_.block_tokens, piece * piece_tokens, piece_tokens);
      CopyBulk(target + run.target, tile + static_cast<int64_t>(run.source), run.bytes, barrier);
    }
  }

  KVTIER_DEVICE void CopyPieceAsync(SharedAddress target, uint32_t piece, uint32_t piece_tokens,
                                    uint32_t lane) const {
    const uint32_t token = token_ + piece * piece_tokens;
    const Global<const std::byte> tile = Tile(token);
    if (params_.block_tokens == kStageTokens) {
      CopyRun(target, tile, StageBytes(kHeadDim), lane);
      return;
    }
    KVTIER_NO_UNROLL
    for (uint32_t i = 0; i < kRuns; ++i) {
      const Run run = RunOf(i, token % params_.block_tokens, piece * piece_tokens, piece_tokens);
      CopyRun(target + run.target, tile + static_cast<int64_t>(run.source), run.bytes, lane);
    }
  }

  static KVTIER_DEVICE void CopyRun(SharedAddress target, Global<const std::byte> source,
                                    uint32_t bytes, uint32_t lane) {
    KVTIER_NO_UNROLL
    for (uint32_t at = 16 * lane; at < bytes; at += 16 * 32) {
      CopyAsync16(target + at, source.At<const Words4>(at));
    }
  }

  KVTIER_DEVICE void EnterItem() {
    item_ = ItemAt(params_, item_index_, kStageTokens);
    token_ = item_.begin_token + ThreadX() / 32 * kStageTokens;
    end_token_ = item_.end_token;
  }
  // Goes on to the next item until there is a stage for this warp.
  KVTIER_DEVICE void FindStage() {
    while (!done() && token_ >= end_token_) {
      item_index_ += GridX();
      if (!done()) EnterItem();
    }
  }

  const DecodeParams& params_;
  uint32_t item_end_;
  uint32_t item_index_;
  DecodeItem item_;
  uint32_t token_ = 0;
  uint32_t end_token_ = 0;
};

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_DECODE_RING_H_
