// SPDX-License-Identifier: Apache-2.0
//
// The scrub thread of NvmeTier: reads every live record once in a while, slowly, so that damage is
// found before somebody waits for the block. And the books of what is written.
#include <fcntl.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"
#include "tiers/nvme/nvme_impl.h"

namespace kvtier {

namespace {

// Of linux/ioprio.h, which Debian's kernel headers do not give to programs.
constexpr int kIoPriorityOfProcess = 1;
constexpr int kIoPriorityIdle = 3 << 13;
// Between two rounds when there is next to nothing to read.
constexpr absl::Duration kRoundMin = absl::Seconds(1);

// The whole record, or what is there of it. Errors: UNAVAILABLE.
absl::StatusOr<uint64_t> ReadAt(int fd, uint64_t offset_bytes, std::span<std::byte> target) {
  uint64_t done_bytes = 0;
  while (done_bytes < target.size()) {
    const ssize_t got = pread(fd, target.data() + done_bytes, target.size() - done_bytes,
                              static_cast<off_t>(offset_bytes + done_bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "scrub");
    if (got == 0) break;
    done_bytes += static_cast<uint64_t>(got);
    // O_DIRECT cannot go on from the middle of a page.
    if (done_bytes % nvme::kPageBytes != 0) break;
  }
  return done_bytes;
}

}  // namespace

void NvmeTier::Impl::CountWritten(uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  written_bytes_ += bytes;
  budget_.Spend(bytes, Now());
}

absl::Time NvmeTier::Impl::Now() const { return options_.now ? options_.now() : absl::Now(); }

void NvmeTier::Impl::ScrubMain() {
  // Reads of ours give way to everybody's, where the scheduler of the device knows priorities.
  syscall(SYS_ioprio_set, kIoPriorityOfProcess, 0, kIoPriorityIdle);
  while (ScrubRound()) {
  }
}

// Every segment once. False: the tier closes.
bool NvmeTier::Impl::ScrubRound() {
  std::vector<uint32_t> segments;
  {
    absl::MutexLock lock(&mutex_);
    segments = replicas_.SegmentsWithMembers();
  }
  for (const uint32_t segment_idx : segments) {
    if (!ScrubSegment(segment_idx)) return false;
  }
  {
    absl::MutexLock lock(&mutex_);
    ++scrub_round_count_;
  }
  return ScrubPause(kRoundMin);
}

// False: the tier closes.
bool NvmeTier::Impl::ScrubPause(absl::Duration duration) { return !scrub_end_.WaitFor(duration); }

bool NvmeTier::Impl::ScrubSegment(uint32_t segment_idx) {
  std::vector<ReplicaId> members;
  {
    absl::MutexLock lock(&mutex_);
    members = replicas_.MembersOf(segment_idx);
  }
  const auto fd =
      storage().Open(dir_->SegmentPath(segment_idx), O_RDONLY | (dir_->is_direct() ? O_DIRECT : 0));
  if (!fd.ok()) return ScrubPause(kRoundMin);
  bool is_open = true;
  uint64_t lost_count = 0;
  for (const ReplicaId replica_id : members) {
    const uint64_t read_bytes = ScrubReplica(*fd, segment_idx, replica_id, lost_count);
    if (read_bytes == 0) continue;
    is_open = ScrubPause(absl::Seconds(static_cast<double>(read_bytes) /
                                       static_cast<double>(options_.scrub_bytes_per_second)));
    if (!is_open) break;
  }
  close(*fd);
  // One line, however many they are.
  if (lost_count > 0) {
    spdlog::warn("nvme: scrub: {} blocks of {} are damaged on the disk and dropped", lost_count,
                 dir_->SegmentPath(segment_idx));
  }
  return is_open;
}

// Returns the bytes read, and counts in `lost_count` if it dropped the block.
uint64_t NvmeTier::Impl::ScrubReplica(int fd, uint32_t segment_idx, ReplicaId replica_id,
                                      uint64_t& lost_count) {
  Replica expected;
  NamespaceHash namespace_hash;
  {
    absl::MutexLock lock(&mutex_);
    const Replica* const replica = replicas_.Find(replica_id);
    if (is_closing_ || replica == nullptr || !IsScrubbable(*replica, segment_idx)) return 0;
    expected = *replica;
    namespace_hash = replicas_.NamespaceOf(expected);
    segments_->Pin(segment_idx);
  }
  const nvme::PageMemory record(nvme::RecordBytes(expected.payload_bytes));
  auto verdict = VerifyRecord(fd, expected, namespace_hash, record);
  // A second look tells damage on the disk from an accident on the way.
  if (verdict.ok() && !*verdict) verdict = VerifyRecord(fd, expected, namespace_hash, record);
  bool is_lost = false;
  {
    absl::MutexLock lock(&mutex_);
    segments_->Unpin(segment_idx);
    ++scrubbed_count_;
    const Replica* const replica = replicas_.Find(replica_id);
    // One that moves is verified by the move; an I/O error may pass, and deletes nothing.
    if (verdict.ok() && !*verdict && replica != nullptr && IsScrubbable(*replica, segment_idx) &&
        replica->generation == expected.generation) {
      LoseReplica(replica_id);
      ++scrub_lost_count_;
      is_lost = true;
    }
  }
  if (is_lost) ++lost_count;
  if (is_lost && options_.on_lost) options_.on_lost(namespace_hash, expected.key);
  return record.bytes().size();
}

bool NvmeTier::Impl::IsScrubbable(const Replica& replica, uint32_t segment_idx) {
  return replica.state == ReplicaState::kLive && !replica.is_freed && !replica.is_moving &&
         replica.segment_idx == segment_idx;
}

// Whether the record is intact and the one that is expected. Errors: UNAVAILABLE.
absl::StatusOr<bool> NvmeTier::Impl::VerifyRecord(int fd, const Replica& expected,
                                                  const NamespaceHash& namespace_hash,
                                                  const nvme::PageMemory& record) {
  KVT_ASSIGN_OR_RETURN(const uint64_t got_bytes,
                       ReadAt(fd, expected.at().offset_bytes, record.bytes()));
  if (got_bytes != record.bytes().size()) return false;
  const auto header = nvme::ParseRecordHeader(record.first_page());
  return header.ok() && header->generation == expected.generation &&
         header->meta.namespace_hash == namespace_hash && header->meta.key == expected.key &&
         header->meta.payload_bytes == expected.payload_bytes &&
         Crc32c(record.bytes().subspan(nvme::kPageBytes, expected.payload_bytes)) ==
             header->meta.crc32c;
}

}  // namespace kvtier
