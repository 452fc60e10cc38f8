// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_MERGE_H_
#define KVTIER_KERNELS_CUDA_DECODE_MERGE_H_

#include <cstdint>

#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/decode_ring.h"
#include "kernels/cuda/decode_softmax.h"
#include "kernels/cuda/decode_tile.h"
#include "kernels/cuda/primitives.h"

// From the accumulators of warps to results. The warps of a block are merged in shared memory, the
// items of a sequence in global memory by the block that comes last. Both go through the parts in
// index order, so that the result does not depend on who comes when. Accumulators keep the order of
// the lanes' fragments until the very end.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// What one warp has of an item. Lanes hold columns 2 * t and 2 * t + 1 of each tile n; `sum` is the
// lane's own part, to be added over g.
template <uint32_t kHeadDim, uint32_t kTilesN>
struct WarpResult {
  Accumulators<kHeadDim, kTilesN> out;
  float top[kTilesN][2];
  float sum[kTilesN][2];

  KVTIER_DEVICE WarpResult() {
    KVTIER_UNROLL
    for (uint32_t n = 0; n < kTilesN; ++n) {
      KVTIER_UNROLL
      for (uint32_t column = 0; column < 2; ++column) {
        top[n][column] = kNoScore;
        sum[n][column] = 0.0F;
      }
      KVTIER_UNROLL
      for (uint32_t tile = 0; tile < kHeadDim / 16; ++tile) {
        KVTIER_UNROLL
        for (uint32_t i = 0; i < 4; ++i) out.c[tile][n][i] = 0.0F;
      }
    }
  }
};

// A weighted mean in the making, of the two rows of a slot: 4 accumulators of one lane.
struct SlotSum {
  float out[4] = {};
  float sum[2] = {};

  KVTIER_DEVICE void Add(const Words4& part, float first_factor, float second_factor) {
    out[0] = FmaRn(FloatOf(part.x), first_factor, out[0]);
    out[1] = FmaRn(FloatOf(part.y), second_factor, out[1]);
    out[2] = FmaRn(FloatOf(part.z), first_factor, out[2]);
    out[3] = FmaRn(FloatOf(part.w), second_factor, out[3]);
  }
};

// Which dims the 4 accumulators of a lane belong to, of the MMAs of decode_tile.h.
template <typename Arch, uint32_t kHeadDim>
struct FragmentPlaces {
  static KVTIER_DEVICE AccumulatorPlace Place(uint32_t dim) {
    return PlaceOfDim<Arch, kHeadDim>(dim);
  }
  static KVTIER_DEVICE uint32_t Dim(uint32_t tile, uint32_t g, uint32_t upper) {
    return AccumulatorDim<Arch, kHeadDim>(tile, g, upper);
  }
};

template <typename Places, uint32_t kHeadDim, uint32_t kTilesN>
class ResultMerger {
 public:
  static constexpr uint32_t kRows = 8 * kTilesN;
  static constexpr uint32_t kTiles = kHeadDim / 16;
  // A slot is the 4 values of one lane of one tile, 16 bytes: index (n * kTiles + tile) * 32 +
  // lane.
  static constexpr uint32_t kSlots = kTiles * kTilesN * 32;

  KVTIER_DEVICE ResultMerger(const DecodeParams& params, const DecodeItem& item)
      : params_(params), item_(item) {}

  // Publishing: every warp says what it has of the item, in shared memory of its own for kSlots
  // slots, and then merges. Lanes of the warp may share the work.
  KVTIER_DEVICE void Publish(const WarpResult<kHeadDim, kTilesN>& result,
                             SharedAddress buffer) const {
    const uint32_t lane = ThreadX() % 32;
    KVTIER_UNROLL
    for (uint32_t n = 0; n < kTilesN; ++n) {
      KVTIER_UNROLL
      for (uint32_t column = 0; column < 2; ++column) {
        float sum = result.sum[n][column];
        KVTIER_UNROLL
        for (uint32_t bit = 4; bit < 32; bit <<= 1) sum += FloatOf(ShuffleXor(BitsOf(sum), bit));
        if (lane < 4) PublishWeight(8 * n + 2 * lane + column, result.top[n][column], sum);
      }
      KVTIER_UNROLL
      for (uint32_t tile = 0; tile < kTiles; ++tile) {
        const float(&c)[4] = result.out.c[tile][n];
        StoreShared(buffer + ((n * kTiles + tile) * 32 + lane) * 16,
                    Words4{BitsOf(c[0]), BitsOf(c[1]), BitsOf(c[2]), BitsOf(c[3])});
      }
    }
    PublishBuffer(buffer);
  }
  KVTIER_DEVICE void PublishWeight(uint32_t row, float top, float sum) const {
    StoreShared(Weights(ThreadX() / 32, row), Words2{BitsOf(top), BitsOf(sum)});
  }
  KVTIER_DEVICE void PublishBuffer(SharedAddress buffer) const {
    if (ThreadX() % 32 == 0) StoreShared(BufferOf(ThreadX() / 32), buffer);
  }
  // Bytes from the start of the buffer to the accumulator of (row, dim).
  static KVTIER_DEVICE uint32_t ValueOffset(uint32_t row, uint32_t dim) {
    const AccumulatorPlace place = Places::Place(dim);
    const uint32_t lane = place.g * 4 + row % 8 / 2;
    return ((row / 8 * kTiles + place.tile) * 32 + lane) * 16 + (2 * place.upper + row % 2) * 4;
  }

  // All threads of the block, after publishing. `unit` multiplies the accumulators. On return the
  // buffers are not read any more.
  KVTIER_DEVICE void Merge(float unit) const {
    SyncThreads();
    const bool is_only = item_.item_count == 1;
    KVTIER_NO_UNROLL
    for (uint32_t slot = ThreadX(); slot < kSlots; slot += BlockSizeX()) {
      float top[2];
      SlotSum merged = MergeWarps(slot, top);
      KVTIER_UNROLL
      for (uint32_t i = 0; i < 4; ++i) {
        merged.out[i] *= merged.sum[i & 1] > 0.0F ? unit / merged.sum[i & 1] : unit;
      }
      float lse[2];
      KVTIER_UNROLL
      for (uint32_t column = 0; column < 2; ++column)
        lse[column] = Lse(top[column], merged.sum[column]);
      if (is_only) {
        WriteWithSinks(slot, merged, lse);
      } else {
        WritePartial(slot, merged, lse);
      }
    }
    if (!is_only && IsLastItem()) MergeItems();
    SyncThreads();
  }

 private:
  KVTIER_DEVICE SharedAddress Weights(uint32_t warp, uint32_t row) const {
    return SharedBegin() + params_.shared.weights + (warp * DecodeShared::kRowsMax + row) * 8;
  }
  KVTIER_DEVICE SharedAddress BufferOf(uint32_t warp) const {
    return SharedBegin() + params_.shared.buffers + 4 * warp;
  }

  // Base 2; NaN stays NaN.
  static KVTIER_DEVICE float Lse(float top, float sum) {
    return sum == 0.0F ? kNoScore : top + Log2(sum);
  }
  // Rows of a slot: 8 * n + 2 * t and the next.
  static KVTIER_DEVICE uint32_t FirstRow(uint32_t slot) {
    return slot / (32 * kTiles) * 8 + slot % 4 * 2;
  }

  KVTIER_DEVICE SlotSum MergeWarps(uint32_t slot, float (&top)[2]) const {
    const uint32_t row = FirstRow(slot);
    top[0] = kNoScore;
    top[1] = kNoScore;
    KVTIER_NO_UNROLL
    for (uint32_t warp = 0; warp < BlockSizeX() / 32; ++warp) {
      const auto both = LoadShared<Words4>(Weights(warp, row));
      top[0] = MaxFloat(top[0], FloatOf(both.x));
      top[1] = MaxFloat(top[1], FloatOf(both.z));
    }
    SlotSum merged;
    KVTIER_NO_UNROLL
    for (uint32_t warp = 0; warp < BlockSizeX() / 32; ++warp) {
      const auto both = LoadShared<Words4>(Weights(warp, row));
      const float first = Exp2(FloatOf(both.x) - top[0]);
      const float second = Exp2(FloatOf(both.z) - top[1]);
      merged.sum[0] = FmaRn(FloatOf(both.y), first, merged.sum[0]);
      merged.sum[1] = FmaRn(FloatOf(both.w), second, merged.sum[1]);
      const auto buffer = LoadShared<uint32_t>(BufferOf(warp));
      merged.Add(LoadShared<Words4>(buffer + 16 * slot), first, second);
    }
    return merged;
  }

  KVTIER_DEVICE uint64_t StreamIndex() const {
    return (uint64_t{item_.sequence} * params_.kv_head_count + item_.kv_head) * params_.pass_count +
           item_.pass;
  }
  KVTIER_DEVICE Global<float> Partial(uint32_t split) const {
    const uint64_t index = StreamIndex() * params_.split_slots + split;
    return params_.partials + static_cast<int64_t>(index * PartialFloats(kHeadDim, kRows));
  }

  KVTIER_DEVICE void WritePartial(uint32_t slot, const SlotSum& merged,
                                  const float (&lse)[2]) const {
    const Global<float> partial = Partial(item_.split);
    StoreGlobal(partial.At<Words4>(16 * uint64_t{slot}),
                Words4{BitsOf(merged.out[0]), BitsOf(merged.out[1]), BitsOf(merged.out[2]),
                       BitsOf(merged.out[3])});
    // Lanes 0 to 3 of the first tile of each n have all rows.
    if (slot / 32 % kTiles == 0 && slot % 32 < 4) {
      StoreGlobal(partial.At<Words2>(16 * uint64_t{kSlots} + 4 * FirstRow(slot)),
                  Words2{BitsOf(lse[0]), BitsOf(lse[1])});
    }
  }

  // True in the block that completes the sequence's items; the counter is ready for the next
  // launch.
  KVTIER_DEVICE bool IsLastItem() const {
    SyncThreads();
    if (ThreadX() == 0) {
      const Global<uint32_t> arrivals = params_.arrivals + static_cast<int64_t>(StreamIndex());
      const bool last = AddAcquireRelease(arrivals, 1) + 1 == item_.item_count;
      if (last) StoreGlobal<uint32_t>(arrivals, 0);
      StoreShared<uint32_t>(SharedBegin() + params_.shared.flag, last ? 1 : 0);
    }
    SyncThreads();
    return LoadShared<uint32_t>(SharedBegin() + params_.shared.flag) != 0;
  }

  KVTIER_DEVICE void MergeItems() const {
    KVTIER_NO_UNROLL
    for (uint32_t slot = ThreadX(); slot < kSlots; slot += BlockSizeX()) {
      float top[2] = {kNoScore, kNoScore};
      KVTIER_NO_UNROLL
      for (uint32_t split = 0; split < item_.item_count; ++split) {
        const Words2 lse = PartialLse(split, slot);
        top[0] = MaxFloat(top[0], FloatOf(lse.x));
        top[1] = MaxFloat(top[1], FloatOf(lse.y));
      }
      SlotSum merged;
      KVTIER_NO_UNROLL
      for (uint32_t split = 0; split < item_.item_count; ++split) {
        const Words2 lse = PartialLse(split, slot);
        const float first = Share(FloatOf(lse.x), top[0]);
        const float second = Share(FloatOf(lse.y), top[1]);
        merged.sum[0] += first;
        merged.sum[1] += second;
        merged.Add(
            LoadGlobal<Words4>(Partial(split).template At<const Words4>(16 * uint64_t{slot})),
            first, second);
      }
      float lse[2];
      KVTIER_UNROLL
      for (uint32_t i = 0; i < 4; ++i) {
        const float sum = merged.sum[i & 1];
        if (sum != 0.0F) merged.out[i] = merged.out[i] / sum;
      }
      KVTIER_UNROLL
      for (uint32_t column = 0; column < 2; ++column)
        lse[column] = Lse(top[column], merged.sum[column]);
      WriteWithSinks(slot, merged, lse);
    }
  }
  KVTIER_DEVICE Words2 PartialLse(uint32_t split, uint32_t slot) const {
    return LoadGlobal<Words2>(
        Partial(split).template At<const Words2>(16 * uint64_t{kSlots} + 4 * FirstRow(slot)));
  }
  // Weight of a part; an empty one has none.
  static KVTIER_DEVICE float Share(float lse, float top) {
    return lse == kNoScore ? 0.0F : Exp2(lse - top);
  }

  // Normalized values of a slot, with the sink's share taken off, to their places in the output.
  KVTIER_DEVICE void WriteWithSinks(uint32_t slot, const SlotSum& values,
                                    const float (&lse)[2]) const {
    const uint32_t g = slot % 32 / 4;
    const uint32_t tile = slot / 32 % kTiles;
    KVTIER_UNROLL
    for (uint32_t column = 0; column < 2; ++column) {
      const uint32_t row = item_.pass * kRows + FirstRow(slot) + column;
      if (row >= RowsOfHead(params_)) continue;
      float row_lse = lse[column];
      float share = 1.0F;
      if (!params_.sinks.is_null()) {
        const uint32_t head = item_.kv_head * params_.group_heads + row % params_.group_heads;
        const float sink = LoadConstant(params_.sinks + head) * kLog2E;
        const float top = MaxFloat(row_lse, sink);
        const float own = Share(row_lse, top);
        const float sum = own + Exp2(sink - top);
        share = own / sum;
        row_lse = top + Log2(sum);
      }
      const uint64_t out_row = QueryRow(params_, item_, row);
      if (tile == 0 && g == 0 && !params_.lse.is_null()) {
        StoreGlobal(params_.lse + static_cast<int64_t>(out_row),
                    row_lse == kNoScore ? kHiddenScore : row_lse * kLn2);
      }
      KVTIER_UNROLL
      for (uint32_t upper = 0; upper < 2; ++upper) {
        const uint64_t element = out_row * kHeadDim + Places::Dim(tile, g, upper);
        Store(element, values.out[2 * upper + column] * share);
      }
    }
  }
  KVTIER_DEVICE void Store(uint64_t element, float value) const {
    if (params_.out_is_bf16) {
      StoreGlobal(params_.out.At<uint16_t>(2 * element),
                  static_cast<uint16_t>(PackBf162(value, 0.0F)));
    } else {
      StoreGlobal(params_.out.At<float>(4 * element), value);
    }
  }

  const DecodeParams& params_;
  const DecodeItem& item_;
};

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_DECODE_MERGE_H_
