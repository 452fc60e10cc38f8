// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_MLA_DECODE_KERNEL_H_
#define KVTIER_KERNELS_CUDA_MLA_DECODE_KERNEL_H_

#include <cstdint>

#include "kernels/cuda/decode_merge.h"
#include "kernels/cuda/decode_query.h"
#include "kernels/cuda/decode_ring.h"
#include "kernels/cuda/decode_rows.h"
#include "kernels/cuda/mla_decode_plan.h"
#include "kernels/cuda/nvfp4_device.h"
#include "kernels/cuda/primitives.h"
#include "kernels/mla_layout.h"

// Decode of latent attention: the row attention of decode_rows.h over keys of 576 dims, of which
// the first 512 are the values. Items, splits and merging are those of the other decode kernels; a
// pass is 8 of a sequence's query rows.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// Latents and ropes of one item's tokens, as a Reader of RowAttention. Values come with g or their
// scale applied.
template <typename Arch>
class MlaReader {
 public:
  static constexpr uint32_t kKeyDim = kMlaKeyDim;
  static constexpr uint32_t kValueDim = kMlaLatentDim;
  static constexpr uint32_t kKeyStep = 8;  // A vector would take too many registers.
  static constexpr uint32_t kLaneDims = kValueDim / 32;
  static_assert(kLaneDims == kVectorDims, "a lane sums up the dims of a vector");

  KVTIER_DEVICE MlaReader(const MlaDecodeParams& params, const DecodeItem& item)
      : params_(params), item_(item), unit_(LoadConstant(params.base.g_k) * CodeUnit<Arch>()) {}

  KVTIER_DEVICE void LoadK(uint32_t token, uint32_t dim, float (&out)[kKeyStep],
                           uint32_t& damage) const {
    if (dim < kMlaLatentDim) {
      LoadLatent(token, dim, out, damage);
    } else if (item_.is_tail) {
      LoadTail(params_.rope, token, dim - kMlaLatentDim, out);
    } else {
      const Global<const std::byte> tile = Tile(token);
      const uint32_t slot = token % params_.base.block_tokens;
      LoadBf16(tile.At<const std::byte>(MlaRopeElementOffset(Shape(), slot, dim - kMlaLatentDim)),
               out);
    }
  }

  static KVTIER_DEVICE uint32_t ValueDim(uint32_t lane, uint32_t j) {
    return kVectorDims * lane + j;
  }
  KVTIER_DEVICE void LoadV(uint32_t token, uint32_t lane, float (&out)[kLaneDims],
                           uint32_t& damage) const {
    LoadLatent(token, lane * kVectorDims, out, damage);
  }

 private:
  KVTIER_DEVICE MlaShape Shape() const { return {params_.base.block_tokens}; }

  // Of a sealed token.
  KVTIER_DEVICE Global<const std::byte> Tile(uint32_t token) const {
    const uint64_t entry =
        uint64_t{item_.sequence} * params_.base.table_stride + token / params_.base.block_tokens;
    return TileOf(params_.base, item_,
                  LoadConstant(params_.base.block_table + static_cast<int64_t>(entry)));
  }

  // Dims [dim, dim + kDims) of a token's latent: a vector or half of one.
  template <uint32_t kDims>
  KVTIER_DEVICE void LoadLatent(uint32_t token, uint32_t dim, float (&out)[kDims],
                                uint32_t& damage) const {
    if (item_.is_tail) {
      LoadTail(params_.latent, token, dim, out);
      return;
    }
    const Global<const std::byte> tile = Tile(token);
    const uint32_t slot = token % params_.base.block_tokens;
    const uint32_t vector = dim / kVectorDims;
    uint32_t codes[kDims / 8];
    LoadWords(
        tile.At<const std::byte>(MlaCodeOffset(Shape(), slot, vector) + dim % kVectorDims / 2),
        codes);
    const uint32_t scale =
        LoadConstant(tile.At<const uint8_t>(MlaScaleByteOffset(Shape(), slot, vector)));
    damage |= ScaleDamage(scale);
    // Exact: scales have 4 bits, g is a power of two.
    const float factor = ScaleToFloat<Arch>(scale) * unit_;
    KVTIER_UNROLL
    for (uint32_t word = 0; word < kDims / 8; ++word) {
      uint32_t pairs[4];
      DequantizeWord<Arch>(codes[word], pairs);
      KVTIER_UNROLL
      for (uint32_t i = 0; i < 4; ++i) {
        out[8 * word + Codes<Arch>::FirstOf(i)] = FirstHalf(pairs[i]) * factor;
        out[8 * word + Codes<Arch>::SecondOf(i)] = SecondHalf(pairs[i]) * factor;
      }
    }
  }

  // The address of the rows is loaded every time (LoadConstant would be moved out of the loops),
  // because the registers are full.
  template <uint32_t kDims>
  KVTIER_DEVICE void LoadTail(const MlaTailSide& side, uint32_t token, uint32_t dim,
                              float (&out)[kDims]) const {
    const auto row = Global<const std::byte>{}.At<const std::byte>(
        LoadGlobal(side.addresses + item_.sequence) + token * side.token_stride);
    if (!side.is_fp8) {
      LoadBf16(row.At<const std::byte>(2 * dim), out);
      return;
    }
    uint32_t bytes[kDims / 4];
    LoadWords(row.At<const std::byte>(dim), bytes);
    KVTIER_UNROLL
    for (uint32_t i = 0; i < kDims; ++i) {
      out[i] = SignedE4m3(bytes[i / 4] >> (8 * (i % 4)) & 0xFF) * side.scale;
    }
  }

  template <uint32_t kDims>
  static KVTIER_DEVICE void LoadBf16(Global<const std::byte> from, float (&out)[kDims]) {
    uint32_t pairs[kDims / 2];
    LoadWords(from, pairs);
    KVTIER_UNROLL
    for (uint32_t i = 0; i < kDims / 2; ++i) {
      out[2 * i] = FirstBf16(pairs[i]);
      out[2 * i + 1] = SecondBf16(pairs[i]);
    }
  }

  const MlaDecodeParams& params_;
  const DecodeItem& item_;
  float unit_;
};

// A tile of the merger is a vector, so that the stores of a warp meet in sectors.
struct MlaPlaces {
  static KVTIER_DEVICE AccumulatorPlace Place(uint32_t dim) {
    return {dim / 16, dim % 16 / 2, dim % 2};
  }
  static KVTIER_DEVICE uint32_t Dim(uint32_t tile, uint32_t g, uint32_t upper) {
    return tile * 16 + g * 2 + upper;
  }
};

template <typename Arch>
KVTIER_DEVICE void MlaDecodeBody(const MlaDecodeParams& params) {
  const DecodeParams& base = params.base;
  CountItems(base, kRowChunkTokens);
  const uint32_t lane = ThreadX() % 32;
  const SharedAddress buffer = SharedBegin() + ThreadX() / 32 * kMlaBufferBytes;
  uint32_t damage = 0;
  const uint32_t item_count = TotalItems(base);
  for (uint32_t index = BlockX(); index < item_count; index += GridX()) {
    const DecodeItem item = ItemAt(base, index, kRowChunkTokens);
    const ResultMerger<MlaPlaces, kMlaLatentDim, kMlaPassRows / 8> merger(base, item);
    RowQuery<kMlaKeyDim, kMlaPassRows, false> query(base);
    query.Load(item, item.pass * kMlaPassRows, buffer, lane);
    const MlaReader<Arch> reader(params, item);
    RowAttention<MlaReader<Arch>, kMlaPassRows> attention;
    attention.AddItem(item, reader, buffer, query, lane, damage);
    attention.Publish(merger, buffer, 0, lane);
    merger.PublishBuffer(buffer);
    merger.Merge(1.0F);
  }
  ReportDamage(base, damage);
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_MLA_DECODE_KERNEL_H_
