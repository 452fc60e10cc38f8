// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/gather.h"
#include "kernels/cuda/seal.h"
#include "tests/gpu/device_transfer.h"
#include "tests/gpu/suite.h"

// Sealing and gathering on the device, bit for bit against SealTile and GatherTile.

namespace kvtier::gpu {
namespace {

using kernels::ElementType;
using kernels::ScaleSearch;
using kernels::SealStats;
using kernels::SideFormat;
using kernels::cuda::TransferCase;
using kernels::cuda::TransferData;

constexpr uint64_t kSeed = 20261129;
constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32,
                                  ElementType::kFp8E4m3};
constexpr uint32_t kPageTokens[] = {0, 1, 16, 24, 64};

std::string NameOf(const TransferCase& test_case) {
  return "T " + std::to_string(test_case.shape.block_tokens) + " d " +
         std::to_string(test_case.shape.head_dim) + " type " +
         std::to_string(static_cast<int>(test_case.type)) + " page " +
         std::to_string(test_case.page_tokens) + " g 2^" + std::to_string(test_case.g_exponent) +
         " formats " + std::to_string(static_cast<int>(test_case.format.k)) + " " +
         std::to_string(static_cast<int>(test_case.format.v));
}

void ExpectSame(std::span<const std::byte> expected, std::span<const std::byte> got,
                const std::string& what, Suite* suite) {
  const auto difference = std::mismatch(expected.begin(), expected.end(), got.begin());
  suite->Expect(difference.first == expected.end(),
                what + " byte " + std::to_string(difference.first - expected.begin()));
}

void CheckCase(const TransferCase& test_case, Suite* suite) {
  TransferData data(test_case, kSeed + test_case.shape.head_dim);
  DeviceTransfer device(&data);
  SealStats stats;
  const std::vector<std::byte> sealed = data.ExpectedBlocks(&stats);
  const auto status = SealBlocks(device.SealArgs(), nullptr);
  suite->Expect(status.ok(), status.message());
  CheckCuda(cudaDeviceSynchronize(), "seal");
  const std::string name = NameOf(test_case);
  ExpectSame(sealed, device.blocks.Download(), "seal " + name, suite);
  const kernels::cuda::SealCounters counters = device.seal_counters.Download()[0];
  suite->Expect(counters.nonfinite_count == stats.nonfinite_count &&
                    counters.saturated_count == stats.saturated_count &&
                    counters.refused_count == 0,
                "seal counters " + name);

  const std::vector<std::byte> gathered = data.ExpectedRows(sealed);
  const auto gather_status = GatherBlocks(device.GatherArgs(), nullptr);
  suite->Expect(gather_status.ok(), gather_status.message());
  CheckCuda(cudaDeviceSynchronize(), "gather");
  ExpectSame(gathered, device.rows.Download(), "gather " + name, suite);
  const kernels::cuda::GatherCounters gather_counters = device.gather_counters.Download()[0];
  suite->Expect(gather_counters.invalid_count == 0 && gather_counters.refused_count == 0,
                "gather counters " + name);
}

void CheckShapes(Suite* suite) {
  const bool is_quick = suite->options().is_sanitized;
  uint32_t turn = 0;
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    for (uint32_t head_dim = 64; head_dim <= 256; head_dim += 16) {
      for (const ElementType type : kTypes) {
        ++turn;
        if (is_quick && turn % 17 != 0) continue;
        CheckCase({.shape = {.layer_count = 2,
                             .kv_head_count = 3,
                             .block_tokens = block_tokens,
                             .head_dim = head_dim},
                   .type = type,
                   .page_tokens = kPageTokens[turn % 5],
                   .is_hnd = turn % 3 == 0,
                   .has_layer_data = turn % 7 < 3,
                   .has_transform = turn % 11 < 4,
                   .has_special_values = turn % 2 == 0,
                   .search = turn % 3 == 1 ? ScaleSearch::kFourOverSix : ScaleSearch::kAmax6,
                   .entry_count = 3,
                   .first_layer_offset = turn % 3 * 16},
                  suite);
      }
    }
  }
}

// K and V sides of every format, from and to every type.
void CheckFormats(Suite* suite) {
  const bool is_quick = suite->options().is_sanitized;
  uint32_t turn = 0;
  for (const SideFormat k : {SideFormat::kNvfp4, SideFormat::kFp8, SideFormat::kBf16}) {
    for (const SideFormat v : {SideFormat::kNvfp4, SideFormat::kFp8, SideFormat::kBf16}) {
      for (const ElementType type : kTypes) {
        for (const uint32_t head_dim : {64U, 80U, 128U, 192U, 256U}) {
          ++turn;
          if (is_quick && turn % 23 != 0) continue;
          CheckCase({.shape = {.layer_count = 2,
                               .kv_head_count = 2,
                               .block_tokens = 16U << turn % 4,
                               .head_dim = head_dim},
                     .type = type,
                     .page_tokens = kPageTokens[turn % 5],
                     .is_hnd = turn % 3 == 0,
                     .has_layer_data = turn % 7 < 3,
                     .has_transform = turn % 4 < 2,
                     .has_special_values = true,
                     .search = turn % 3 == 1 ? ScaleSearch::kFourOverSix : ScaleSearch::kAmax6,
                     .first_layer_offset = turn % 3 * 16,
                     .format = {k, v}},
                    suite);
        }
      }
    }
  }
}

void CheckGlobalScales(Suite* suite) {
  if (suite->options().is_sanitized) return;
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp8E4m3}) {
    for (int exponent = -98; exponent <= 98; exponent += 7) {
      CheckCase(
          {.shape = {.layer_count = 1, .kv_head_count = 1, .block_tokens = 64, .head_dim = 128},
           .type = type,
           .has_special_values = exponent % 2 == 0,
           .search = exponent % 3 == 0 ? ScaleSearch::kFourOverSix : ScaleSearch::kAmax6,
           .g_exponent = exponent},
          suite);
    }
  }
}

// A captured graph, replayed with another count: the launch depends on nothing of the host.
void CheckGraph(Suite* suite) {
  TransferData data(
      {.shape = {.layer_count = 2, .kv_head_count = 2, .block_tokens = 64, .head_dim = 128},
       .page_tokens = 16,
       .entry_count = 4},
      kSeed);
  DeviceTransfer device(&data);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CheckCuda(cudaStreamCreate(&stream), "stream");
  CheckCuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  const auto status = SealBlocks(device.SealArgs(), stream);
  suite->Expect(status.ok(), status.message());
  CheckCuda(cudaStreamEndCapture(stream, &graph), "capture");
  CheckCuda(cudaGraphInstantiate(&executable, graph, 0), "graph");
  SealStats stats;
  const std::vector<std::byte> expected = data.ExpectedBlocks(&stats);
  const auto block_bytes = data.block_bytes();
  for (const uint32_t count : {2U, 4U}) {
    const std::vector<uint32_t> counts = {count};
    device.entry_count.Upload(counts);
    device.blocks.Upload(std::vector<std::byte>(data.blocks_.begin(), data.blocks_.end()));
    CheckCuda(cudaGraphLaunch(executable, stream), "graph");
    CheckCuda(cudaStreamSynchronize(stream), "graph");
    const std::vector<std::byte> got = device.blocks.Download();
    for (uint32_t entry = 0; entry < 4; ++entry) {
      const auto place = uint64_t{(entry + 1) % 4} * block_bytes;
      const auto wanted =
          entry < count ? std::span(expected).subspan(place, block_bytes)
                        : std::span<const std::byte>(data.blocks_).subspan(place, block_bytes);
      ExpectSame(wanted, std::span(got).subspan(place, block_bytes),
                 "graph with " + std::to_string(count) + " entries, entry " + std::to_string(entry),
                 suite);
    }
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace

void CheckTransfers(Suite* suite) {
  suite->Begin("seal and gather: every shape and type");
  CheckShapes(suite);
  suite->Begin("seal and gather: FP8 and BF16 sides");
  CheckFormats(suite);
  suite->Begin("seal and gather: global scales");
  CheckGlobalScales(suite);
  suite->Begin("seal: replayed graph");
  CheckGraph(suite);
}

}  // namespace kvtier::gpu
