// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_TRANSFER_FIXTURE_H_
#define KVTIER_KERNELS_CUDA_TRANSFER_FIXTURE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "kernels/cuda/blocks.h"
#include "kernels/cuda/emu/device_buffer.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/seal.h"
#include "kernels/element.h"
#include "kernels/gather.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "kernels/tile_layout.h"

// Cases for the seal and gather kernels, and what the CPU makes of them. Shared by the emulation
// tests and tests/gpu, so it knows neither the machine nor the driver.

namespace kvtier::kernels::cuda {

struct TransferCase {
  BlockShape shape;
  ElementType type = ElementType::kBf16;
  uint32_t page_tokens = 0;  // 0: dense.
  bool is_hnd = false;
  bool has_layer_data = false;
  bool has_transform = false;
  bool has_special_values = false;
  ScaleSearch search = ScaleSearch::kAmax6;
  uint32_t entry_count = 3;
  int g_exponent = -6;
  uint64_t first_layer_offset = 0;
  LayerFormat format = {};
};

// A cache of rows, blocks, scales: all the memory of one case, on the host. Rows are a random
// permutation of pages, K and V beside each other in each page or apart.
class TransferData {
 public:
  TransferData(const TransferCase& test_case, uint64_t seed);

  // Arguments over this memory. The device test replaces the pointers.
  DeviceRows Rows(bool is_v);
  DevicePages Pages() const;
  DeviceBlocks Blocks();

  // The bytes that SealTile gives for all entries, layers and heads, and its counts.
  std::vector<std::byte> ExpectedBlocks(SealStats* stats) const;
  // The rows that GatherTile gives from `blocks`, over what `rows` held.
  std::vector<std::byte> ExpectedRows(std::span<const std::byte> blocks) const;

  // Bytes that a tile of the case's format can hold: any, but for scale bytes and NaNs of FP8.
  void FillBlocks();

  uint64_t block_bytes() const {
    return case_.first_layer_offset +
           case_.shape.layer_count * case_.shape.kv_head_count * tile_bytes();
  }
  uint64_t tile_bytes() const { return TileBytes(TileOf(case_.shape), case_.format); }

  TransferCase case_;
  emu::DeviceBuffer<std::byte> rows_;
  emu::DeviceBuffer<std::byte> blocks_;
  emu::DeviceBuffer<BlockEntry> entries_;
  emu::DeviceBuffer<uint32_t> page_table_;
  emu::DeviceBuffer<uint32_t> entry_count_;
  emu::DeviceBuffer<void*> layer_data_[2];
  emu::DeviceBuffer<float> g_[2];
  emu::DeviceBuffer<float> scales_[2];
  emu::DeviceBuffer<float> mean_;
  emu::DeviceBuffer<float> inverse_smooth_;
  std::vector<float> smooth_;

 private:
  struct Strides {
    uint64_t layer, head, token, page, side;
  };

  void FillRows();
  void StoreElement(uint64_t idx, float x);
  // Calls visit(entry, layer, head, scale_idx, tile offset).
  template <typename Visit>
  void ForEachTile(const Visit& visit) const;
  template <typename RowsType>
  RowsType CpuRows(bool is_v, uint32_t entry, uint32_t layer, uint32_t head, std::byte* data) const;

  std::mt19937_64 random_;
  Strides strides_{};
  uint32_t token_count_ = 0;
};

inline TransferData::TransferData(const TransferCase& test_case, uint64_t seed)
    : case_(test_case), random_(seed) {
  const BlockShape& shape = case_.shape;
  const uint64_t dim = shape.head_dim;
  const uint64_t heads = shape.kv_head_count;
  token_count_ = case_.entry_count * shape.block_tokens + 5;
  const uint32_t page_tokens = case_.page_tokens;
  const uint64_t page_count = page_tokens == 0 ? 1 : token_count_ / page_tokens + 3;
  const uint64_t run_tokens = page_tokens == 0 ? token_count_ : page_tokens;
  strides_.token = case_.is_hnd ? dim : heads * dim;
  strides_.head = case_.is_hnd ? run_tokens * dim : dim;
  strides_.side = run_tokens * heads * dim;
  strides_.page = 2 * strides_.side;
  strides_.layer = page_count * strides_.page;
  rows_.resize(shape.layer_count * strides_.layer * ElementBytes(case_.type));
  FillRows();

  // Pages in a random order; sequences begin anywhere in their first page.
  page_table_.resize(page_count);
  for (uint32_t i = 0; i < page_count; ++i) page_table_[i] = i;
  std::shuffle(page_table_.begin(), page_table_.end(), random_);
  blocks_.assign(case_.entry_count * block_bytes(), std::byte{0xEE});
  const auto first_slot = static_cast<uint32_t>(random_() % 6);
  for (uint32_t i = 0; i < case_.entry_count; ++i) {
    // Blocks lie in another order than their tokens.
    const uint32_t place = (i + 1) % case_.entry_count;
    entries_.push_back({.block = blocks_.data() + place * block_bytes(),
                        .first_slot = first_slot + i * shape.block_tokens});
  }
  entry_count_.assign(1, case_.entry_count);
  const uint64_t tile_count = shape.layer_count * heads;
  for (const uint32_t side : {0U, 1U}) {
    for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
      layer_data_[side].push_back(rows_.data() + (layer * strides_.layer + side * strides_.side) *
                                                     ElementBytes(case_.type));
    }
    for (uint64_t i = 0; i < tile_count; ++i) {
      const float g = std::ldexp(1.0F, case_.g_exponent + static_cast<int>(random_() % 4) - 2);
      const bool is_fp8 = (side == 0 ? case_.format.k : case_.format.v) == SideFormat::kFp8;
      g_[side].push_back(is_fp8 ? g * (1.0F + static_cast<float>(random_() % 1000) / 1000.0F) : g);
      scales_[side].push_back(case_.type == ElementType::kFp8E4m3
                                  ? 0.5F + static_cast<float>(random_() % 100) / 64.0F
                                  : 1.0F);
    }
  }
  for (uint64_t i = 0; i < tile_count * dim; ++i) {
    mean_.push_back(static_cast<float>(random_() % 1000) / 500.0F - 1.0F);
    smooth_.push_back(0.25F + static_cast<float>(random_() % 1000) / 300.0F);
    inverse_smooth_.push_back(1.0F / smooth_.back());
  }
}

inline void TransferData::StoreElement(uint64_t idx, float x) {
  std::byte* target = rows_.data() + idx * ElementBytes(case_.type);
  if (case_.type == ElementType::kFp32) {
    std::memcpy(target, &x, sizeof(x));
  } else if (case_.type == ElementType::kFp8E4m3) {
    *target = static_cast<std::byte>(EncodeE4m3Scale(std::fabs(x)) | (x < 0.0F ? 0x80 : 0));
  } else {
    const uint16_t bits = case_.type == ElementType::kBf16 ? FloatToBf16(x) : FloatToFp16(x);
    std::memcpy(target, &bits, sizeof(bits));
  }
}

// Normal numbers of mixed size, ties, zeros, subnormals; with special values any bit pattern too.
inline void TransferData::FillRows() {
  std::normal_distribution<float> normal;
  const uint32_t element_bytes = ElementBytes(case_.type);
  const uint64_t count = rows_.size() / element_bytes;
  for (uint64_t i = 0; i < count; ++i) {
    const auto kind = static_cast<uint32_t>(random_() % 64);
    float x = normal(random_);
    if (kind < 16) x = std::ldexp(std::nearbyint(x * 8.0F), -3);
    if (kind == 16) x = 0.0F;
    if (kind == 17) x = -0.0F;
    if (kind == 18) x *= 0x1p-130F;
    if (kind == 19) x *= 1000.0F;
    StoreElement(i, x);
    if (case_.has_special_values && kind == 20) {
      for (uint32_t b = 0; b < element_bytes; ++b) {
        rows_[i * element_bytes + b] = static_cast<std::byte>(random_());
      }
    }
  }
}

inline DeviceRows TransferData::Rows(bool is_v) {
  DeviceRows rows{.type = case_.type,
                  .data = layer_data_[is_v ? 1 : 0][0],
                  .layer_stride = strides_.layer,
                  .head_stride = strides_.head,
                  .token_stride = strides_.token,
                  .page_stride = strides_.page};
  if (case_.has_layer_data) {
    rows.layer_data = layer_data_[is_v ? 1 : 0].data();
    rows.data = nullptr;
  }
  if (case_.type == ElementType::kFp8E4m3) rows.scales = scales_[is_v ? 1 : 0].data();
  return rows;
}

inline DevicePages TransferData::Pages() const {
  if (case_.page_tokens == 0) return {};
  return {.page_table = page_table_.data(), .page_tokens = case_.page_tokens};
}

inline DeviceBlocks TransferData::Blocks() {
  return {.entries = entries_.data(),
          .entry_count_max = case_.entry_count,
          .entry_count = entry_count_.data(),
          .shape = case_.shape,
          .format = case_.format,
          .first_layer_offset = case_.first_layer_offset};
}

template <typename Visit>
void TransferData::ForEachTile(const Visit& visit) const {
  for (uint32_t entry = 0; entry < case_.entry_count; ++entry) {
    const auto block =
        static_cast<uint64_t>(static_cast<std::byte*>(entries_[entry].block) - blocks_.data());
    for (uint32_t layer = 0; layer < case_.shape.layer_count; ++layer) {
      for (uint32_t head = 0; head < case_.shape.kv_head_count; ++head) {
        visit(entry, layer, head, layer * case_.shape.kv_head_count + head,
              block + case_.first_layer_offset +
                  (layer * case_.shape.kv_head_count + head) * tile_bytes());
      }
    }
  }
}

template <typename RowsType>
RowsType TransferData::CpuRows(bool is_v, uint32_t entry, uint32_t layer, uint32_t head,
                               std::byte* data) const {
  const uint64_t element_bytes = ElementBytes(case_.type);
  uint64_t first = layer * strides_.layer + (is_v ? strides_.side : 0) + head * strides_.head;
  RowsType rows{};
  rows.type = case_.type;
  rows.token_stride = strides_.token;
  rows.scale = scales_[is_v ? 1 : 0][layer * case_.shape.kv_head_count + head];
  if (case_.page_tokens == 0) {
    first += entries_[entry].first_slot * strides_.token;
  } else {
    rows.paging = {.page_table = page_table_.data(),
                   .page_table_count = static_cast<uint32_t>(page_table_.size()),
                   .page_tokens = case_.page_tokens,
                   .page_stride = strides_.page,
                   .first_slot = entries_[entry].first_slot};
  }
  rows.data = data + first * element_bytes;
  return rows;
}

inline void TransferData::FillBlocks() {
  for (auto& byte : blocks_) byte = static_cast<std::byte>(random_());
  const TileShape tile = TileOf(case_.shape);
  ForEachTile([&](uint32_t, uint32_t, uint32_t, uint32_t, uint64_t offset) {
    std::byte* side = blocks_.data() + offset;
    for (const SideFormat format : {case_.format.k, case_.format.v}) {
      const uint64_t bytes = SideBytes(tile, format);
      for (uint64_t i = 0; format == SideFormat::kFp8 && i < bytes; ++i) {
        if ((side[i] & std::byte{0x7F}) == std::byte{0x7F}) side[i] = std::byte{0};
      }
      for (uint64_t i = DataBytes(tile); format == SideFormat::kNvfp4 && i < bytes; ++i) {
        side[i] = static_cast<std::byte>(random_() % 0x7F);
      }
      side += bytes;
    }
  });
}

inline std::vector<std::byte> TransferData::ExpectedBlocks(SealStats* stats) const {
  std::vector<std::byte> result(blocks_.begin(), blocks_.end());
  auto* rows = const_cast<std::byte*>(rows_.data());
  const uint64_t dim = case_.shape.head_dim;
  ForEachTile(
      [&](uint32_t entry, uint32_t layer, uint32_t head, uint32_t scale_idx, uint64_t offset) {
        SealOptions options{.g_k = g_[0][scale_idx],
                            .g_v = g_[1][scale_idx],
                            .search = case_.search,
                            .isa = Isa::kScalar};
        if (case_.has_transform) {
          options.k_mean = std::span(mean_).subspan(scale_idx * dim, dim);
          options.k_smooth = std::span(smooth_).subspan(scale_idx * dim, dim);
        }
        const Status status = SealTile(TileOf(case_.shape), case_.format,
                                       CpuRows<ConstRows>(false, entry, layer, head, rows),
                                       CpuRows<ConstRows>(true, entry, layer, head, rows), options,
                                       std::span(result).subspan(offset, tile_bytes()), stats);
        if (!status.ok()) std::abort();
      });
  return result;
}

inline std::vector<std::byte> TransferData::ExpectedRows(std::span<const std::byte> blocks) const {
  std::vector<std::byte> result(rows_.begin(), rows_.end());
  ForEachTile(
      [&](uint32_t entry, uint32_t layer, uint32_t head, uint32_t scale_idx, uint64_t offset) {
        const Status status =
            GatherTile(TileOf(case_.shape), case_.format, blocks.subspan(offset, tile_bytes()),
                       {.g_k = g_[0][scale_idx], .g_v = g_[1][scale_idx], .isa = Isa::kScalar},
                       CpuRows<MutableRows>(false, entry, layer, head, result.data()),
                       CpuRows<MutableRows>(true, entry, layer, head, result.data()));
        if (!status.ok()) std::abort();
      });
  return result;
}

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_TRANSFER_FIXTURE_H_
