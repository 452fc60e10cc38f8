// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_QUERY_H_
#define KVTIER_KERNELS_CUDA_DECODE_QUERY_H_

#include <cstdint>

#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/decode_ring.h"
#include "kernels/cuda/decode_softmax.h"
#include "kernels/cuda/decode_tile.h"
#include "kernels/cuda/primitives.h"

// The query rows of a pass as the two ways of attending want them: FP16 fragments for the MMAs, or
// FP32 rows in shared memory. K's transform is folded in: q . (k * smooth + mean) is
// (q * smooth) . k + q . mean.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

KVTIER_DEVICE void LoadFloats8(Global<const float> source, float (&out)[8]) {
  KVTIER_UNROLL
  for (uint32_t i = 0; i < 8; i += 4) {
    const auto words = LoadConstant(source.At<const Words4>(4 * i));
    out[i] = FloatOf(words.x);
    out[i + 1] = FloatOf(words.y);
    out[i + 2] = FloatOf(words.z);
    out[i + 3] = FloatOf(words.w);
  }
}

// Dims [dim, dim + 8) of query row `row` of the pass's kv head. With `transformed`, times k_smooth;
// *mean_dot grows by their product with k_mean.
template <uint32_t kHeadDim>
KVTIER_DEVICE void LoadQuery8(const DecodeParams& params, const DecodeItem& item, uint32_t row,
                              uint32_t dim, bool transformed, float (&out)[8], float* mean_dot) {
  const uint64_t element = QueryRow(params, item, row) * kHeadDim + dim;
  if (params.query_is_bf16) {
    const auto words = LoadConstant(params.query.At<const Words4>(2 * element));
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      out[2 * i] = FirstBf16(pairs[i]);
      out[2 * i + 1] = SecondBf16(pairs[i]);
    }
  } else {
    LoadFloats8(params.query.At<const float>(4 * element), out);
  }
  if (!transformed) return;
  const uint64_t channel = uint64_t{item.kv_head} * kHeadDim + dim;
  float factor[8];
  if (!params.k_mean.is_null()) {
    LoadFloats8(params.k_mean.At<const float>(4 * channel), factor);
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 8; ++i) *mean_dot = FmaRn(out[i], factor[i], *mean_dot);
  }
  if (!params.k_smooth.is_null()) {
    LoadFloats8(params.k_smooth.At<const float>(4 * channel), factor);
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 8; ++i) out[i] = MulRn(out[i], factor[i]);
  }
}

// For StageAttention. Column c of tile n is row 8 * n + c of the pass; a lane holds the constants
// of its columns 2 * t and 2 * t + 1.
template <uint32_t kHeadDim, uint32_t kTilesN, uint32_t kParts>
struct PassQuery {
  QueryFragments<kHeadDim, kTilesN, kParts> fragments;
  float unit[kTilesN][2];  // Accumulated score to log2 units.
  float bias[kTilesN][2];
  uint32_t end[kTilesN][2];  // Of what the row sees.

  // Every row is scaled by a power of two so that its largest value is in [2^14, 2^15). One part
  // holds the 8 bits of BF16 values down to 2^-31 of it, two parts hold 22 bits of any values down
  // to 2^-29 of it. What is smaller still is off by 2^-39 of the largest, or 2^-50.
  template <typename Arch>
  KVTIER_DEVICE void Load(const DecodeParams& params, const DecodeItem& item, uint32_t g,
                          uint32_t t) {
    const float g_k = LoadConstant(params.g_k + item.kv_head);
    KVTIER_UNROLL
    for (uint32_t n = 0; n < kTilesN; ++n) {
      const uint32_t row = item.pass * 8 * kTilesN + 8 * n + g;
      const bool is_row = row < RowsOfHead(params);
      // Twice through the row, because all of it would take too many registers.
      float mean_dot = 0.0F;
      float largest = 0.0F;
      KVTIER_NO_UNROLL
      for (uint32_t i = 0; i < kHeadDim / 32; ++i) {
        float values[8] = {};
        if (is_row) {
          LoadQuery8<kHeadDim>(params, item, row, KLane<kHeadDim>::Dim(i, t), true, values,
                               &mean_dot);
        }
        KVTIER_UNROLL
        for (uint32_t j = 0; j < 8; ++j) {
          largest = MaxFloat(largest, FloatOf(BitsOf(values[j]) & 0x7FFFFFFFU));
        }
      }
      KVTIER_UNROLL
      for (uint32_t bit = 1; bit < 4; bit <<= 1) {
        largest = MaxFloat(largest, FloatOf(ShuffleXor(BitsOf(largest), bit)));
        mean_dot += FloatOf(ShuffleXor(BitsOf(mean_dot), bit));
      }
      const uint32_t exponent = ScaleExponent(largest);
      const float scale = FloatOf(exponent << 23);
      KVTIER_UNROLL
      for (uint32_t i = 0; i < kHeadDim / 32; ++i) {
        float values[8] = {};
        float unused = 0.0F;
        if (is_row) {
          LoadQuery8<kHeadDim>(params, item, row, KLane<kHeadDim>::Dim(i, t), true, values,
                               &unused);
        }
        KVTIER_UNROLL
        for (uint32_t pair = 0; pair < 4; ++pair) {
          const float first = MulRn(values[Codes<Arch>::FirstOf(pair)], scale);
          const float second = MulRn(values[Codes<Arch>::SecondOf(pair)], scale);
          const uint32_t rounded = PackHalf2(first, second);
          fragments.b[0][n][2 * i + pair / 2][pair % 2] = rounded;
          if constexpr (kParts == 2) {
            // Exact differences.
            fragments.b[1][n][2 * i + pair / 2][pair % 2] =
                PackHalf2(SubRn(first, FirstHalf(rounded)) * kRestScale,
                          SubRn(second, SecondHalf(rounded)) * kRestScale);
          }
        }
      }
      const float to_score = params.softmax_scale * kLog2E;
      const float row_unit = FloatOf((254 - exponent) << 23) * g_k * CodeUnit<Arch>() * to_score;
      const float row_bias = mean_dot * to_score;
      KVTIER_UNROLL
      for (uint32_t column = 0; column < 2; ++column) {
        const uint32_t from = (2 * t + column) * 4;
        unit[n][column] = FloatOf(ShuffleFrom(BitsOf(row_unit), from));
        bias[n][column] = FloatOf(ShuffleFrom(BitsOf(row_bias), from));
        end[n][column] = VisibleEnd(params, item, item.pass * 8 * kTilesN + 8 * n + 2 * t + column);
      }
    }
  }

 private:
  // Exponent field of the power of two that brings `largest` to [2^14, 2^15), limited so that its
  // inverse is a normal number too.
  static KVTIER_DEVICE uint32_t ScaleExponent(float largest) {
    const uint32_t field = BitsOf(largest) >> 23;
    const uint32_t exponent = 127 + 14 + 127 - (field == 0 ? 1 : field);
    return exponent > 240 ? 240 : exponent;
  }
};

// For RowAttention. All lanes hold the constants of all rows. Without a transform there are fewer.
template <uint32_t kHeadDim, uint32_t kRows, bool kHasTransform>
struct RowQuery {
  const DecodeParams& params;
  float unit;
  float bias[kRows];
  uint32_t context;  // Tokens.
  uint32_t hidden;   // 4 bits a row: HiddenTokens.
  static_assert(kRows <= 8);

  KVTIER_DEVICE explicit RowQuery(const DecodeParams& decode_params) : params(decode_params) {}

  // Rows from first_row on. Writes [kRows][kHeadDim] floats to `buffer`; rows beyond the kv head's
  // last are zeros.
  KVTIER_DEVICE void Load(const DecodeItem& item, uint32_t first_row, SharedAddress buffer,
                          uint32_t lane) {
    const bool transformed = kHasTransform && !item.is_tail;
    const float multiplier = item.is_tail ? params.tail_k_scale
                             : params.k_format == SideFormat::kBf16
                                 ? 1.0F
                                 : LoadConstant(params.g_k + item.kv_head);
    unit = params.softmax_scale * kLog2E * multiplier;
    context = item.sealed_tokens + item.tail_tokens;
    hidden = 0;
    KVTIER_UNROLL
    for (uint32_t i = 0; i < kRows; ++i) {
      const uint32_t row = first_row + i;
      float mean_dot = 0.0F;
      KVTIER_NO_UNROLL
      for (uint32_t step = 0; step < kHeadDim; step += 32 * 8) {
        const uint32_t dim = step + 8 * lane;
        if (dim >= kHeadDim) continue;
        float values[8] = {};
        if (row < RowsOfHead(params)) {
          LoadQuery8<kHeadDim>(params, item, row, dim, transformed, values, &mean_dot);
        }
        KVTIER_UNROLL
        for (uint32_t j = 0; j < 8; j += 4) {
          StoreShared(buffer + (i * kHeadDim + dim + j) * 4,
                      Words4{BitsOf(values[j]), BitsOf(values[j + 1]), BitsOf(values[j + 2]),
                             BitsOf(values[j + 3])});
        }
      }
      bias[i] = 0.0F;
      if constexpr (kHasTransform) {
        KVTIER_UNROLL
        for (uint32_t bit = 1; bit < 32; bit <<= 1) {
          mean_dot += FloatOf(ShuffleXor(BitsOf(mean_dot), bit));
        }
        bias[i] = mean_dot * params.softmax_scale * kLog2E;
      }
      hidden |= HiddenTokens(params, row) << (4 * i);
    }
    SyncWarp();
  }

  KVTIER_DEVICE bool Sees(uint32_t row, uint32_t token) const {
    const uint32_t end = FloorSub(context, hidden >> (4 * row) & 0xF);
    return token >= WindowBegin(params, end) && token < end;
  }
  KVTIER_DEVICE float Score(uint32_t row, float product) const {
    const float score = FmaRn(product, unit, bias[row]);
    return params.soft_cap != 0.0F ? SoftCap(score, params.soft_cap, params.soft_cap_inverse)
                                   : score;
  }
};

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_DECODE_QUERY_H_
