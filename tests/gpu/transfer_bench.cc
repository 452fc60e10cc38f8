// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/gather.h"
#include "kernels/cuda/seal.h"
#include "kernels/nvfp4.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/suite.h"

// Bytes read and written per second by sealing and gathering, over what a copy reaches.

namespace kvtier::gpu {
namespace {

using kernels::ElementType;

constexpr kernels::BlockShape kShape{
    .layer_count = 16, .kv_head_count = 8, .block_tokens = 64, .head_dim = 128};
constexpr uint32_t kBlocks = 64;
constexpr uint32_t kPageTokens = 16;

// Pages of all layers in HND order, K then V in each page, the table a permutation.
class Workload {
 public:
  explicit Workload(ElementType type)
      : type_(type),
        page_stride_(uint64_t{2} * kShape.kv_head_count * kPageTokens * kShape.head_dim),
        page_count_(kBlocks * kShape.block_tokens / kPageTokens),
        rows_(kShape.layer_count * page_count_ * page_stride_ * kernels::ElementBytes(type)),
        blocks_(kBlocks * kernels::BlockBytes(kShape)),
        entries_(kBlocks),
        table_(page_count_),
        g_(std::vector<float>(size_t{kShape.layer_count} * kShape.kv_head_count, 0x1p-6F)),
        counters_(std::vector<uint32_t>(4)) {
    std::vector<kernels::cuda::BlockEntry> entries;
    for (uint32_t i = 0; i < kBlocks; ++i) {
      entries.push_back({.block = blocks_.data() + i * kernels::BlockBytes(kShape),
                         .first_slot = i * kShape.block_tokens});
    }
    entries_.Upload(entries);
    std::vector<uint32_t> table;
    for (uint32_t i = 0; i < page_count_; ++i) table.push_back((i * 37 + 11) % page_count_);
    table_.Upload(table);
    FillRows();
  }

  kernels::cuda::SealBlocksArgs SealArgs() {
    return {.blocks = Blocks(),
            .k = Rows(false),
            .v = Rows(true),
            .pages = {.page_table = table_.data(), .page_tokens = kPageTokens},
            .g_k = g_.data(),
            .g_v = g_.data(),
            .counters = reinterpret_cast<kernels::cuda::SealCounters*>(counters_.data())};
  }
  kernels::cuda::GatherBlocksArgs GatherArgs() {
    return {.blocks = Blocks(),
            .k = Rows(false),
            .v = Rows(true),
            .pages = {.page_table = table_.data(), .page_tokens = kPageTokens},
            .g_k = g_.data(),
            .g_v = g_.data(),
            .counters = reinterpret_cast<kernels::cuda::GatherCounters*>(counters_.data())};
  }
  // Of one call.
  double Bytes() const { return static_cast<double>(rows_.size() + blocks_.size()); }

 private:
  // Normal numbers of the type, repeated.
  void FillRows() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<std::byte> pattern(size_t{4} << 20);
    const uint32_t element_bytes = kernels::ElementBytes(type_);
    for (size_t i = 0; i < pattern.size(); i += element_bytes) {
      const float x = normal(random);
      const uint32_t bits = type_ == ElementType::kBf16
                                ? kernels::FloatToBf16(x)
                                : kernels::EncodeE4m3Scale(x < 0.0F ? -x : x);
      for (uint32_t b = 0; b < element_bytes; ++b) {
        pattern[i + b] = static_cast<std::byte>(bits >> (8 * b));
      }
    }
    for (size_t at = 0; at < rows_.size(); at += pattern.size()) {
      const size_t bytes = std::min(pattern.size(), rows_.size() - at);
      CheckCuda(cudaMemcpy(rows_.data() + at, pattern.data(), bytes, cudaMemcpyHostToDevice),
                "fill");
    }
  }
  kernels::cuda::DeviceBlocks Blocks() {
    return {.entries = entries_.data(), .entry_count_max = kBlocks, .shape = kShape};
  }
  kernels::cuda::DeviceRows Rows(bool is_v) {
    const uint64_t side = is_v ? page_stride_ / 2 * kernels::ElementBytes(type_) : 0;
    return {.type = type_,
            .data = rows_.data() + side,
            .layer_stride = page_count_ * page_stride_,
            .head_stride = uint64_t{kPageTokens} * kShape.head_dim,
            .token_stride = kShape.head_dim,
            .page_stride = page_stride_};
  }

  ElementType type_;
  uint64_t page_stride_;
  uint32_t page_count_;
  DeviceArray<std::byte> rows_;
  DeviceArray<std::byte> blocks_;
  DeviceArray<kernels::cuda::BlockEntry> entries_;
  DeviceArray<uint32_t> table_;
  DeviceArray<float> g_;
  DeviceArray<uint32_t> counters_;
};

void AddRow(Suite* suite, const std::string& name, double bytes, double seconds, double copy,
            std::optional<double> must) {
  const double rate = bytes / seconds;
  suite->AddBenchmark(
      name, rate / copy, "of copy bandwidth",
      std::to_string(rate * 1e-9) + " GB/s, " + std::to_string(seconds * 1e6) + " us", must);
}

}  // namespace

void BenchmarkTransfers(Suite* suite) {
  // What docs/kernels-cuda.md asks for; it names nothing for gathering to FP8.
  constexpr double kSealMust = 0.6;
  constexpr double kGatherBf16Must = 0.7;
  const double copy = CopyBytesPerSecond();
  suite->AddBenchmark("copy", copy * 1e-9, "GB/s", "512 MiB within the device, read and written");
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp8E4m3}) {
    const std::string name = type == ElementType::kBf16 ? "BF16" : "FP8";
    Workload workload(type);
    const double seal = SecondsOf(20, [&](cudaStream_t stream) {
      if (!SealBlocks(workload.SealArgs(), stream).ok()) std::abort();
    });
    AddRow(suite, "seal from " + name + ", T 64, d 128", workload.Bytes(), seal, copy, kSealMust);
    const double gather = SecondsOf(20, [&](cudaStream_t stream) {
      if (!GatherBlocks(workload.GatherArgs(), stream).ok()) std::abort();
    });
    AddRow(suite, "gather to " + name + ", T 64, d 128", workload.Bytes(), gather, copy,
           type == ElementType::kBf16 ? std::optional(kGatherBf16Must) : std::nullopt);
  }
}

}  // namespace kvtier::gpu
