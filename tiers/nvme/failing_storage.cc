// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/failing_storage.h"

#include <rocksdb/env.h>
#include <rocksdb/file_system.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

namespace kvtier::nvme {

// The room on a disk, counted in writes.
struct FailingRoom {
  std::atomic<int64_t> write_count = std::numeric_limits<int64_t>::max();
  std::atomic<bool> has_failed = false;
};

namespace {

using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;
using rocksdb::Slice;

class FailingFile final : public rocksdb::FSWritableFileOwnerWrapper {
 public:
  FailingFile(std::unique_ptr<rocksdb::FSWritableFile>&& file, std::shared_ptr<FailingRoom> room)
      : FSWritableFileOwnerWrapper(std::move(file)), room_(std::move(room)) {}

  IOStatus Append(const Slice& data, const IOOptions& options, IODebugContext* debug) override {
    const int64_t left_count = room_->write_count--;
    if (left_count > 0) return target()->Append(data, options, debug);
    room_->has_failed = true;
    const Slice half(data.data(), data.size() / 2);
    if (left_count == 0) target()->Append(half, options, debug).PermitUncheckedError();
    return IOStatus::NoSpace("No space left on device");
  }
  IOStatus Append(const Slice& data, const IOOptions& options, const rocksdb::DataVerificationInfo&,
                  IODebugContext* debug) override {
    return Append(data, options, debug);
  }

 private:
  const std::shared_ptr<FailingRoom> room_;
};

class FailingRocksDb final : public rocksdb::FileSystemWrapper {
 public:
  explicit FailingRocksDb(std::shared_ptr<FailingRoom> room)
      : FileSystemWrapper(rocksdb::FileSystem::Default()), room_(std::move(room)) {}

  const char* Name() const override { return "kvtier.FailingRocksDb"; }

  IOStatus NewWritableFile(const std::string& path, const rocksdb::FileOptions& options,
                           std::unique_ptr<rocksdb::FSWritableFile>* result,
                           IODebugContext* debug) override {
    std::unique_ptr<rocksdb::FSWritableFile> file;
    IOStatus status = target()->NewWritableFile(path, options, &file, debug);
    if (status.ok()) *result = std::make_unique<FailingFile>(std::move(file), room_);
    return status;
  }
  IOStatus ReopenWritableFile(const std::string& path, const rocksdb::FileOptions& options,
                              std::unique_ptr<rocksdb::FSWritableFile>* result,
                              IODebugContext* debug) override {
    std::unique_ptr<rocksdb::FSWritableFile> file;
    IOStatus status = target()->ReopenWritableFile(path, options, &file, debug);
    if (status.ok()) *result = std::make_unique<FailingFile>(std::move(file), room_);
    return status;
  }

 private:
  const std::shared_ptr<FailingRoom> room_;
};

}  // namespace

class FailingFileSystem {
 public:
  FailingRoom& room() { return *room_; }
  rocksdb::Env* env() { return env_.get(); }

 private:
  const std::shared_ptr<FailingRoom> room_ = std::make_shared<FailingRoom>();
  const std::unique_ptr<rocksdb::Env> env_ =
      rocksdb::NewCompositeEnv(std::make_shared<FailingRocksDb>(room_));
};

FailingStorage::FailingStorage() : file_system_(std::make_unique<FailingFileSystem>()) {}

FailingStorage::~FailingStorage() = default;

void FailingStorage::FillUpAfter(uint64_t write_count) {
  file_system_->room().has_failed = false;
  file_system_->room().write_count = static_cast<int64_t>(write_count);
}

void FailingStorage::MakeRoom() {
  file_system_->room().write_count = std::numeric_limits<int64_t>::max();
}

bool FailingStorage::has_failed() const { return file_system_->room().has_failed; }

rocksdb::Env* FailingStorage::index_env() { return file_system_->env(); }

}  // namespace kvtier::nvme
