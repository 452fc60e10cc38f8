// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "kernels/cuda/emu/machine.h"

// Memory, copies in flight and mbarriers of the machine.

namespace kvtier::kernels::cuda::emu {
namespace {

constexpr uint32_t kMbarrierBytes = 8;
constexpr uint32_t kAsyncCopyBytes = 16;
constexpr uint32_t kBulkCopyAlignment = 16;

uint64_t AddressOf(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

void Machine::CheckAlignment(uint64_t address, uint32_t alignment, const char* what,
                             const Site& site) {
  if (address % alignment == 0) return;
  Fail(FindingKind::kMisaligned, site, "%s: address %#llx is not a multiple of %u", what,
       static_cast<unsigned long long>(address), alignment);
}

Machine::GlobalRange& Machine::FindGlobal(const void* address, uint32_t bytes, const char* what,
                                          const Site& site) {
  const auto* begin = static_cast<const std::byte*>(address);
  const auto holds = [&](const GlobalRange& global) {
    const Memory::Range& range = global.range;
    return begin >= range.begin &&
           begin - range.begin + int64_t{bytes} <= static_cast<int64_t>(range.bytes);
  };
  if (last_global_ < globals_.size() && holds(globals_[last_global_])) {
    return globals_[last_global_];
  }
  const auto after = std::upper_bound(
      globals_.begin(), globals_.end(), begin,
      [](const std::byte* value, const GlobalRange& global) { return value < global.range.begin; });
  if (after == globals_.begin() || !holds(*(after - 1))) {
    const bool is_near = after != globals_.begin();
    Fail(FindingKind::kOutOfBounds, site,
         "%s of %u bytes at %p is in no range of the launch (%lld bytes after the begin of the "
         "nearest below, which has %lld)",
         what, bytes, address,
         is_near ? static_cast<long long>(begin - (after - 1)->range.begin) : -1LL,
         is_near ? static_cast<long long>((after - 1)->range.bytes) : -1LL);
  }
  last_global_ = static_cast<size_t>(after - 1 - globals_.begin());
  return globals_[last_global_];
}

void Machine::CheckShared(uint32_t address, uint32_t bytes, uint32_t alignment, const char* what,
                          const Site& site) {
  if (uint64_t{address} + bytes > shared_.size()) {
    Fail(FindingKind::kOutOfBounds, site, "%s of %u bytes at shared address %u; the block has %zu",
         what, bytes, address, shared_.size());
  }
  CheckAlignment(address, alignment, what, site);
}

void Machine::FailConflict(Conflict conflict, uint32_t other, const char* what, const Site& site) {
  switch (conflict) {
    case Conflict::kNone:
      return;
    case Conflict::kUninitialized:
      Fail(FindingKind::kUninitialized, site, "%s of a byte that was never written", what);
    case Conflict::kInFlight:
      Fail(FindingKind::kAsyncMisuse, site, "%s of a byte that a copy in flight writes", what);
    case Conflict::kWithWrite:
      Fail(FindingKind::kRace, site, "%s races with a write by thread %u", what, other);
    case Conflict::kWithRead:
      Fail(FindingKind::kRace, site, "%s races with a read by thread %u", what, other);
  }
}

void Machine::LogAccess(AccessKind kind, uint64_t address, uint32_t bytes, const Site& site) {
  const uint32_t warp_idx = current_ / kWarpLanes;
  const Warp& warp = warps_[warp_idx];
  log_.Record(kind, site, warp_idx, lane_idx(), warp.lanes & ~warp.exited, address, bytes);
}

void Machine::ReadGlobalRun(const void* source, uint32_t bytes, const Site& site) {
  GlobalRange& global = FindGlobal(source, bytes, "global read", site);
  if (global.shadow == nullptr) return;
  uint32_t other = 0;
  const auto offset =
      static_cast<uint64_t>(static_cast<const std::byte*>(source) - global.range.begin);
  FailConflict(global.shadow->Read(offset, bytes, current_, clocks_, &other), other, "global read",
               site);
}

void Machine::ReadGlobal(const void* source, void* out, uint32_t bytes, const Site& site) {
  CheckAlignment(AddressOf(source), bytes, "global read", site);
  ReadGlobalRun(source, bytes, site);
  LogAccess(AccessKind::kGlobalRead, AddressOf(source), bytes, site);
  std::memcpy(out, source, bytes);
}

void Machine::WriteGlobal(void* target, const void* in, uint32_t bytes, const Site& site) {
  CheckAlignment(AddressOf(target), bytes, "global write", site);
  GlobalRange& global = FindGlobal(target, bytes, "global write", site);
  if (global.shadow == nullptr) {
    Fail(FindingKind::kOutOfBounds, site, "global write to an input of the launch");
  }
  uint32_t other = 0;
  const auto offset = static_cast<uint64_t>(static_cast<std::byte*>(target) - global.range.begin);
  FailConflict(global.shadow->Write(offset, bytes, current_, clocks_, &other), other,
               "global write", site);
  LogAccess(AccessKind::kGlobalWrite, AddressOf(target), bytes, site);
  std::memcpy(target, in, bytes);
}

void Machine::ReadShared(uint32_t source, void* out, uint32_t bytes, const Site& site) {
  CheckShared(source, bytes, bytes, "shared read", site);
  uint32_t other = 0;
  FailConflict(shared_shadow_->Read(source, bytes, current_, clocks_, &other), other, "shared read",
               site);
  LogAccess(AccessKind::kSharedRead, source, bytes, site);
  std::memcpy(out, shared_.data() + source, bytes);
}

void Machine::WriteShared(uint32_t target, const void* in, uint32_t bytes, const Site& site) {
  CheckShared(target, bytes, bytes, "shared write", site);
  uint32_t other = 0;
  FailConflict(shared_shadow_->Write(target, bytes, current_, clocks_, &other), other,
               "shared write", site);
  LogAccess(AccessKind::kSharedWrite, target, bytes, site);
  std::memcpy(shared_.data() + target, in, bytes);
}

uint32_t Machine::AtomicAdd(uint32_t* target, uint32_t value, bool synchronizes, const Site& site) {
  CheckAlignment(AddressOf(target), sizeof(*target), "atomic", site);
  GlobalRange& global = FindGlobal(target, sizeof(*target), "atomic", site);
  if (global.shadow == nullptr || !global.range.is_initialized) {
    Fail(FindingKind::kUninitialized, site, "atomic on an input or on an output without a value");
  }
  if (synchronizes) clocks_.SynchronizeBlocks(target, current_);
  const uint32_t before = *target;
  *target = before + value;
  return before;
}

void Machine::CopyAsync(uint32_t target, const void* source, const Site& site) {
  CheckShared(target, kAsyncCopyBytes, kAsyncCopyBytes, "cp.async", site);
  CheckAlignment(AddressOf(source), kAsyncCopyBytes, "cp.async", site);
  ReadGlobalRun(source, kAsyncCopyBytes, site);
  LogAccess(AccessKind::kGlobalRead, AddressOf(source), kAsyncCopyBytes, site);
  uint32_t other = 0;
  FailConflict(shared_shadow_->Write(target, kAsyncCopyBytes, current_, clocks_, &other), other,
               "cp.async", site);
  LogAccess(AccessKind::kSharedWrite, target, kAsyncCopyBytes, site);
  shared_shadow_->SetInFlight(target, kAsyncCopyBytes);
  threads_[current_].open_copies.push_back(
      {target, static_cast<const std::byte*>(source), kAsyncCopyBytes, 0, site});
}

void Machine::CommitCopies() {
  Thread& thread = threads_[current_];
  thread.copy_groups.push_back(std::move(thread.open_copies));
  thread.open_copies.clear();
}

void Machine::WaitCopies(uint32_t group_count) {
  Thread& thread = threads_[current_];
  while (thread.copy_groups.size() > group_count) {
    for (const Copy& copy : thread.copy_groups.front()) Land(copy, current_);
    thread.copy_groups.pop_front();
  }
}

// The bytes are written now, by `agent`: whoever is not ordered after this must not touch them.
// Conflicts with earlier accesses were looked for when the copy was issued.
void Machine::Land(const Copy& copy, uint32_t agent) {
  shared_shadow_->Overwrite(copy.target, copy.bytes, agent, clocks_);
  std::memcpy(shared_.data() + copy.target, copy.source, copy.bytes);
}

Machine::Mbarrier& Machine::FindMbarrier(uint32_t address, const Site& site) {
  CheckShared(address, kMbarrierBytes, kMbarrierBytes, "mbarrier", site);
  const auto found = mbarriers_.find(address);
  if (found == mbarriers_.end()) {
    Fail(FindingKind::kAsyncMisuse, site, "the mbarrier at %u is not initialized", address);
  }
  Mbarrier& barrier = found->second;
  if (!clocks_.IsBefore(clocks_.block_idx(), barrier.initializer, barrier.init_clock, current_)) {
    Fail(FindingKind::kRace, site, "the initialization of the mbarrier at %u is not ordered before",
         address);
  }
  return barrier;
}

void Machine::MbarrierInit(uint32_t address, uint32_t arrival_count, const Site& site) {
  CheckShared(address, kMbarrierBytes, kMbarrierBytes, "mbarrier", site);
  uint32_t other = 0;
  FailConflict(shared_shadow_->Write(address, kMbarrierBytes, current_, clocks_, &other), other,
               "mbarrier init", site);
  Mbarrier barrier;
  barrier.arrival_count = arrival_count;
  barrier.pending_arrivals = arrival_count;
  barrier.initializer = current_;
  barrier.init_clock = clocks_.Now(current_);
  mbarriers_[address] = barrier;
}

void Machine::FenceProxyAsync() {
  for (auto& [address, barrier] : mbarriers_) {
    if (barrier.initializer == current_) barrier.is_fenced = true;
  }
}

void Machine::EndPhaseIfComplete(uint32_t address, Mbarrier* barrier) {
  if (barrier->pending_arrivals != 0 || barrier->pending_bytes != 0) return;
  ++barrier->phase;
  barrier->pending_arrivals = barrier->arrival_count;
  Join(barrier->arrivals, &barrier->done);
  barrier->arrivals.clear();
  for (uint32_t i = 0; i < thread_count_; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state == ThreadState::kAtMbarrier && thread.wait_address == address) Wake(i);
  }
}

void Machine::MbarrierArrive(uint32_t address, uint32_t expected_bytes, const Site& site) {
  Mbarrier& barrier = FindMbarrier(address, site);
  if (barrier.pending_arrivals == 0) {
    Fail(FindingKind::kAsyncMisuse, site, "more arrivals than the mbarrier at %u counts", address);
  }
  barrier.pending_bytes += expected_bytes;
  --barrier.pending_arrivals;
  clocks_.Release(current_, &barrier.arrivals);
  EndPhaseIfComplete(address, &barrier);
}

bool Machine::MbarrierTryWait(uint32_t address, uint32_t parity, const Site& site) {
  if (parity > 1) Fail(FindingKind::kAsyncMisuse, site, "parity %u is not 0 or 1", parity);
  // Phase n (from 0) has parity n % 2; the wait is for the end of the phase with that parity.
  const auto is_done = [&] { return FindMbarrier(address, site).phase % 2 != parity; };
  if (!is_done()) {
    const bool is_spurious = config_.seed != 0 && Random(4) == 0;
    if (is_spurious) {
      ready_.push_back(current_);
      Suspend(ThreadState::kReady, site);
      return false;
    }
    threads_[current_].wait_address = address;
    Suspend(ThreadState::kAtMbarrier, site);
    if (!is_done()) return false;
  }
  clocks_.Acquire(FindMbarrier(address, site).done, current_);
  return true;
}

void Machine::CopyBulk(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier,
                       const Site& site) {
  const Mbarrier& completion = FindMbarrier(barrier, site);
  if (!completion.is_fenced) {
    Fail(FindingKind::kAsyncMisuse, site,
         "no FenceProxyAsync between the initialization of the mbarrier and the copy");
  }
  if (bytes == 0 || bytes % kBulkCopyAlignment != 0) {
    Fail(FindingKind::kMisaligned, site, "a bulk copy of %u bytes: use a multiple of 16", bytes);
  }
  CheckShared(target, bytes, kBulkCopyAlignment, "bulk copy", site);
  CheckAlignment(AddressOf(source), kBulkCopyAlignment, "bulk copy", site);
  ReadGlobalRun(source, bytes, site);
  // Whoever read or wrote the target must be done with it before the copy is issued.
  uint32_t other = 0;
  FailConflict(shared_shadow_->Write(target, bytes, current_, clocks_, &other), other, "bulk copy",
               site);
  shared_shadow_->SetInFlight(target, bytes);
  bulk_copies_.push_back({target, static_cast<const std::byte*>(source), bytes, barrier, site});
}

void Machine::LandBulkCopy(size_t copy_idx) {
  const Copy copy = bulk_copies_[copy_idx];
  bulk_copies_.erase(bulk_copies_.begin() + static_cast<ptrdiff_t>(copy_idx));
  Land(copy, bulk_agent());
  Mbarrier& barrier = mbarriers_[copy.barrier];
  barrier.pending_bytes -= copy.bytes;
  clocks_.Release(bulk_agent(), &barrier.arrivals);
  EndPhaseIfComplete(copy.barrier, &barrier);
}

void ReadGlobal(const void* source, void* out, uint32_t bytes, const Site& site) {
  Machine::Current().ReadGlobal(source, out, bytes, site);
}
void WriteGlobal(void* target, const void* in, uint32_t bytes, const Site& site) {
  Machine::Current().WriteGlobal(target, in, bytes, site);
}
void ReadShared(uint32_t source, void* out, uint32_t bytes, const Site& site) {
  Machine::Current().ReadShared(source, out, bytes, site);
}
void WriteShared(uint32_t target, const void* in, uint32_t bytes, const Site& site) {
  Machine::Current().WriteShared(target, in, bytes, site);
}
uint32_t AtomicAdd(uint32_t* target, uint32_t value, bool synchronizes, const Site& site) {
  return Machine::Current().AtomicAdd(target, value, synchronizes, site);
}
void CopyAsync(uint32_t target, const void* source, const Site& site) {
  Machine::Current().CopyAsync(target, source, site);
}
void CommitCopies() { Machine::Current().CommitCopies(); }
void WaitCopies(uint32_t group_count) { Machine::Current().WaitCopies(group_count); }
void MbarrierInit(uint32_t barrier, uint32_t arrival_count, const Site& site) {
  Machine::Current().MbarrierInit(barrier, arrival_count, site);
}
void MbarrierArrive(uint32_t barrier, uint32_t expected_bytes, const Site& site) {
  Machine::Current().MbarrierArrive(barrier, expected_bytes, site);
}
bool MbarrierTryWait(uint32_t barrier, uint32_t parity, const Site& site) {
  return Machine::Current().MbarrierTryWait(barrier, parity, site);
}
void CopyBulk(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier,
              const Site& site) {
  Machine::Current().CopyBulk(target, source, bytes, barrier, site);
}
void FenceProxyAsync() { Machine::Current().FenceProxyAsync(); }

}  // namespace kvtier::kernels::cuda::emu
