// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/sealed_head.h"

#include <algorithm>
#include <span>

#include "kernels/calibrate.h"
#include "kernels/decode.h"
#include "kernels/gather.h"
#include "kernels/nvfp4.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl::eval {
namespace {

constexpr uint32_t kBlockTokens = 64;  // the product's default
constexpr size_t kQueriesAtOnce = 16;

absl::Status ToAbslStatus(const kernels::Status& status) {
  if (status.ok()) return absl::OkStatus();
  if (status.code() == kernels::StatusCode::kDataLoss) return DataLoss("%s", status.message());
  return Invalid("%s", status.message());
}

// BF16, with rows of zeros up to a whole tile.
std::vector<uint16_t> WholeTiles(const Matrix& x) {
  const size_t row_count = (x.rows() + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
  std::vector<uint16_t> rows(row_count * x.cols(), 0);
  for (size_t i = 0; i < x.values().size(); ++i) {
    rows[i] = kernels::FloatToBf16(static_cast<float>(x.values()[i]));
  }
  return rows;
}

kernels::ConstRows RowsAt(const uint16_t* data, uint32_t head_dim) {
  return {.type = kernels::ElementType::kBf16, .data = data, .token_stride = head_dim};
}

}  // namespace

absl::StatusOr<SealedHead> SealedHead::Seal(const Matrix& k, const Matrix& v,
                                            const Options& options) {
  SealedHead head;
  head.shape_ = {.block_tokens = kBlockTokens, .head_dim = static_cast<uint32_t>(k.cols())};
  head.token_count_ = static_cast<uint32_t>(k.rows());
  KVT_RETURN_IF_ERROR(ToAbslStatus(kernels::Validate(head.shape_)));
  const Rows rows{.k = WholeTiles(k), .v = WholeTiles(v)};
  KVT_RETURN_IF_ERROR(head.Calibrate(rows, options));
  KVT_RETURN_IF_ERROR(head.SealTiles(rows, options.search));
  KVT_RETURN_IF_ERROR(head.GatherTiles());
  return head;
}

absl::Status SealedHead::Calibrate(const Rows& rows, const Options& options) {
  const uint32_t dims = shape_.head_dim;
  std::vector<kernels::ChannelStats> k_stats(dims);
  std::vector<kernels::ChannelStats> v_stats(dims);
  KVT_RETURN_IF_ERROR(
      ToAbslStatus(kernels::Observe(RowsAt(rows.k.data(), dims), token_count_, k_stats)));
  KVT_RETURN_IF_ERROR(
      ToAbslStatus(kernels::Observe(RowsAt(rows.v.data(), dims), token_count_, v_stats)));
  if (options.mean) k_mean_.resize(dims);
  if (options.smooth_alpha > 0.0F) k_smooth_.resize(dims);
  KVT_RETURN_IF_ERROR(ToAbslStatus(kernels::ChooseTransform(
      k_stats, {.mean = options.mean, .smooth_alpha = options.smooth_alpha, .token_count_min = 1},
      k_mean_, k_smooth_)));
  if (options.unit_scales) return absl::OkStatus();
  float k_amax = 0.0F;
  float v_amax = 0.0F;
  KVT_RETURN_IF_ERROR(ToAbslStatus(kernels::AmaxOf(k_stats, k_mean_, k_smooth_, &k_amax)));
  KVT_RETURN_IF_ERROR(ToAbslStatus(kernels::AmaxOf(v_stats, {}, {}, &v_amax)));
  KVT_RETURN_IF_ERROR(ToAbslStatus(kernels::GlobalScaleFromAmax(k_amax, &g_k_)));
  return ToAbslStatus(kernels::GlobalScaleFromAmax(v_amax, &g_v_));
}

absl::Status SealedHead::SealTiles(const Rows& rows, kernels::ScaleSearch search) {
  const size_t tile_bytes = kernels::TileBytes(shape_);
  const size_t tile_values = size_t{kBlockTokens} * shape_.head_dim;
  const size_t tile_count = rows.k.size() / tile_values;
  tiles_.resize(tile_count * tile_bytes);
  const kernels::SealOptions options{
      .g_k = g_k_, .g_v = g_v_, .search = search, .k_mean = k_mean_, .k_smooth = k_smooth_};
  kernels::SealStats stats;
  for (size_t i = 0; i < tile_count; ++i) {
    KVT_RETURN_IF_ERROR(ToAbslStatus(
        kernels::SealTile(shape_, RowsAt(rows.k.data() + i * tile_values, shape_.head_dim),
                          RowsAt(rows.v.data() + i * tile_values, shape_.head_dim), options,
                          std::span(tiles_).subspan(i * tile_bytes, tile_bytes), &stats)));
  }
  return absl::OkStatus();
}

absl::Status SealedHead::GatherTiles() {
  const size_t tile_bytes = kernels::TileBytes(shape_);
  keys_ = Matrix(token_count_, shape_.head_dim);
  values_ = Matrix(token_count_, shape_.head_dim);
  std::vector<float> k_rows(size_t{kBlockTokens} * shape_.head_dim);
  std::vector<float> v_rows(k_rows.size());
  const auto rows = [this](std::vector<float>* data) {
    return kernels::MutableRows{
        .type = kernels::ElementType::kFp32, .data = data->data(), .token_stride = shape_.head_dim};
  };
  for (size_t begin = 0; begin < token_count_; begin += kBlockTokens) {
    KVT_RETURN_IF_ERROR(ToAbslStatus(kernels::GatherTile(
        shape_, std::span(tiles_).subspan(begin / kBlockTokens * tile_bytes, tile_bytes), g_k_,
        g_v_, rows(&k_rows), rows(&v_rows))));
    const size_t at = begin * shape_.head_dim;
    const size_t count = std::min<size_t>(k_rows.size(), (token_count_ - begin) * shape_.head_dim);
    std::copy_n(k_rows.begin(), count, keys_.values().subspan(at).begin());
    std::copy_n(v_rows.begin(), count, values_.values().subspan(at).begin());
  }
  for (size_t t = 0; t < token_count_; ++t) {
    for (size_t d = 0; d < shape_.head_dim; ++d) {
      double& value = keys_.Row(t)[d];
      if (!k_smooth_.empty()) value *= k_smooth_[d];
      if (!k_mean_.empty()) value += k_mean_[d];
    }
  }
  return absl::OkStatus();
}

size_t SealedHead::full_tile_token_count() const {
  return token_count_ / kBlockTokens * kBlockTokens;
}

absl::StatusOr<Matrix> SealedHead::Attend(const Matrix& q, double softmax_scale) const {
  KVT_CHECK(q.cols() == shape_.head_dim && full_tile_token_count() > 0);
  std::vector<const std::byte*> table(full_tile_token_count() / kBlockTokens);
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = tiles_.data() + i * kernels::TileBytes(shape_);
  }
  Matrix out(q.rows(), q.cols());
  for (size_t begin = 0; begin < q.rows(); begin += kQueriesAtOnce) {
    const size_t count = std::min(kQueriesAtOnce, q.rows() - begin);
    const std::span<const double> rows = q.values().subspan(begin * q.cols(), count * q.cols());
    std::vector<float> query(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) query[i] = static_cast<float>(rows[i]);
    std::vector<float> result(query.size());
    std::vector<float> lse(count);
    // Each query as a head of its own, which all read the one kv head.
    const kernels::DecodeArgs args{.block_shape = {.layer_count = 1,
                                                   .kv_head_count = 1,
                                                   .block_tokens = kBlockTokens,
                                                   .head_dim = shape_.head_dim},
                                   .query = query.data(),
                                   .query_head_count = static_cast<uint32_t>(count),
                                   .block_table = table,
                                   .sealed_token_count = full_tile_token_count(),
                                   .softmax_scale = static_cast<float>(softmax_scale),
                                   .g_k = std::span(&g_k_, 1),
                                   .g_v = std::span(&g_v_, 1),
                                   .out = result,
                                   .lse = lse,
                                   .k_smooth = k_smooth_,
                                   .k_mean = k_mean_};
    KVT_RETURN_IF_ERROR(ToAbslStatus(kernels::Decode(args)));
    std::copy(result.begin(), result.end(), out.values().subspan(begin * q.cols()).begin());
  }
  return out;
}

}  // namespace kvtier::ctl::eval
