// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/seal.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/suite.h"

// Every BF16 value under every scale byte: 15 values share a vector with an anchor that fixes the
// scale. Under 0x7E every value, infinities and NaNs included, occurs.

namespace kvtier::gpu {
namespace {

constexpr kernels::TileShape kTile{.block_tokens = 128, .head_dim = 128};
constexpr float kG = 0x1p-6F;

// BF16 bits, vectors of 16.
std::vector<uint16_t> MakeValues(uint32_t byte_step) {
  std::vector<uint16_t> values;
  for (uint32_t byte = 0; byte <= kernels::kScaleByteMax; byte += byte_step) {
    // 2^-10 * g is the largest scale that rounds to byte 0.
    const float scale = byte == 0 ? 0x1p-10F : kernels::DecodeE4m3Scale(static_cast<uint8_t>(byte));
    const float anchor = 6.0F * scale * kG;
    uint32_t in_vector = 0;
    for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
      const float value = kernels::Bf16ToFloat(static_cast<uint16_t>(bits));
      if (byte != kernels::kScaleByteMax && !(std::fabs(value) <= anchor)) continue;
      if (in_vector == 0) values.push_back(kernels::FloatToBf16(anchor));
      values.push_back(static_cast<uint16_t>(bits));
      in_vector = (in_vector + 1) % 15;
    }
    while (values.size() % kernels::kVectorDims != 0) values.push_back(0);
  }
  const size_t tile_values = size_t{kTile.block_tokens} * kTile.head_dim;
  values.resize((values.size() + tile_values - 1) / tile_values * tile_values);
  return values;
}

}  // namespace

void CheckEncoder(Suite* suite) {
  suite->Begin("encoder: every BF16 value under every scale byte");
  const std::vector<uint16_t> values = MakeValues(suite->options().is_sanitized ? 42 : 1);
  const auto token_count = static_cast<uint32_t>(values.size() / kTile.head_dim);
  const uint32_t block_count = token_count / kTile.block_tokens;
  const uint64_t block_bytes = kernels::TileBytes(kTile);
  const DeviceArray<uint16_t> rows{std::span<const uint16_t>(values)};
  const DeviceArray<std::byte> blocks(block_count * block_bytes);
  std::vector<kernels::cuda::BlockEntry> entries;
  for (uint32_t i = 0; i < block_count; ++i) {
    entries.push_back(
        {.block = blocks.data() + i * block_bytes, .first_slot = i * kTile.block_tokens});
  }
  const DeviceArray<kernels::cuda::BlockEntry> device_entries{
      std::span<const kernels::cuda::BlockEntry>(entries)};
  const DeviceArray<float> g{std::vector<float>{kG}};
  const DeviceArray<kernels::cuda::SealCounters> counters{
      std::vector<kernels::cuda::SealCounters>(1)};
  const kernels::cuda::DeviceRows device_rows{
      .data = rows.data(), .head_stride = kTile.head_dim, .token_stride = kTile.head_dim};
  const auto status =
      kernels::cuda::SealBlocks({.blocks = {.entries = device_entries.data(),
                                            .entry_count_max = block_count,
                                            .shape = {.layer_count = 1,
                                                      .kv_head_count = 1,
                                                      .block_tokens = kTile.block_tokens,
                                                      .head_dim = kTile.head_dim}},
                                 .k = device_rows,
                                 .v = device_rows,
                                 .pages = {},
                                 .g_k = g.data(),
                                 .g_v = g.data(),
                                 .counters = counters.data()},
                                nullptr);
  suite->Expect(status.ok(), status.message());
  CheckCuda(cudaDeviceSynchronize(), "exhaustive seal");
  const std::vector<std::byte> got = blocks.Download();
  std::vector<std::byte> expected(block_bytes);
  kernels::SealStats stats;
  for (uint32_t i = 0; i < block_count; ++i) {
    const kernels::ConstRows cpu_rows{
        .data = values.data() + uint64_t{i} * kTile.block_tokens * kTile.head_dim,
        .token_stride = kTile.head_dim};
    const auto cpu_status =
        kernels::SealTile(kTile, cpu_rows, cpu_rows,
                          {.g_k = kG, .g_v = kG, .isa = kernels::Isa::kScalar}, expected, &stats);
    suite->Expect(cpu_status.ok(), cpu_status.message());
    const auto difference = std::mismatch(expected.begin(), expected.end(),
                                          got.begin() + static_cast<ptrdiff_t>(i * block_bytes));
    suite->Expect(difference.first == expected.end(),
                  "block " + std::to_string(i) + " byte " +
                      std::to_string(difference.first - expected.begin()));
  }
  suite->AddCases(2 * values.size());
}

}  // namespace kvtier::gpu
