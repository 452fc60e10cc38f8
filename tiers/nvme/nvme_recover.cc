// SPDX-License-Identifier: Apache-2.0
//
// NvmeTier's start: opening or rebuilding the index, and making the tables agree with the files.
#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <bit>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"
#include "tiers/nvme/nvme_impl.h"
#include "tiers/nvme/segment_scan.h"

namespace kvtier {

namespace {

constexpr uint64_t kSegmentBytesDefault = 256ULL << 20;
constexpr uint64_t kIndexBufferBytesMin = 64ULL << 10;
constexpr uint64_t kIndexBufferBytesMax = 16ULL << 20;
// Share of the capacity set aside for the index: its entries are about 2 % of the smallest records.
constexpr uint64_t kIndexShare = 32;
// Of that, what a damaged index that is kept aside may take.
constexpr uint64_t kAsideShare = 2;
constexpr size_t kRebuildBatchCount = 1000;
constexpr uint64_t kSegmentCountMax = 999'999;

absl::Status CheckOptions(const NvmeOptions& options) {
  if (options.dir.empty()) return Invalid("nvme: dir is empty");
  if (options.segment_bytes != 0 && (options.segment_bytes < NvmeTier::kSegmentBytesMin ||
                                     options.segment_bytes > nvme::kSegmentBytesMax ||
                                     options.segment_bytes % nvme::kPageBytes != 0)) {
    return Invalid("nvme: segment_bytes %d: must be a multiple of %d in %d to %d",
                   options.segment_bytes, nvme::kPageBytes, NvmeTier::kSegmentBytesMin,
                   nvme::kSegmentBytesMax);
  }
  if (options.queue_depth < 2 || options.queue_depth > 4096 || options.queue_limit < 1 ||
      options.heal_interval_ms < 1) {
    return Invalid("nvme: queue_depth %d (2 to 4096), queue_limit %d, heal_interval_ms %d (1 up)",
                   options.queue_depth, options.queue_limit, options.heal_interval_ms);
  }
  return absl::OkStatus();
}

// By segment, offset and generation. Entries are large and many: each is moved once.
void SortByPlace(std::vector<nvme::IndexEntry>* entries) {
  struct Place {
    uint32_t segment_idx;
    uint32_t from_idx;
    uint64_t offset_bytes;
    uint64_t generation;
  };
  std::vector<Place> places;
  places.reserve(entries->size());
  for (const nvme::IndexEntry& entry : *entries) {
    places.push_back({.segment_idx = entry.at.segment_idx,
                      .from_idx = static_cast<uint32_t>(places.size()),
                      .offset_bytes = entry.at.offset_bytes,
                      .generation = entry.at.generation});
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return std::tie(a.segment_idx, a.offset_bytes, a.generation) <
           std::tie(b.segment_idx, b.offset_bytes, b.generation);
  });
  // Each cycle of entries that take each other's places, from where it is met first.
  for (uint32_t start = 0; start < places.size(); ++start) {
    if (places[start].from_idx == start) continue;
    const nvme::IndexEntry first = (*entries)[start];
    uint32_t to = start;
    while (places[to].from_idx != start) {
      const uint32_t from = std::exchange(places[to].from_idx, to);
      (*entries)[to] = (*entries)[from];
      to = from;
    }
    places[to].from_idx = to;
    (*entries)[to] = first;
  }
}

// Requires: `before` does not come after `entry`.
bool Overlap(const nvme::IndexEntry& before, const nvme::IndexEntry& entry) {
  return before.at.segment_idx == entry.at.segment_idx &&
         before.at.offset_bytes + nvme::RecordBytes(before.meta.payload_bytes) >
             entry.at.offset_bytes;
}

nvme::IndexRemoval RemovalOfEntry(const nvme::IndexEntry& entry) {
  return {.namespace_hash = entry.meta.namespace_hash,
          .key = entry.meta.key,
          .generation = entry.at.generation};
}

}  // namespace

absl::Status NvmeTier::Impl::Open() {
  KVT_RETURN_IF_ERROR(CheckOptions(options_));
  hook_ = options_.fault_hook;
  KVT_ASSIGN_OR_RETURN(dir_, nvme::DataDir::Open(options_.dir, storage()));
  KVT_ASSIGN_OR_RETURN(files_, dir_->LoadSegments());
  for (const auto& [segment_idx, file] : files_) {
    if (absl::IsFailedPrecondition(file.header_error)) {
      return Annotate(file.header_error, dir_->SegmentPath(segment_idx));
    }
  }
  KVT_RETURN_IF_ERROR(OpenIndex());
  const uint64_t index_bytes = IndexBytes(options_.capacity_bytes);
  if (dir_->RemoveLargeAside(index_bytes / kAsideShare)) {
    spdlog::warn("nvme: {}: the damaged index is not kept: the capacity has no room for it",
                 options_.dir);
  }
  const uint64_t payload_bytes =
      options_.capacity_bytes > index_bytes ? options_.capacity_bytes - index_bytes : 0;
  const uint64_t segment_count = payload_bytes / segment_bytes_;
  KVT_RETURN_IF_ERROR(CheckSegmentCount(segment_count, index_bytes));
  segment_count_ = static_cast<uint32_t>(segment_count);
  {
    absl::MutexLock lock(&mutex_);
    segments_ = std::make_unique<nvme::SegmentTable>(nvme::SegmentTable::Options{
        .segment_bytes = segment_bytes_, .segment_count = segment_count_});
  }
  return StartThreads();
}

// What to do about it is not the same when the segments are there already.
absl::Status NvmeTier::Impl::CheckSegmentCount(uint64_t segment_count, uint64_t index_bytes) const {
  constexpr uint64_t kCountMin = nvme::SegmentTable::kSegmentCountMin;
  const bool is_kept = options_.segment_bytes != 0 && options_.segment_bytes != segment_bytes_;
  if (segment_count < kCountMin) {
    return FailedPrecondition(
        "nvme: a capacity of %d bytes is room for %d segments of %d bytes beside %d for the index, "
        "and must be for %d: raise the capacity of each directory to %d, or %s",
        options_.capacity_bytes, segment_count, segment_bytes_, index_bytes, kCountMin,
        (kCountMin + 1) * segment_bytes_ + index_bytes,
        is_kept ? "delete this directory, which has segments of this size from before"
                : "lower segment_bytes");
  }
  if (segment_count > kSegmentCountMax) {
    const auto text = absl::StrFormat(
        "nvme: a capacity of %d bytes is %d segments of %d bytes, and may be %d: lower the "
        "capacity, or %s to %d",
        options_.capacity_bytes, segment_count, segment_bytes_, kSegmentCountMax,
        is_kept ? "delete this directory, which has segments of this size from before, and raise "
                  "segment_bytes"
                : "raise segment_bytes",
        nvme::RoundUpToPage(options_.capacity_bytes / kSegmentCountMax));
    // What is configured alone is wrong, or what is there does not go with it.
    return is_kept ? FailedPrecondition("%s", text) : Invalid("%s", text);
  }
  return absl::OkStatus();
}

uint64_t NvmeTier::Impl::IndexBytes(uint64_t capacity_bytes) const {
  // A compaction writes its output beside its input, and logs go when their buffers are written.
  return std::max(capacity_bytes / kIndexShare, 8 * IndexBufferBytes()) + 4 * IndexBufferBytes();
}

uint64_t NvmeTier::Impl::IndexBufferBytes() const {
  return std::clamp(options_.capacity_bytes / 256, kIndexBufferBytesMin, kIndexBufferBytesMax);
}

absl::Status NvmeTier::Impl::StartThreads() {
  // One thread takes checksums faster than a disk reads; more are for fast arrays.
  const int core_count = static_cast<int>(std::thread::hardware_concurrency());
  checkers_ = std::make_unique<nvme::WorkerPool>(std::clamp(core_count / 4, 1, 4));
  io_thread_ = std::jthread([this] {
    pthread_setname_np(pthread_self(), "kvt-nvme-io");
    // The ring belongs to the thread that makes it.
    const absl::Status made = StartEngine();
    {
      absl::MutexLock lock(&mutex_);
      engine_made_ = made;
    }
    if (made.ok()) IoMain();
  });
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](std::optional<absl::Status>* made) { return made->has_value(); }, &engine_made_));
    // Asked for and refused, which waiting does not change.
    if (!engine_made_->ok()) return FailedPrecondition("%s", FromAbsl(engine_made_->message()));
  }
  index_thread_ = std::jthread([this] {
    pthread_setname_np(pthread_self(), "kvt-nvme-index");
    IndexMain();
  });
  return absl::OkStatus();
}

void NvmeTier::Impl::ChooseSegmentBytes() {
  // Without a segment file there is nothing that a size was chosen for.
  segment_bytes_ = files_.empty() && options_.segment_bytes != 0 ? 0 : index_->segment_bytes();
  for (const auto& [segment_idx, file] : files_) {
    if (segment_bytes_ == 0 && file.header) segment_bytes_ = file.header->segment_bytes;
  }
  if (segment_bytes_ == 0) segment_bytes_ = options_.segment_bytes;
  if (segment_bytes_ == 0) {
    segment_bytes_ = std::clamp(std::bit_floor(options_.capacity_bytes / 16), kSegmentBytesMin,
                                kSegmentBytesDefault);
  }
  if (options_.segment_bytes != 0 && options_.segment_bytes != segment_bytes_) {
    spdlog::warn("nvme: {} was created with segments of {} bytes; keeping them", options_.dir,
                 segment_bytes_);
  }
}

absl::Status NvmeTier::Impl::OpenIndex() {
  const absl::Status opened = OpenDatabase();
  if (absl::IsDataLoss(opened)) return RebuildIndex(opened);
  KVT_RETURN_IF_ERROR(opened);
  ChooseSegmentBytes();
  const bool same_size = index_->segment_bytes() == segment_bytes_;
  if (!index_->is_incomplete() && same_size) return absl::OkStatus();
  if (!files_.empty()) return FillIndexFromSegments();
  return index_->MarkComplete(segment_bytes_, nvme::kFormatVersion);
}

absl::Status NvmeTier::Impl::OpenDatabase() {
  KVT_ASSIGN_OR_RETURN(index_, nvme::BlockIndex::Open({.path = dir_->index_path(),
                                                       .write_buffer_bytes = IndexBufferBytes(),
                                                       .env = storage().index_env()}));
  // It may be new: RocksDB does not make the name of its folder durable.
  return dir_->SyncNames();
}

absl::Status NvmeTier::Impl::RebuildIndex(const absl::Status& why) {
  index_.reset();
  KVT_ASSIGN_OR_RETURN(const std::string aside, dir_->MoveIndexAside());
  spdlog::error("nvme: the index is damaged, moved to {}: {}", aside, why.ToString());
  KVT_RETURN_IF_ERROR(OpenDatabase());
  if (segment_bytes_ == 0) ChooseSegmentBytes();
  return FillIndexFromSegments();
}

absl::Status NvmeTier::Impl::FillIndexFromSegments() {
  is_rebuilt_ = true;
  rebuilt_spent_bytes_ = 0;
  const uint64_t today = nvme::WriteBudget::DayOf(Now());
  absl::flat_hash_map<std::pair<Digest, Digest>, nvme::IndexEntry> newest;
  for (const auto& [segment_idx, file] : files_) {
    const bool is_todays = nvme::WriteBudget::DayOf(file.modified) == today;
    const auto visit = [&, idx = segment_idx](const nvme::RecordHeader& record,
                                              uint64_t offset_bytes) {
      if (is_todays) rebuilt_spent_bytes_ += nvme::RecordBytes(record.meta.payload_bytes);
      nvme::IndexEntry& entry = newest[{record.meta.namespace_hash, record.meta.key}];
      if (entry.at.generation > record.generation) return;
      entry = {
          .meta = record.meta,
          .at = {
              .segment_idx = idx, .offset_bytes = offset_bytes, .generation = record.generation}};
    };
    KVT_RETURN_IF_ERROR(
        nvme::ScanSegment(dir_->OpenedFd(segment_idx), file.file_bytes, file.header, visit));
  }
  std::vector<nvme::IndexEntry> batch;
  for (const auto& [key, entry] : newest) {
    batch.push_back(entry);
    if (batch.size() < kRebuildBatchCount) continue;
    KVT_RETURN_IF_ERROR(index_->Apply(batch, {}));
    batch.clear();
  }
  KVT_RETURN_IF_ERROR(index_->Apply(batch, {}));
  KVT_RETURN_IF_ERROR(index_->MarkComplete(segment_bytes_, nvme::kFormatVersion));
  spdlog::warn("nvme: made the index anew from {} blocks in {} segments", newest.size(),
               files_.size());
  return absl::OkStatus();
}

bool NvmeTier::Impl::IsPossible(const nvme::IndexEntry& entry) const {
  const auto it = files_.find(entry.at.segment_idx);
  if (it == files_.end() || entry.meta.payload_bytes == 0) return false;
  const nvme::DataDir::SegmentFile& file = it->second;
  const uint64_t record_bytes = nvme::RecordBytes(entry.meta.payload_bytes);
  const uint64_t end_bytes = std::min(file.file_bytes, segment_bytes_);
  if (entry.at.offset_bytes < nvme::kPageBytes || record_bytes > end_bytes ||
      entry.at.offset_bytes > end_bytes - record_bytes) {
    return false;
  }
  if (nvme::OffsetOf(entry.at.generation) != entry.at.offset_bytes) return false;
  // A segment that was activated again since holds other records. Without a header, the record's
  // own tells at each read.
  return !file.header || file.header->sequence == nvme::SequenceOf(entry.at.generation);
}

absl::StatusOr<std::vector<nvme::IndexEntry>> NvmeTier::Impl::LoadEntries(
    std::vector<nvme::IndexRemoval>& dropped) {
  std::vector<nvme::IndexEntry> entries;
  uint64_t bad_count = 0;
  KVT_RETURN_IF_ERROR(index_->ForEach(
      [&](const nvme::IndexEntry& entry) {
        if (IsPossible(entry)) {
          entries.push_back(entry);
        } else {
          dropped.push_back(RemovalOfEntry(entry));
        }
      },
      bad_count));
  dropped_count_ += bad_count;
  // Two entries over the same bytes: at most one can be true, and reads would find out; the
  // accounting must not.
  SortByPlace(&entries);
  size_t kept_count = 0;
  for (const nvme::IndexEntry& entry : entries) {
    if (kept_count > 0 && Overlap(entries[kept_count - 1], entry)) {
      dropped.push_back(RemovalOfEntry(entry));
    } else {
      entries[kept_count++] = entry;
    }
  }
  entries.resize(kept_count);
  return entries;
}

// The capacity became smaller: the files that hold least go.
absl::Status NvmeTier::Impl::DropExcessSegments(std::vector<nvme::IndexEntry>& entries,
                                                std::vector<nvme::IndexRemoval>& dropped) {
  std::map<uint32_t, uint64_t> live_bytes;
  for (const auto& [segment_idx, file] : files_) live_bytes[segment_idx] = 0;
  for (const nvme::IndexEntry& entry : entries) {
    live_bytes[entry.at.segment_idx] += nvme::RecordBytes(entry.meta.payload_bytes);
  }
  while (files_.size() > segment_count_) {
    const auto least =
        std::min_element(live_bytes.begin(), live_bytes.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    const uint32_t segment_idx = least->first;
    live_bytes.erase(least);
    std::erase_if(entries, [&](const nvme::IndexEntry& entry) {
      if (entry.at.segment_idx != segment_idx) return false;
      dropped.push_back(RemovalOfEntry(entry));
      return true;
    });
    files_.erase(segment_idx);
    KVT_RETURN_IF_ERROR(dir_->RemoveSegment(segment_idx));
  }
  return absl::OkStatus();
}

// Less capacity, or freed blocks that a rebuild brought back: the oldest go.
void NvmeTier::Impl::DropExcessEntries(std::vector<nvme::IndexEntry>& entries,
                                       uint64_t capacity_bytes,
                                       std::vector<nvme::IndexRemoval>& dropped) const {
  uint64_t used_bytes = 0;
  for (const nvme::IndexEntry& entry : entries) {
    used_bytes += FootprintBytes(entry.meta.payload_bytes);
  }
  if (used_bytes <= capacity_bytes) return;
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.at.generation > b.at.generation; });
  while (used_bytes > capacity_bytes) {
    used_bytes -= FootprintBytes(entries.back().meta.payload_bytes);
    dropped.push_back(RemovalOfEntry(entries.back()));
    entries.pop_back();
  }
}

// Each of the two is written at other times, and either may be lost.
nvme::WriteBudget::Spent NvmeTier::Impl::FindSpent() {
  nvme::WriteBudget::Spent spent;
  const auto in_file = dir_->LoadSpent();
  if (in_file.ok()) {
    spent = *in_file;
  } else if (!absl::IsNotFound(in_file.status())) {
    spdlog::warn("nvme: {}/written is of no use: {}", options_.dir, in_file.status().ToString());
  }
  const auto in_index = index_->LoadSpent();
  if (in_index.ok()) {
    spent = nvme::WriteBudget::Later(spent, *in_index);
  } else {
    spdlog::warn("nvme: {}: what was written today: {}", options_.dir,
                 in_index.status().ToString());
  }
  if (is_rebuilt_ && !in_file.ok()) {
    spent = nvme::WriteBudget::Later(
        spent, {.day = nvme::WriteBudget::DayOf(Now()), .bytes = rebuilt_spent_bytes_});
  }
  return spent;
}

absl::Status NvmeTier::Impl::Recover(
    const std::function<void(const BlockMeta&, ReplicaId)>& found) {
  std::vector<nvme::IndexRemoval> dropped;
  auto loaded = LoadEntries(dropped);
  if (absl::IsDataLoss(loaded.status())) {
    dropped.clear();
    KVT_RETURN_IF_ERROR(RebuildIndex(loaded.status()));
    loaded = LoadEntries(dropped);
  }
  KVT_RETURN_IF_ERROR(loaded.status());
  std::vector<nvme::IndexEntry>& entries = *loaded;
  dropped_count_ += dropped.size();
  if (dropped_count_ > 0) {
    spdlog::warn(
        "nvme: {}: {} index entries dropped: their segments are missing, too short or hold others",
        options_.dir, dropped_count_);
  }
  const size_t loaded_count = entries.size();
  KVT_RETURN_IF_ERROR(DropExcessSegments(entries, dropped));
  DropExcessEntries(entries, Usage().capacity_bytes, dropped);
  if (entries.size() < loaded_count) {
    spdlog::warn("nvme: {}: {} blocks dropped: there is more than the capacity of {} bytes",
                 options_.dir, loaded_count - entries.size(), options_.capacity_bytes);
  }
  KVT_RETURN_IF_ERROR(index_->Apply({}, dropped));
  dropped_count_ += loaded_count - entries.size();
  recovered_count_ = entries.size();

  std::vector<ReplicaId> replica_ids;  // of the entries
  replica_ids.reserve(entries.size());
  {
    absl::MutexLock lock(&mutex_);
    KVT_CHECK(!is_recovered_);
    for (const auto& [segment_idx, file] : files_) {
      segments_->LoadSegment(segment_idx, file.header, file.file_bytes == segment_bytes_);
    }
    for (const nvme::IndexEntry& entry : entries) {
      const ReplicaId replica_id = replicas_.Add(entry.meta.payload_bytes);
      replicas_.Name(&replicas_.At(replica_id), entry.meta.namespace_hash, entry.meta.key);
      replicas_.Settle(replica_id, entry.at);
      segments_->LoadRecord(entry.at, nvme::RecordBytes(entry.meta.payload_bytes));
      used_bytes_ += FootprintBytes(entry.meta.payload_bytes);
      replica_ids.push_back(replica_id);
    }
    segments_->FinishLoad();
    physical_bytes_ = dir_->PhysicalBytes();
  }
  files_.clear();
  const nvme::WriteBudget::Spent spent = FindSpent();
  for (size_t i = 0; i < entries.size(); ++i) found(entries[i].meta, replica_ids[i]);
  absl::MutexLock lock(&mutex_);
  budget_.Load(spent);
  is_recovered_ = true;
  if (options_.scrub_bytes_per_second > 0) {
    scrub_thread_ = std::jthread([this] {
      pthread_setname_np(pthread_self(), "kvt-nvme-scrub");
      ScrubMain();
    });
  }
  return absl::OkStatus();
}

}  // namespace kvtier
