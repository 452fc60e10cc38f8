// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "tiers/nvme/storage.h"

namespace kvtier::nvme {

class FailingFileSystem;

// Plain(), but for RocksDB's files, which can be put on a full disk. Thread-safe.
class FailingStorage final : public Storage {
 public:
  FailingStorage();
  ~FailingStorage() override;

  // All writes to them after so many more fail, the first one half-way; files can still be made,
  // synced, renamed and removed.
  void FillUpAfter(uint64_t write_count);
  void MakeRoom();
  // Has a write failed since FillUpAfter?
  bool has_failed() const;

  rocksdb::Env* index_env() override;

 private:
  std::unique_ptr<FailingFileSystem> file_system_;
};

}  // namespace kvtier::nvme
