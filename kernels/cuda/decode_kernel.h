// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_KERNEL_H_
#define KVTIER_KERNELS_CUDA_DECODE_KERNEL_H_

#include <cstdint>

#include "kernels/cuda/decode_merge.h"
#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/decode_query.h"
#include "kernels/cuda/decode_ring.h"
#include "kernels/cuda/decode_rows.h"
#include "kernels/cuda/decode_softmax.h"
#include "kernels/cuda/decode_tile.h"
#include "kernels/cuda/primitives.h"

// Fused decode: attention over sealed tiles in place and the tails, one launch for a batch and a
// layer. Blocks stay for the whole launch and go through the items of decode_ring.h; the lengths
// are read on the device, so that a captured launch serves any lengths.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// Online softmax of one warp over the stages of an item.
template <typename Arch, uint32_t kHeadDim, uint32_t kTilesN, uint32_t kParts>
struct StageAttention {
  static constexpr uint32_t kStageTokens = StageTokens(kHeadDim);
  // Groups of 16 tokens that are weighed at a time: as many as there are registers for.
  static constexpr uint32_t kGroups = kHeadDim * kTilesN > 192  ? 1
                                      : kHeadDim* kTilesN > 128 ? kStageTokens / 32
                                                                : kStageTokens / 16;

  WarpResult<kHeadDim, kTilesN> result;

  KVTIER_DEVICE StageAttention() {
    KVTIER_UNROLL
    for (uint32_t n = 0; n < kTilesN; ++n) reference_[n][0] = reference_[n][1] = kNoScore;
  }

  // Stage of `count` tokens that begins at token `first` of the sequence. With kMasked, some tokens
  // may be hidden from some rows, and count may be below kStageTokens.
  template <bool kMasked>
  KVTIER_DEVICE void Add(SharedAddress stage, uint32_t first, uint32_t count, uint32_t g,
                         uint32_t t, const PassQuery<kHeadDim, kTilesN, kParts>& query,
                         const DecodeParams& params, uint32_t& damage) {
    KVTIER_NO_UNROLL
    for (uint32_t slot = 0; slot < kStageTokens; slot += 16 * kGroups) {
      AddGroups<kMasked>(stage, slot, first, count, g, t, query, params, damage);
    }
  }

  // After the last stage: `result` is of weights against its maxima from here on.
  KVTIER_DEVICE void Finish() {
    KVTIER_UNROLL
    for (uint32_t n = 0; n < kTilesN; ++n) {
      KVTIER_UNROLL
      for (uint32_t column = 0; column < 2; ++column) {
        result.top[n][column] = reference_[n][column];
      }
    }
  }

 private:
  // A weight is 2^(score - reference), at most 2^15, which FP16 holds: the lower the reference,
  // the more tokens of small weight keep all 11 bits. They are the result where the tokens that
  // take most of the weight have hardly any values.
  float reference_[kTilesN][2];

  static KVTIER_DEVICE float ReferenceOf(float top) {
    const float reference = top - 15.0F;
    // Beyond 2^27 this may be rounded to 16 less, which would be infinity in FP16.
    return top - reference > 15.0F ? top : reference;
  }

  // kGroups groups from token `slot` of the stage on.
  template <bool kMasked>
  KVTIER_DEVICE void AddGroups(SharedAddress stage, uint32_t slot, uint32_t first, uint32_t count,
                               uint32_t g, uint32_t t,
                               const PassQuery<kHeadDim, kTilesN, kParts>& query,
                               const DecodeParams& params, uint32_t& damage) {
    float scores[kGroups][kTilesN][4];
    KVTIER_UNROLL
    for (uint32_t group = 0; group < kGroups; ++group) {
      KVTIER_UNROLL
      for (uint32_t n = 0; n < kTilesN; ++n) {
        KVTIER_UNROLL
        for (uint32_t i = 0; i < 4; ++i) scores[group][n][i] = 0.0F;
      }
      if (kMasked && slot + 16 * group >= count) continue;
      ScoreTokens<Arch, kHeadDim, kTilesN, kParts>(stage, slot + 16 * group, g, t, query.fragments,
                                                   scores[group], damage);
    }
    ToLog2<kMasked>(scores, slot, first, count, g, query, params);
    Rescale(scores);
    KVTIER_UNROLL
    for (uint32_t group = 0; group < kGroups; ++group) {
      uint32_t weights[kTilesN][2];
      KVTIER_UNROLL
      for (uint32_t n = 0; n < kTilesN; ++n) {
        KVTIER_UNROLL
        for (uint32_t upper = 0; upper < 2; ++upper) {
          const float first_weight = Exp2(scores[group][n][2 * upper] - reference_[n][0]);
          const float second_weight = Exp2(scores[group][n][2 * upper + 1] - reference_[n][1]);
          result.sum[n][0] += first_weight;
          result.sum[n][1] += second_weight;
          weights[n][upper] = TransposeMatrix(PackHalf2(first_weight, second_weight));
        }
      }
      if (kMasked && slot + 16 * group >= count) continue;
      AccumulateTokens<Arch, kHeadDim, kTilesN>(stage, slot + 16 * group, g, t, weights, result.out,
                                                damage);
    }
  }

  // Accumulated products to scores; hidden ones to -inf.
  template <bool kMasked>
  static KVTIER_DEVICE void ToLog2(float (&scores)[kGroups][kTilesN][4], uint32_t first_slot,
                                   uint32_t first, uint32_t count, uint32_t g,
                                   const PassQuery<kHeadDim, kTilesN, kParts>& query,
                                   const DecodeParams& params) {
    const bool has_cap = params.soft_cap != 0.0F;
    KVTIER_UNROLL
    for (uint32_t group = 0; group < kGroups; ++group) {
      KVTIER_UNROLL
      for (uint32_t n = 0; n < kTilesN; ++n) {
        KVTIER_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
          const uint32_t column = i & 1;
          float score = FmaRn(scores[group][n][i], query.unit[n][column], query.bias[n][column]);
          if (has_cap) score = SoftCap(score, params.soft_cap, params.soft_cap_inverse);
          if (kMasked) {
            const uint32_t slot = first_slot + 16 * group + TokenMap<kHeadDim>::Row(g, i >> 1);
            const uint32_t end = query.end[n][column];
            const uint32_t token = first + slot;
            const bool seen = slot < count && token >= WindowBegin(params, end) && token < end;
            score = seen ? score : kHiddenScore;
          }
          scores[group][n][i] = score;
        }
      }
    }
  }

  // Raises the maxima to those of `scores`; what was summed is scaled down, which is rare.
  KVTIER_DEVICE void Rescale(const float (&scores)[kGroups][kTilesN][4]) {
    bool rises = false;
    float top[kTilesN][2];
    KVTIER_UNROLL
    for (uint32_t n = 0; n < kTilesN; ++n) {
      KVTIER_UNROLL
      for (uint32_t column = 0; column < 2; ++column) {
        float best = result.top[n][column];
        KVTIER_UNROLL
        for (uint32_t group = 0; group < kGroups; ++group) {
          best = MaxFloat(best, MaxFloat(scores[group][n][column], scores[group][n][column + 2]));
        }
        KVTIER_UNROLL
        for (uint32_t bit = 4; bit < 32; bit <<= 1) {
          best = MaxFloat(best, FloatOf(ShuffleXor(BitsOf(best), bit)));
        }
        top[n][column] = best;
        rises = rises || best > result.top[n][column];
      }
    }
    if (!AnyLane(rises)) return;
    KVTIER_UNROLL
    for (uint32_t n = 0; n < kTilesN; ++n) {
      KVTIER_UNROLL
      for (uint32_t column = 0; column < 2; ++column) {
        const float next = ReferenceOf(top[n][column]);
        const float factor = Exp2(reference_[n][column] - next);
        result.sum[n][column] *= factor;
        result.top[n][column] = top[n][column];
        reference_[n][column] = next;
        KVTIER_UNROLL
        for (uint32_t tile = 0; tile < kHeadDim / 16; ++tile) {
          result.out.c[tile][n][column] *= factor;
          result.out.c[tile][n][column + 2] *= factor;
        }
      }
    }
  }
};

// A warp's place in its ring. Between steps the slot that comes next is free: steps begin with
// the copy into it.
struct RingPosition {
  uint32_t issue = 0;    // Next slot to copy into.
  uint32_t consume = 0;  // Next slot to read.
  uint32_t parity = 0;   // Of the phase that fills it.
};

template <typename Arch, uint32_t kHeadDim, uint32_t kTilesN, uint32_t kParts>
class DecodeWarp {
 public:
  static constexpr uint32_t kRows = 8 * kTilesN;
  static constexpr uint32_t kStageTokens = StageTokens(kHeadDim);
  static_assert(kRows <= DecodeRowsMax(kHeadDim));
  static_assert(kRows * kHeadDim * 4 <= StageBytes(kHeadDim), "a stage holds the merge buffer");

  KVTIER_DEVICE explicit DecodeWarp(const DecodeParams& params)
      : params_(params), stream_(params, IsNvfp4(params) ? TotalItems(params) : 0) {}

  KVTIER_DEVICE void Run() {
    for (uint32_t i = 0; i + 1 < params_.stage_count; ++i) IssueNext();
    for (uint32_t index = BlockX(); index < TotalItems(params_); index += GridX()) {
      const DecodeItem item = ItemAt(params_, index, kStageTokens);
      const Merger merger(params_, item);
      merger.Merge(IsNvfp4(params_) && !item.is_tail ? AttendStages(item, merger)
                                                     : AttendRows(item, merger));
      // The merge buffer becomes the target of a bulk copy again.
      if constexpr (Arch::kCopiesBulk) FenceProxyAsync();
      SyncWarp();
    }
    if constexpr (!Arch::kCopiesBulk) WaitCopies<0>();  // Empty groups are left at most.
    ReportDamage(params_, damage_);
  }

 private:
  using Merger = ResultMerger<FragmentPlaces<Arch, kHeadDim>, kHeadDim, kTilesN>;

  // Not members: registers are scarce.
  static KVTIER_DEVICE uint32_t Lane() { return ThreadX() % 32; }
  static KVTIER_DEVICE uint32_t Warp() { return ThreadX() / 32; }
  static KVTIER_DEVICE uint32_t WarpCount() { return BlockSizeX() / 32; }

  static KVTIER_DEVICE bool IsNvfp4(const DecodeParams& params) {
    return params.k_format == SideFormat::kNvfp4 && params.v_format == SideFormat::kNvfp4;
  }
  KVTIER_DEVICE SharedAddress Slot(uint32_t slot) const {
    return SharedBegin() + (Warp() * params_.stage_count + slot) * StageBytes(kHeadDim);
  }
  KVTIER_DEVICE SharedAddress Barrier(uint32_t slot) const {
    return SharedBegin() + params_.shared.barriers + (Warp() * params_.stage_count + slot) * 8;
  }
  KVTIER_DEVICE void IssueNext() {
    stream_.Issue(Slot(ring_.issue), Barrier(ring_.issue), Lane());
    ring_.issue = ring_.issue + 1 == params_.stage_count ? 0 : ring_.issue + 1;
  }
  KVTIER_DEVICE void AwaitStage() {
    if constexpr (Arch::kCopiesBulk) {
      MbarrierWait(Barrier(ring_.consume), ring_.parity);
    } else {
      WaitCopies<1>();
      SyncWarp();
    }
  }

  // Both publish what this warp has of the item and return the unit of the values.
  KVTIER_DEVICE float AttendStages(const DecodeItem& item, const Merger& merger) {
    const uint32_t g = Lane() / 4;
    const uint32_t t = Lane() % 4;
    PassQuery<kHeadDim, kTilesN, kParts> query;
    query.template Load<Arch>(params_, item, g, t);
    const uint32_t context = item.sealed_tokens + item.tail_tokens;
    const uint32_t all_see_end = FloorSub(context, params_.query_len - 1);
    const uint32_t all_see_begin = params_.window == 0 ? 0 : FloorSub(context, params_.window);
    StageAttention<Arch, kHeadDim, kTilesN, kParts> attention;
    const uint32_t step = kStageTokens * WarpCount();
    for (uint32_t first = item.begin_token + Warp() * kStageTokens; first < item.end_token;
         first += step) {
      IssueNext();
      AwaitStage();
      const SharedAddress stage = Slot(ring_.consume);
      const uint32_t count = MinU32(kStageTokens, item.end_token - first);
      const bool masked =
          count < kStageTokens || first < all_see_begin || first + kStageTokens > all_see_end;
      if (masked) {
        attention.template Add<true>(stage, first, count, g, t, query, params_, damage_);
      } else {
        attention.template Add<false>(stage, first, count, g, t, query, params_, damage_);
      }
      SyncWarp();
      ring_.consume = ring_.consume + 1 == params_.stage_count ? 0 : ring_.consume + 1;
      ring_.parity ^= ring_.consume == 0 ? 1 : 0;
    }
    attention.Finish();
    merger.Publish(attention.result, Slot(ring_.issue));
    return CodeUnit<Arch>() * LoadConstant(params_.g_v + item.kv_head);
  }

  KVTIER_DEVICE float AttendRows(const DecodeItem& item, const Merger& merger) {
    const SharedAddress buffer = Slot(ring_.issue);
    for (uint32_t n = 0; n < kTilesN; ++n) AttendEightRows(item, merger, buffer, 8 * n);
    merger.PublishBuffer(buffer);
    if (item.is_tail) return params_.tail_v_scale;
    return params_.v_format == SideFormat::kBf16 ? 1.0F : LoadConstant(params_.g_v + item.kv_head);
  }

  // Rows [first_row, first_row + 8) of the pass. Their part of the merge buffer holds the queries
  // before the results.
  KVTIER_DEVICE void AttendEightRows(const DecodeItem& item, const Merger& merger,
                                     SharedAddress buffer, uint32_t first_row) {
    const SharedAddress rows = buffer + first_row * kHeadDim * 4;
    RowQuery<kHeadDim, 8, true> query(params_);
    query.Load(item, item.pass * kRows + first_row, rows, Lane());
    const RowReader<kHeadDim> reader(params_, item);
    RowAttention<RowReader<kHeadDim>, 8> attention;
    attention.AddItem(item, reader, rows, query, Lane(), damage_);
    attention.Publish(merger, buffer, first_row, Lane());
  }

  const DecodeParams& params_;
  StageStream<Arch, kHeadDim> stream_;
  RingPosition ring_;
  uint32_t damage_ = 0;
};

// Of a DecodePlan: kTilesN is its tiles_n, kParts its query_parts.
template <typename Arch, uint32_t kHeadDim, uint32_t kTilesN, uint32_t kParts>
KVTIER_DEVICE void DecodeBody(const DecodeParams& params) {
  const SharedAddress memory = SharedBegin();
  if constexpr (Arch::kCopiesBulk) {
    for (uint32_t i = ThreadX(); i < BlockSizeX() / 32 * params.stage_count; i += BlockSizeX()) {
      MbarrierInit(memory + params.shared.barriers + 8 * i, 1);
    }
    FenceProxyAsync();
  }
  CountItems(params, StageTokens(kHeadDim));
  DecodeWarp<Arch, kHeadDim, kTilesN, kParts>(params).Run();
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_DECODE_KERNEL_H_
