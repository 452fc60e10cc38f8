// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/decode.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/suite.h"

// Stored bytes that decode attends over per second, over what a copy reaches. Values are zeros:
// time does not depend on them.

namespace kvtier::gpu {
namespace {

using kernels::SideFormat;
using kernels::cuda::DecodeBatchArgs;

constexpr uint32_t kBlockTokens = 64;
constexpr uint32_t kHeadDim = 128;
constexpr uint32_t kKvHeads = 8;

class Workload {
 public:
  Workload(uint32_t batch_size, uint32_t context_tokens, uint32_t group_heads)
      : batch_size_(batch_size),
        group_heads_(group_heads),
        blocks_per_sequence_(context_tokens / kBlockTokens),
        blocks_(uint64_t{batch_size} * blocks_per_sequence_ * kernels::BlockBytes(kShape)),
        table_(size_t{batch_size} * blocks_per_sequence_),
        counts_(std::vector<uint32_t>(batch_size, context_tokens)),
        g_(std::vector<float>(kKvHeads, 1.0F)),
        query_(RowCount() * kHeadDim * 2),
        out_(RowCount() * kHeadDim * 2),
        workspace_(kernels::cuda::DecodeBatchWorkspaceBytes(Args())) {
    CheckCuda(cudaMemset(blocks_.data(), 0, blocks_.size()), "fill");
    CheckCuda(cudaMemset(query_.data(), 0, query_.size()), "fill");
    CheckCuda(cudaMemset(workspace_.data(), 0, workspace_.size()), "fill");
    // Blocks of the sequences lie in random order, as an allocator leaves them.
    std::vector<const void*> table;
    for (size_t i = 0; i < table_.size(); ++i) {
      table.push_back(blocks_.data() + i * kernels::BlockBytes(kShape));
    }
    std::mt19937_64 random(1);
    std::shuffle(table.begin(), table.end(), random);
    table_.Upload(table);
  }

  DecodeBatchArgs Args() {
    return {.block_shape = kShape,
            .batch_size = batch_size_,
            .block_table = table_.data(),
            .table_stride = blocks_per_sequence_,
            .sealed_token_counts = counts_.data(),
            .query = query_.data(),
            .query_head_count = kKvHeads * group_heads_,
            .softmax_scale = 0.088388F,
            .g_k = g_.data(),
            .g_v = g_.data(),
            .out = out_.data(),
            .workspace = workspace_.data()};
  }
  double StoredBytes() const { return static_cast<double>(blocks_.size()); }

 private:
  static constexpr kernels::BlockShape kShape{.layer_count = 1,
                                              .kv_head_count = kKvHeads,
                                              .block_tokens = kBlockTokens,
                                              .head_dim = kHeadDim};
  size_t RowCount() const { return size_t{batch_size_} * kKvHeads * group_heads_; }

  uint32_t batch_size_;
  uint32_t group_heads_;
  uint32_t blocks_per_sequence_;
  DeviceArray<std::byte> blocks_;
  DeviceArray<const void*> table_;
  DeviceArray<uint32_t> counts_;
  DeviceArray<float> g_;
  DeviceArray<std::byte> query_;
  DeviceArray<std::byte> out_;
  DeviceArray<std::byte> workspace_;
};

}  // namespace

void BenchmarkDecode(Suite* suite) {
  const double copy = CopyBytesPerSecond();
  // What docs/kernels-cuda.md asks for of an H200, of steps that read as many tokens.
  constexpr double kMust = 0.70;
  constexpr uint64_t kMustTokens = 65536;
  const bool is_h200 = suite->device().name.find("H200") != std::string::npos;
  struct Row {
    uint32_t batch_size;
    uint32_t context_tokens;
    uint32_t group_heads;
  };
  for (const Row& row :
       {Row{1, 32768, 8}, Row{1, 65536, 8}, Row{1, 262144, 8}, Row{16, 8192, 8}, Row{32, 32768, 8},
        Row{64, 2048, 8}, Row{32, 32768, 1}, Row{32, 32768, 16}}) {
    Workload workload(row.batch_size, row.context_tokens, row.group_heads);
    const double seconds = SecondsOf(20, [&](cudaStream_t stream) {
      if (!DecodeBatch(workload.Args(), stream).ok()) std::abort();
    });
    const double rate = workload.StoredBytes() / seconds;
    const bool has_must = is_h200 && uint64_t{row.batch_size} * row.context_tokens >= kMustTokens;
    suite->AddBenchmark(
        "decode, batch " + std::to_string(row.batch_size) + " x " +
            std::to_string(row.context_tokens) + " tokens, GQA " + std::to_string(row.group_heads),
        rate / copy, "of copy bandwidth",
        std::to_string(rate * 1e-9) + " GB/s stored, " + std::to_string(seconds * 1e6) + " us",
        has_must ? std::optional(kMust) : std::nullopt);
  }
}

}  // namespace kvtier::gpu
