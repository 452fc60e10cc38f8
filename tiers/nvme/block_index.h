// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tiers/nvme/index_entry.h"
#include "tiers/nvme/write_budget.h"
#include "tiers/tier.h"

namespace rocksdb {
class ColumnFamilyHandle;
class DB;
class Env;
class Status;
}  // namespace rocksdb

namespace kvtier::nvme {

// Takes the entry of a key away if it still names this generation.
struct IndexRemoval {
  NamespaceHash namespace_hash;
  Key key;
  uint64_t generation = 0;
};

// The durable map from blocks to places: RocksDB, small values only.
// Owns the database. Thread-safe; every call blocks on I/O.
// Errors everywhere: DATA_LOSS (the database is damaged), UNAVAILABLE (I/O; may pass).
class BlockIndex {
 public:
  struct Options {
    std::string path;
    uint64_t write_buffer_bytes = 16ULL << 20;
    // Of RocksDB's own when null; outlives the index.
    rocksdb::Env* env = nullptr;
  };

  // Creates the database when there is none. Also FAILED_PRECONDITION: a newer format.
  static absl::StatusOr<std::unique_ptr<BlockIndex>> Open(const Options& options);
  ~BlockIndex();

  // MarkComplete was never called: new, or a process ended while it filled a new one.
  bool is_incomplete() const { return is_incomplete_; }
  // What MarkComplete was told; 0 before.
  uint64_t segment_bytes() const { return segment_bytes_; }
  // The index holds every block there is. `format_version` is kFormatVersion but in tests.
  absl::Status MarkComplete(uint64_t segment_bytes, uint64_t format_version);

  // Values of an unknown shape are counted in `bad_count` and skipped.
  absl::Status ForEach(const std::function<void(const IndexEntry&)>& visit, uint64_t& bad_count);
  // All of it durably, or an error: then any part may have happened.
  // `spent`, if any, is kept with them.
  absl::Status Apply(std::span<const IndexEntry> puts, std::span<const IndexRemoval> removals,
                     const WriteBudget::Spent* spent = nullptr);
  // What the last Apply was told; zeros when none was.
  absl::StatusOr<WriteBudget::Spent> LoadSpent();
  // Tries to leave the read-only state that RocksDB enters after a failed write.
  absl::Status Probe();

 private:
  BlockIndex();
  absl::Status OpenDatabase(const Options& options);
  absl::Status CheckFormat();
  absl::StatusOr<std::optional<uint64_t>> GetMeta(const std::string& key);

  std::unique_ptr<rocksdb::DB> db_;
  std::vector<rocksdb::ColumnFamilyHandle*> handles_;
  bool is_incomplete_ = false;
  uint64_t segment_bytes_ = 0;
};

// The one mapping of RocksDB's errors.
absl::Status StatusOfRocksDb(const rocksdb::Status& status, std::string_view what);

}  // namespace kvtier::nvme
