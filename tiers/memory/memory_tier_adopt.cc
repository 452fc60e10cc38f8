// SPDX-License-Identifier: Apache-2.0
//
// How blocks of a memory tier outlive the process: what is given to the keeper, and what is taken
// over from it. Processes that were clients of an earlier daemon may have its segments mapped, and
// write to slots they were filling, for as long as they live. So blocks are not served where they
// lie: each is copied into new memory, and the checksum of the copy decides.
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <set>

#include "proto/base/status_util.h"
#include "tiers/memory/checked_copy.h"
#include "tiers/memory/memory_tier.h"

namespace kvtier {
namespace {

// Beyond that, memory is no faster.
constexpr uint32_t kAdoptThreadsMax = 8;

// Gives memory of a kept file back to the system.
void PunchHole(int fd, uint64_t offset_bytes, uint64_t bytes) {
  fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset_bytes),
            static_cast<off_t>(bytes));
}

uint64_t CountEntries(const LeftoverIndex& index, const SlotIndexFrame& frame) {
  uint64_t count = 0;
  for (uint64_t slot_idx = 0; slot_idx < index.SlotCount(frame); ++slot_idx) {
    if (!absl::IsNotFound(index.Entry(frame, slot_idx).status())) ++count;
  }
  return count;
}

}  // namespace

std::string MemoryTier::KeptName(const char* kind, const FileId& file_id) const {
  return absl::StrFormat("kvtier-%s-%s-%x-%x", TierName(options_.id), kind, file_id.device,
                         file_id.inode);
}

void MemoryTier::GiveKeeperOrders() {
  while (true) {
    KeeperOrder order;
    {
      absl::MutexLock lock(&mutex_);
      if (ordering_ || keeper_orders_.empty()) return;
      ordering_ = true;
      order = std::move(keeper_orders_.front());
      keeper_orders_.pop_front();
    }
    absl::Status obeyed = absl::OkStatus();
    if (order.segment == nullptr) {
      obeyed = options_.keeper->Forget(order.name);
    } else if (!order.segment->retired()) {
      obeyed = options_.keeper->Keep(order.name, order.segment->fd());
    }
    absl::MutexLock lock(&mutex_);
    ordering_ = false;
    if (!obeyed.ok()) {
      shortfall_ = "memory may not outlive the process: " + std::string(obeyed.message());
    }
  }
}

void MemoryTier::AwaitKept() {
  // The background threads may be at something long.
  GiveKeeperOrders();
  absl::MutexLock lock(&mutex_);
  const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return keeper_orders_.empty() && !ordering_;
  };
  mutex_.Await(absl::Condition(&done));
}

void MemoryTier::Refuse(uint64_t Adoption::* counter, uint64_t count, const absl::Status& reason) {
  absl::MutexLock lock(&adoption_mutex_);
  if (counter != nullptr) adoption_.*counter += count;
  if (adoption_.refusal.empty()) adoption_.refusal = std::string(reason.message());
}

void MemoryTier::AdoptAll(const std::function<void(const BlockMeta&, ReplicaId)>& found) {
  const std::vector<KeptFd> kept = options_.keeper->TakeKept();
  const absl::Status keeps =
      options_.keeper->Keep(KeptName("index", index_->file_id()), index_->fd());
  if (!keeps.ok()) Refuse(nullptr, 0, keeps);
  std::vector<std::unique_ptr<LeftoverIndex>> indexes;
  std::map<FileId, int> segments;
  std::set<std::string> names;
  for (const KeptFd& leftover : kept) {
    names.insert(leftover.name);
    if (leftover.name.starts_with(absl::StrFormat("kvtier-%s-index-", TierName(options_.id)))) {
      auto index =
          LeftoverIndex::Open(leftover.fd, {.boot_id = options_.boot_id, .uid = geteuid()});
      if (index.ok()) {
        indexes.push_back(std::move(index).value());
      } else {
        Refuse(nullptr, 0, index.status());
      }
      continue;
    }
    struct stat status{};
    const bool exists = fstat(leftover.fd, &status) == 0;
    const FileId file_id{.device = status.st_dev, .inode = status.st_ino};
    if (!exists || !segments.emplace(file_id, leftover.fd).second) close(leftover.fd);
  }
  const std::vector<LeftoverFrame> frames = FindLeftovers(indexes, segments);
  {
    std::atomic<size_t> next = 0;
    std::vector<std::jthread> workers;
    const size_t worker_count = std::min<size_t>(
        frames.size(), std::clamp(std::thread::hardware_concurrency(), 1U, kAdoptThreadsMax));
    for (size_t i = 0; i < worker_count; ++i) {
      workers.emplace_back([&] {
        pthread_setname_np(pthread_self(), "kvtier-adopt");
        for (size_t at = next++; at < frames.size(); at = next++) AdoptFrame(frames[at], found);
      });
    }
  }
  AwaitKept();
  for (const std::string& name : names) {
    if (absl::Status forgot = options_.keeper->Forget(name); !forgot.ok()) {
      Refuse(nullptr, 0, forgot);
    }
  }
  for (const auto& [file_id, fd] : segments) close(fd);
}

std::vector<MemoryTier::LeftoverFrame> MemoryTier::FindLeftovers(
    const std::vector<std::unique_ptr<LeftoverIndex>>& indexes,
    const std::map<FileId, int>& segments) {
  std::vector<LeftoverFrame> frames;
  const std::vector<Digest>& tags = options_.owner_tags;
  for (const std::unique_ptr<LeftoverIndex>& index : indexes) {
    for (uint32_t frame_idx = 0; frame_idx < index->frame_count(); ++frame_idx) {
      const std::optional<SlotIndexFrame> frame = index->Frame(frame_idx);
      if (!frame.has_value()) continue;
      const auto tag = std::ranges::find(tags, frame->owner_tag);
      if (tag == tags.end()) {
        Refuse(&Adoption::foreign_count, CountEntries(*index, *frame),
               FailedPrecondition("blocks of a tenant that is not configured"));
        continue;
      }
      const auto segment = segments.find(frame->file_id);
      const absl::Status usable =
          segment == segments.end()
              ? FailedPrecondition("was not kept")
              : CheckLeftover(segment->second, index->segment_bytes(), geteuid());
      if (!usable.ok()) {
        Refuse(&Adoption::damaged_count, CountEntries(*index, *frame),
               Annotate(usable, "a segment"));
        continue;
      }
      frames.push_back({.index = index.get(),
                        .frame = *frame,
                        .owner = static_cast<OwnerIdx>(tag - tags.begin()),
                        .fd = segment->second});
    }
  }
  return frames;
}

void MemoryTier::AdoptFrame(const LeftoverFrame& leftover,
                            const std::function<void(const BlockMeta&, ReplicaId)>& found) {
  const uint64_t bytes = leftover.index->segment_bytes();
  void* const base = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, leftover.fd, 0);
  if (base == MAP_FAILED) {
    Refuse(&Adoption::damaged_count, CountEntries(*leftover.index, leftover.frame),
           ErrnoStatus(errno, "map a segment"));
    return;
  }
  const std::span<const std::byte> memory(static_cast<const std::byte*>(base), bytes);
  const uint64_t slot_bytes = leftover.frame.slot_bytes;
  for (uint64_t slot_idx = 0; slot_idx < leftover.index->SlotCount(leftover.frame); ++slot_idx) {
    AdoptBlock(leftover, slot_idx, memory.subspan(slot_idx * slot_bytes, slot_bytes), found);
  }
  munmap(base, bytes);
  // A slot is less than a huge page; what nobody took is lost.
  PunchHole(leftover.fd, 0, bytes);
}

void MemoryTier::AdoptBlock(const LeftoverFrame& leftover, uint64_t slot_idx,
                            std::span<const std::byte> source,
                            const std::function<void(const BlockMeta&, ReplicaId)>& found) {
  const absl::StatusOr<BlockMeta> meta = leftover.index->Entry(leftover.frame, slot_idx);
  if (absl::IsNotFound(meta.status())) return;
  if (!meta.ok()) return Refuse(&Adoption::damaged_count, 1, meta.status());
  const absl::StatusOr<ReplicaId> replica = Reserve(meta->payload_bytes, leftover.owner);
  if (!replica.ok()) return Refuse(&Adoption::no_room_count, 1, replica.status());
  const std::span<std::byte> target = SlotBytes(*replica).first(meta->payload_bytes);
  if (CopyWithCrc32c(target, source.first(target.size())) != meta->crc32c) {
    Free(*replica);
    return Refuse(&Adoption::corrupt_count, 1,
                  DataLoss("block %s does not match its checksum", meta->key.Hex()));
  }
  {
    absl::MutexLock lock(&adoption_mutex_);
    ++adoption_.kept_count;
    adoption_.kept_bytes += meta->payload_bytes;
    found(*meta, *replica);
  }
  // A kill from here on finds the copy; only then does the original go.
  AwaitKept();
  leftover.index->Erase(leftover.frame, slot_idx);
  const uint64_t slot_bytes = leftover.frame.slot_bytes;
  PunchHole(leftover.fd, slot_idx * slot_bytes, slot_bytes);
}

}  // namespace kvtier
