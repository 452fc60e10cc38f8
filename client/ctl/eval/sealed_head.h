// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/eval/matrix.h"
#include "kernels/seal.h"

namespace kvtier::ctl::eval {

// K and V of one kv head as the product stores them: scales and transform of K chosen by
// kernels/calibrate.h from the head itself, sealed with kernels::SealTile, read back with
// kernels::GatherTile. Owns the tiles. Immutable.
class SealedHead {
 public:
  struct Options {
    bool unit_scales = false;  // global scales 1 instead of calibrated ones
    kernels::ScaleSearch search = kernels::ScaleSearch::kAmax6;
    bool mean = false;          // of K, as in kernels::TransformOptions
    float smooth_alpha = 0.0F;  // of K, as in kernels::TransformOptions
  };
  // `k` and `v` are [token][dim], finite in BF16, and rounded to it here. Tokens are filled up with
  // zeros to whole tiles. Errors: INVALID_ARGUMENT if the format does not define the head dim.
  static absl::StatusOr<SealedHead> Seal(const Matrix& k, const Matrix& v, const Options& options);

  // What the bytes stand for, the transform of K undone.
  const Matrix& keys() const { return keys_; }
  const Matrix& values() const { return values_; }
  // Tokens in full tiles, which are those that Attend sees.
  size_t full_tile_token_count() const;

  // kernels::Decode of every row of `q` over the full tiles. Requires: q.cols() == dims, and one
  // full tile.
  absl::StatusOr<Matrix> Attend(const Matrix& q, double softmax_scale) const;

 private:
  // BF16 rows of whole tiles.
  struct Rows {
    std::vector<uint16_t> k;
    std::vector<uint16_t> v;
  };

  SealedHead() = default;
  absl::Status Calibrate(const Rows& rows, const Options& options);
  absl::Status SealTiles(const Rows& rows, kernels::ScaleSearch search);
  absl::Status GatherTiles();

  kernels::TileShape shape_;
  uint32_t token_count_ = 0;
  float g_k_ = 1.0F;
  float g_v_ = 1.0F;
  std::vector<float> k_mean_;    // [dim] or empty
  std::vector<float> k_smooth_;  // [dim] or empty
  std::vector<std::byte> tiles_;
  Matrix keys_;
  Matrix values_;
};

}  // namespace kvtier::ctl::eval
