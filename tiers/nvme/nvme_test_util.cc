// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/nvme_test_util.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

namespace kvtier {

namespace fs = std::filesystem;

NvmeTierTest::NvmeTierTest() {
  options_.dir = folder_.path() + "/nvme";
  options_.capacity_bytes = 16 * kTestSegmentBytes;
  options_.segment_bytes = kTestSegmentBytes;
  options_.heal_interval_ms = 5;
}

void NvmeTierTest::Open(bool is_exact) {
  tier_.reset();
  auto tier = NvmeTier::Create(options_);
  ASSERT_TRUE(tier.ok()) << tier.status();
  tier_ = std::move(tier).value();
  std::map<Key, ReplicaId> found;
  const absl::Status recovered = tier_->Recover([&](const BlockMeta& meta, ReplicaId replica) {
    EXPECT_TRUE(found.emplace(meta.key, replica).second) << "found twice";
  });
  ASSERT_TRUE(recovered.ok()) << recovered;
  for (auto it = held_.begin(); it != held_.end();) {
    const auto at = found.find(it->second.block.meta.key);
    if (at == found.end()) {
      EXPECT_FALSE(is_exact) << "block " << it->first << " is gone";
      it = held_.erase(it);
      continue;
    }
    it->second.replica = at->second;
    found.erase(at);
    ++it;
  }
  unexpected_count_ = static_cast<int>(found.size());
  EXPECT_TRUE(!is_exact || unexpected_count_ == 0) << unexpected_count_ << " too many";
  for (const auto& [key, replica] : found) tier_->Free(replica);
}

absl::Status NvmeTierTest::Put(uint32_t payload_bytes) {
  const uint64_t seed = next_seed_++;
  TestBlock block = MakeBlock(seed, payload_bytes);
  auto replica = tier_->Reserve(payload_bytes, 1);
  if (!replica.ok()) return replica.status();
  absl::Status status = WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes());
  if (!status.ok()) {
    tier_->Free(*replica);
    return status;
  }
  held_.emplace(seed, Held{.block = std::move(block), .replica = *replica});
  return status;
}

void NvmeTierTest::PutMany(int count, uint32_t payload_bytes) {
  for (int i = 0; i < count; ++i) ASSERT_EQ(Put(payload_bytes), absl::OkStatus());
}

void NvmeTierTest::FreeHeld(uint64_t seed) {
  tier_->Free(held_.at(seed).replica);
  held_.erase(seed);
}

void NvmeTierTest::ExpectAllReadable() {
  for (const auto& [seed, held] : held_) {
    ASSERT_EQ(ReadAndCompare(*tier_, held.replica, held.block), absl::OkStatus()) << seed;
  }
}

void NvmeTierTest::AwaitDegraded(bool is_degraded) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (tier_->Health().degraded != is_degraded) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
}

uint64_t NvmeTierTest::DiskBytes() const {
  uint64_t total_bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator it(options_.dir, error), end; it != end;
       it.increment(error)) {
    struct stat status = {};
    if (lstat(it->path().c_str(), &status) == 0) {
      total_bytes += static_cast<uint64_t>(status.st_blocks) * 512;
    }
  }
  return total_bytes;
}

std::string NvmeTierTest::SegmentPath(uint32_t segment_idx) const {
  std::string number = std::to_string(segment_idx);
  return options_.dir + "/segments/" + std::string(6 - number.size(), '0') + number + ".seg";
}

std::vector<std::string> NvmeTierTest::SegmentPaths() const {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(options_.dir + "/segments")) {
    paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

uint64_t NvmeTierTest::FindRecord(const BlockMeta& meta, std::string& path) const {
  constexpr uint64_t kKeyOffset = 64;
  for (const std::string& candidate : SegmentPaths()) {
    const std::string bytes = ReadFile(candidate);
    const size_t at = bytes.find(meta.key.AsBytes());
    if (at == std::string::npos) continue;
    path = candidate;
    return at - kKeyOffset;
  }
  ADD_FAILURE() << "no record of the block";
  return 0;
}

void KeepTestFilesInMemory() {
  struct statvfs memory = {};
  if (statvfs("/dev/shm", &memory) == 0 && memory.f_bavail * memory.f_frsize > (256ULL << 20)) {
    setenv("TMPDIR", "/dev/shm", /*overwrite=*/1);
  }
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
  EXPECT_TRUE(file.flush()) << path;
}

void FlipByte(const std::string& path, uint64_t offset_bytes) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(static_cast<std::streamoff>(offset_bytes));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(offset_bytes));
  file.put(static_cast<char>(byte ^ 1));
  EXPECT_TRUE(file.flush()) << path;
}

}  // namespace kvtier
