// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_TILE_H_
#define KVTIER_KERNELS_CUDA_DECODE_TILE_H_

#include <cstdint>

#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/nvfp4_device.h"
#include "kernels/cuda/primitives.h"

// Attention of one warp over the NVFP4 tokens of one stage in shared memory. K and V are the A
// operand of m16n8k16, query rows are its columns: nothing is wasted on 8 query heads a kv head,
// and every lane reads its operands from the tile as it was sealed.
//
// g = lane / 4, t = lane % 4. A word is 8 codes. One lane's words of a K row stand for k indices of
// two MMAs each; which dims these are does not matter as long as the query has the same order. For
// V the dims are rows of the output, put right when it is written.
//
// Codes become FP16 as nvfp4_device.h does it. The product with a block scale has 6 significant
// bits and is at least 2^-24: exact.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// What a product of codes, scales and the other operand is multiplied with.
template <typename Arch>
KVTIER_DEVICE constexpr float CodeUnit() {
  static_assert(Codes<Arch>::kCodeExponent == 0 || Codes<Arch>::kCodeExponent == -14);
  return Codes<Arch>::kCodeExponent == 0 ? 1.0F : 0x1p14F;
}

// Where the top bit of a byte is set, that byte of `scales` is none that sealing writes.
KVTIER_DEVICE uint32_t ScaleDamage(uint32_t scales) { return (scales + 0x01010101U) | scales; }

// Which tokens of 16 are the rows of the score fragments, and so the k indices of the V operand.
// Chosen for each head dim so that the loads of K and V touch every bank once.
template <uint32_t kHeadDim>
struct TokenMap {
  static constexpr bool kPairsEven = kHeadDim == 96;  // V pairs tokens (0, 2) and (1, 3) of four.

  static KVTIER_DEVICE uint32_t Row(uint32_t g, uint32_t upper) {
    if (kPairsEven) return 2 * g + upper;
    return 4 * (g >> 1) + (g & 1) + 2 * ((g >> 1 & 1) ^ upper);
  }
};

// The words of one token's K that a lane takes: kWords words, from kVectors vectors.
template <uint32_t kHeadDim>
struct KLane {
  static constexpr uint32_t kWords = kHeadDim / 32;
  static constexpr uint32_t kVectors = kHeadDim == 64    ? 1
                                       : kHeadDim <= 128 ? 2
                                       : kHeadDim == 192 ? 3
                                                         : 4;
  static constexpr uint32_t kFullPanels = kHeadDim / 128;

  // First dim of word i.
  static KVTIER_DEVICE uint32_t Dim(uint32_t i, uint32_t t) {
    if (i / 4 + 1 <= kFullPanels) return i / 4 * 128 + 32 * t + 8 * (i % 4);
    if (kHeadDim == 96 && i == 2) return 64 + 8 * t;
    return i / 4 * 128 + 16 * t + 8 * (i % 4);
  }
  // Index among the lane's vectors of the one that word i is part of.
  static KVTIER_DEVICE constexpr uint32_t Vector(uint32_t i) {
    if (i / 4 + 1 <= kFullPanels) return i / 2;
    if (kHeadDim == 96) return i / 2;
    return kFullPanels * 2;
  }
};

// A lane's parts of two K rows: words of codes, scales as pairs of the same FP16 value.
template <uint32_t kHeadDim>
struct KRows {
  uint32_t words[2][KLane<kHeadDim>::kWords];
  uint32_t scales[2][KLane<kHeadDim>::kVectors];
};

KVTIER_DEVICE void SwapIf(bool swap, uint32_t* a, uint32_t* b) {
  const uint32_t first = swap ? *b : *a;
  *b = swap ? *a : *b;
  *a = first;
}

// Rows token[0] and token[1]. Some loads would meet another row's banks: there, some lanes read the
// second row first (masks found by search, one bit for each g).
template <uint32_t kHeadDim>
KVTIER_DEVICE void LoadKWords(SharedAddress stage, const uint32_t (&token)[2], uint32_t g,
                              uint32_t t, uint32_t (&words)[2][KLane<kHeadDim>::kWords]) {
  constexpr uint32_t kPanelBytes = StageTokens(kHeadDim) * 64;
  constexpr uint32_t kPanels = KLane<kHeadDim>::kFullPanels;
  KVTIER_UNROLL
  for (uint32_t row = 0; row < 2; ++row) {
    KVTIER_UNROLL
    for (uint32_t panel = 0; panel != kPanels; ++panel) {
      const auto codes = LoadShared<Words4>(stage + panel * kPanelBytes + token[row] * 64 + 16 * t);
      words[row][4 * panel] = codes.x;
      words[row][4 * panel + 1] = codes.y;
      words[row][4 * panel + 2] = codes.z;
      words[row][4 * panel + 3] = codes.w;
    }
    if constexpr (kHeadDim % 128 != 0) {
      constexpr uint32_t kRowBytes = kHeadDim % 128 / 2;
      const auto codes =
          LoadShared<Words2>(stage + kPanels * kPanelBytes + token[row] * kRowBytes + 8 * t);
      words[row][4 * kPanels] = codes.x;
      words[row][4 * kPanels + 1] = codes.y;
    }
  }
  if constexpr (kHeadDim == 96) {
    const bool swap = g >= 4;
    words[0][2] = LoadShared<uint32_t>(stage + (swap ? token[1] : token[0]) * 48 + 32 + 4 * t);
    words[1][2] = LoadShared<uint32_t>(stage + (swap ? token[0] : token[1]) * 48 + 32 + 4 * t);
    SwapIf(swap, &words[0][2], &words[1][2]);
  }
}

// Bytes as stored, two to a word: vectors 2i and 2i + 1 of the lane.
template <uint32_t kHeadDim>
KVTIER_DEVICE void LoadKScaleBytes(SharedAddress stage, const uint32_t (&token)[2], uint32_t g,
                                   uint32_t t, uint32_t (&bytes)[2][2]) {
  constexpr uint32_t kSwapMask = kHeadDim == 256 ? 0xF0 : kHeadDim == 192 ? 0x21 : 0;
  constexpr uint32_t kVectorCount = kHeadDim / 16;
  constexpr uint32_t kPanels = KLane<kHeadDim>::kFullPanels;
  const SharedAddress scales = stage + StageTokens(kHeadDim) * kHeadDim / 2;
  const bool swap = (kSwapMask >> g & 1) != 0;
  KVTIER_UNROLL
  for (uint32_t row = 0; row < 2; ++row) {
    const SharedAddress own = scales + token[row] * kVectorCount;
    if constexpr (kHeadDim == 96) {
      const uint32_t first = LoadShared<uint8_t>(own + t);
      bytes[row][0] = first | static_cast<uint32_t>(LoadShared<uint8_t>(own + 4 + (t >> 1))) << 8;
    } else {
      const SharedAddress read =
          kSwapMask == 0 ? own : scales + (swap ? token[1 - row] : token[row]) * kVectorCount;
      KVTIER_UNROLL
      for (uint32_t panel = 0; panel != kPanels; ++panel) {
        bytes[row][panel] = LoadShared<uint16_t>(read + 8 * panel + 2 * t);
      }
      if constexpr (kHeadDim % 128 == 64) {
        bytes[row][kPanels] = LoadShared<uint8_t>(own + 8 * kPanels + t);
      }
    }
  }
  if constexpr (kSwapMask != 0) {
    KVTIER_UNROLL
    for (uint32_t panel = 0; panel != kPanels; ++panel) {
      SwapIf(swap, &bytes[0][panel], &bytes[1][panel]);
    }
  }
}

template <typename Arch, uint32_t kHeadDim>
KVTIER_DEVICE void LoadKRows(SharedAddress stage, const uint32_t (&token)[2], uint32_t g,
                             uint32_t t, KRows<kHeadDim>& rows, uint32_t& damage) {
  LoadKWords<kHeadDim>(stage, token, g, t, rows.words);
  uint32_t bytes[2][2] = {};
  LoadKScaleBytes<kHeadDim>(stage, token, g, t, bytes);
  KVTIER_UNROLL
  for (uint32_t row = 0; row < 2; ++row) {
    KVTIER_UNROLL
    for (uint32_t i = 0; i < KLane<kHeadDim>::kVectors; i += 2) {
      damage |= ScaleDamage(bytes[row][i / 2]);
      const uint32_t two = ScalesToHalf2<Arch>(bytes[row][i / 2]);
      rows.scales[row][i] = PermuteBytes(two, two, 0x1010);
      if (i + 1 < KLane<kHeadDim>::kVectors) {
        rows.scales[row][i + 1] = PermuteBytes(two, two, 0x3232);
      }
    }
  }
}

// A lane's share of query rows [8 * n, 8 * n + 8) for all n, in the order of KLane's words: column
// g of the B operands. Values that FP16 does not hold have a second part: what rounding took from
// the first, times kRestScale.
template <uint32_t kHeadDim, uint32_t kTilesN, uint32_t kParts>
struct QueryFragments {
  static_assert(kParts == 1 || kParts == 2);
  uint32_t b[kParts][kTilesN][kHeadDim / 16][2];
};
// The rest is at most half a unit of the last of 11 bits: this brings it to where the first part
// is, so that it too loses nothing to subnormals before the first part has lost 11 bits more.
inline constexpr float kRestScale = 0x1p11F;

// scores[n] += K . Q for 16 tokens of the stage: rows of the fragment are TokenMap's tokens,
// columns query rows, in units of CodeUnit^-1 and the query's scale.
template <typename Arch, uint32_t kHeadDim, uint32_t kTilesN, uint32_t kParts>
KVTIER_DEVICE void ScoreTokens(SharedAddress stage, uint32_t first_token, uint32_t g, uint32_t t,
                               const QueryFragments<kHeadDim, kTilesN, kParts>& query,
                               float (&scores)[kTilesN][4], uint32_t& damage) {
  float rest[kTilesN][4] = {};
  const uint32_t token[2] = {first_token + TokenMap<kHeadDim>::Row(g, 0),
                             first_token + TokenMap<kHeadDim>::Row(g, 1)};
  KRows<kHeadDim> rows;
  LoadKRows<Arch, kHeadDim>(stage, token, g, t, rows, damage);
  KVTIER_UNROLL
  for (uint32_t i = 0; i < KLane<kHeadDim>::kWords; ++i) {
    uint32_t first[4];
    uint32_t second[4];
    DequantizeWord<Arch>(rows.words[0][i], first);
    DequantizeWord<Arch>(rows.words[1][i], second);
    const uint32_t first_scale = rows.scales[0][KLane<kHeadDim>::Vector(i)];
    const uint32_t second_scale = rows.scales[1][KLane<kHeadDim>::Vector(i)];
    KVTIER_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t a[4] = {
          MulHalf2(first[2 * half], first_scale), MulHalf2(second[2 * half], second_scale),
          MulHalf2(first[2 * half + 1], first_scale), MulHalf2(second[2 * half + 1], second_scale)};
      KVTIER_UNROLL
      for (uint32_t n = 0; n < kTilesN; ++n) {
        MmaF16(scores[n], a, query.b[0][n][2 * i + half][0], query.b[0][n][2 * i + half][1]);
        if constexpr (kParts == 2) {
          MmaF16(rest[n], a, query.b[1][n][2 * i + half][0], query.b[1][n][2 * i + half][1]);
        }
      }
    }
  }
  if constexpr (kParts == 2) {
    KVTIER_UNROLL
    for (uint32_t n = 0; n < kTilesN; ++n) {
      KVTIER_UNROLL
      for (uint32_t j = 0; j < 4; ++j) {
        scores[n][j] = FmaRn(rest[n][j], 1.0F / kRestScale, scores[n][j]);
      }
    }
  }
}

// Output accumulators of a warp: tiles of 16 dims by 8 query rows.
template <uint32_t kHeadDim, uint32_t kTilesN>
struct Accumulators {
  static constexpr uint32_t kTiles = kHeadDim / 16;
  float c[kTiles][kTilesN][4];
};

// Parts of the head dim that V is read in. A lane has 16, 8 or 4 dims of a part of 128, 64 or 32:
// a whole vector, one of its two words, or half the codes of a word.
template <uint32_t kHeadDim>
struct VParts {
  static constexpr uint32_t kCount = kHeadDim == 64 || kHeadDim == 128 ? 1 : 2;
  static KVTIER_DEVICE constexpr uint32_t Dims(uint32_t part) {
    if (kHeadDim == 96) return part == 0 ? 64 : 32;
    return kHeadDim - 128 * part < 128 ? kHeadDim - 128 * part : 128;
  }
  static KVTIER_DEVICE constexpr uint32_t FirstDim(uint32_t part) {
    return part == 0 ? 0 : kHeadDim == 96 ? 64 : 128;
  }
  // The vector that a lane reads.
  static KVTIER_DEVICE uint32_t Vector(uint32_t part, uint32_t g) {
    const uint32_t dims = Dims(part);
    return FirstDim(part) / 16 + (dims == 128 ? g : dims == 64 ? g >> 1 : g >> 2);
  }
};

// The dim of row g (upper = 0) or g + 8 (upper = 1) of accumulator tile `tile`.
template <typename Arch, uint32_t kHeadDim>
KVTIER_DEVICE uint32_t AccumulatorDim(uint32_t tile, uint32_t g, uint32_t upper) {
  const uint32_t part = tile * 16 + 1 > VParts<kHeadDim>::FirstDim(VParts<kHeadDim>::kCount - 1)
                            ? VParts<kHeadDim>::kCount - 1
                            : 0;
  const uint32_t dims = VParts<kHeadDim>::Dims(part);
  const uint32_t own = tile - VParts<kHeadDim>::FirstDim(part) / 16;
  // Unit: 4 codes that one pair of MMA rows takes, of word unit / 2.
  const uint32_t unit = dims == 128 ? own / 2 : dims == 64 ? 2 * (g & 1) + own / 2 : g & 3;
  const uint32_t pair = 2 * (own & 1) + upper;
  const uint32_t code =
      Arch::kConvertsE2m1 ? 2 * pair + (unit & 1) : 4 * (unit & 1) + Codes<Arch>::FirstOf(pair);
  return VParts<kHeadDim>::Vector(part, g) * 16 + 8 * (unit >> 1) + code;
}

// Where AccumulatorDim gives `dim`.
struct AccumulatorPlace {
  uint32_t tile;
  uint32_t g;
  uint32_t upper;
};
template <typename Arch, uint32_t kHeadDim>
KVTIER_DEVICE AccumulatorPlace PlaceOfDim(uint32_t dim) {
  constexpr uint32_t kLastPart = VParts<kHeadDim>::kCount - 1;
  const uint32_t part = dim + 1 > VParts<kHeadDim>::FirstDim(kLastPart) ? kLastPart : 0;
  const uint32_t dims = VParts<kHeadDim>::Dims(part);
  const uint32_t vector = (dim - VParts<kHeadDim>::FirstDim(part)) / 16;
  const uint32_t word = dim % 16 / 8;
  const uint32_t code = dim % 8;
  const uint32_t parity = Arch::kConvertsE2m1 ? code & 1 : code >> 2;
  // The order of pairs, 3 1 2 0, is its own inverse.
  const uint32_t pair = Arch::kConvertsE2m1 ? code >> 1 : Codes<Arch>::FirstOf(code & 3);
  const uint32_t unit = dims == 128 ? 2 * word + parity : dims == 64 ? parity : 0;
  const uint32_t g = dims == 128  ? vector
                     : dims == 64 ? 2 * vector + word
                                  : 4 * vector + 2 * word + parity;
  return {VParts<kHeadDim>::FirstDim(part) / 16 + 2 * unit + (pair >> 1), g, pair & 1};
}

// Codes of two tokens, word against word, as one word whose pairs are (first, second) of one dim.
// `parity` chooses the half of the 8 dims: the lower or upper 4, or (hardware conversion) the even
// or odd ones.
template <typename Arch>
KVTIER_DEVICE uint32_t PairTokens(uint32_t first, uint32_t second, uint32_t parity) {
  if constexpr (Arch::kConvertsE2m1) {
    const uint32_t shift = 4 * parity;
    return (first >> shift & 0x0F0F0F0FU) | ((second >> shift & 0x0F0F0F0FU) << 4);
  } else {
    return PermuteBytes(first, second, parity != 0 ? 0x7632 : 0x5410);
  }
}

// The words of V that one lane multiplies: of four tokens, in the order of the MMA's k indices.
struct VWords {
  uint32_t word[2][4];  // [word of the vector][token]
};

template <uint32_t kHeadDim>
KVTIER_DEVICE VWords LoadVWords(SharedAddress group, uint32_t vector, uint32_t t) {
  // Halves of four tokens, odd lanes the other way round (TokenMap).
  const uint32_t flip = (vector & 1) ^ (TokenMap<kHeadDim>::kPairsEven ? 0 : t & 1);
  const SharedAddress own = group + vector * 128 + t * 32;
  const auto first = LoadShared<Words4>(own + 16 * flip);
  const auto second = LoadShared<Words4>(own + 16 * (1 - flip));
  if constexpr (TokenMap<kHeadDim>::kPairsEven) {
    return {{{first.x, second.x, first.z, second.z}, {first.y, second.y, first.w, second.w}}};
  }
  return {{{first.x, first.z, second.x, second.z}, {first.y, first.w, second.y, second.w}}};
}

// Scales of the lane's four tokens in each part, as stored, in the order of the MMA's k indices.
template <uint32_t kHeadDim>
KVTIER_DEVICE void LoadVScaleBytes(SharedAddress scales, uint32_t quad, uint32_t g, uint32_t t,
                                   uint32_t (&bytes)[2]) {
  using Parts = VParts<kHeadDim>;
  // As for K: some lanes read their second part first. A bit for each (t, g / 2).
  constexpr uint32_t kSwapMask = kHeadDim == 256 ? 0xFF00 : kHeadDim == 192 ? 0x3010 : 0;
  const bool swap = (kSwapMask >> (4 * t + (g >> 1)) & 1) != 0;
  const SharedAddress own = scales + quad * (kHeadDim / 4);
  const uint32_t order = TokenMap<kHeadDim>::kPairsEven ? 0x3120 : (t & 1) != 0 ? 0x1032 : 0x3210;
  KVTIER_UNROLL
  for (uint32_t part = 0; part < Parts::kCount; ++part) {
    const uint32_t read = swap ? Parts::kCount - 1 - part : part;
    const uint32_t word = LoadShared<uint32_t>(own + 4 * Parts::Vector(read, g));
    bytes[part] = PermuteBytes(word, word, order);
  }
  if (kSwapMask != 0) SwapIf(swap, &bytes[0], &bytes[1]);
}

// accumulators += V^T . P^T for one part and 16 tokens, whose V begins at `group`; `bytes` are the
// lane's scales, p the B operands of each n.
template <typename Arch, uint32_t kHeadDim, uint32_t kTilesN, uint32_t kPart>
KVTIER_DEVICE void AccumulatePart(SharedAddress group, uint32_t bytes, uint32_t g, uint32_t t,
                                  const uint32_t (&p)[kTilesN][2],
                                  Accumulators<kHeadDim, kTilesN>& out) {
  constexpr uint32_t kDims = VParts<kHeadDim>::Dims(kPart);
  constexpr uint32_t kFirstTile = VParts<kHeadDim>::FirstDim(kPart) / 16;
  const uint32_t first_scales = ScalesToHalf2<Arch>(bytes & 0xFFFFU);
  const uint32_t second_scales = ScalesToHalf2<Arch>(bytes >> 16);
  const VWords v = LoadVWords<kHeadDim>(group, VParts<kHeadDim>::Vector(kPart, g), t);
  KVTIER_UNROLL
  for (uint32_t unit = 0; unit < kDims / 32; ++unit) {
    // A part of 64 or 32 dims: the lane's own word, and half of it.
    const bool high_word = kDims == 128 ? unit >= 2 : kDims == 64 ? (g & 1) != 0 : (g & 2) != 0;
    const uint32_t parity = kDims == 32 ? g & 1 : unit & 1;
    uint32_t word[4];
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 4; ++i) word[i] = high_word ? v.word[1][i] : v.word[0][i];
    uint32_t first[4];
    uint32_t second[4];
    DequantizeWord<Arch>(PairTokens<Arch>(word[0], word[1], parity), first);
    DequantizeWord<Arch>(PairTokens<Arch>(word[2], word[3], parity), second);
    KVTIER_UNROLL
    for (uint32_t k = 0; k < 2; ++k) {
      const uint32_t a[4] = {
          MulHalf2(first[2 * k], first_scales), MulHalf2(first[2 * k + 1], first_scales),
          MulHalf2(second[2 * k], second_scales), MulHalf2(second[2 * k + 1], second_scales)};
      KVTIER_UNROLL
      for (uint32_t n = 0; n < kTilesN; ++n) {
        MmaF16(out.c[kFirstTile + 2 * unit + k][n], a, p[n][0], p[n][1]);
      }
    }
  }
}

template <typename Arch, uint32_t kHeadDim, uint32_t kTilesN>
KVTIER_DEVICE void AccumulateTokens(SharedAddress stage, uint32_t first_token, uint32_t g,
                                    uint32_t t, const uint32_t (&p)[kTilesN][2],
                                    Accumulators<kHeadDim, kTilesN>& out, uint32_t& damage) {
  constexpr uint32_t kSideBytes = StageTokens(kHeadDim) * kHeadDim * 9 / 16;
  const SharedAddress group = stage + kSideBytes + first_token * kHeadDim / 2;
  const SharedAddress scales = stage + kSideBytes + StageTokens(kHeadDim) * kHeadDim / 2;
  uint32_t bytes[2] = {};
  LoadVScaleBytes<kHeadDim>(scales, first_token / 4 + t, g, t, bytes);
  damage |= ScaleDamage(bytes[0]) | ScaleDamage(bytes[1]);
  AccumulatePart<Arch, kHeadDim, kTilesN, 0>(group, bytes[0], g, t, p, out);
  if constexpr (VParts<kHeadDim>::kCount == 2) {
    AccumulatePart<Arch, kHeadDim, kTilesN, 1>(group, bytes[1], g, t, p, out);
  }
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_DECODE_TILE_H_
