// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/mla_decode.h"
#include "kernels/cuda/mla_transfer.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/suite.h"

// Latent attention: bytes read and written per second by sealing and gathering, stored bytes that
// decode attends over per second, over what a copy reaches. Values are zeros: time does not depend
// on them.

namespace kvtier::gpu {
namespace {

using kernels::cuda::DecodeMlaBatchArgs;
using kernels::cuda::MlaDeviceBlocks;

constexpr uint32_t kBlockTokens = 64;
constexpr uint32_t kRowDims = kernels::kMlaLatentDim + kernels::kMlaRopeDim;

void AddRow(Suite* suite, const std::string& name, double bytes, double seconds, double copy) {
  const double rate = bytes / seconds;
  suite->AddBenchmark(
      name, rate / copy, "of copy bandwidth",
      std::to_string(rate * 1e-9) + " GB/s, " + std::to_string(seconds * 1e6) + " us");
}

// Dense BF16 rows [layer][token][latent, rope] and their blocks.
void BenchmarkTransfer(Suite* suite, double copy) {
  constexpr kernels::MlaBlockShape kShape{.layer_count = 61,
                                          .tile = {.block_tokens = kBlockTokens}};
  constexpr uint32_t kBlocks = 64;
  const uint64_t layer_elements = uint64_t{kBlocks} * kBlockTokens * kRowDims;
  const DeviceArray<std::byte> rows(kShape.layer_count * layer_elements * 2);
  const DeviceArray<std::byte> blocks(kBlocks * MlaBlockBytes(kShape));
  CheckCuda(cudaMemset(rows.data(), 0, rows.size()), "fill");
  std::vector<kernels::cuda::BlockEntry> entries;
  for (uint32_t i = 0; i < kBlocks; ++i) {
    entries.push_back(
        {.block = blocks.data() + i * MlaBlockBytes(kShape), .first_slot = i * kBlockTokens});
  }
  const DeviceArray<kernels::cuda::BlockEntry> device_entries(entries);
  const DeviceArray<float> g(std::vector<float>(kShape.layer_count, 0x1p-6F));
  const DeviceArray<kernels::cuda::SealCounters> seal_counters{
      std::vector<kernels::cuda::SealCounters>(1)};
  const DeviceArray<kernels::cuda::GatherCounters> gather_counters{
      std::vector<kernels::cuda::GatherCounters>(1)};
  MlaDeviceBlocks work{
      .entries = device_entries.data(),
      .entry_count_max = kBlocks,
      .shape = kShape,
      .latent = {.data = rows.data(), .layer_stride = layer_elements, .token_stride = kRowDims},
      .rope = {},
      .pages = {},
      .g = g.data()};
  work.rope = work.latent;
  work.rope.data = rows.data() + kernels::kMlaLatentDim * 2;
  const auto bytes = static_cast<double>(rows.size() + blocks.size());
  const double seal = SecondsOf(20, [&](cudaStream_t stream) {
    if (!kernels::cuda::SealMlaBlocks({.blocks = work, .counters = seal_counters.data()}, stream)
             .ok()) {
      std::abort();
    }
  });
  AddRow(suite, "MLA: seal from BF16, T 64", bytes, seal, copy);
  const double gather = SecondsOf(20, [&](cudaStream_t stream) {
    if (!kernels::cuda::GatherMlaBlocks({.blocks = work, .counters = gather_counters.data()},
                                        stream)
             .ok()) {
      std::abort();
    }
  });
  AddRow(suite, "MLA: gather to BF16, T 64", bytes, gather, copy);
}

void BenchmarkDecodeOf(uint32_t batch_size, uint32_t context_tokens, uint32_t heads, Suite* suite,
                       double copy) {
  constexpr kernels::MlaBlockShape kShape{.layer_count = 1, .tile = {.block_tokens = kBlockTokens}};
  const uint32_t stride = context_tokens / kBlockTokens;
  const DeviceArray<std::byte> blocks(uint64_t{batch_size} * stride * MlaBlockBytes(kShape));
  CheckCuda(cudaMemset(blocks.data(), 0, blocks.size()), "fill");
  std::vector<const void*> table;
  for (uint32_t i = 0; i < batch_size * stride; ++i) {
    table.push_back(blocks.data() + i * MlaBlockBytes(kShape));
  }
  std::mt19937_64 random(1);
  std::shuffle(table.begin(), table.end(), random);
  const DeviceArray<const void*> device_table(table);
  const DeviceArray<uint32_t> counts(std::vector<uint32_t>(batch_size, context_tokens));
  const DeviceArray<float> g{std::vector<float>{1.0F}};
  const size_t rows = size_t{batch_size} * heads;
  const DeviceArray<std::byte> query(std::vector<std::byte>(rows * kRowDims * 2));
  const DeviceArray<std::byte> out(rows * kernels::kMlaLatentDim * 2);
  DecodeMlaBatchArgs args{.block_shape = kShape,
                          .batch_size = batch_size,
                          .block_table = device_table.data(),
                          .table_stride = stride,
                          .sealed_token_counts = counts.data(),
                          .query = query.data(),
                          .query_head_count = heads,
                          .softmax_scale = 0.07F,
                          .g = g.data(),
                          .out = out.data()};
  const DeviceArray<std::byte> workspace(
      std::vector<std::byte>(kernels::cuda::DecodeMlaBatchWorkspaceBytes(args)));
  args.workspace = workspace.data();
  const double seconds = SecondsOf(5, [&](cudaStream_t stream) {
    if (!DecodeMlaBatch(args, stream).ok()) std::abort();
  });
  AddRow(suite,
         "MLA: decode, batch " + std::to_string(batch_size) + " x " +
             std::to_string(context_tokens) + " tokens, " + std::to_string(heads) + " heads",
         static_cast<double>(blocks.size()), seconds, copy);
}

}  // namespace

void BenchmarkMla(Suite* suite) {
  const double copy = CopyBytesPerSecond();
  BenchmarkTransfer(suite, copy);
  for (const uint32_t heads : {8U, 16U, 128U}) BenchmarkDecodeOf(16, 8192, heads, suite, copy);
}

}  // namespace kvtier::gpu
