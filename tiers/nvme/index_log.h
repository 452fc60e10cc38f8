// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace kvtier::nvme {

enum class LogState : uint8_t {
  kWhole,
  // Its last write is damaged: a power loss cut it short, and some of its sectors reached the disk
  // while others did not. It was not acknowledged.
  kTorn,
  // Something intact starts behind the damage. Every write of ours is synced before the next one,
  // so the damage came later, and what it hides had been acknowledged.
  kDamaged,
};

// A log of RocksDB, and a manifest, is blocks of 32 KiB; a block holds fragments and, if fewer than
// 7 bytes are left, zeros.
//   offset  size  field
//        0     4  CRC-32C of what follows but for the length, rotated and shifted as RocksDB does
//        4     2  bytes of the fragment
//        6     1  1: a whole write, 2: its first, 3: a middle, 4: its last fragment
//        7        the fragment
// What is written to a log starts with the number of its first change (8 bytes) and their count (4
// bytes).
struct LogReport {
  LogState state = LogState::kWhole;
  // Up to the end of the last whole write.
  size_t whole_bytes = 0;
  // Of the first change in the log and of the first after it; absent in a log without a write.
  std::optional<uint64_t> first_sequence;
  std::optional<uint64_t> next_sequence;
};

// Pure.
LogReport ExamineLog(std::span<const std::byte> log);

// Of the logs in a database's folder together. A torn one may be followed by another when RocksDB
// went on without the torn write: with the number that this would have had. Blocks: reads them.
LogState StateOfLogs(const std::string& index_path);

// Cuts a torn last write off the manifest that CURRENT names. RocksDB passes over one that ends too
// early, but takes one of which a middle is missing for damage of the whole database. What the
// write was to say had not happened: RocksDB syncs the manifest before it removes a log or a file.
// Blocks.
void CutTornManifest(const std::string& index_path);

}  // namespace kvtier::nvme
