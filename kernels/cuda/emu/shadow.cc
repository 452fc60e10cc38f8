// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emu/shadow.h"

#include <algorithm>

namespace kvtier::kernels::cuda::emu {

void Join(const Clock& other, Clock* clock) {
  if (clock->size() < other.size()) clock->resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) (*clock)[i] = std::max((*clock)[i], other[i]);
}

void Clocks::BeginBlock(uint32_t block_idx, uint32_t agent_count) {
  block_idx_ = block_idx;
  acquired_.clear();
  clocks_.assign(agent_count, Clock(agent_count));
  for (uint32_t agent = 0; agent < agent_count; ++agent) clocks_[agent][agent] = 1;
}

void Clocks::SyncAll() {
  Clock joined(clocks_.size());
  // Nobody knows more of a thread than it does itself. The last agent, the bulk copies, is no
  // thread: others know of it what they waited for.
  const size_t last = clocks_.size() - 1;
  for (size_t agent = 0; agent < last; ++agent) {
    joined[agent] = clocks_[agent][agent];
    joined[last] = std::max(joined[last], clocks_[agent][last]);
  }
  for (size_t agent = 0; agent < last; ++agent) {
    clocks_[agent] = joined;
    ++clocks_[agent][agent];
  }
}

void Clocks::SyncLanes(uint32_t first_agent, uint32_t mask) {
  Clock joined(clocks_.size());
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1U) != 0) Join(clocks_[first_agent + lane], &joined);
  }
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1U) == 0) continue;
    const uint32_t agent = first_agent + lane;
    clocks_[agent] = joined;
    ++clocks_[agent][agent];
  }
}

void Clocks::Release(uint32_t agent, Clock* to) {
  Join(clocks_[agent], to);
  ++clocks_[agent][agent];
}

void Clocks::SynchronizeBlocks(const void* word, uint32_t agent) {
  BlockClocks& released = words_[word];
  for (const auto& [block, clock] : released) {
    if (block == block_idx_) {
      Acquire(clock, agent);
    } else {
      Join(clock, &acquired_[block]);
    }
  }
  for (const auto& [block, clock] : acquired_) Join(clock, &released[block]);
  Release(agent, &released[block_idx_]);
}

bool Clocks::IsBefore(uint32_t other_block, uint32_t other_agent, uint32_t clock,
                      uint32_t agent) const {
  if (other_block == block_idx_) return clock <= clocks_[agent][other_agent];
  const auto found = acquired_.find(other_block);
  return found != acquired_.end() && clock <= found->second[other_agent];
}

Shadow::Shadow(uint64_t bytes, bool is_initialized)
    : starts_initialized_(is_initialized),
      bytes_(static_cast<Byte*>(std::calloc(std::max<uint64_t>(bytes, 1), sizeof(Byte)))) {
  if (bytes_ == nullptr) std::abort();
}

bool Shadow::IsBefore(const Access& access, uint32_t agent, const Clocks& clocks) {
  if (access.agent_plus_one == 0) return true;
  if (access.agent_plus_one == agent + 1 && access.block == clocks.block_idx()) return true;
  return clocks.IsBefore(access.block, access.agent_plus_one - 1, access.clock, agent);
}

Conflict Shadow::Read(uint64_t offset, uint32_t bytes, uint32_t agent, const Clocks& clocks,
                      uint32_t* other) {
  const Access now{clocks.block_idx(), clocks.Now(agent), agent + 1};
  for (uint64_t i = offset; i < offset + bytes; ++i) {
    Byte& byte = bytes_[i];
    if (byte.is_in_flight) return Conflict::kInFlight;
    if (!byte.is_initialized && !starts_initialized_) return Conflict::kUninitialized;
    if (!IsBefore(byte.write, agent, clocks)) {
      *other = byte.write.agent_plus_one - 1;
      return Conflict::kWithWrite;
    }
    // Forgets a read that this one comes after, else the older of the two.
    if (IsBefore(byte.reads[0], agent, clocks)) {
      byte.reads[0] = now;
    } else if (IsBefore(byte.reads[1], agent, clocks)) {
      byte.reads[1] = now;
    } else {
      byte.reads[0] = byte.reads[1];
      byte.reads[1] = now;
    }
  }
  return Conflict::kNone;
}

Conflict Shadow::Write(uint64_t offset, uint32_t bytes, uint32_t agent, const Clocks& clocks,
                       uint32_t* other) {
  const Access now{clocks.block_idx(), clocks.Now(agent), agent + 1};
  for (uint64_t i = offset; i < offset + bytes; ++i) {
    Byte& byte = bytes_[i];
    if (byte.is_in_flight) return Conflict::kInFlight;
    for (const Access* access : {&byte.write, &byte.reads[0], &byte.reads[1]}) {
      if (IsBefore(*access, agent, clocks)) continue;
      *other = access->agent_plus_one - 1;
      return access == &byte.write ? Conflict::kWithWrite : Conflict::kWithRead;
    }
    byte.write = now;
    byte.reads[0] = {};
    byte.reads[1] = {};
    byte.is_initialized = true;
  }
  return Conflict::kNone;
}

void Shadow::SetInFlight(uint64_t offset, uint32_t bytes) {
  for (uint64_t i = offset; i < offset + bytes; ++i) bytes_[i].is_in_flight = true;
}

void Shadow::Overwrite(uint64_t offset, uint32_t bytes, uint32_t agent, const Clocks& clocks) {
  const Access now{clocks.block_idx(), clocks.Now(agent), agent + 1};
  for (uint64_t i = offset; i < offset + bytes; ++i) {
    bytes_[i] = {.write = now, .reads = {}, .is_initialized = true, .is_in_flight = false};
  }
}

}  // namespace kvtier::kernels::cuda::emu
