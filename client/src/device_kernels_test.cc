// SPDX-License-Identifier: Apache-2.0
//
// What DeviceKernels refuses before it begins, on the cpu device and on a GPU whose launches are
// only counted. tests/integration/device_kernels_test.cc runs the kernels.
#include "client/include/kvtier/device_kernels.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "client/src/kernel_launches.h"
#include "kernels/cuda/blocks.h"

namespace kvtier::client {
namespace {

namespace cuda = kernels::cuda;

struct LaunchCounts {
  int upload = 0;
  int seal = 0;
  int gather = 0;
  int decode = 0;
};
LaunchCounts launched;

constexpr KernelLaunches kCounting = {.upload =
                                          [](void*, const void*, uint64_t, cuda::Stream) {
                                            ++launched.upload;
                                            return kernels::Status();
                                          },
                                      .seal =
                                          [](const cuda::SealBlocksArgs&, cuda::Stream) {
                                            ++launched.seal;
                                            return kernels::Status();
                                          },
                                      .gather =
                                          [](const cuda::GatherBlocksArgs&, cuda::Stream) {
                                            ++launched.gather;
                                            return kernels::Status();
                                          },
                                      .decode =
                                          [](const cuda::DecodeBatchArgs&, cuda::Stream) {
                                            ++launched.decode;
                                            return kernels::Status();
                                          }};

constexpr uint32_t kBlocks = 3;
constexpr uint32_t kTokens = 16;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 64;
constexpr uint64_t kValues = uint64_t{kBlocks} * kTokens * kHeads * kDim;

class DeviceKernelsArgsTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    SetKernelLaunches(&kCounting);
    launched = {};
    layout_.model = "test";
    layout_.layer_count = 1;
    layout_.kv_head_count = kHeads;
    layout_.head_dim = kDim;
    layout_.block_tokens = kTokens;
    ns_.layout = layout_.Fingerprint();
    ns_.block_bytes = layout_.BlockBytes();
    bytes_.resize(uint64_t{kBlocks} * ns_.block_bytes);
    for (uint32_t i = 0; i < kBlocks; ++i) {
      MappedBlock block{.status = BlockStatus::kOk, .tier = 1};
      if (GetParam()) {
        block.device_address = uint64_t{i + 1} << 20;
      } else {
        block.bytes = std::span(bytes_).subspan(uint64_t{i} * ns_.block_bytes, ns_.block_bytes);
      }
      blocks_.push_back(block);
    }
  }
  void TearDown() override { SetKernelLaunches(nullptr); }

  DeviceKernels Kernels() { return DeviceKernels::Create(layout_, ns_).value(); }
  KvRows Rows() {
    return {.k = k_.data(),
            .v = v_.data(),
            .layer_stride = kValues,
            .head_stride = kDim,
            .token_stride = uint64_t{kHeads} * kDim};
  }
  KvRows PagedRows() {
    KvRows rows = Rows();
    rows.page_stride = uint64_t{kTokens} * kHeads * kDim;
    rows.page_table = pages_.data();
    rows.page_table_count = kBlocks;
    rows.page_tokens = kTokens;
    return rows;
  }
  TableSpace Space() {
    const auto host = std::as_writable_bytes(std::span(table_));
    return {
        .host = host, .device = GetParam() ? table_.data() : nullptr, .device_bytes = host.size()};
  }
  absl::StatusCode Seal(const std::vector<uint32_t>& first_slots, const KvRows& rows) {
    return Kernels()
        .Seal(blocks_, first_slots, rows, {g_.data(), g_.data()}, &sealed_, {}, Space())
        .code();
  }
  absl::StatusCode Gather(const std::vector<uint32_t>& first_slots, const KvRows& rows) {
    return Kernels()
        .Gather(blocks_, first_slots, rows, {g_.data(), g_.data()}, &gathered_, {}, Space())
        .code();
  }

  Layout layout_;
  Namespace ns_;
  std::vector<std::byte> bytes_;
  std::vector<MappedBlock> blocks_;
  const std::vector<uint32_t> first_slots_ = {0, kTokens, 2 * kTokens};
  alignas(16) std::array<uint16_t, kValues> k_{};
  alignas(16) std::array<uint16_t, kValues> v_{};
  alignas(16) std::array<uint64_t, 64> table_{};
  std::array<uint32_t, kBlocks> pages_ = {2, 0, 1};
  std::array<float, kHeads> g_ = {1.0F, 1.0F};
  cuda::SealCounters sealed_;
  cuda::GatherCounters gathered_;
};

INSTANTIATE_TEST_SUITE_P(Devices, DeviceKernelsArgsTest, testing::Bool(),
                         [](const auto& param) { return param.param ? "Gpu" : "Cpu"; });

TEST_P(DeviceKernelsArgsTest, RefusesSlotsBeyondThePageTable) {
  EXPECT_EQ(Seal(first_slots_, PagedRows()), absl::StatusCode::kOk);
  EXPECT_EQ(Gather(first_slots_, PagedRows()), absl::StatusCode::kOk);
  EXPECT_EQ(launched.seal + launched.gather, GetParam() ? 2 : 0);
  launched = {};
  for (const uint32_t slot : {2 * kTokens + 1, 0x7FFFFFF0U, 0xFFFFFFFFU}) {
    EXPECT_EQ(Seal({0, kTokens, slot}, PagedRows()), absl::StatusCode::kInvalidArgument) << slot;
    EXPECT_EQ(Gather({0, kTokens, slot}, PagedRows()), absl::StatusCode::kInvalidArgument) << slot;
  }
  EXPECT_EQ(Seal({0, kTokens, 0x7FFFFFF0U}, Rows()), absl::StatusCode::kInvalidArgument);
  // A block without a slot has no tokens.
  blocks_[2] = {.status = BlockStatus::kExists};
  EXPECT_EQ(Seal({0, kTokens, 0xFFFFFFFFU}, PagedRows()), absl::StatusCode::kOk);
  EXPECT_EQ(launched.upload, GetParam() ? 1 : 0);
}

TEST_P(DeviceKernelsArgsTest, EnqueuesNothingOfWhatTheKernelsRefuse) {
  KvRows rows = Rows();
  rows.token_stride = kDim - 8;
  EXPECT_EQ(Seal(first_slots_, rows), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Gather(first_slots_, rows), absl::StatusCode::kInvalidArgument);
  const DecodeSequence sequences[] = {{.blocks = blocks_}};
  std::array<float, 4 * kDim> out{};
  const DecodeStep step{.sequences = sequences,
                        .query = k_.data(),
                        .query_head_count = 2 * kHeads - 1,
                        .softmax_scale = 0.125F,
                        .scales = {g_.data(), g_.data()},
                        .out = out.data(),
                        .lse = out.data()};
  EXPECT_EQ(Kernels().Decode(step, {}, Space()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(launched.upload, 0);
}

TEST_P(DeviceKernelsArgsTest, ReadsScalesOfFp8RowsOnly) {
  const std::array<float, kHeads> zeros{};  // Which no FP8 row may have.
  KvRows rows = Rows();
  rows.k_scales = zeros.data();
  rows.v_scales = zeros.data();
  EXPECT_EQ(Seal(first_slots_, rows), absl::StatusCode::kOk);
}

}  // namespace
}  // namespace kvtier::client
