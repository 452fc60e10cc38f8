// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/pinned_segments.h"

#include <pthread.h>

#include <algorithm>
#include <functional>

#include "absl/strings/str_format.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier {

PinnedSegments::PinnedSegments(CudaDevice* device, Options options)
    : device_(device), options_(std::move(options)), thread_([this] {
        pthread_setname_np(pthread_self(), "kvtier-pin");
        Run();
      }) {}

PinnedSegments::~PinnedSegments() {
  {
    absl::MutexLock lock(&mutex_);
    KVT_CHECK(segments_.empty());
    stopping_ = true;
  }
  thread_.join();
}

void PinnedSegments::OnMapped(std::span<std::byte> segment) {
  absl::MutexLock lock(&mutex_);
  KVT_CHECK(segments_.emplace(segment.data(), Segment{.bytes = segment}).second);
}

void PinnedSegments::OnUnmapping(std::span<std::byte> segment) {
  uint64_t pinned_bytes = 0;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = segments_.find(segment.data());
    KVT_CHECK(found != segments_.end());
    found->second.is_closed = true;
    const auto may_go = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return !found->second.is_pinning && (abandoned_ || found->second.hold_count == 0);
    };
    mutex_.Await(absl::Condition(&may_go));
    if (!abandoned_) pinned_bytes = found->second.pinned_bytes;
    segments_.erase(found);
  }
  for (uint64_t at = 0; at < pinned_bytes; at += options_.chunk_bytes) {
    // Fails on a lost device alone, which has no use for them any more.
    device_->UnregisterHost(segment.subspan(at, std::min(options_.chunk_bytes, pinned_bytes - at)))
        .IgnoreError();
  }
}

std::optional<PinnedSegments::Hold> PinnedSegments::Acquire(std::span<const std::byte> bytes) {
  absl::MutexLock lock(&mutex_);
  if (abandoned_) return std::nullopt;
  auto found = segments_.upper_bound(bytes.data());
  if (found == segments_.begin()) return std::nullopt;
  --found;
  const uint64_t offset_bytes = static_cast<uint64_t>(bytes.data() - found->first);
  if (offset_bytes + bytes.size() > found->second.pinned_bytes) return std::nullopt;
  ++found->second.hold_count;
  return Hold(this, found->first);
}

void PinnedSegments::End(const std::byte* base) {
  absl::MutexLock lock(&mutex_);
  // Not there: given up with the device.
  if (const auto found = segments_.find(base); found != segments_.end()) {
    --found->second.hold_count;
  }
}

void PinnedSegments::Abandon() {
  absl::MutexLock lock(&mutex_);
  abandoned_ = true;
}

PinnedSegments::Progress PinnedSegments::progress() const {
  absl::MutexLock lock(&mutex_);
  Progress progress;
  for (const auto& [base, segment] : segments_) {
    progress.mapped_bytes += segment.bytes.size();
    progress.pinned_bytes += segment.pinned_bytes;
  }
  return progress;
}

PinnedSegments::Segment* PinnedSegments::FindUnpinned() {
  if (abandoned_) return nullptr;
  for (auto& [base, segment] : segments_) {
    if (!segment.is_closed && segment.pinned_bytes < segment.bytes.size()) return &segment;
  }
  return nullptr;
}

void PinnedSegments::Run() {
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || FindUnpinned() != nullptr;
  };
  while (true) {
    Segment* segment = nullptr;
    std::span<std::byte> chunk;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&ready));
      if (stopping_) return;
      segment = FindUnpinned();
      segment->is_pinning = true;
      chunk = segment->bytes.subspan(segment->pinned_bytes);
      chunk = chunk.first(std::min<uint64_t>(chunk.size(), options_.chunk_bytes));
    }
    // It stays mapped, and in the table, as long as is_pinning is set.
    const absl::Status status = device_->RegisterHost(chunk);
    {
      absl::MutexLock lock(&mutex_);
      segment->is_pinning = false;
      if (status.ok()) {
        segment->pinned_bytes += chunk.size();
      } else {
        segment->is_closed = true;
      }
    }
    if (status.ok() || std::exchange(has_failed_, true) || !options_.on_failure) continue;
    options_.on_failure(
        Annotate(status, absl::StrFormat("pin %d bytes of host memory", chunk.size())));
  }
}

}  // namespace kvtier
