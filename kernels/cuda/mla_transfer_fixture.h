// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_MLA_TRANSFER_FIXTURE_H_
#define KVTIER_KERNELS_CUDA_MLA_TRANSFER_FIXTURE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/emu/device_buffer.h"
#include "kernels/cuda/mla_transfer.h"
#include "kernels/mla.h"
#include "kernels/nvfp4.h"

// Cases for the kernels that seal and gather latents, and what the CPU makes of them. Shared by the
// emulation tests and tests/gpu, so it knows neither the machine nor the driver.

namespace kvtier::kernels::cuda {

inline constexpr uint32_t kMlaRowDims = kMlaLatentDim + kMlaRopeDim;

struct MlaTransferCase {
  uint32_t block_tokens = 16;
  uint32_t page_tokens = 0;  // 0: dense.
  ElementType type = ElementType::kBf16;
  ScaleSearch search = ScaleSearch::kAmax6;
};

// A cache of rows [latent | rope], the blocks of its tokens, and what the CPU makes of both.
class MlaTransferData {
 public:
  static constexpr uint32_t kLayers = 2;
  static constexpr uint32_t kEntries = 2;
  static constexpr uint32_t kFirstSlot = 5;

  MlaTransferData(const MlaTransferCase& test_case, uint64_t seed)
      : case_(test_case), random_(seed), shape_{kLayers, {test_case.block_tokens}} {
    const uint32_t token_count = kFirstSlot + kEntries * case_.block_tokens;
    page_count_ = case_.page_tokens == 0 ? 1 : token_count / case_.page_tokens + 2;
    run_tokens_ = case_.page_tokens == 0 ? token_count + 3 : case_.page_tokens;
    const uint64_t element_count = uint64_t{kLayers} * page_count_ * run_tokens_ * kMlaRowDims;
    for (uint64_t i = 0; i < element_count; ++i) AddElement(random_() % 64 == 0);
    for (uint32_t i = 0; i < page_count_; ++i) page_table_.push_back(i);
    std::shuffle(page_table_.begin(), page_table_.end(), random_);
    blocks_.assign(kEntries * MlaBlockBytes(shape_), std::byte{0xEE});
    for (uint32_t i = 0; i < kEntries; ++i) {
      entries_.push_back({.block = blocks_.data() + (1 - i) * MlaBlockBytes(shape_),
                          .first_slot = kFirstSlot + i * case_.block_tokens});
    }
  }

  MlaDeviceBlocks Blocks() {
    const uint64_t page_stride = uint64_t{run_tokens_} * kMlaRowDims;
    const DeviceRows latent{.type = case_.type,
                            .data = rows_.data(),
                            .layer_stride = page_count_ * page_stride,
                            .token_stride = kMlaRowDims,
                            .page_stride = page_stride,
                            .scales = latent_scales_.data()};
    DeviceRows rope = latent;
    rope.data = rows_.data() + kMlaLatentDim * ElementBytes(case_.type);
    rope.scales = rope_scales_.data();
    DevicePages pages;
    if (case_.page_tokens != 0) pages = {page_table_.data(), case_.page_tokens};
    return {.entries = entries_.data(),
            .entry_count_max = kEntries,
            .shape = shape_,
            .latent = latent,
            .rope = rope,
            .pages = pages,
            .g = g_.data()};
  }

  // Calls visit(entry, layer, bytes from blocks_ to the tile).
  template <typename Visit>
  void ForEachTile(const Visit& visit) const {
    for (uint32_t entry = 0; entry < kEntries; ++entry) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        visit(entry, layer, (1 - entry) * MlaBlockBytes(shape_) + MlaTileOffset(shape_, layer));
      }
    }
  }

  template <typename RowsType>
  RowsType CpuRows(bool is_rope, uint32_t entry, uint32_t layer, std::byte* data) const {
    RowsType rows{};
    const uint64_t layer_elements = uint64_t{page_count_} * run_tokens_ * kMlaRowDims;
    uint64_t first = layer * layer_elements + (is_rope ? kMlaLatentDim : 0);
    if (case_.page_tokens == 0) {
      first += uint64_t{entries_[entry].first_slot} * kMlaRowDims;
    } else {
      rows.paging = {.page_table = page_table_.data(),
                     .page_table_count = page_count_,
                     .page_tokens = case_.page_tokens,
                     .page_stride = uint64_t{run_tokens_} * kMlaRowDims,
                     .first_slot = entries_[entry].first_slot};
    }
    rows.type = case_.type;
    rows.token_stride = kMlaRowDims;
    if (case_.type == ElementType::kFp8E4m3) {
      rows.scale = is_rope ? rope_scales_[layer] : latent_scales_[layer];
    }
    rows.data = data + first * ElementBytes(case_.type);
    return rows;
  }

  std::vector<std::byte> ExpectedBlocks(SealStats* stats) const {
    std::vector<std::byte> result(blocks_.begin(), blocks_.end());
    auto* rows = const_cast<std::byte*>(rows_.data());
    ForEachTile([&](uint32_t entry, uint32_t layer, uint64_t offset) {
      const Status status =
          SealMlaTile(shape_.tile, CpuRows<ConstRows>(false, entry, layer, rows),
                      CpuRows<ConstRows>(true, entry, layer, rows),
                      {.g = g_[layer], .search = case_.search, .isa = Isa::kScalar},
                      std::span(result).subspan(offset, MlaTileBytes(shape_.tile)), stats);
      if (!status.ok()) std::abort();
    });
    return result;
  }

  std::vector<std::byte> ExpectedRows() const {
    std::vector<std::byte> result(rows_.begin(), rows_.end());
    ForEachTile([&](uint32_t entry, uint32_t layer, uint64_t offset) {
      const Status status =
          GatherMlaTile(shape_.tile, std::span(blocks_).subspan(offset, MlaTileBytes(shape_.tile)),
                        {.g = g_[layer], .isa = Isa::kScalar},
                        CpuRows<MutableRows>(false, entry, layer, result.data()),
                        CpuRows<MutableRows>(true, entry, layer, result.data()));
      if (!status.ok()) std::abort();
    });
    return result;
  }

  // Any codes, any valid scales, ropes of any bits.
  void FillBlocks() {
    for (auto& byte : blocks_) byte = static_cast<std::byte>(random_());
    ForEachTile([&](uint32_t, uint32_t, uint64_t offset) {
      std::byte* tile = blocks_.data() + offset;
      for (uint64_t i = 0; i < MlaScaleBytes(shape_.tile); ++i) {
        tile[MlaScaleOffset(shape_.tile) + i] = static_cast<std::byte>(random_() % 0x7F);
      }
    });
  }

  std::string Name() const {
    return "T " + std::to_string(case_.block_tokens) + " type " +
           std::to_string(static_cast<int>(case_.type)) + " page " +
           std::to_string(case_.page_tokens);
  }

  MlaTransferCase case_;
  std::mt19937_64 random_;
  MlaBlockShape shape_;
  uint32_t page_count_ = 0;
  uint32_t run_tokens_ = 0;
  emu::DeviceBuffer<std::byte> rows_, blocks_;
  emu::DeviceBuffer<BlockEntry> entries_;
  emu::DeviceBuffer<uint32_t> page_table_;
  emu::DeviceBuffer<float> g_ = {0x1p-6F, 0x1p-7F};
  emu::DeviceBuffer<float> latent_scales_ = {0.75F, 1.5F};
  emu::DeviceBuffer<float> rope_scales_ = {1.25F, 0.625F};

 private:
  // Special values: any bits, half of them of NaNs and infinities, of which half have no payload in
  // the upper 16 bits.
  void AddElement(bool is_special) {
    const float x = std::normal_distribution<float>()(random_);
    const uint64_t draw = random_();
    auto any = static_cast<uint32_t>(draw);
    if ((draw >> 32 & 1) != 0) any |= 0x7F800000U;
    if ((draw >> 32 & 3) == 3) any &= 0xFF80FFFFU;
    std::byte bytes[4];
    const uint32_t element_bytes = ElementBytes(case_.type);
    if (case_.type == ElementType::kFp32) {
      std::memcpy(bytes, &x, sizeof(x));
      if (is_special) std::memcpy(bytes, &any, sizeof(any));
    } else if (case_.type == ElementType::kFp8E4m3) {
      bytes[0] = static_cast<std::byte>(EncodeE4m3Scale(std::fabs(x)) | (x < 0.0F ? 0x80 : 0));
      if (is_special) bytes[0] = static_cast<std::byte>(draw | (draw >> 32 & 1) * 0x7F);
    } else {
      uint16_t bits = case_.type == ElementType::kBf16 ? FloatToBf16(x) : FloatToFp16(x);
      if (is_special) bits = static_cast<uint16_t>(any >> 16);
      std::memcpy(bytes, &bits, sizeof(bits));
    }
    rows_.insert(rows_.end(), bytes, bytes + element_bytes);
  }
};

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_MLA_TRANSFER_FIXTURE_H_
