// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/memory_tier.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "tiers/conformance_test.h"
#include "tiers/memory/memory_limit.h"

namespace kvtier {
namespace {

std::unique_ptr<MemoryTier> MakeTier(uint64_t capacity_bytes = 4 * kMiB,
                                     uint64_t segment_bytes = kMiB, TierId id = TierId::kHost) {
  auto tier = MemoryTier::Create(
      {.id = id, .capacity_bytes = capacity_bytes, .segment_bytes = segment_bytes});
  EXPECT_TRUE(tier.ok()) << tier.status();
  return std::move(tier).value();
}

INSTANTIATE_TEST_SUITE_P(
    Memory, TierConformanceTest,
    testing::Values(TierCase{.name = "Host",
                             .create =
                                 [](const std::string&) { return MakeTier(16 * kMiB, 2 * kMiB); }},
                    TierCase{.name = "HbmCpuDevice",
                             .create =
                                 [](const std::string&) {
                                   return MakeTier(32 * kMiB, 4 * kMiB, TierId::kHbm);
                                 }}),
    CaseName);

TEST(MemoryTierTest, ClientSeesTheSlotThroughTheExportedSegment) {
  auto tier = MakeTier();
  const TestBlock block = MakeBlock(1, 5000);
  ASSERT_TRUE(tier->Reserve(8192, 3).ok());
  const auto replica = tier->Reserve(5000, 3);
  ASSERT_TRUE(replica.ok());
  ASSERT_EQ(WriteAndWait(*tier, *replica, block.meta, block.payload.bytes()), absl::OkStatus());
  const SlotPlace place = tier->Place(*replica);
  const auto handle = tier->ExportSegment(place.segment_idx, /*writable=*/false);
  ASSERT_TRUE(handle.ok()) << handle.status();
  EXPECT_EQ(handle->owner, 3u);
  EXPECT_EQ(handle->segment_bytes, kMiB);
  EXPECT_NE(fcntl(handle->fd, F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(mmap(nullptr, kMiB, PROT_WRITE, MAP_SHARED, handle->fd, 0), MAP_FAILED);
  void* base = mmap(nullptr, kMiB, PROT_READ, MAP_SHARED, handle->fd, 0);
  ASSERT_NE(base, MAP_FAILED);
  EXPECT_TRUE(std::equal(block.payload.bytes().begin(), block.payload.bytes().end(),
                         static_cast<std::byte*>(base) + place.offset_bytes));
  munmap(base, kMiB);
  close(handle->fd);
  EXPECT_EQ(tier->ExportSegment(99, false).status().code(), absl::StatusCode::kNotFound);
}

TEST(MemoryTierTest, AcceptsFillsThroughAWritableExportAndKeepsTheSize) {
  auto tier = MakeTier();
  const TestBlock block = MakeBlock(2, 4096);
  const auto replica = tier->Reserve(4096, 1);
  ASSERT_TRUE(replica.ok());
  const SlotPlace place = tier->Place(*replica);
  const auto handle = tier->ExportSegment(place.segment_idx, /*writable=*/true);
  ASSERT_TRUE(handle.ok());
  EXPECT_NE(ftruncate(handle->fd, 0), 0) << "a client could shrink the segment under the daemon";
  EXPECT_NE(ftruncate(handle->fd, 2 * kMiB), 0);
  EXPECT_NE(fcntl(handle->fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), 0);
  ASSERT_EQ(pwrite(handle->fd, block.payload.bytes().data(), 4096,
                   static_cast<off_t>(place.offset_bytes)),
            4096);
  close(handle->fd);
  EXPECT_EQ(ReadAndCompare(*tier, *replica, block), absl::OkStatus());
}

TEST(MemoryTierTest, AnotherOwnerGetsZeroedMemoryUnderANewNumber) {
  auto tier = MakeTier(kMiB, kMiB);
  const auto replica = tier->Reserve(kMiB, 1);
  ASSERT_TRUE(replica.ok());
  std::ranges::fill(tier->Mapped(*replica), std::byte{0xAB});
  const uint32_t segment_idx = tier->Place(*replica).segment_idx;
  const auto stale = tier->ExportSegment(segment_idx, false);
  ASSERT_TRUE(stale.ok());
  tier->Free(*replica);
  const auto other = tier->Reserve(kMiB, 2);
  ASSERT_TRUE(other.ok());
  EXPECT_NE(tier->Place(*other).segment_idx, segment_idx);
  EXPECT_EQ(tier->ExportSegment(segment_idx, false).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(std::ranges::all_of(tier->Mapped(*other),
                                  [](std::byte byte) { return byte == std::byte{0}; }));
  // The old owner's descriptor shows nothing of the new one, and holds no memory.
  std::ranges::fill(tier->Mapped(*other), std::byte{0xCD});
  std::byte seen{0xFF};
  ASSERT_EQ(pread(stale->fd, &seen, 1, 0), 1);
  EXPECT_EQ(seen, std::byte{0});
  close(stale->fd);
  EXPECT_EQ(tier->Usage().physical_bytes, kMiB);
}

// Says what is mapped at present.
class SpanObserver final : public SegmentObserver {
 public:
  void OnMapped(std::span<std::byte> segment) override {
    EXPECT_TRUE(mapped.emplace(segment.data(), segment.size()).second);
    segment[0] = std::byte{1};
  }
  void OnUnmapping(std::span<std::byte> segment) override {
    EXPECT_EQ(mapped.erase(segment.data()), 1u);
    // Still there.
    segment[0] = std::byte{2};
  }
  std::map<std::byte*, size_t> mapped;
};

TEST(MemoryTierTest, TellsObserversOfEverySegmentWhileItIsMapped) {
  SpanObserver observer;
  auto tier = MemoryTier::Create(
      {.capacity_bytes = 2 * kMiB, .segment_bytes = kMiB, .observers = {&observer}});
  ASSERT_TRUE(tier.ok()) << tier.status();
  const auto first = (*tier)->Reserve(4096, 1);
  const auto second = (*tier)->Reserve(kMiB, 2);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(observer.mapped.size(), 2u);
  const std::span<std::byte> slot = (*tier)->Mapped(*second);
  ASSERT_TRUE(observer.mapped.contains(slot.data()));
  EXPECT_EQ(observer.mapped[slot.data()], kMiB);
  // Another owner's memory takes its place.
  (*tier)->Free(*first);
  ASSERT_TRUE((*tier)->Reserve(4096, 3).ok());
  EXPECT_EQ(observer.mapped.size(), 2u);
  tier->reset();
  EXPECT_TRUE(observer.mapped.empty());
}

TEST(MemoryTierTest, RefusesBadSizesAndMoreThanTheMachineHas) {
  const auto code = [](uint64_t capacity_bytes, uint64_t segment_bytes) {
    return MemoryTier::Create({.capacity_bytes = capacity_bytes, .segment_bytes = segment_bytes})
        .status()
        .code();
  };
  EXPECT_EQ(code(kMiB, 4096), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kMiB, (64 << 10) + 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kMiB - 1, kMiB), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(1ULL << 62, kMiB), absl::StatusCode::kInvalidArgument);
  const auto limit = ReadMemoryLimit();
  ASSERT_TRUE(limit.ok());
  const absl::Status status =
      MemoryTier::Create({.capacity_bytes = limit->bytes + kMiB, .segment_bytes = kMiB}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.ToString().find(std::to_string(limit->bytes)), std::string::npos) << status;
}

class MemoryLimitTest : public testing::Test {
 protected:
  void Put(const std::string& path, const std::string& text) {
    const std::filesystem::path full = folder_.path() + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  MemoryLimit Read() {
    const auto limit = ReadMemoryLimit(folder_.path() + "/proc", folder_.path() + "/cgroup");
    EXPECT_TRUE(limit.ok()) << limit.status();
    return limit.ok() ? *limit : MemoryLimit{};
  }
  TempFolder folder_;
};

TEST_F(MemoryLimitTest, IsTheLeastOfTheMachineAndEveryGroupAbove) {
  Put("/proc/meminfo", "MemTotal:       1000 kB\nMemFree: 1 kB\n");
  EXPECT_EQ(Read().bytes, 1000u * 1024);
  Put("/proc/self/cgroup", "0::/a/b\n");
  Put("/cgroup/a/b/memory.max", "max\n");
  EXPECT_EQ(Read().bytes, 1000u * 1024);
  Put("/cgroup/a/memory.max", "5000\n");
  EXPECT_EQ(Read().bytes, 5000u);
  EXPECT_EQ(Read().source, folder_.path() + "/cgroup/a/memory.max");
  Put("/cgroup/memory.max", "4000\n");
  EXPECT_EQ(Read().bytes, 4000u);
}

TEST_F(MemoryLimitTest, ReadsVersionOneAndContainersThatSeeOnlyTheirRoot) {
  Put("/proc/meminfo", "MemTotal:       1000 kB\n");
  Put("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n");
  Put("/cgroup/memory/memory.limit_in_bytes", "7000\n");
  EXPECT_EQ(Read().bytes, 7000u);
}

TEST_F(MemoryLimitTest, FailsWithoutMeminfo) {
  EXPECT_EQ(ReadMemoryLimit(folder_.path(), folder_.path()).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace kvtier
