// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/segment_table.h"

#include <algorithm>

#include "proto/base/check.h"

namespace kvtier::nvme {
namespace {

// Of the head of the writes, filled before the next segment is won.
constexpr uint64_t kReclaimQuarters = 3;

}  // namespace

SegmentTable::SegmentTable(const Options& options)
    : options_(options), file_limit_(options.segment_count) {
  KVT_CHECK(options.segment_bytes >= 2 * kPageBytes && options.segment_bytes % kPageBytes == 0);
  KVT_CHECK(options.segment_bytes <= kSegmentBytesMax);
  KVT_CHECK(options.segment_count >= kSegmentCountMin);
  segments_.resize(options.segment_count);
}

void SegmentTable::LoadSegment(uint32_t segment_idx, const std::optional<SegmentHeader>& header,
                               bool is_whole) {
  if (segment_idx >= segments_.size()) segments_.resize(segment_idx + 1);
  Segment& segment = segments_[segment_idx];
  KVT_CHECK(segment.state == State::kAbsent);
  ++file_count_;
  segment.state = State::kSealed;
  segment.is_prepared = header.has_value() && is_whole;
  segment.is_reopenable = segment.is_prepared;
  // What lies behind the live records is unknown: worth bringing back.
  segment.filled_bytes = room_bytes();
  if (!header) return;
  segment.sequence = header->sequence;
  segment.nonce = header->nonce;
  next_sequence_ = std::max(next_sequence_, header->sequence + 1);
}

void SegmentTable::LoadRecord(const Location& at, uint64_t record_bytes) {
  Segment& segment = segments_.at(at.segment_idx);
  KVT_CHECK(segment.state == State::kSealed);
  segment.live_bytes += record_bytes;
  live_bytes_ += record_bytes;
  segment.end_bytes = std::max(segment.end_bytes, at.offset_bytes + record_bytes);
  next_sequence_ = std::max(next_sequence_, SequenceOf(at.generation) + 1);
}

void SegmentTable::FinishLoad() {
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    if (segments_[i].state == State::kSealed) RecycleIfDone(i);
  }
}

uint32_t SegmentTable::reserve_count() const {
  // One left to moves, two heads; more makes emptying cheaper.
  return std::max(3u, (file_limit_ + 9) / 10);
}

void SegmentTable::LimitFiles(uint64_t more_count, bool may_lower) {
  const uint64_t wanted_count = file_count_ + std::max<uint64_t>(more_count, free_.empty() ? 1 : 0);
  const auto limit = static_cast<uint32_t>(
      std::clamp<uint64_t>(wanted_count, kSegmentCountMin, options_.segment_count));
  if (may_lower || limit > file_limit_) file_limit_ = limit;
}

bool SegmentTable::HasFile(uint32_t segment_idx) const {
  const State state = segments_.at(segment_idx).state;
  return state != State::kAbsent && state != State::kActivating;
}

bool SegmentTable::LoseFile(uint32_t segment_idx) {
  KVT_CHECK(HasFile(segment_idx));
  SealIfHead(segment_idx);
  Segment& segment = segments_[segment_idx];
  if (segment.is_missing) return false;
  segment.is_missing = true;
  segment.is_prepared = false;
  segment.is_reopenable = false;
  if (segment.state == State::kFree) {
    std::erase(free_, segment_idx);
    Vanish(segment_idx);
  } else {
    RecycleIfDone(segment_idx);
  }
  return true;
}

void SegmentTable::Vanish(uint32_t segment_idx) {
  Segment& segment = segments_[segment_idx];
  segment.state = State::kAbsent;
  segment.is_missing = false;
  --file_count_;
  vanished_.push_back(segment_idx);
}

uint64_t SegmentTable::capacity_bytes() const {
  return (file_limit_ - reserve_count()) * room_bytes();
}

uint32_t SegmentTable::free_count() const {
  const uint32_t creatable = file_limit_ > file_count_ ? file_limit_ - file_count_ : 0;
  return static_cast<uint32_t>(free_.size()) + creatable;
}

uint64_t SegmentTable::segment_live_bytes(uint32_t segment_idx) const {
  return segments_.at(segment_idx).live_bytes;
}

std::optional<Location> SegmentTable::Place(Stream stream, uint64_t record_bytes) {
  const Head& head = heads_[Idx(stream)];
  if (!head.segment_idx) return std::nullopt;
  Segment& segment = segments_[*head.segment_idx];
  if (segment.end_bytes + record_bytes > options_.segment_bytes) return std::nullopt;
  const Location at{.segment_idx = *head.segment_idx,
                    .offset_bytes = segment.end_bytes,
                    .generation = GenerationOf(segment.sequence, segment.end_bytes),
                    .nonce = segment.nonce};
  segment.end_bytes += record_bytes;
  segment.filled_bytes = std::max(segment.filled_bytes, segment.end_bytes - kPageBytes);
  segment.live_bytes += record_bytes;
  live_bytes_ += record_bytes;
  ++segment.uncommitted_count;
  ++uncommitted_count_;
  return at;
}

std::optional<uint32_t> SegmentTable::TakeFree() {
  if (!free_.empty()) {
    const uint32_t segment_idx = free_.front();
    free_.pop_front();
    return segment_idx;
  }
  if (file_count_ >= file_limit_) return std::nullopt;
  const auto absent = std::find_if(segments_.begin(), segments_.end(), [](const Segment& segment) {
    return segment.state == State::kAbsent;
  });
  KVT_CHECK(absent != segments_.end());
  absent->is_prepared = false;
  ++file_count_;
  return static_cast<uint32_t>(absent - segments_.begin());
}

std::optional<uint32_t> SegmentTable::FindReopenable(uint64_t record_bytes,
                                                     std::optional<uint32_t> except) const {
  std::optional<uint32_t> best;
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    if (segment.state != State::kSealed || !segment.is_reopenable || except == i) continue;
    if (segment.end_bytes + record_bytes > options_.segment_bytes) continue;
    if (!best || segment.end_bytes < segments_[*best].end_bytes) best = i;
  }
  return best;
}

std::optional<SegmentTable::Activation> SegmentTable::BeginActivation(Stream stream,
                                                                      uint64_t record_bytes,
                                                                      uint64_t nonce) {
  Head& head = heads_[Idx(stream)];
  KVT_CHECK(!head.activating);
  if (head.segment_idx) Seal(stream);
  if (stream == Stream::kWrite && !MayWriteTakeFree()) return std::nullopt;
  Activation activation;
  std::optional<uint32_t> segment_idx = TakeFree();
  if (!segment_idx) {
    // Only after a crash in the middle of emptying a segment, when its target is sealed, too.
    segment_idx = FindReopenable(record_bytes, victim_);
    if (!segment_idx) return std::nullopt;
    activation.is_reopened = true;
  }
  Segment& segment = segments_[*segment_idx];
  if (!activation.is_reopened) {
    segment.sequence = next_sequence_++;
    segment.nonce = nonce;
    segment.end_bytes = kPageBytes;
    segment.filled_bytes = 0;
    segment.is_reopenable = false;
  }
  segment.state = State::kActivating;
  head.activating = *segment_idx;
  activation.header = {.segment_idx = *segment_idx,
                       .segment_bytes = options_.segment_bytes,
                       .sequence = segment.sequence,
                       .nonce = segment.nonce};
  activation.needs_prepare = !segment.is_prepared;
  return activation;
}

void SegmentTable::EndActivation(Stream stream, bool is_ready, bool exists) {
  Head& head = heads_[Idx(stream)];
  KVT_CHECK(head.activating);
  const uint32_t segment_idx = *head.activating;
  head.activating.reset();
  Segment& segment = segments_[segment_idx];
  if (is_ready) {
    segment.is_prepared = true;
    segment.state = State::kHead;
    head.segment_idx = segment_idx;
  } else if (exists) {
    segment.state = State::kSealed;
    RecycleIfDone(segment_idx);
  } else {
    segment.state = State::kAbsent;
    --file_count_;
  }
}

void SegmentTable::Seal(Stream stream) {
  Head& head = heads_[Idx(stream)];
  const uint32_t segment_idx = *head.segment_idx;
  head.segment_idx.reset();
  segments_[segment_idx].state = State::kSealed;
  RecycleIfDone(segment_idx);
}

void SegmentTable::SealIfHead(uint32_t segment_idx) {
  for (const Stream stream : {Stream::kWrite, Stream::kMove}) {
    if (heads_[Idx(stream)].segment_idx != segment_idx) continue;
    // Its unused rest is worth bringing back.
    segments_[segment_idx].filled_bytes = room_bytes();
    Seal(stream);
  }
}

void SegmentTable::Commit(const Location& at) {
  Segment& segment = segments_.at(at.segment_idx);
  KVT_CHECK(segment.uncommitted_count > 0);
  --segment.uncommitted_count;
  --uncommitted_count_;
  RecycleIfDone(at.segment_idx);
}

void SegmentTable::Abandon(const Location& at, uint64_t record_bytes) {
  Segment& segment = segments_.at(at.segment_idx);
  KVT_CHECK(segment.uncommitted_count > 0 && segment.live_bytes >= record_bytes);
  --segment.uncommitted_count;
  --uncommitted_count_;
  segment.live_bytes -= record_bytes;
  live_bytes_ -= record_bytes;
  RecycleIfDone(at.segment_idx);
}

void SegmentTable::Drop(const Location& at, uint64_t record_bytes) {
  Segment& segment = segments_.at(at.segment_idx);
  KVT_CHECK(segment.live_bytes >= record_bytes);
  segment.live_bytes -= record_bytes;
  live_bytes_ -= record_bytes;
  RecycleIfDone(at.segment_idx);
}

void SegmentTable::Pin(uint32_t segment_idx) {
  ++segments_.at(segment_idx).pin_count;
  ++pin_count_;
}

void SegmentTable::Unpin(uint32_t segment_idx) {
  Segment& segment = segments_.at(segment_idx);
  KVT_CHECK(segment.pin_count > 0);
  --segment.pin_count;
  --pin_count_;
  RecycleIfDone(segment_idx);
}

void SegmentTable::RecycleIfDone(uint32_t segment_idx) {
  Segment& segment = segments_[segment_idx];
  if (segment.state != State::kSealed && segment.state != State::kVictim) return;
  if (segment.live_bytes > 0 || segment.uncommitted_count > 0 || segment.pin_count > 0) return;
  if (victim_ == segment_idx) victim_.reset();
  segment.is_bad = false;
  if (segment.is_missing) {
    Vanish(segment_idx);
    return;
  }
  segment.state = State::kFree;
  free_.push_back(segment_idx);
}

uint64_t SegmentTable::MoveHeadRoom() const {
  const std::optional<uint32_t> head = heads_[Idx(Stream::kMove)].segment_idx;
  return head ? options_.segment_bytes - segments_[*head].end_bytes : 0;
}

bool SegmentTable::MayWriteTakeFree() const {
  if (free_count() != 1) return free_count() > 1;
  // Moves go on without a free segment: what is moved takes no more room than it held.
  const uint64_t room = MoveHeadRoom();
  if (victim_) return segments_[*victim_].live_bytes <= room;
  const std::optional<uint32_t> next = FindVictim(/*is_urgent=*/true);
  return next && segments_[*next].live_bytes <= room;
}

bool SegmentTable::wants_reclaim() const {
  if (free_count() > 1) return false;
  if (const std::optional<uint32_t> head = heads_[Idx(Stream::kWrite)].segment_idx) {
    const Segment& segment = segments_[*head];
    if (segment.end_bytes < options_.segment_bytes / 4 * kReclaimQuarters) return false;
  }
  return !MayWriteTakeFree();
}

uint64_t SegmentTable::MoveRoom(uint32_t victim_idx) const {
  if (free_count() > 0) return room_bytes();
  uint64_t room = MoveHeadRoom();
  if (const auto reopenable = FindReopenable(kPageBytes, victim_idx)) {
    room += options_.segment_bytes - segments_[*reopenable].end_bytes;
  }
  return room;
}

std::optional<uint32_t> SegmentTable::FindVictim(bool is_urgent) const {
  if (victim_) return std::nullopt;
  // Half of what the emptiest of equally filled segments must give at full capacity.
  const uint64_t worthwhile_bytes = room_bytes() * (reserve_count() - 2) / (file_limit_ - 2) / 2;
  const uint64_t gain_bytes_min = is_urgent ? 1 : worthwhile_bytes;
  std::optional<uint32_t> best;
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    if (segment.state != State::kSealed || segment.is_bad || segment.uncommitted_count > 0) {
      continue;
    }
    if (segment.live_bytes == 0) continue;  // Free as soon as its pins are gone.
    if (segment.filled_bytes < segment.live_bytes + gain_bytes_min) continue;
    if (best && segments_[*best].live_bytes <= segment.live_bytes) continue;
    if (segment.live_bytes > MoveRoom(i)) continue;
    best = i;
  }
  return best;
}

std::optional<uint32_t> SegmentTable::PickVictim(bool is_urgent) {
  const std::optional<uint32_t> best = FindVictim(is_urgent);
  if (!best) return std::nullopt;
  victim_ = best;
  segments_[*best].state = State::kVictim;
  return best;
}

void SegmentTable::ReleaseVictim(bool is_bad) {
  KVT_CHECK(victim_);
  Segment& segment = segments_[*victim_];
  segment.state = State::kSealed;
  segment.is_bad = is_bad;
  victim_.reset();
}

}  // namespace kvtier::nvme
