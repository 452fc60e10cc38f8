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
#include <utility>

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
      const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !keeper_orders_.empty();
      };
      mutex_.Await(absl::Condition(&ready));
      if (keeper_orders_.empty()) return;
      order = std::move(keeper_orders_.front());
      keeper_orders_.pop_front();
    }
    if (order.segment == nullptr) {
      Forget(order.name);
    } else if (!order.segment->retired()) {
      Keep(*order.segment);
    }
  }
}

void MemoryTier::OrderForget(const MemorySegment& segment) {
  keeper_orders_.push_back({KeptName("segment", segment.file_id()), nullptr});
}

void MemoryTier::Keep(MemorySegment& segment) {
  const absl::Status said =
      options_.keeper->Keep(KeptName("segment", segment.file_id()), segment.fd());
  absl::MutexLock lock(&mutex_);
  NoteKeeper(said);
  if (said.ok()) segment.SetKept();
}

void MemoryTier::Forget(const std::string& name) {
  const absl::Status said = options_.keeper->Forget(name);
  absl::MutexLock lock(&mutex_);
  NoteKeeper(said);
}

void MemoryTier::NoteKeeper(const absl::Status& said) {
  if (said.ok()) return;
  keeper_failed_ = true;
  shortfall_ = "memory may not outlive the process: " + std::string(said.message());
}

bool MemoryTier::AwaitKept(ReplicaId replica) {
  absl::MutexLock lock(&mutex_);
  const MemorySegment& segment = *segments_.at(allocator_.Find(replica).place.segment_idx).segment;
  const auto answered = [this, &segment]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return segment.kept() || keeper_failed_;
  };
  mutex_.Await(absl::Condition(&answered));
  return !keeper_failed_;
}

bool MemoryTier::KeeperFailed() const {
  absl::MutexLock lock(&mutex_);
  return keeper_failed_;
}

void MemoryTier::Refuse(uint64_t Adoption::* counter, uint64_t count, const absl::Status& reason) {
  absl::MutexLock lock(&adoption_mutex_);
  if (counter != nullptr) adoption_.*counter += count;
  if (adoption_.refusal.empty()) adoption_.refusal = std::string(reason.message());
}

MemoryTier::Leftovers::~Leftovers() {
  for (const auto& [file_id, segment] : segments) close(segment.fd);
}

void MemoryTier::AdoptAll(const std::function<void(const BlockMeta&, ReplicaId)>& found) {
  // Before the keeper gets anything from this process, which is not to be taken for a leftover.
  const absl::StatusOr<std::vector<KeptFd>> kept = options_.keeper->TakeKept();
  const absl::Status keeps =
      options_.keeper->Keep(KeptName("index", index_->file_id()), index_->fd());
  for (const absl::Status& said : {kept.status(), keeps}) {
    if (said.ok()) continue;
    Refuse(nullptr, 0, said);
    absl::MutexLock lock(&mutex_);
    NoteKeeper(said);
  }
  keeper_thread_ = std::jthread([this] {
    pthread_setname_np(pthread_self(), "kvtier-keep");
    GiveKeeperOrders();
  });
  if (!kept.ok()) return;
  Leftovers leftovers;
  OpenLeftovers(*kept, &leftovers);
  const std::vector<LeftoverFrame> frames = FindLeftovers(&leftovers);
  // Memory without blocks makes room first.
  std::set<const LeftoverSegment*> used;
  for (const LeftoverFrame& frame : frames) used.insert(frame.segment);
  for (auto& [file_id, segment] : leftovers.segments) {
    if (!used.contains(&segment)) GiveBack(&segment);
  }
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
  uint64_t missing_count = 0;
  absl::Status missing_reason;
  {
    absl::MutexLock lock(&adoption_mutex_);
    missing_count = std::exchange(missing_, {}).size();
    missing_reason = missing_reason_;
  }
  if (missing_count > 0) Refuse(&Adoption::damaged_count, missing_count, missing_reason);
  for (auto& [file_id, segment] : leftovers.segments) GiveBack(&segment);
  for (const std::string& name : leftovers.index_names) {
    if (!KeeperFailed()) Forget(name);
  }
  absl::MutexLock lock(&mutex_);
  if (keeper_failed_ && adoption_.refusal.empty()) adoption_.refusal = shortfall_;
}

void MemoryTier::OpenLeftovers(const std::vector<KeptFd>& kept, Leftovers* leftovers) {
  const std::string index_prefix = absl::StrFormat("kvtier-%s-index-", TierName(options_.id));
  for (const KeptFd& leftover : kept) {
    if (leftover.name.starts_with(index_prefix)) {
      leftovers->index_names.push_back(leftover.name);
      auto index =
          LeftoverIndex::Open(leftover.fd, {.boot_id = options_.boot_id, .uid = geteuid()});
      if (index.ok()) {
        leftovers->indexes.push_back(std::move(index).value());
      } else {
        Refuse(nullptr, 0, index.status());
      }
      continue;
    }
    struct stat status{};
    const bool exists = fstat(leftover.fd, &status) == 0;
    const FileId file_id{.device = status.st_dev, .inode = status.st_ino};
    const LeftoverSegment segment{.fd = leftover.fd, .name = leftover.name};
    if (!exists || !leftovers->segments.emplace(file_id, segment).second) close(leftover.fd);
  }
}

std::vector<MemoryTier::LeftoverFrame> MemoryTier::FindLeftovers(Leftovers* leftovers) {
  std::vector<LeftoverFrame> frames;
  const std::vector<Digest>& tags = options_.owner_tags;
  for (const std::unique_ptr<LeftoverIndex>& index : leftovers->indexes) {
    for (uint32_t frame_idx = 0; frame_idx < index->frame_count(); ++frame_idx) {
      const std::optional<SlotIndexFrame> frame = index->Frame(frame_idx);
      if (!frame.has_value()) continue;
      const auto tag = std::ranges::find(tags, frame->owner_tag);
      if (tag == tags.end()) {
        Refuse(&Adoption::foreign_count, CountEntries(*index, *frame),
               FailedPrecondition("blocks of a tenant that is not configured"));
        continue;
      }
      const auto segment = leftovers->segments.find(frame->file_id);
      const absl::Status usable =
          segment == leftovers->segments.end()
              ? FailedPrecondition("was not kept")
              : CheckLeftover(segment->second.fd, index->segment_bytes(), geteuid());
      if (!usable.ok()) {
        NoteMissing(*index, *frame, Annotate(usable, "a segment"));
        continue;
      }
      frames.push_back({.index = index.get(),
                        .frame = *frame,
                        .owner = static_cast<OwnerIdx>(tag - tags.begin()),
                        .segment = &segment->second});
    }
  }
  return frames;
}

void MemoryTier::NoteMissing(const LeftoverIndex& index, const SlotIndexFrame& frame,
                             const absl::Status& reason) {
  for (uint64_t slot_idx = 0; slot_idx < index.SlotCount(frame); ++slot_idx) {
    const absl::StatusOr<BlockMeta> meta = index.Entry(frame, slot_idx);
    if (absl::IsNotFound(meta.status())) continue;
    if (!meta.ok()) {
      Refuse(&Adoption::damaged_count, 1, meta.status());
      continue;
    }
    absl::MutexLock lock(&adoption_mutex_);
    missing_.emplace(meta->namespace_hash, meta->key);
    missing_reason_ = reason;
  }
}

void MemoryTier::GiveBack(LeftoverSegment* segment) {
  if (KeeperFailed()) return;
  std::string name;
  {
    absl::MutexLock lock(&adoption_mutex_);
    name = std::exchange(segment->name, "");
  }
  if (name.empty()) return;
  // Also under mappings that old clients still have.
  struct stat status{};
  if (fstat(segment->fd, &status) == 0) {
    PunchHole(segment->fd, 0, static_cast<uint64_t>(status.st_size));
  }
  Forget(name);
}

void MemoryTier::AdoptFrame(const LeftoverFrame& leftover,
                            const std::function<void(const BlockMeta&, ReplicaId)>& found) {
  const uint64_t bytes = leftover.index->segment_bytes();
  void* const base = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, leftover.segment->fd, 0);
  if (base == MAP_FAILED) {
    Refuse(&Adoption::damaged_count, CountEntries(*leftover.index, leftover.frame),
           ErrnoStatus(errno, "map a segment"));
    return;
  }
  const std::span<const std::byte> memory(static_cast<const std::byte*>(base), bytes);
  const uint64_t slot_bytes = leftover.frame.slot_bytes;
  for (uint64_t slot_idx = 0; slot_idx < leftover.index->SlotCount(leftover.frame); ++slot_idx) {
    if (!AdoptBlock(leftover, slot_idx, memory.subspan(slot_idx * slot_bytes, slot_bytes), found)) {
      continue;
    }
    // Only now, when a kill finds the copy.
    leftover.index->Erase(leftover.frame, slot_idx);
    PunchHole(leftover.segment->fd, slot_idx * slot_bytes, slot_bytes);
  }
  munmap(base, bytes);
  // A slot may be less than a huge page; what nobody took is lost.
  GiveBack(leftover.segment);
}

bool MemoryTier::AdoptBlock(const LeftoverFrame& leftover, uint64_t slot_idx,
                            std::span<const std::byte> source,
                            const std::function<void(const BlockMeta&, ReplicaId)>& found) {
  const absl::StatusOr<BlockMeta> meta = leftover.index->Entry(leftover.frame, slot_idx);
  if (absl::IsNotFound(meta.status())) return false;
  const auto refuse = [this](uint64_t Adoption::* counter, const absl::Status& reason) {
    Refuse(counter, 1, reason);
    return false;
  };
  if (!meta.ok()) return refuse(&Adoption::damaged_count, meta.status());
  const absl::StatusOr<ReplicaId> replica = Reserve(meta->payload_bytes, leftover.owner);
  if (!replica.ok()) return refuse(&Adoption::no_room_count, replica.status());
  const std::span<std::byte> target = SlotBytes(*replica).first(meta->payload_bytes);
  if (CopyWithCrc32c(target, source.first(target.size())) != meta->crc32c) {
    Free(*replica);
    return refuse(&Adoption::corrupt_count,
                  DataLoss("block %s does not match its checksum", meta->key.Hex()));
  }
  // First, so that the new index names no segment that the next process does not get.
  const bool is_safe = AwaitKept(*replica);
  absl::MutexLock lock(&adoption_mutex_);
  ++adoption_.kept_count;
  adoption_.kept_bytes += meta->payload_bytes;
  missing_.erase({meta->namespace_hash, meta->key});
  found(*meta, *replica);
  return is_safe;
}

}  // namespace kvtier
