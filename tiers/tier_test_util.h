// SPDX-License-Identifier: Apache-2.0
//
// What tests of tiers share: blocks with predictable bytes, blocking calls, temporary folders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tiers/tier.h"

namespace kvtier {

inline constexpr uint64_t kMiB = 1 << 20;

// Page-aligned bytes with whole pages, as a slot of a memory tier has.
class PageBuffer {
 public:
  explicit PageBuffer(size_t size_bytes);
  std::span<std::byte> bytes() { return {data_.get(), size_bytes_}; }
  std::span<const std::byte> bytes() const { return {data_.get(), size_bytes_}; }

 private:
  struct Freer {
    void operator()(std::byte* data) const;
  };
  size_t size_bytes_;
  std::unique_ptr<std::byte, Freer> data_;
};

struct TestBlock {
  BlockMeta meta;
  PageBuffer payload;
};

// The same `seed` and size give the same block; different seeds give different keys and bytes.
TestBlock MakeBlock(uint64_t seed, uint32_t payload_bytes);

// Wait for `done`; abort when it is called twice.
absl::Status WriteAndWait(Tier& tier, ReplicaId replica, const BlockMeta& meta,
                          std::span<const std::byte> source);
absl::Status ReadAndWait(Tier& tier, ReplicaId replica, const BlockMeta& meta,
                         std::span<std::byte> target);
// Reads into a fresh page-aligned buffer and compares. OK, the read's error, or INTERNAL when the
// tier said OK and gave other bytes.
absl::Status ReadAndCompare(Tier& tier, ReplicaId replica, const TestBlock& block);

// A folder of its own under $TMPDIR or /tmp; removed with its contents.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// The seed of a random test: $KVTIER_TEST_SEED, else a new one; printed.
uint64_t TestSeed();

}  // namespace kvtier
