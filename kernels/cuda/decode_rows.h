// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_ROWS_H_
#define KVTIER_KERNELS_CUDA_DECODE_ROWS_H_

#include <cstdint>

#include "kernels/cuda/decode_merge.h"
#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/decode_ring.h"
#include "kernels/cuda/decode_softmax.h"
#include "kernels/cuda/decode_tile.h"
#include "kernels/cuda/primitives.h"
#include "kernels/tile_layout.h"

// Attention over rows read from global memory, of any side format, in FP32: tails, and layers that
// are not NVFP4 on both sides. Built for exactness and few lines; about four times the instructions
// of decode_tile.h for a value.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

KVTIER_DEVICE float SignedE4m3(uint32_t byte) {
  if ((byte & 0x7F) == 0x7F) return FloatOf(0x7FC00000);
  return FirstHalf((byte & 0x80) << 8 | (byte & 0x7F) << 7) * 256.0F;
}
KVTIER_DEVICE float SignedE2m1(uint32_t code) {
  return FirstHalf((code & 8) << 12 | (code & 7) << 9) * 16384.0F;
}

// Sealed FP8 bytes, 1 to 4 of them: sets bit 7 of each that is NaN, which sealing never writes.
// What is counted of them is collected as ScaleDamage's.
KVTIER_DEVICE uint32_t Fp8Damage(uint32_t bytes) { return (bytes & 0x7F7F7F7FU) + 0x01010101U; }

// To the launch's counter, if a damaged scale or FP8 value was seen.
KVTIER_DEVICE void ReportDamage(const DecodeParams& params, uint32_t damage) {
  if ((damage & 0x80808080U) != 0 && !params.damage_count.is_null()) {
    AddCounter(params.damage_count, 1);
  }
}

// K or V of the tokens of one item.
struct RowSide {
  Global<const std::byte> base;  // Tails: the item's first row.
  uint64_t token_stride;         // Bytes; tails only.
  uint64_t side_offset;          // In a tile; sealed tokens only.
  SideFormat format;
  bool is_v;
};

template <uint32_t kHeadDim>
class RowReader {
 public:
  static constexpr uint32_t kKeyDim = kHeadDim;
  static constexpr uint32_t kValueDim = kHeadDim;
  static constexpr uint32_t kKeyStep = 8;
  static constexpr uint32_t kLaneDims = kValueDim / 32;

  KVTIER_DEVICE RowReader(const DecodeParams& params, const DecodeItem& item)
      : params_(params), item_(item) {
    if (item.is_tail) {
      k_ = TailSide(params.tail_k, false);
      v_ = TailSide(params.tail_v, true);
    } else {
      k_ = {{}, 0, 0, params.k_format, false};
      v_ = {{}, 0, params.v_side_offset, params.v_format, true};
    }
  }

  // Dims [dim, dim + kKeyStep) of K. `token` counts from the item's first row of the tail, or the
  // start of the sequence.
  KVTIER_DEVICE void LoadK(uint32_t token, uint32_t dim, float (&out)[kKeyStep],
                           uint32_t& damage) const {
    const Global<const std::byte> row = Row(k_, token);
    if (k_.format == SideFormat::kBf16) {
      const auto words = LoadConstant(row.At<const Words4>(2 * dim));
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
      KVTIER_UNROLL
      for (uint32_t i = 0; i < 4; ++i) {
        out[2 * i] = FirstBf16(pairs[i]);
        out[2 * i + 1] = SecondBf16(pairs[i]);
      }
    } else if (k_.format == SideFormat::kFp8) {
      const auto words = LoadConstant(row.At<const Words2>(dim));
      // A tail may hold NaN.
      if (!item_.is_tail) damage |= Fp8Damage(words.x) | Fp8Damage(words.y);
      KVTIER_UNROLL
      for (uint32_t i = 0; i < 8; ++i) {
        out[i] = SignedE4m3((i < 4 ? words.x : words.y) >> (8 * (i % 4)) & 0xFF);
      }
    } else {
      const TileShape shape{params_.block_tokens, kHeadDim};
      const uint32_t slot = token % params_.block_tokens;
      const uint32_t codes =
          LoadConstant(row.At<const uint32_t>(KCodeOffset(shape, slot, dim / 16) + dim % 16 / 2));
      const uint32_t scale =
          LoadConstant(row.At<const uint8_t>(KScaleByteOffset(shape, slot, dim / 16)));
      damage |= ScaleDamage(scale);
      const float factor = SignedE4m3(scale);
      KVTIER_UNROLL
      for (uint32_t i = 0; i < 8; ++i) out[i] = SignedE2m1(codes >> (4 * i) & 0xF) * factor;
    }
  }

  // The dims of V that a lane sums up.
  static KVTIER_DEVICE uint32_t ValueDim(uint32_t lane, uint32_t j) { return lane + 32 * j; }
  KVTIER_DEVICE void LoadV(uint32_t token, uint32_t lane, float (&out)[kLaneDims],
                           uint32_t& damage) const {
    KVTIER_UNROLL
    for (uint32_t j = 0; j < kLaneDims; ++j) out[j] = LoadValue(token, ValueDim(lane, j), damage);
  }

 private:
  KVTIER_DEVICE float LoadValue(uint32_t token, uint32_t dim, uint32_t& damage) const {
    const Global<const std::byte> row = Row(v_, token);
    if (v_.format == SideFormat::kBf16) {
      return FirstBf16(LoadConstant(row.At<const uint16_t>(2 * dim)));
    }
    if (v_.format == SideFormat::kFp8) {
      const uint32_t byte = LoadConstant(row.At<const uint8_t>(dim));
      if (!item_.is_tail) damage |= Fp8Damage(byte);
      return SignedE4m3(byte);
    }
    const TileShape shape{params_.block_tokens, kHeadDim};
    const uint32_t slot = token % params_.block_tokens;
    const uint64_t side = VDataOffset(shape);
    const uint32_t codes = LoadConstant(
        row.At<const uint8_t>(VCodeOffset(shape, slot, dim / 16) - side + dim % 16 / 2));
    const uint32_t scale =
        LoadConstant(row.At<const uint8_t>(VScaleByteOffset(shape, slot, dim / 16) - side));
    damage |= ScaleDamage(scale);
    return SignedE2m1(codes >> (4 * (dim & 1)) & 0xF) * SignedE4m3(scale);
  }

  KVTIER_DEVICE RowSide TailSide(Global<const uint64_t> bases, bool is_v) const {
    const uint32_t bytes = params_.tail_format == SideFormat::kBf16 ? 2 : 1;
    const uint64_t head = item_.kv_head * params_.tail_head_stride * bytes;
    return {
        Global<const std::byte>{}.At<const std::byte>(LoadConstant(bases + item_.sequence) + head),
        params_.tail_token_stride * bytes, 0, params_.tail_format, is_v};
  }

  // The row; for NVFP4 the start of the side.
  KVTIER_DEVICE Global<const std::byte> Row(const RowSide& side, uint32_t token) const {
    if (item_.is_tail) return side.base.At<const std::byte>(token * side.token_stride);
    const uint64_t entry =
        uint64_t{item_.sequence} * params_.table_stride + token / params_.block_tokens;
    const Global<const std::byte> tile =
        TileOf(params_, item_, LoadConstant(params_.block_table + static_cast<int64_t>(entry)));
    const uint32_t row_bytes = side.format == SideFormat::kBf16  ? kHeadDim * 2
                               : side.format == SideFormat::kFp8 ? kHeadDim
                                                                 : 0;
    return tile.At<const std::byte>(side.side_offset + token % params_.block_tokens * row_bytes);
  }

  const DecodeParams& params_;
  const DecodeItem& item_;
  RowSide k_;
  RowSide v_;
};

inline constexpr uint32_t kRowChunkTokens = 16;

// Online softmax over 16 tokens at a time. Lane: token lane % 16, half of the dims lane / 16, for
// the scores; dims Reader::ValueDim for the output. A Reader is as RowReader.
template <typename Reader, uint32_t kRows>
struct RowAttention {
  static constexpr uint32_t kKeyDim = Reader::kKeyDim;
  static constexpr uint32_t kLaneDims = Reader::kLaneDims;
  static constexpr uint32_t kKeyStep = Reader::kKeyStep;
  static constexpr uint32_t kChunkTokens = kRowChunkTokens;

  float top[kRows];
  float sum[kRows];
  float out[kRows][kLaneDims];

  KVTIER_DEVICE RowAttention() {
    KVTIER_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      top[row] = kNoScore;
      sum[row] = 0.0F;
      KVTIER_UNROLL
      for (uint32_t j = 0; j < kLaneDims; ++j) out[row][j] = 0.0F;
    }
  }

  // This warp's share of an item's tokens. `query` is [kRows][kKeyDim] floats in shared memory,
  // `rows` says scale, bias and visibility.
  template <typename Rows>
  KVTIER_DEVICE void AddItem(const DecodeItem& item, const Reader& reader, SharedAddress query,
                             const Rows& rows, uint32_t lane, uint32_t& damage) {
    const uint32_t begin = item.is_tail ? 0 : item.begin_token;
    const uint32_t end = item.is_tail ? item.tail_tokens : item.end_token;
    const uint32_t origin = item.is_tail ? item.sealed_tokens : 0;
    for (uint32_t first = begin + ThreadX() / 32 * kChunkTokens; first < end;
         first += kChunkTokens * (BlockSizeX() / 32)) {
      AddTokens(reader, query, rows, first, MinU32(kChunkTokens, end - first), origin + first, lane,
                damage);
    }
    SyncWarp();
  }

  // To the merge buffer of this warp, as rows [first_row, first_row + kRows) of the pass.
  template <typename Merger>
  KVTIER_DEVICE void Publish(const Merger& merger, SharedAddress buffer, uint32_t first_row,
                             uint32_t lane) const {
    KVTIER_UNROLL
    for (uint32_t i = 0; i < kRows; ++i) {
      const uint32_t row = first_row + i;
      KVTIER_UNROLL
      for (uint32_t j = 0; j < kLaneDims; ++j) {
        StoreShared<float>(buffer + Merger::ValueOffset(row, Reader::ValueDim(lane, j)), out[i][j]);
      }
      if (lane == 0) merger.PublishWeight(row, top[i], sum[i]);
    }
  }

 private:
  // Scores (log2 units, capped, -inf where not visible) of the chunk's tokens against all rows,
  // then their weighted values.
  template <typename Rows>
  KVTIER_DEVICE void AddTokens(const Reader& reader, SharedAddress query, const Rows& rows,
                               uint32_t first, uint32_t count, uint32_t position, uint32_t lane,
                               uint32_t& damage) {
    const uint32_t token = lane % kChunkTokens;
    const uint32_t half = lane / kChunkTokens;
    float score[kRows];
    KVTIER_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) score[row] = 0.0F;
    // Lanes beyond the last token repeat the first; their scores are hidden.
    const uint32_t read = first + (token < count ? token : 0);
    KVTIER_NO_UNROLL
    for (uint32_t i = 0; i < kKeyDim / 2; i += kKeyStep) {
      const uint32_t dim = half * (kKeyDim / 2) + i;
      float k[kKeyStep];
      reader.LoadK(read, dim, k, damage);
      KVTIER_UNROLL
      for (uint32_t row = 0; row < kRows; ++row) {
        // Not all loads at once: there are no registers for them.
        if (row % 2 == 0) SyncWarp();
        const SharedAddress q = query + (row * kKeyDim + dim) * 4;
        KVTIER_UNROLL
        for (uint32_t j = 0; j < kKeyStep; j += 4) {
          const auto words = LoadShared<Words4>(q + 4 * j);
          score[row] = FmaRn(FloatOf(words.x), k[j], score[row]);
          score[row] = FmaRn(FloatOf(words.y), k[j + 1], score[row]);
          score[row] = FmaRn(FloatOf(words.z), k[j + 2], score[row]);
          score[row] = FmaRn(FloatOf(words.w), k[j + 3], score[row]);
        }
      }
    }
    KVTIER_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      score[row] += FloatOf(ShuffleXor(BitsOf(score[row]), 16));
      const bool visible = token < count && rows.Sees(row, position + token);
      score[row] = visible ? rows.Score(row, score[row]) : kHiddenScore;
    }
    Weigh(score);
    KVTIER_NO_UNROLL
    for (uint32_t i = 0; i < count; ++i) {
      float v[kLaneDims];
      reader.LoadV(first + i, lane, v, damage);
      KVTIER_UNROLL
      for (uint32_t row = 0; row < kRows; ++row) {
        const float weight = FloatOf(ShuffleFrom(BitsOf(score[row]), i));
        // A token that this row does not see may hold anything, NaN included.
        if (weight < 0.0F) continue;
        KVTIER_UNROLL
        for (uint32_t j = 0; j < kLaneDims; ++j) out[row][j] = FmaRn(weight, v[j], out[row][j]);
      }
    }
  }

  // Scores to weights against the new maximum; -1 where not visible.
  KVTIER_DEVICE void Weigh(float (&score)[kRows]) {
    KVTIER_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      float best = score[row];
      KVTIER_UNROLL
      for (uint32_t bit = 1; bit < kChunkTokens; bit <<= 1) {
        best = MaxFloat(best, FloatOf(ShuffleXor(BitsOf(best), bit)));
      }
      const float next = MaxFloat(top[row], best);
      const float rescale = Exp2(top[row] - next);
      KVTIER_UNROLL
      for (uint32_t j = 0; j < kLaneDims; ++j) out[row][j] *= rescale;
      sum[row] *= rescale;
      top[row] = next;
      const bool hidden = score[row] == kHiddenScore;
      const float weight = Exp2(score[row] - next);
      float total = hidden ? 0.0F : weight;
      KVTIER_UNROLL
      for (uint32_t bit = 1; bit < kChunkTokens; bit <<= 1) {
        total += FloatOf(ShuffleXor(BitsOf(total), bit));
      }
      sum[row] += total;
      score[row] = hidden ? -1.0F : weight;
    }
  }
};

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_DECODE_ROWS_H_
