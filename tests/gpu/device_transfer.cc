// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/device_transfer.h"

namespace kvtier::gpu {
namespace {

using kernels::cuda::BlockEntry;

template <typename Buffer>
auto SpanOf(const Buffer& buffer) {
  return std::span<const typename Buffer::value_type>(buffer);
}

// The same offsets from another begin.
std::vector<BlockEntry> Moved(const kernels::cuda::TransferData& data, std::byte* begin) {
  std::vector<BlockEntry> entries(data.entries_.begin(), data.entries_.end());
  for (BlockEntry& entry : entries) {
    entry.block = begin + (static_cast<std::byte*>(entry.block) - data.blocks_.data());
  }
  return entries;
}

std::vector<void*> Moved(const kernels::cuda::TransferData& data, bool is_v, std::byte* begin) {
  std::vector<void*> layers;
  for (void* layer : data.layer_data_[is_v ? 1 : 0]) {
    layers.push_back(begin + (static_cast<std::byte*>(layer) - data.rows_.data()));
  }
  return layers;
}

}  // namespace

DeviceTransfer::DeviceTransfer(kernels::cuda::TransferData* data)
    : rows(SpanOf(data->rows_)),
      blocks(SpanOf(data->blocks_)),
      entry_count(SpanOf(data->entry_count_)),
      seal_counters(std::vector<kernels::cuda::SealCounters>(1)),
      gather_counters(std::vector<kernels::cuda::GatherCounters>(1)),
      data_(data),
      entries_(Moved(*data, blocks.data())),
      page_table_(SpanOf(data->page_table_)),
      k_layers_(Moved(*data, false, rows.data())),
      v_layers_(Moved(*data, true, rows.data())),
      g_k_(SpanOf(data->g_[0])),
      g_v_(SpanOf(data->g_[1])),
      k_scales_(SpanOf(data->scales_[0])),
      v_scales_(SpanOf(data->scales_[1])),
      mean_(SpanOf(data->mean_)),
      inverse_smooth_(SpanOf(data->inverse_smooth_)) {}

kernels::cuda::DeviceBlocks DeviceTransfer::Blocks() {
  kernels::cuda::DeviceBlocks result = data_->Blocks();
  result.entries = entries_.data();
  result.entry_count = entry_count.data();
  return result;
}

kernels::cuda::DeviceRows DeviceTransfer::Rows(bool is_v) {
  kernels::cuda::DeviceRows result = data_->Rows(is_v);
  const DeviceArray<void*>& layers = is_v ? v_layers_ : k_layers_;
  if (result.layer_data != nullptr) result.layer_data = layers.data();
  if (result.data != nullptr) {
    result.data = rows.data() + (static_cast<std::byte*>(result.data) - data_->rows_.data());
  }
  if (result.scales != nullptr) result.scales = (is_v ? v_scales_ : k_scales_).data();
  return result;
}

kernels::cuda::DevicePages DeviceTransfer::Pages() {
  kernels::cuda::DevicePages result = data_->Pages();
  if (result.page_table != nullptr) result.page_table = page_table_.data();
  return result;
}

kernels::cuda::SealBlocksArgs DeviceTransfer::SealArgs() {
  kernels::cuda::SealBlocksArgs args{.blocks = Blocks(),
                                     .k = Rows(false),
                                     .v = Rows(true),
                                     .pages = Pages(),
                                     .g_k = g_k_.data(),
                                     .g_v = g_v_.data(),
                                     .search = data_->case_.search,
                                     .counters = seal_counters.data()};
  if (data_->case_.has_transform) {
    args.k_mean = mean_.data();
    args.k_inverse_smooth = inverse_smooth_.data();
  }
  return args;
}

kernels::cuda::GatherBlocksArgs DeviceTransfer::GatherArgs() {
  return {.blocks = Blocks(),
          .k = Rows(false),
          .v = Rows(true),
          .pages = Pages(),
          .g_k = g_k_.data(),
          .g_v = g_v_.data(),
          .counters = gather_counters.data()};
}

}  // namespace kvtier::gpu
