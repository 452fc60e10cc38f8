// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/segment_scan.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <span>

#include "absl/status/statusor.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"
#include "tiers/nvme/data_dir.h"

namespace kvtier::nvme {
namespace {

constexpr uint64_t kWindowBytes = 1 << 20;

// Reads a file through one window that moves forward.
class WindowReader {
 public:
  WindowReader(int fd, uint64_t file_bytes)
      : fd_(fd), file_bytes_(file_bytes), window_(kWindowBytes) {}

  // The page at `offset_bytes`; valid until the next call. Short at the end of the file.
  absl::StatusOr<std::span<const std::byte>> Page(uint64_t offset_bytes) {
    if (offset_bytes < start_bytes_ || offset_bytes + kPageBytes > start_bytes_ + held_bytes_) {
      KVT_RETURN_IF_ERROR(Load(offset_bytes));
    }
    const uint64_t at = offset_bytes - start_bytes_;
    return window_.bytes().subspan(at, std::min<uint64_t>(kPageBytes, held_bytes_ - at));
  }

  absl::StatusOr<uint32_t> PayloadCrc(uint64_t offset_bytes, uint32_t payload_bytes) {
    uint32_t crc = 0;
    for (uint64_t done_bytes = 0; done_bytes < payload_bytes;) {
      KVT_RETURN_IF_ERROR(Load(offset_bytes + done_bytes));
      const uint64_t part_bytes = std::min<uint64_t>(held_bytes_, payload_bytes - done_bytes);
      if (part_bytes == 0) return ~crc;  // cut off: no checksum matches
      crc = Crc32c(window_.bytes().first(part_bytes), crc);
      done_bytes += part_bytes;
    }
    return crc;
  }

 private:
  absl::Status Load(uint64_t offset_bytes) {
    start_bytes_ = offset_bytes;
    held_bytes_ = 0;
    while (held_bytes_ < kWindowBytes && start_bytes_ + held_bytes_ < file_bytes_) {
      const ssize_t got = pread(fd_, window_.data() + held_bytes_, kWindowBytes - held_bytes_,
                                static_cast<off_t>(start_bytes_ + held_bytes_));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return ErrnoStatus(errno, "scan a segment");
      if (got == 0) break;
      held_bytes_ += static_cast<uint64_t>(got);
      // O_DIRECT cannot go on from the middle of a page.
      if (held_bytes_ % kPageBytes != 0) break;
    }
    return absl::OkStatus();
  }

  const int fd_;
  const uint64_t file_bytes_;
  PageMemory window_;
  uint64_t start_bytes_ = 0;
  uint64_t held_bytes_ = 0;
};

}  // namespace

absl::Status ScanSegment(int fd, uint64_t file_bytes, const std::optional<SegmentHeader>& header,
                         const std::function<void(const RecordHeader&, uint64_t)>& visit) {
  WindowReader reader(fd, file_bytes);
  std::optional<uint64_t> sequence;
  uint64_t nonce = 0;
  if (header) {
    sequence = header->sequence;
    nonce = header->nonce;
  }
  for (uint64_t offset_bytes = kPageBytes; offset_bytes + kPageBytes <= file_bytes;) {
    KVT_ASSIGN_OR_RETURN(const auto page, reader.Page(offset_bytes));
    const auto record = ParseRecordHeader(page);
    // Behind a record that was torn or never finished, good ones may follow on any page.
    const uint64_t next_page_bytes = offset_bytes + kPageBytes;
    if (!record.ok()) {
      if (!sequence) return absl::OkStatus();
      offset_bytes = next_page_bytes;
      continue;
    }
    if (!sequence) {
      sequence = SequenceOf(record->generation);
      nonce = record->nonce;
    }
    if (record->generation != GenerationOf(*sequence, offset_bytes) || record->nonce != nonce) {
      offset_bytes = next_page_bytes;
      continue;
    }
    KVT_ASSIGN_OR_RETURN(const uint32_t crc,
                         reader.PayloadCrc(next_page_bytes, record->meta.payload_bytes));
    if (crc != record->meta.crc32c) {
      offset_bytes = next_page_bytes;
      continue;
    }
    visit(*record, offset_bytes);
    offset_bytes += RecordBytes(record->meta.payload_bytes);
  }
  return absl::OkStatus();
}

}  // namespace kvtier::nvme
