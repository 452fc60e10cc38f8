// SPDX-License-Identifier: Apache-2.0
//
// Memory of other tiers that NvmeTier registers with its I/O engine. A ring takes orders from one
// thread only, so the I/O thread does what the observer's callers ask for.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <utility>

#include "tiers/nvme/nvme_impl.h"

namespace kvtier {

namespace {

// Registering touches and pins every page; a piece of this size holds up transfers for about 20 ms
// at worst.
constexpr size_t kPieceBytes = 64 << 20;

}  // namespace

void NvmeTier::Impl::OnMapped(std::span<std::byte> segment) {
  {
    absl::MutexLock lock(&mutex_);
    coming_memory_.push_back(segment);
  }
  engine_->Wake();
}

// The caller holds up its tier, and whoever wants a block of it: this goes before all that is still
// to be registered, of which there may be seconds' worth after a start.
void NvmeTier::Impl::OnUnmapping(std::span<std::byte> segment) {
  uint64_t sequence;
  {
    absl::MutexLock lock(&mutex_);
    leaving_memory_.push_back(segment);
    sequence = ++leaving_memory_count_;
  }
  engine_->Wake();
  absl::MutexLock lock(&mutex_);
  // After the I/O thread's end nothing is registered.
  const auto is_done = [this, sequence]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return left_memory_count_ >= sequence || is_io_done_;
  };
  mutex_.Await(absl::Condition(&is_done));
}

void NvmeTier::Impl::ServeMemory() {
  std::span<std::byte> leaving;
  std::span<std::byte> coming;
  {
    absl::MutexLock lock(&mutex_);
    if (!leaving_memory_.empty()) {
      leaving = leaving_memory_.front();
      leaving_memory_.pop_front();
    } else if (!coming_memory_.empty()) {
      std::span<std::byte>& next = coming_memory_.front();
      coming = next.first(std::min(next.size(), kPieceBytes));
      next = next.subspan(coming.size());
      if (next.empty()) coming_memory_.pop_front();
    }
    wants_another_round_ |= !leaving_memory_.empty() || !coming_memory_.empty();
  }
  if (!leaving.empty()) {
    LetGoOfMemory(leaving);
  } else if (!coming.empty()) {
    registered_.push_back(coming);
    engine_->RegisterMemory(coming);
    NoteEngine();
  }
}

void NvmeTier::Impl::LetGoOfMemory(std::span<std::byte> memory) {
  ReleaseMemory(memory);
  NoteEngine();
  absl::MutexLock lock(&mutex_);
  // What of it was not registered yet never is.
  std::erase_if(coming_memory_, [&](std::span<std::byte> coming) {
    return coming.data() >= memory.data() && coming.data() < memory.data() + memory.size();
  });
  ++left_memory_count_;
}

// Memory that cannot be registered costs speed only, and is said once.
void NvmeTier::Impl::NoteEngine() {
  std::string name = engine_->Description() + engine_note_;
  const uint64_t own_bytes = pages_->memory().size();
  {
    absl::MutexLock lock(&mutex_);
    registered_bytes_ = std::max(engine_->registered_bytes(), own_bytes) - own_bytes;
    if (name == engine_name_) return;
    engine_name_ = name;
  }
  spdlog::warn("nvme: {}: {}", options_.dir, name);
}

void NvmeTier::Impl::ReleaseMemory(std::span<std::byte> memory) {
  std::erase_if(registered_, [&](std::span<std::byte> piece) {
    const bool is_inside =
        piece.data() >= memory.data() && piece.data() < memory.data() + memory.size();
    if (is_inside) engine_->UnregisterMemory(piece);
    return is_inside;
  });
}

void NvmeTier::Impl::ReleaseAllMemory() {
  for (const std::span<std::byte> piece : registered_) engine_->UnregisterMemory(piece);
  registered_.clear();
}

}  // namespace kvtier
