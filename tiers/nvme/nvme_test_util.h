// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tiers/nvme/nvme_tier.h"
#include "tiers/tier_test_util.h"

namespace kvtier {

inline constexpr uint64_t kTestSegmentBytes = 1 << 20;

// A small nvme tier in a folder of its own, and the blocks it should hold.
class NvmeTierTest : public testing::Test {
 protected:
  NvmeTierTest();

  // Opens (again) and checks that exactly the blocks in held() are there when `is_exact`, with
  // their right bytes; others are freed.
  void Open(bool is_exact = true);
  void Close() { tier_.reset(); }

  // Each uses a new seed.
  absl::Status Put(uint32_t payload_bytes);
  void PutMany(int count, uint32_t payload_bytes);
  void FreeHeld(uint64_t seed);
  void ExpectAllReadable();
  // Until the tier reports this; fails after half a minute.
  void AwaitDegraded(bool is_degraded);

  // Bytes on the file system.
  uint64_t DiskBytes() const;
  std::string SegmentPath(uint32_t segment_idx) const;
  std::vector<std::string> SegmentPaths() const;
  // Where the record of this block starts; its segment file in `path`.
  uint64_t FindRecord(const BlockMeta& meta, std::string& path) const;

  struct Held {
    TestBlock block;
    ReplicaId replica = kNoReplica;
  };

  TempFolder folder_;
  NvmeOptions options_;
  std::unique_ptr<NvmeTier> tier_;
  std::map<uint64_t, Held> held_;
  uint64_t next_seed_ = 1;
  // What Recover found at the last Open beyond held_.
  int unexpected_count_ = 0;
};

// TempFolders are on a file system in memory from now on, if there is one with room: for tests that
// open thousands of tiers and need no real disk.
void KeepTestFilesInMemory();

std::string ReadFile(const std::string& path);
void WriteFile(const std::string& path, const std::string& bytes);
void FlipByte(const std::string& path, uint64_t offset_bytes);

}  // namespace kvtier
