// SPDX-License-Identifier: Apache-2.0
//
// Memory of other tiers that NvmeTier registers with its I/O engine. A ring takes orders from one
// thread only, so the I/O thread does what the observer's callers ask for.
#include <algorithm>
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
    memory_requests_.push_back({.memory = segment});
    ++memory_request_count_;
  }
  engine_->Wake();
}

void NvmeTier::Impl::OnUnmapping(std::span<std::byte> segment) {
  uint64_t sequence;
  {
    absl::MutexLock lock(&mutex_);
    memory_requests_.push_back({.memory = segment, .is_unmapping = true});
    sequence = ++memory_request_count_;
  }
  engine_->Wake();
  absl::MutexLock lock(&mutex_);
  // After the I/O thread's end nothing is registered.
  const auto is_done = [this, sequence]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return memory_done_count_ >= sequence || is_io_done_;
  };
  mutex_.Await(absl::Condition(&is_done));
}

void NvmeTier::Impl::ServeMemory() {
  MemoryRequest request;
  {
    absl::MutexLock lock(&mutex_);
    if (memory_requests_.empty()) return;
    request = memory_requests_.front();
  }
  std::span<std::byte> rest;
  if (request.is_unmapping) {
    ReleaseMemory(request.memory);
  } else {
    const size_t piece_bytes = std::min(request.memory.size(), kPieceBytes);
    rest = request.memory.subspan(piece_bytes);
    registered_.push_back(request.memory.first(piece_bytes));
    engine_->RegisterMemory(registered_.back());
  }
  absl::MutexLock lock(&mutex_);
  engine_name_ = engine_->Description() + engine_note_;
  if (!rest.empty()) {
    memory_requests_.front().memory = rest;
  } else {
    memory_requests_.pop_front();
    ++memory_done_count_;
  }
  if (!memory_requests_.empty()) wants_another_round_ = true;
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
