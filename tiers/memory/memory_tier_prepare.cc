// SPDX-License-Identifier: Apache-2.0
//
// The background half of a memory tier: segments are made, touched and locked before anybody needs
// them.
#include <pthread.h>

#include <algorithm>

#include "proto/base/status_util.h"
#include "tiers/memory/memory_tier.h"

namespace kvtier {

void MemoryTier::StartPreparing() {
  if (!preparers_.empty()) return;
  for (uint32_t i = 0; i < options_.prepare_thread_count; ++i) {
    preparers_.emplace_back([this] {
      pthread_setname_np(pthread_self(), "kvtier-prepare");
      PrepareAll();
    });
  }
}

void MemoryTier::StopPreparing() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  preparers_.clear();
  // What was ordered is given.
  if (keeper_thread_.joinable()) keeper_thread_.join();
}

uint64_t MemoryTier::SegmentCount() const {
  return segments_.size() + spares_.size() + coming_.size();
}

bool MemoryTier::WantsSpare() const {
  return !gave_up_ &&
         (SegmentCount() + making_count_) * options_.segment_bytes < allocator_.capacity_bytes();
}

void MemoryTier::PrepareAll() {
  while (std::optional<Work> work = NextWork()) {
    if (work->segment == nullptr) work->segment = MakeSpare();
    if (work->segment != nullptr) PrepareSegment(*work->segment);
    FinishWork(work->segment);
  }
}

std::optional<MemoryTier::Work> MemoryTier::NextWork() {
  absl::MutexLock lock(&mutex_);
  const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !cold_.empty() || WantsSpare();
  };
  mutex_.Await(absl::Condition(&ready));
  if (stopping_) return std::nullopt;
  ++working_count_;
  if (cold_.empty()) {
    ++making_count_;
    return Work{};
  }
  Work work{.segment = std::move(cold_.front())};
  cold_.pop_front();
  return work;
}

std::shared_ptr<MemorySegment> MemoryTier::MakeSpare() {
  MemorySegment::Options next;
  {
    absl::MutexLock lock(&mutex_);
    next = NextSegment();
  }
  auto made = MemorySegment::Create(next);
  // Before it can hold a block: no instant of the process's end loses what is in it.
  if (made.ok() && index_ != nullptr) Keep(**made);
  absl::MutexLock lock(&mutex_);
  --making_count_;
  if (!made.ok()) {
    gave_up_ = true;
    shortfall_ = std::string(made.status().message());
    return nullptr;
  }
  // Somebody could not wait and made one himself.
  if (SegmentCount() * options_.segment_bytes >= allocator_.capacity_bytes()) {
    if ((*made)->kept()) OrderForget(**made);
    return nullptr;
  }
  coming_.push_back(*made);
  return *std::move(made);
}

void MemoryTier::PrepareSegment(MemorySegment& segment) {
  while (!segment.ready() && !segment.retired()) {
    bool locks = false;
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
      locks = locks_;
    }
    const absl::Status prepared = segment.PrepareNext(kPieceBytes, locks);
    if (prepared.ok()) continue;
    absl::MutexLock lock(&mutex_);
    shortfall_ = std::string(prepared.message());
    // What cannot be locked is served as it is.
    if (absl::IsResourceExhausted(prepared)) {
      locks_ = false;
      continue;
    }
    gave_up_ = true;
    return;
  }
}

void MemoryTier::FinishWork(const std::shared_ptr<MemorySegment>& segment) {
  Prepared report;
  {
    absl::MutexLock lock(&mutex_);
    --working_count_;
    // Else somebody has taken it already, or it was in use from the start.
    if (const auto it = std::find(coming_.begin(), coming_.end(), segment); it != coming_.end()) {
      coming_.erase(it);
      if (segment->ready()) {
        for (SegmentObserver* observer : options_.observers) observer->OnMapped(segment->memory());
        spares_.push_back(segment);
      } else if (segment->kept()) {
        OrderForget(*segment);
      }
    }
    if (stopping_ || reported_ || working_count_ > 0 || !cold_.empty() || WantsSpare()) return;
    reported_ = true;
    report = PreparedSoFar();
  }
  if (options_.on_prepared) options_.on_prepared(report);
}

MemoryTier::Prepared MemoryTier::PreparedSoFar() const {
  Prepared sum{.shortfall = shortfall_};
  const auto add = [&](const MemorySegment& segment) {
    sum.ready_bytes += segment.ready_bytes();
    sum.locked_bytes += segment.locked_bytes();
    if (segment.has_reserved_huge_pages()) sum.reserved_huge_bytes += segment.memory().size();
  };
  for (const auto& [segment_idx, live] : segments_) add(*live.segment);
  for (const auto& segment : spares_) add(*segment);
  for (const auto& segment : coming_) add(*segment);
  return sum;
}

MemoryTier::Prepared MemoryTier::prepared() const {
  absl::MutexLock lock(&mutex_);
  return PreparedSoFar();
}

}  // namespace kvtier
