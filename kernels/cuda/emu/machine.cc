// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emu/machine.h"

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <numeric>

// Threads, their schedule and their rendezvous. Memory is in machine_memory.cc.

namespace kvtier::kernels::cuda::emu {
namespace {

thread_local Machine* current_machine = nullptr;

// Stacks are kept from block to block and from launch to launch.
std::vector<std::unique_ptr<Fiber>>& Fibers() {
  thread_local std::vector<std::unique_ptr<Fiber>> fibers;
  return fibers;
}

uint32_t ThreadCount(const Dim3& block) { return block.x * block.y * block.z; }

bool IsSamePlace(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         std::strcmp(a.file_name(), b.file_name()) == 0;
}

void SyncWarpFunction(WarpExchange&) {}

}  // namespace

Machine::Machine(const LaunchConfig& config, const Memory& memory,
                 const std::function<void()>& kernel)
    : config_(config),
      kernel_(kernel),
      thread_count_(ThreadCount(config.block)),
      random_(config.seed) {
  for (const Memory::Range& range : memory.ranges()) {
    globals_.push_back({range, range.is_writable
                                   ? std::make_unique<Shadow>(range.bytes, range.is_initialized)
                                   : nullptr});
  }
}

Machine& Machine::Current() { return *current_machine; }

Dim3 Machine::thread_index() const {
  return {current_ % config_.block.x, current_ / config_.block.x % config_.block.y,
          current_ / (config_.block.x * config_.block.y)};
}

void Machine::Record(FindingKind kind, const Site& site, const char* text) {
  if (!report_.ok()) return;
  char line[512];
  std::snprintf(line, sizeof(line), "%s:%u: %s [block %u,%u,%u thread %u]", site.file_name(),
                static_cast<unsigned>(site.line()), text, block_.x, block_.y, block_.z, current_);
  report_.findings.push_back({kind, line});
}

void Machine::Fail(FindingKind kind, const Site& site, const char* format, ...) {
  // No object with a destructor may be alive here: the fiber is never resumed.
  char text[320];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  Record(kind, site, text);
  for (;;) Fibers()[current_]->Suspend();
}

void Machine::Run() {
  if (thread_count_ == 0 || thread_count_ > kBlockThreadsMax) {
    report_.findings.push_back({FindingKind::kBadLaunch, "a block has 1 to 1024 threads"});
    return;
  }
  auto& fibers = Fibers();
  while (fibers.size() < thread_count_) fibers.push_back(std::make_unique<Fiber>());
  std::vector<uint32_t> order(config_.grid.x * config_.grid.y * config_.grid.z);
  std::iota(order.begin(), order.end(), 0U);
  if (config_.seed != 0) std::shuffle(order.begin(), order.end(), random_);
  Machine* outer = current_machine;
  current_machine = this;
  for (const uint32_t block_idx : order) {
    block_ = {block_idx % config_.grid.x, block_idx / config_.grid.x % config_.grid.y,
              block_idx / (config_.grid.x * config_.grid.y)};
    clocks_.BeginBlock(block_idx, thread_count_ + 1);
    RunBlock();
    if (!report_.ok()) break;
  }
  current_machine = outer;
}

void Machine::RunBlock() {
  // What a block finds in shared memory: nothing that a kernel could take for data.
  shared_.assign(config_.shared_bytes, std::byte{0xCB});
  shared_shadow_ = std::make_unique<Shadow>(config_.shared_bytes, false);
  mbarriers_.clear();
  bulk_copies_.clear();
  done_count_ = 0;
  barrier_waiter_count_ = 0;
  threads_.assign(thread_count_, Thread{});
  warps_.assign((thread_count_ + kWarpLanes - 1) / kWarpLanes, Warp{});
  ready_.clear();
  for (uint32_t i = 0; i < thread_count_; ++i) {
    warps_[i / kWarpLanes].lanes |= 1U << (i % kWarpLanes);
    ready_.push_back(i);
    Fibers()[i]->Start(&Machine::ThreadMain, this);
  }
  while (done_count_ < thread_count_ && report_.ok()) {
    uint32_t next = 0;
    if (!PickThread(&next)) {
      ReportDeadlock();
      break;
    }
    current_ = next;
    Fibers()[current_]->Resume();
  }
  if (report_.ok() && !bulk_copies_.empty()) {
    Record(FindingKind::kAsyncMisuse, bulk_copies_[0].site, "a bulk copy that nobody waited for");
  }
  for (uint32_t i = 0; i < thread_count_; ++i) Fibers()[i]->Abandon();
  log_.Flush();
}

bool Machine::PickThread(uint32_t* thread_idx) {
  const bool is_random = config_.seed != 0;
  if (!bulk_copies_.empty() && (ready_.empty() || (is_random && Random(8) == 0))) {
    LandBulkCopy(is_random ? Random(static_cast<uint32_t>(bulk_copies_.size())) : 0);
    return PickThread(thread_idx);
  }
  if (ready_.empty()) return false;
  const size_t idx = is_random ? Random(static_cast<uint32_t>(ready_.size())) : 0;
  *thread_idx = ready_[idx];
  ready_[idx] = ready_.front();
  ready_.pop_front();
  return true;
}

void Machine::ThreadMain(void* machine) {
  auto* self = static_cast<Machine*>(machine);
  self->kernel_();
  self->FinishThread();
}

void Machine::FinishThread() {
  Thread& thread = threads_[current_];
  if (!thread.copy_groups.empty() || !thread.open_copies.empty()) {
    const Copy& copy =
        thread.copy_groups.empty() ? thread.open_copies[0] : thread.copy_groups[0][0];
    Record(FindingKind::kAsyncMisuse, copy.site, "a copy that its thread did not wait for");
  }
  thread.state = ThreadState::kDone;
  ++done_count_;
  Warp& warp = warps_[current_ / kWarpLanes];
  warp.exited |= 1U << lane_idx();
  for (const Rendezvous& rendezvous : warp.open) {
    if ((rendezvous.exchange.mask & warp.exited) != 0) {
      Record(FindingKind::kDivergence, rendezvous.site,
             "a lane exited that this warp collective waits for");
    }
  }
  ReleaseBarrierIfFull();
}

void Machine::Suspend(ThreadState state, const Site& site) {
  threads_[current_].state = state;
  threads_[current_].site = site;
  Fibers()[current_]->Suspend();
}

void Machine::Wake(uint32_t thread_idx) {
  threads_[thread_idx].state = ThreadState::kReady;
  ready_.push_back(thread_idx);
}

void Machine::ReportDeadlock() {
  constexpr uint32_t kShownMax = 3;
  std::string text = "nobody can go on:";
  uint32_t shown = 0;
  const Thread* first = nullptr;
  for (uint32_t i = 0; i < thread_count_; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state == ThreadState::kDone || thread.state == ThreadState::kReady) continue;
    const char* what = thread.state == ThreadState::kAtBarrier      ? "__syncthreads"
                       : thread.state == ThreadState::kInCollective ? "a warp collective"
                                                                    : "an mbarrier";
    const bool is_news =
        first == nullptr || first->state != thread.state || !IsSamePlace(first->site, thread.site);
    if (!is_news || shown == kShownMax) continue;
    if (first == nullptr) first = &thread;
    text += " thread " + std::to_string(i) + " waits in " + what + " at line " +
            std::to_string(thread.site.line()) + ";";
    ++shown;
  }
  if (first != nullptr) Record(FindingKind::kDeadlock, first->site, text.c_str());
}

void Machine::SyncThreads(const Site& site) {
  ++barrier_waiter_count_;
  threads_[current_].state = ThreadState::kAtBarrier;
  threads_[current_].site = site;
  ReleaseBarrierIfFull();
  // The last thread to arrive was woken with the others.
  Fibers()[current_]->Suspend();
}

void Machine::ReleaseBarrierIfFull() {
  if (barrier_waiter_count_ == 0 || barrier_waiter_count_ + done_count_ < thread_count_) return;
  CheckBarrierSites();
  barrier_waiter_count_ = 0;
  ++report_.barrier_count;
  clocks_.SyncAll();
  for (uint32_t i = 0; i < thread_count_; ++i) {
    if (threads_[i].state == ThreadState::kAtBarrier) Wake(i);
  }
}

void Machine::CheckBarrierSites() {
  const Thread* first = nullptr;
  for (const Thread& thread : threads_) {
    if (thread.state != ThreadState::kAtBarrier) continue;
    if (first == nullptr) first = &thread;
    if (!IsSamePlace(first->site, thread.site)) {
      char text[96];
      std::snprintf(text, sizeof(text), "other threads are in the __syncthreads of line %u",
                    static_cast<unsigned>(first->site.line()));
      Record(FindingKind::kDivergence, thread.site, text);
      return;
    }
  }
}

void Machine::SyncWarp(uint32_t mask, const Site& site) {
  Collective(&SyncWarpFunction, mask, {}, {}, site);
}

void Machine::Collective(WarpFunction function, uint32_t mask, std::span<const uint32_t> in,
                         std::span<uint32_t> out, const Site& site) {
  const uint32_t warp_idx = current_ / kWarpLanes;
  const uint32_t lane = lane_idx();
  Warp& warp = warps_[warp_idx];
  if ((mask >> lane & 1U) == 0) {
    Fail(FindingKind::kDivergence, site, "lane %u is not in its own mask %08x", lane, mask);
  }
  if ((mask & ~warp.lanes) != 0 || (mask & warp.exited) != 0) {
    Fail(FindingKind::kDivergence, site, "mask %08x has lanes that do not run: %08x", mask,
         mask & (~warp.lanes | warp.exited));
  }
  size_t idx = 0;
  while (idx < warp.open.size() && (warp.open[idx].exchange.mask & mask) == 0) ++idx;
  if (idx == warp.open.size()) {
    warp.open.emplace_back();
    warp.open[idx].function = function;
    warp.open[idx].site = site;
    warp.open[idx].exchange.mask = mask;
  }
  Rendezvous& rendezvous = warp.open[idx];
  if (rendezvous.exchange.mask != mask || rendezvous.function != function ||
      !IsSamePlace(rendezvous.site, site)) {
    Fail(FindingKind::kDivergence, site,
         "lane %u is here with mask %08x, others of its warp are in the collective of line %u with "
         "mask %08x",
         lane, mask, static_cast<unsigned>(rendezvous.site.line()), rendezvous.exchange.mask);
  }
  std::copy(in.begin(), in.end(), rendezvous.exchange.in[lane].begin());
  rendezvous.arrived |= 1U << lane;
  if (rendezvous.arrived == mask) {
    Complete(&warp, warp_idx, idx);
  } else {
    Suspend(ThreadState::kInCollective, site);
  }
  std::copy_n(threads_[current_].out.begin(), out.size(), out.begin());
}

void Machine::Complete(Warp* warp, uint32_t warp_idx, size_t rendezvous_idx) {
  Rendezvous& rendezvous = warp->open[rendezvous_idx];
  const uint32_t mask = rendezvous.exchange.mask;
  rendezvous.function(rendezvous.exchange);
  ++report_.collective_count;
  if (rendezvous.function == &SyncWarpFunction) clocks_.SyncLanes(warp_idx * kWarpLanes, mask);
  for (uint32_t lanes = mask; lanes != 0; lanes &= lanes - 1) {
    const auto lane = static_cast<uint32_t>(std::countr_zero(lanes));
    const uint32_t thread_idx = warp_idx * kWarpLanes + lane;
    threads_[thread_idx].out = rendezvous.exchange.out[lane];
    if (thread_idx != current_) Wake(thread_idx);
  }
  warp->open.erase(warp->open.begin() + static_cast<ptrdiff_t>(rendezvous_idx));
}

Report Machine::TakeReport() {
  report_.sites = log_.Counters();
  return std::move(report_);
}

Report LaunchThreads(const LaunchConfig& config, const Memory& memory,
                     const std::function<void()>& kernel) {
  Machine machine(config, memory, kernel);
  machine.Run();
  return machine.TakeReport();
}

Dim3 ThreadIndex() { return Machine::Current().thread_index(); }
Dim3 BlockIndex() { return Machine::Current().block_index(); }
Dim3 BlockSize() { return Machine::Current().config().block; }
Dim3 GridSize() { return Machine::Current().config().grid; }
uint32_t LaneIndex() { return Machine::Current().lane_idx(); }
void SyncThreads(const Site& site) { Machine::Current().SyncThreads(site); }
void SyncWarp(uint32_t mask, const Site& site) { Machine::Current().SyncWarp(mask, site); }
void Collective(WarpFunction function, uint32_t mask, std::span<const uint32_t> in,
                std::span<uint32_t> out, const Site& site) {
  Machine::Current().Collective(function, mask, in, out, site);
}

}  // namespace kvtier::kernels::cuda::emu
