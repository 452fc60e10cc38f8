// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_SCALE_SET_H_
#define KVTIER_KERNELS_SCALE_SET_H_

#include <cstdint>
#include <span>

#include "kernels/decode.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

namespace kvtier::kernels {

// Everything beside the tiles that fixes how values became bytes, of all layers: what an engine
// passes around instead of scales by the handful. Blocks sealed under different scale sets must not
// meet, so its identity is part of the layout. A view: owns nothing. Immutable, thread-safe.
struct ScaleSet {
  uint32_t layer_count = 0;
  uint32_t kv_head_count = 0;
  uint32_t head_dim = 0;
  ScaleSearch search = ScaleSearch::kAmax6;

  // [layer_count][kv_head_count]. Of an NVFP4 side a power of two in [2^-100, 2^100], of an FP8
  // side any value above 0 that is finite and has a finite reciprocal, of a BF16 side 1.
  std::span<const float> g_k;
  std::span<const float> g_v;

  // [layer_count][kv_head_count][head_dim] each or empty: the transform of K, see SealOptions.
  std::span<const float> k_mean = {};
  std::span<const float> k_smooth = {};

  // [layer_count] or empty, which means NVFP4 everywhere.
  std::span<const LayerFormat> layer_formats = {};
};

// Errors: kInvalidArgument for a shape that no block has, a span of another size, or a value
// outside what is said above. A set that passes gives options that SealTile and Decode accept.
Status Validate(const ScaleSet& set);

// The format of a layer's tiles, for SealTile. Requires: Validate(set).ok() and an index in range.
constexpr LayerFormat LayerFormatOf(const ScaleSet& set, uint32_t layer_idx) {
  return set.layer_formats.empty() ? LayerFormat{} : set.layer_formats[layer_idx];
}

// What seals tiles of (layer, kv head). Views into the set. Requires: Validate(set).ok() and
// indices in range.
SealOptions SealOptionsOf(const ScaleSet& set, uint32_t layer_idx, uint32_t kv_head_idx,
                          Isa isa = BestIsa());

// Sets g_k, g_v, k_mean, k_smooth and layer_formats of `args` for args->layer_idx. Views into the
// set. Requires: Validate(set).ok() and args->layer_idx < set.layer_count.
void SetScales(const ScaleSet& set, DecodeArgs* args);

// Tells when data no longer fits the scales: the share of vectors that saturate. Values within 6
// times of what calibration saw never do (FORMAT.md, 1.2), so any share that stays is news about
// the traffic. Single-thread; a plain value of a few words.
class StaleScaleMonitor {
 public:
  struct Options {
    // Stale above this share of vectors. At 1 in 10,000 clipped vectors are still lost in the error
    // of the format; a distribution that moved saturates far more (at twice the range of g, the
    // relative error of the values is 0.11 instead of 0.095, at four times 0.32).
    double saturated_share_max = 1e-4;
    // Vectors that a verdict needs: 1024 tokens of 32 layers of 8 kv heads of head dim 128.
    uint64_t window_vectors = uint64_t{1} << 22;
  };

  StaleScaleMonitor() = default;
  explicit StaleScaleMonitor(const Options& options) : options_(options) {}

  // Counts `vector_count` sealed vectors, of which stats.saturated_count saturated. Verdicts change
  // here only.
  void Add(uint64_t vector_count, const SealStats& stats);

  // Of the last full window; 0 before there is one.
  double saturated_share() const { return share_; }
  bool stale() const { return share_ > options_.saturated_share_max; }

 private:
  Options options_;
  uint64_t vector_count_ = 0;  // Of the window that is being filled.
  uint64_t saturated_count_ = 0;
  double share_ = 0.0;
};

// Vectors in one sealed tile, K and V together.
constexpr uint64_t TileVectorCount(const TileShape& shape) {
  return uint64_t{2} * shape.block_tokens * VectorsPerToken(shape);
}

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_SCALE_SET_H_
