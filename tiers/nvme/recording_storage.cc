// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/recording_storage.h"

#include <fcntl.h>
#include <rocksdb/env.h>
#include <rocksdb/file_system.h>

#include <filesystem>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier::nvme {

// A DiskState that several threads write to. Paths are absolute, below the root.
class DiskBook {
 public:
  using NodeId = DiskState::NodeId;

  DiskBook(const std::string& root, std::function<void(const DiskState&)> at_sync)
      : root_(root), at_sync_(std::move(at_sync)), state_(DiskState::Load(root)) {}

  absl::Mutex& mutex() { return mutex_; }

  bool Exists(const std::string& path) {
    absl::MutexLock lock(&mutex_);
    return state_.Exists(Below(path));
  }
  void MakeFolder(const std::string& path) {
    absl::MutexLock lock(&mutex_);
    state_.MakeFolder(Below(path));
  }
  NodeId CreateFile(const std::string& path) {
    absl::MutexLock lock(&mutex_);
    return state_.CreateFile(Below(path));
  }
  NodeId FileAt(const std::string& path) {
    absl::MutexLock lock(&mutex_);
    return state_.FileAt(Below(path));
  }
  void Rename(const std::string& from, const std::string& to) {
    absl::MutexLock lock(&mutex_);
    // RocksDB's LOG is written past its file system.
    if (state_.Exists(Below(from))) state_.Rename(Below(from), Below(to));
  }
  void Remove(const std::string& path) {
    absl::MutexLock lock(&mutex_);
    state_.Remove(Below(path));
  }
  void SyncFolder(const std::string& path) {
    absl::MutexLock lock(&mutex_);
    at_sync_(state_);
    state_.SyncFolder(Below(path));
    at_sync_(state_);
  }
  uint64_t StartWrite(NodeId file, uint64_t offset_bytes, std::string_view bytes) {
    absl::MutexLock lock(&mutex_);
    return state_.StartWrite(file, offset_bytes, bytes);
  }
  uint64_t StartAllocate(NodeId file, uint64_t end_bytes) {
    absl::MutexLock lock(&mutex_);
    return state_.StartAllocate(file, end_bytes);
  }
  void EndWrite(NodeId file, uint64_t write_id) {
    absl::MutexLock lock(&mutex_);
    state_.EndWrite(file, write_id);
  }
  DiskState::Sync StartSync(NodeId file) {
    absl::MutexLock lock(&mutex_);
    return state_.StartSync(file);
  }
  void EndSync(const DiskState::Sync& sync) {
    absl::MutexLock lock(&mutex_);
    at_sync_(state_);
    state_.EndSync(sync);
    at_sync_(state_);
  }
  // Which file the tier opened as `fd` last.
  void SetNode(int fd, NodeId file) {
    absl::MutexLock lock(&mutex_);
    nodes_[fd] = file;
  }
  NodeId NodeOf(int fd) {
    absl::MutexLock lock(&mutex_);
    return nodes_.at(fd);
  }

 private:
  std::string Below(const std::string& path) const {
    const auto normal = std::filesystem::path(path).lexically_normal();
    std::string below = normal.lexically_relative(root_).string();
    if (below.ends_with('/')) below.pop_back();
    return below == "." ? "" : below;
  }

  const std::string root_;
  const std::function<void(const DiskState&)> at_sync_;
  absl::Mutex mutex_;
  DiskState state_ ABSL_GUARDED_BY(mutex_);
  std::map<int, NodeId> nodes_ ABSL_GUARDED_BY(mutex_);
};

namespace {

using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;
using rocksdb::Slice;

class RecordingFile final : public rocksdb::FSWritableFileOwnerWrapper {
 public:
  RecordingFile(std::unique_ptr<rocksdb::FSWritableFile>&& file, DiskBook& book,
                DiskState::NodeId node, uint64_t end_bytes)
      : FSWritableFileOwnerWrapper(std::move(file)),
        book_(book),
        node_(node),
        end_bytes_(end_bytes) {}

  IOStatus Append(const Slice& data, const IOOptions& options, IODebugContext* debug) override {
    Record(data);
    return target()->Append(data, options, debug);
  }
  IOStatus Append(const Slice& data, const IOOptions& options,
                  const rocksdb::DataVerificationInfo& verification,
                  IODebugContext* debug) override {
    Record(data);
    return target()->Append(data, options, verification, debug);
  }
  IOStatus Sync(const IOOptions& options, IODebugContext* debug) override {
    const DiskState::Sync sync = book_.StartSync(node_);
    IOStatus status = target()->Sync(options, debug);
    if (status.ok()) book_.EndSync(sync);
    return status;
  }
  IOStatus Fsync(const IOOptions& options, IODebugContext* debug) override {
    const DiskState::Sync sync = book_.StartSync(node_);
    IOStatus status = target()->Fsync(options, debug);
    if (status.ok()) book_.EndSync(sync);
    return status;
  }
  // RocksDB as we open it appends only.
  IOStatus PositionedAppend(const Slice&, uint64_t, const IOOptions&, IODebugContext*) override {
    KVT_CHECK(false);
  }
  IOStatus PositionedAppend(const Slice&, uint64_t, const IOOptions&,
                            const rocksdb::DataVerificationInfo&, IODebugContext*) override {
    KVT_CHECK(false);
  }
  // Of the log, to give back room that was allocated ahead: there is none.
  IOStatus Truncate(uint64_t size_bytes, const IOOptions& options, IODebugContext* debug) override {
    KVT_CHECK(size_bytes == end_bytes_);
    return target()->Truncate(size_bytes, options, debug);
  }

 private:
  void Record(const Slice& data) {
    book_.EndWrite(node_, book_.StartWrite(node_, end_bytes_, {data.data(), data.size()}));
    end_bytes_ += data.size();
  }

  DiskBook& book_;
  const DiskState::NodeId node_;
  uint64_t end_bytes_;
};

class RecordingFolder final : public rocksdb::FSDirectoryWrapper {
 public:
  RecordingFolder(std::unique_ptr<rocksdb::FSDirectory>&& folder, DiskBook& book, std::string path)
      : FSDirectoryWrapper(std::move(folder)), book_(book), path_(std::move(path)) {}

  IOStatus Fsync(const IOOptions& options, IODebugContext* debug) override {
    IOStatus status = FSDirectoryWrapper::Fsync(options, debug);
    if (status.ok()) book_.SyncFolder(path_);
    return status;
  }
  IOStatus FsyncWithDirOptions(const IOOptions& options, IODebugContext* debug,
                               const rocksdb::DirFsyncOptions& reason) override {
    // RocksDB's own leaves the sync out where a file system is known not to need it.
    IOStatus status = FSDirectoryWrapper::FsyncWithDirOptions(options, debug, reason);
    if (status.ok()) book_.SyncFolder(path_);
    return status;
  }

 private:
  DiskBook& book_;
  const std::string path_;
};

class RecordingRocksDb final : public rocksdb::FileSystemWrapper {
 public:
  explicit RecordingRocksDb(DiskBook& book)
      : FileSystemWrapper(rocksdb::FileSystem::Default()), book_(book) {}

  const char* Name() const override { return "kvtier.RecordingRocksDb"; }

  IOStatus NewWritableFile(const std::string& path, const rocksdb::FileOptions& options,
                           std::unique_ptr<rocksdb::FSWritableFile>* result,
                           IODebugContext* debug) override {
    std::unique_ptr<rocksdb::FSWritableFile> file;
    IOStatus status = target()->NewWritableFile(path, options, &file, debug);
    if (!status.ok()) return status;
    *result = std::make_unique<RecordingFile>(std::move(file), book_, book_.CreateFile(path), 0);
    return status;
  }
  IOStatus ReopenWritableFile(const std::string& path, const rocksdb::FileOptions& options,
                              std::unique_ptr<rocksdb::FSWritableFile>* result,
                              IODebugContext* debug) override {
    std::unique_ptr<rocksdb::FSWritableFile> file;
    IOStatus status = target()->ReopenWritableFile(path, options, &file, debug);
    if (!status.ok()) return status;
    *result = std::make_unique<RecordingFile>(std::move(file), book_, book_.FileAt(path),
                                              std::filesystem::file_size(path));
    return status;
  }
  // RocksDB as we open it does not recycle logs.
  IOStatus ReuseWritableFile(const std::string&, const std::string&, const rocksdb::FileOptions&,
                             std::unique_ptr<rocksdb::FSWritableFile>*, IODebugContext*) override {
    KVT_CHECK(false);
  }
  IOStatus NewDirectory(const std::string& path, const IOOptions& options,
                        std::unique_ptr<rocksdb::FSDirectory>* result,
                        IODebugContext* debug) override {
    std::unique_ptr<rocksdb::FSDirectory> folder;
    IOStatus status = target()->NewDirectory(path, options, &folder, debug);
    if (status.ok()) *result = std::make_unique<RecordingFolder>(std::move(folder), book_, path);
    return status;
  }
  IOStatus DeleteFile(const std::string& path, const IOOptions& options,
                      IODebugContext* debug) override {
    IOStatus status = target()->DeleteFile(path, options, debug);
    if (status.ok()) book_.Remove(path);
    return status;
  }
  IOStatus RenameFile(const std::string& from, const std::string& to, const IOOptions& options,
                      IODebugContext* debug) override {
    IOStatus status = target()->RenameFile(from, to, options, debug);
    if (status.ok()) book_.Rename(from, to);
    return status;
  }
  IOStatus CreateDir(const std::string& path, const IOOptions& options,
                     IODebugContext* debug) override {
    IOStatus status = target()->CreateDir(path, options, debug);
    if (status.ok()) book_.MakeFolder(path);
    return status;
  }
  IOStatus CreateDirIfMissing(const std::string& path, const IOOptions& options,
                              IODebugContext* debug) override {
    IOStatus status = target()->CreateDirIfMissing(path, options, debug);
    if (status.ok()) book_.MakeFolder(path);
    return status;
  }

 private:
  DiskBook& book_;
};

class RecordingEngine final : public IoEngine {
 public:
  RecordingEngine(std::unique_ptr<IoEngine> engine, DiskBook& book)
      : engine_(std::move(engine)), book_(book) {}

  std::string_view name() const override { return engine_->name(); }

  void Submit(std::unique_ptr<IoOp> op) override {
    if (op->kind != IoKind::kRead) pending_[op.get()] = Start(*op);
    engine_->Submit(std::move(op));
  }

  std::vector<Completion> Wait(int timeout_ms) override {
    std::vector<Completion> completed = engine_->Wait(timeout_ms);
    for (const Completion& completion : completed) {
      const auto it = pending_.find(completion.op.get());
      if (it == pending_.end()) continue;
      const Pending pending = std::move(it->second);
      pending_.erase(it);
      // What failed may be on the disk or not, for ever.
      if (completion.result < 0) continue;
      if (completion.op->kind == IoKind::kSync) {
        book_.EndSync(pending.sync);
      } else {
        book_.EndWrite(pending.node, pending.write_id);
      }
    }
    return completed;
  }

  void Wake() override { engine_->Wake(); }

 private:
  struct Pending {
    DiskState::NodeId node = 0;
    uint64_t write_id = 0;
    DiskState::Sync sync;
  };

  Pending Start(const IoOp& op) {
    Pending pending{.node = book_.NodeOf(op.fd), .write_id = 0, .sync = {}};
    if (op.kind == IoKind::kSync) {
      pending.sync = book_.StartSync(pending.node);
    } else if (op.kind == IoKind::kAllocate) {
      pending.write_id = book_.StartAllocate(pending.node, op.offset_bytes + op.total_bytes);
    } else {
      std::string bytes;
      for (int i = 0; i < op.buffer_count; ++i) {
        bytes.append(static_cast<const char*>(op.buffers[i].iov_base), op.buffers[i].iov_len);
      }
      pending.write_id = book_.StartWrite(pending.node, op.offset_bytes, bytes);
    }
    return pending;
  }

  const std::unique_ptr<IoEngine> engine_;
  DiskBook& book_;
  std::map<const IoOp*, Pending> pending_;
};

}  // namespace

// RocksDB's view: owns the environment.
class RecordingFileSystem {
 public:
  explicit RecordingFileSystem(DiskBook& book)
      : env_(rocksdb::NewCompositeEnv(std::make_shared<RecordingRocksDb>(book))) {}
  rocksdb::Env* env() { return env_.get(); }

 private:
  std::unique_ptr<rocksdb::Env> env_;
};

RecordingStorage::RecordingStorage(const std::string& root,
                                   std::function<void(const DiskState&)> at_sync)
    : book_(std::make_unique<DiskBook>(root, std::move(at_sync))),
      file_system_(std::make_unique<RecordingFileSystem>(*book_)) {}

RecordingStorage::~RecordingStorage() = default;

absl::Mutex& RecordingStorage::mutex() { return book_->mutex(); }

absl::StatusOr<bool> RecordingStorage::MakeFolder(const std::string& path) {
  auto made = Storage::MakeFolder(path);
  if (made.ok() && *made) book_->MakeFolder(path);
  return made;
}

absl::StatusOr<int> RecordingStorage::Open(const std::string& path, int flags) {
  KVT_ASSIGN_OR_RETURN(const int fd, Storage::Open(path, flags));
  const bool is_new = !book_->Exists(path) || (flags & O_TRUNC) != 0;
  book_->SetNode(fd, is_new ? book_->CreateFile(path) : book_->FileAt(path));
  return fd;
}

absl::Status RecordingStorage::Rename(const std::string& from, const std::string& to) {
  KVT_RETURN_IF_ERROR(Storage::Rename(from, to));
  book_->Rename(from, to);
  return absl::OkStatus();
}

absl::Status RecordingStorage::Remove(const std::string& path) {
  KVT_RETURN_IF_ERROR(Storage::Remove(path));
  book_->Remove(path);
  return absl::OkStatus();
}

absl::Status RecordingStorage::WriteAndSync(int fd, std::span<const std::byte> bytes) {
  const DiskState::NodeId node = book_->NodeOf(fd);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  book_->EndWrite(node, book_->StartWrite(node, 0, text));
  const DiskState::Sync sync = book_->StartSync(node);
  KVT_RETURN_IF_ERROR(Storage::WriteAndSync(fd, bytes));
  book_->EndSync(sync);
  return absl::OkStatus();
}

absl::Status RecordingStorage::SyncFolder(const std::string& path) {
  KVT_RETURN_IF_ERROR(Storage::SyncFolder(path));
  book_->SyncFolder(path);
  return absl::OkStatus();
}

std::unique_ptr<IoEngine> RecordingStorage::WrapEngine(std::unique_ptr<IoEngine> engine) {
  return std::make_unique<RecordingEngine>(std::move(engine), *book_);
}

rocksdb::Env* RecordingStorage::index_env() { return file_system_->env(); }

}  // namespace kvtier::nvme
