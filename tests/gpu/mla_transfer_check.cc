// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/mla_transfer.h"
#include "kernels/cuda/mla_transfer_fixture.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/suite.h"

// Latents and ropes sealed and gathered on the device, bit for bit against SealMlaTile and
// GatherMlaTile.

namespace kvtier::gpu {
namespace {

using kernels::ElementType;
using kernels::ScaleSearch;
using kernels::cuda::BlockEntry;
using kernels::cuda::GatherCounters;
using kernels::cuda::MlaTransferCase;
using kernels::cuda::MlaTransferData;
using kernels::cuda::SealCounters;

constexpr uint64_t kSeed = 20261129;

template <typename T>
std::span<const T> All(const kernels::cuda::emu::DeviceBuffer<T>& buffer) {
  return buffer;
}

// An MlaTransferData copied to the device, and arguments over the copy.
class DeviceMlaTransfer {
 public:
  explicit DeviceMlaTransfer(MlaTransferData* data)
      : rows(All(data->rows_)),
        blocks(All(data->blocks_)),
        seal_counters(std::vector<SealCounters>(1)),
        gather_counters(std::vector<GatherCounters>(1)),
        data_(data),
        entries_(Moved()),
        page_table_(All(data->page_table_)),
        g_(All(data->g_)),
        latent_scales_(All(data->latent_scales_)),
        rope_scales_(All(data->rope_scales_)) {}

  kernels::cuda::MlaDeviceBlocks Blocks() {
    kernels::cuda::MlaDeviceBlocks result = data_->Blocks();
    result.entries = entries_.data();
    result.latent.data = rows.data();
    result.latent.scales = latent_scales_.data();
    const auto* rope = static_cast<const std::byte*>(result.rope.data);
    result.rope.data = rows.data() + (rope - data_->rows_.data());
    result.rope.scales = rope_scales_.data();
    if (result.pages.page_table != nullptr) result.pages.page_table = page_table_.data();
    result.g = g_.data();
    return result;
  }

  DeviceArray<std::byte> rows;
  DeviceArray<std::byte> blocks;
  DeviceArray<SealCounters> seal_counters;
  DeviceArray<GatherCounters> gather_counters;

 private:
  std::vector<BlockEntry> Moved() const {
    std::vector<BlockEntry> entries(data_->entries_.begin(), data_->entries_.end());
    for (BlockEntry& entry : entries) {
      entry.block = blocks.data() + (static_cast<std::byte*>(entry.block) - data_->blocks_.data());
    }
    return entries;
  }

  MlaTransferData* data_;
  DeviceArray<BlockEntry> entries_;
  DeviceArray<uint32_t> page_table_;
  DeviceArray<float> g_;
  DeviceArray<float> latent_scales_;
  DeviceArray<float> rope_scales_;
};

void ExpectSame(std::span<const std::byte> expected, std::span<const std::byte> got,
                const std::string& what, Suite* suite) {
  const auto difference = std::mismatch(expected.begin(), expected.end(), got.begin());
  suite->Expect(difference.first == expected.end(),
                what + " byte " + std::to_string(difference.first - expected.begin()));
}

void CheckCase(const MlaTransferCase& test_case, Suite* suite) {
  MlaTransferData data(test_case, kSeed);
  const std::string name = data.Name();
  kernels::SealStats stats;
  const std::vector<std::byte> sealed = data.ExpectedBlocks(&stats);
  DeviceMlaTransfer sealing(&data);
  const auto status = kernels::cuda::SealMlaBlocks({.blocks = sealing.Blocks(),
                                                    .search = test_case.search,
                                                    .counters = sealing.seal_counters.data()},
                                                   nullptr);
  suite->Expect(status.ok(), status.message());
  CheckCuda(cudaDeviceSynchronize(), "seal latents");
  ExpectSame(sealed, sealing.blocks.Download(), "seal latents " + name, suite);
  const SealCounters counters = sealing.seal_counters.Download()[0];
  suite->Expect(counters.nonfinite_count == stats.nonfinite_count &&
                    counters.saturated_count == stats.saturated_count &&
                    counters.refused_count == 0,
                "seal counters " + name);

  data.FillBlocks();
  const std::vector<std::byte> gathered = data.ExpectedRows();
  DeviceMlaTransfer gathering(&data);
  const auto gather_status = kernels::cuda::GatherMlaBlocks(
      {.blocks = gathering.Blocks(), .counters = gathering.gather_counters.data()}, nullptr);
  suite->Expect(gather_status.ok(), gather_status.message());
  CheckCuda(cudaDeviceSynchronize(), "gather latents");
  ExpectSame(gathered, gathering.rows.Download(), "gather latents " + name, suite);
  const GatherCounters gather_counters = gathering.gather_counters.Download()[0];
  suite->Expect(gather_counters.invalid_count == 0 && gather_counters.refused_count == 0,
                "gather counters " + name);
}

}  // namespace

void CheckMlaTransfers(Suite* suite) {
  suite->Begin("MLA: seal and gather, every tile and type");
  const bool is_quick = suite->options().is_sanitized;
  uint32_t turn = 0;
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    for (const ElementType type :
         {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32, ElementType::kFp8E4m3}) {
      for (const uint32_t page_tokens : {0U, 1U, 16U, 24U, 64U}) {
        ++turn;
        if (is_quick && (turn % 9 != 0 || block_tokens > 32)) continue;
        CheckCase({.block_tokens = block_tokens,
                   .page_tokens = page_tokens,
                   .type = type,
                   .search = turn % 3 == 1 ? ScaleSearch::kFourOverSix : ScaleSearch::kAmax6},
                  suite);
      }
    }
  }
}

}  // namespace kvtier::gpu
