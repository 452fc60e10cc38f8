// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/decode.h"
#include "tests/gpu/device_decode.h"
#include "tests/gpu/suite.h"

// Fused decode on the device against FP64 over the dequantized values.

namespace kvtier::gpu {
namespace {

using kernels::ElementType;
using kernels::SideFormat;
using kernels::cuda::DecodeCase;
using kernels::cuda::DecodeData;
using kernels::cuda::DecodeErrors;

constexpr uint64_t kSeed = 20261129;

std::string NameOf(const DecodeCase& test_case) {
  return "T " + std::to_string(test_case.block_tokens) + " d " +
         std::to_string(test_case.head_dim) + " group " + std::to_string(test_case.group_heads) +
         " queries " + std::to_string(test_case.query_len) + " window " +
         std::to_string(test_case.window) + " sequences " +
         std::to_string(test_case.block_counts.size());
}

void CheckCase(const DecodeCase& test_case, Suite* suite) {
  DecodeData data(test_case, kSeed + test_case.head_dim);
  DeviceDecode device(&data);
  const auto status = DecodeBatch(device.Args(), nullptr);
  suite->Expect(status.ok(), status.message());
  CheckCuda(cudaDeviceSynchronize(), "decode");
  device.DownloadResults();
  const DecodeErrors errors = data.Errors();
  suite->Expect(errors.out <= kernels::cuda::kOutErrorMax,
                NameOf(test_case) + " error " + std::to_string(errors.out));
  suite->Expect(errors.lse <= LseErrorMax(test_case),
                NameOf(test_case) + " lse error " + std::to_string(errors.lse));
  suite->Expect(device.damage_count.Download()[0] == 0, NameOf(test_case) + " damage");
}

void CheckShapes(Suite* suite) {
  const bool is_quick = suite->options().is_sanitized;
  uint32_t turn = 0;
  for (const uint32_t head_dim : {64U, 96U, 128U, 192U, 256U}) {
    for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
      for (const uint32_t group : {1U, 3U, 8U, 12U, 16U}) {
        if (is_quick && ++turn % 13 != 0) continue;
        CheckCase({.block_tokens = block_tokens,
                   .head_dim = head_dim,
                   .group_heads = group,
                   .block_counts = {0, 1, 257 / block_tokens, 3000 / block_tokens},
                   .tail_tokens = {0, 1, block_tokens, 3}},
                  suite);
      }
    }
  }
}

void CheckOptions(Suite* suite) {
  for (const uint32_t query_len : {2U, 8U}) {
    for (const uint32_t window : {0U, 1U, 70U, 1000U}) {
      CheckCase({.group_heads = 2,
                 .block_counts = {3, 30},
                 .tail_tokens = {9, 0},
                 .query_len = query_len,
                 .window = window},
                suite);
    }
  }
  CheckCase({.soft_cap = 3.0F, .has_sinks = true}, suite);
  CheckCase({.has_transform = true}, suite);
  CheckCase({.tail_type = ElementType::kFp8E4m3, .query_type = ElementType::kFp32}, suite);
  for (const float spread : {0.01F, 16.0F, 64.0F}) {
    CheckCase({.score_spread = spread}, suite);
    CheckCase({.query_type = ElementType::kFp32, .score_spread = spread}, suite);
    CheckCase({.has_transform = true, .score_spread = spread}, suite);
    CheckCase({.group_heads = 12, .query_type = ElementType::kFp32, .score_spread = spread}, suite);
  }
  for (const float lead : {4.0F, 12.0F, 20.0F}) CheckCase({.idle_lead = lead}, suite);
  for (const SideFormat k : {SideFormat::kNvfp4, SideFormat::kFp8, SideFormat::kBf16}) {
    for (const SideFormat v : {SideFormat::kNvfp4, SideFormat::kFp8, SideFormat::kBf16}) {
      CheckCase({.group_heads = 4, .format = {k, v}}, suite);
    }
  }
}

// A captured graph, replayed with other lengths, and twice with the same: equal bits.
void CheckGraph(Suite* suite) {
  DecodeData data({.block_counts = {40, 3}, .tail_tokens = {7, 0}}, kSeed);
  DeviceDecode device(&data);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CheckCuda(cudaStreamCreate(&stream), "stream");
  CheckCuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  const auto status = DecodeBatch(device.Args(), stream);
  suite->Expect(status.ok(), status.message());
  CheckCuda(cudaStreamEndCapture(stream, &graph), "capture");
  CheckCuda(cudaGraphInstantiate(&executable, graph, 0), "graph");
  const auto replay = [&](uint32_t first_count) {
    const std::vector<uint32_t> counts = {first_count, data.sealed_counts[1]};
    device.sealed_counts.Upload(counts);
    CheckCuda(cudaGraphLaunch(executable, stream), "graph");
    CheckCuda(cudaStreamSynchronize(stream), "graph");
    device.DownloadResults();
    return std::vector<std::byte>(data.out.begin(), data.out.end());
  };
  const std::vector<std::byte> whole = replay(data.sealed_counts[0]);
  suite->Expect(data.Errors().out <= kernels::cuda::kOutErrorMax, "the first replay is wrong");
  suite->Expect(replay(64) != whole, "a shorter sequence gives the same");
  suite->Expect(replay(data.sealed_counts[0]) == whole, "the same sequence gives other bits");
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace

void CheckDecode(Suite* suite) {
  suite->Begin("decode: every shape");
  CheckShapes(suite);
  suite->Begin("decode: options");
  CheckOptions(suite);
  suite->Begin("decode: replayed graph");
  CheckGraph(suite);
}

}  // namespace kvtier::gpu
