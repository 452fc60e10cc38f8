// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/synchronization/mutex.h"
#include "tiers/nvme/disk_state.h"
#include "tiers/nvme/storage.h"

namespace kvtier::nvme {

class DiskBook;
class RecordingFileSystem;

// Does what Plain() does, and keeps book of it in a DiskState: names and transfers of the tier, and
// every file of RocksDB. Everything happens below one root. Thread-safe.
class RecordingStorage final : public Storage {
 public:
  // `at_sync` is called under mutex() right before and right after each sync that ends: the moments
  // before which less, and from which on more, is certain. It must not call back.
  RecordingStorage(const std::string& root, std::function<void(const DiskState&)> at_sync);
  ~RecordingStorage() override;

  absl::StatusOr<bool> MakeFolder(const std::string& path) override;
  absl::StatusOr<int> Open(const std::string& path, int flags) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status WriteAndSync(int fd, std::span<const std::byte> bytes) override;
  absl::Status SyncFolder(const std::string& path) override;
  std::unique_ptr<IoEngine> WrapEngine(std::unique_ptr<IoEngine> engine) override;
  rocksdb::Env* index_env() override;

  // For what the test keeps book of in step with the disk.
  absl::Mutex& mutex();

 private:
  std::unique_ptr<DiskBook> book_;
  std::unique_ptr<RecordingFileSystem> file_system_;
};

}  // namespace kvtier::nvme
