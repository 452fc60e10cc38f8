// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tiers/nvme/io_engine.h"

namespace rocksdb {
class Env;
}  // namespace rocksdb

namespace kvtier::nvme {

// Everything by which the tier changes what a disk holds: names, transfers, and RocksDB's files.
// Plain system calls here; the test of power losses overrides it to see each change and each sync.
// Thread-safe; the calls block on small I/O. Nothing follows a link.
class Storage {
 public:
  virtual ~Storage() = default;

  // Mode 0700. False: there is one already.
  virtual absl::StatusOr<bool> MakeFolder(const std::string& path);
  // An open file of mode 0600; NOT_FOUND when there is none and `flags` lack O_CREAT. The caller
  // closes it.
  virtual absl::StatusOr<int> Open(const std::string& path, int flags);
  virtual absl::Status Rename(const std::string& from, const std::string& to);
  // A file; OK when there is none.
  virtual absl::Status Remove(const std::string& path);
  // Writes to an open, empty file and makes its bytes durable, not its name.
  virtual absl::Status WriteAndSync(int fd, std::span<const std::byte> bytes);
  // Makes the names in a folder durable: before this, a power loss may take back what the calls
  // above did, whatever was synced to the files.
  virtual absl::Status SyncFolder(const std::string& path);

  // The engine that the tier is to use instead of `engine`.
  virtual std::unique_ptr<IoEngine> WrapEngine(std::unique_ptr<IoEngine> engine);
  // RocksDB's own when null.
  virtual rocksdb::Env* index_env() { return nullptr; }

  // The one that does nothing but the above.
  static Storage& Plain();
};

}  // namespace kvtier::nvme
