// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/cuda_tier.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "tiers/conformance_test.h"
#include "tiers/cuda/cuda_tier_fixture.h"

namespace kvtier {
namespace {

// The tier, and the card that outlives it.
class TierOnFakeCard final : public Tier {
 public:
  explicit TierOnFakeCard(uint64_t piece_bytes) {
    auto tier = CudaTier::Create(
        driver_.OpenDevice(0).value(),
        {.capacity_bytes = 16 * kMiB, .segment_bytes = 2 * kMiB, .piece_bytes = piece_bytes});
    EXPECT_TRUE(tier.ok()) << tier.status();
    tier_ = std::move(tier).value();
  }
  absl::StatusOr<ReplicaId> Reserve(uint32_t payload_bytes, OwnerIdx owner) override {
    return tier_->Reserve(payload_bytes, owner);
  }
  void Free(ReplicaId replica) override { tier_->Free(replica); }
  uint64_t FootprintBytes(uint32_t bytes) const override { return tier_->FootprintBytes(bytes); }
  TierUsage Usage() const override { return tier_->Usage(); }
  TierId id() const override { return tier_->id(); }
  void Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
             Done done) override {
    tier_->Write(replica, meta, source, std::move(done));
  }
  void Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
            Done done) override {
    tier_->Read(replica, meta, target, std::move(done));
  }
  std::span<std::byte> Mapped(ReplicaId replica) override { return tier_->Mapped(replica); }
  absl::Status Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) override {
    return tier_->Recover(found);
  }
  TierHealth Health() const override { return tier_->Health(); }

 private:
  FakeCudaDriver driver_;
  std::unique_ptr<CudaTier> tier_;
};

TierCase CudaCase(const char* name, uint64_t piece_bytes) {
  return {
      .name = name,
      .create = [=](const std::string&) { return std::make_unique<TierOnFakeCard>(piece_bytes); },
      .is_mapped = false};
}

INSTANTIATE_TEST_SUITE_P(Cuda, TierConformanceTest,
                         testing::Values(CudaCase("HbmCudaDevice", kMiB),
                                         CudaCase("HbmCudaDeviceInPages", 4096)),
                         CaseName);

class CudaTierTest : public CudaTierFixture {};

TEST_F(CudaTierTest, ClientSeesTheSlotThroughTheExportedAllocation) {
  Start();
  const TestBlock block = MakeBlock(1, 5000);
  ASSERT_TRUE(tier_->Reserve(8192, 3).ok());
  const auto replica = tier_->Reserve(5000, 3);
  ASSERT_TRUE(replica.ok());
  ASSERT_EQ(WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes()), absl::OkStatus());
  const SlotPlace place = tier_->Place(*replica);
  const auto handle = tier_->ExportSegment(place.segment_idx, /*writable=*/false);
  ASSERT_TRUE(handle.ok()) << handle.status();
  EXPECT_EQ(handle->owner, 3u);
  EXPECT_EQ(handle->segment_bytes, kTestSegmentBytes);
  EXPECT_EQ(handle->device_uuid, driver_->Devices().value()[0].uuid);

  // Another process, with a driver of its own.
  FakeCudaDriver other;
  const auto device = other.OpenDevice(0).value();
  {
    const auto memory = CudaMemory::Import(device.get(), handle->fd, handle->segment_bytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    close(handle->fd);
    const auto seen = other.DeviceBytes((*memory)->address() + place.offset_bytes, 5000);
    EXPECT_TRUE(std::ranges::equal(seen, block.payload.bytes().first(5000)));
    // What the client fills in place, the daemon reads, and finds when it is torn.
    const TestBlock filled = MakeBlock(2, 5000);
    std::ranges::copy(filled.payload.bytes().first(5000), seen.begin());
    EXPECT_EQ(ReadAndCompare(*tier_, *replica, filled), absl::OkStatus());
    seen[4999] ^= std::byte{1};
    EXPECT_EQ(ReadAndCompare(*tier_, *replica, filled).code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_EQ(other.counts(), FakeCudaDriver::Counts());
  EXPECT_EQ(tier_->ExportSegment(99, false).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CudaTierTest, FreshSlotsAreZeroed) {
  Start();
  const auto replica = tier_->Reserve(kTestSegmentBytes, 1);
  ASSERT_TRUE(replica.ok());
  EXPECT_TRUE(std::ranges::all_of(DeviceBytes(*replica, kTestSegmentBytes),
                                  [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST_F(CudaTierTest, AnotherOwnerGetsOtherZeroedMemoryUnderANewNumber) {
  CudaTier::Options options = Options();
  options.capacity_bytes = kTestSegmentBytes;
  ASSERT_EQ(Start(options), absl::OkStatus());
  const auto replica = tier_->Reserve(kTestSegmentBytes, 1);
  ASSERT_TRUE(replica.ok());
  std::ranges::fill(DeviceBytes(*replica, kTestSegmentBytes), std::byte{0xAB});
  const uint32_t segment_idx = tier_->Place(*replica).segment_idx;
  const auto stale = tier_->ExportSegment(segment_idx, true);
  ASSERT_TRUE(stale.ok());
  tier_->Free(*replica);

  const ReplicaId other = ReserveEventually(kTestSegmentBytes, 2);
  EXPECT_NE(tier_->Place(other).segment_idx, segment_idx);
  EXPECT_EQ(tier_->ExportSegment(segment_idx, false).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(std::ranges::all_of(DeviceBytes(other, kTestSegmentBytes),
                                  [](std::byte byte) { return byte == std::byte{0}; }));
  // The old owner's descriptor reaches nothing of the new one.
  const std::byte intruder{0xEE};
  ASSERT_EQ(pwrite(stale->fd, &intruder, 1, 0), 1);
  EXPECT_EQ(DeviceBytes(other, 1)[0], std::byte{0});
  close(stale->fd);
  EXPECT_EQ(tier_->Usage().physical_bytes, kTestSegmentBytes);
}

TEST_F(CudaTierTest, TheSameOwnerTakesItsSegmentBackAtOnce) {
  CudaTier::Options options = Options();
  options.capacity_bytes = kTestSegmentBytes;
  ASSERT_EQ(Start(options), absl::OkStatus());
  const auto replica = tier_->Reserve(kTestSegmentBytes, 1);
  ASSERT_TRUE(replica.ok());
  tier_->Free(*replica);
  EXPECT_TRUE(tier_->Reserve(4096, 1).ok());
}

TEST_F(CudaTierTest, RefusesWhatTheDeviceCannotDo) {
  const auto start = [&](auto change) {
    CudaTier::Options options = Options();
    FakeCudaDriver::Options card;
    change(options, card);
    return Start(options, card);
  };
  const absl::Status no_vmm = start([](auto&, auto& card) { card.has_vmm = false; });
  EXPECT_EQ(no_vmm.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(no_vmm.ToString().find("virtual memory management"), std::string::npos) << no_vmm;
  EXPECT_EQ(start([](auto&, auto& card) { card.has_fd_export = false; }).code(),
            absl::StatusCode::kUnimplemented);
  const absl::Status unaligned =
      start([](auto& options, auto&) { options.segment_bytes = (1 << 20) + 4096; });
  EXPECT_EQ(unaligned.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(unaligned.ToString().find("multiple of 65536"), std::string::npos) << unaligned;
  EXPECT_EQ(start([](auto& options, auto&) { options.capacity_bytes = kMiB - 1; }).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(start([](auto& options, auto& card) {
              options.capacity_bytes = 8 * kMiB;
              card.total_bytes = 4 * kMiB;
            }).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(start([](auto&, auto& card) { card.device_count = 0; }).code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace kvtier
