// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <system_error>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tiers/nvme/record.h"
#include "tiers/nvme/storage.h"
#include "tiers/nvme/write_budget.h"

namespace kvtier::nvme {

// Page-aligned memory for O_DIRECT, whole pages.
class PageMemory {
 public:
  explicit PageMemory(uint64_t size_bytes);
  std::byte* data() const { return data_.get(); }
  std::span<std::byte> bytes() const { return {data_.get(), size_bytes_}; }
  std::span<std::byte, kPageBytes> first_page() const {
    return std::span<std::byte, kPageBytes>(data_.get(), kPageBytes);
  }

 private:
  struct Freer {
    void operator()(std::byte* data) const { std::free(data); }
  };
  uint64_t size_bytes_;
  std::unique_ptr<std::byte, Freer> data_;
};

// The directory of an nvme tier:
//   LOCK               held with flock by the owner; holds its pid
//   probe              one page, rewritten to see whether the disk works
//   written            what the write budget has spent (spent_file.h)
//   written.new        exists while that is replaced
//   grow               exists while the tier tries whether a full disk has room again
//   index/             RocksDB
//   index.damaged-N/   an index that did not open, kept for inspection (the last, unless large)
//   segments/NNNNNN.seg
// Owns the lock and the open files. Thread-compatible. Blocks on small I/O.
class DataDir {
 public:
  struct SegmentFile {
    uint64_t file_bytes = 0;
    // Absent when unreadable; `header_error` says why.
    std::optional<SegmentHeader> header;
    absl::Status header_error;
    // When it was last written to, by the file system.
    absl::Time modified = absl::InfinitePast();
  };

  // Creates what is missing and takes the lock. `storage` outlives the result. Errors:
  // FAILED_PRECONDITION (another process owns the directory; names its pid), PERMISSION_DENIED,
  // UNAVAILABLE, ...
  static absl::StatusOr<std::unique_ptr<DataDir>> Open(const std::string& path, Storage& storage);
  ~DataDir();
  DataDir(const DataDir&) = delete;
  DataDir& operator=(const DataDir&) = delete;

  // O_DIRECT works here.
  bool is_direct() const { return is_direct_; }
  std::string index_path() const { return path_ + "/index"; }
  int probe_fd() const { return probe_fd_; }

  // Looks at every segment file and opens it. UNAVAILABLE: one cannot be read now (EIO).
  absl::StatusOr<std::map<uint32_t, SegmentFile>> LoadSegments();
  // The open descriptor, opening or creating (durably) the file when there is none.
  absl::StatusOr<int> SegmentFd(uint32_t segment_idx);
  // Requires: SegmentFd gave one out.
  int OpenedFd(uint32_t segment_idx) const { return fds_.at(segment_idx); }
  absl::Status RemoveSegment(uint32_t segment_idx);
  // Forgets the descriptor of a file that is not there any more.
  void ForgetSegment(uint32_t segment_idx);
  // There is a file of this name, or nobody can tell. On any thread.
  bool HasSegment(uint32_t segment_idx) const;
  std::string SegmentPath(uint32_t segment_idx) const;

  // A file to try to allocate space in; removed again by RemoveGrowProbe.
  absl::StatusOr<int> OpenGrowProbe();
  void RemoveGrowProbe(int fd);

  // What KeepSpent kept last. NOT_FOUND: nothing; DATA_LOSS: the file is damaged; UNAVAILABLE.
  absl::StatusOr<WriteBudget::Spent> LoadSpent();
  // Durably and as a whole, or not.
  absl::Status KeepSpent(const WriteBudget::Spent& spent);

  // Renames index/ to index.damaged-N, durably, instead of what was moved aside before; returns the
  // new path.
  absl::StatusOr<std::string> MoveIndexAside();
  // Removes what was moved aside if it is larger than this, for the tier's capacity has no more
  // room for it. True: it did.
  bool RemoveLargeAside(uint64_t bytes_max);
  // Makes the names right below the directory durable: of index/ once it is made.
  absl::Status SyncNames() { return storage_.SyncFolder(path_); }

  // Bytes that the directory occupies on the file system.
  uint64_t PhysicalBytes() const { return PhysicalBytesBelow(path_); }
  // What this process may still write to the file system. UNAVAILABLE and others.
  absl::StatusOr<uint64_t> FreeBytes() const;

 private:
  DataDir(std::string path, Storage& storage) : path_(std::move(path)), storage_(storage) {}
  absl::Status TakeLock();
  absl::Status OpenProbe();
  // The numbers of index.damaged-N.
  std::set<uint32_t> AsideNumbers(std::error_code& error) const;
  std::string AsidePath(uint32_t number) const;
  static uint64_t PhysicalBytesBelow(const std::string& path);
  std::string spent_path() const { return path_ + "/written"; }

  const std::string path_;
  Storage& storage_;
  int lock_fd_ = -1;
  int probe_fd_ = -1;
  bool is_direct_ = false;
  std::map<uint32_t, int> fds_;
};

}  // namespace kvtier::nvme
