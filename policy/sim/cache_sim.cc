// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/cache_sim.h"

#include <memory>
#include <vector>

namespace kvtier::sim {
namespace {

class CacheSim {
 public:
  CacheSim(const Trace& trace, CachePolicy policy, const CacheSimOptions& options)
      : trace_(trace),
        options_(options),
        rule_(NewCacheRule(policy, trace,
                           {.capacity_blocks = options.capacity_blocks,
                            .hints = options.hints,
                            .hazard = options.hazard})),
        entries_(trace.blocks.size()) {}

  CacheHits Run() {
    for (uint32_t i = 0; i < trace_.requests.size(); ++i) Serve(i);
    return hits_;
  }

 private:
  struct Entry {
    bool held = false;
    bool leaf = false;
    uint32_t child_count = 0;
    // The request that uses it now.
    uint32_t user = kNoRequest;
  };

  void Serve(uint32_t request_idx) {
    const TraceRequest& request = trace_.requests[request_idx];
    request_idx_ = request_idx;
    rule_->Begin(request_idx);
    size_t hit_count = 0;
    hits_.token_count += request.token_count;
    for (size_t i = 0; i < request.chain.size(); ++i) {
      Entry& entry = entries_[request.chain[i]];
      entry.user = request_idx;
      if (hit_count == i && entry.held) {
        ++hit_count;
        hits_.hit_token_count += trace_.TokensOfBlock(request, i);
      }
    }
    for (size_t i = 0; i < hit_count; ++i) {
      SetLeaf(request.chain[i], false);
      rule_->Hit(request.chain[i]);
    }
    size_t stored_count = hit_count;
    while (stored_count < request.chain.size() && (!options_.make_room_first || MakeRoom())) {
      Insert(request.chain[stored_count++]);
    }
    request_idx_ = kNoRequest;
    for (size_t i = 0; i < stored_count; ++i) {
      const BlockRef block = request.chain[i];
      entries_[block].user = kNoRequest;
      if (entries_[block].child_count == 0) SetLeaf(block, true);
    }
    for (size_t i = stored_count; i < request.chain.size(); ++i) {
      entries_[request.chain[i]].user = kNoRequest;
    }
    while (held_count_ > options_.capacity_blocks) EvictOne();
  }

  // Room for one more block.
  bool MakeRoom() {
    while (held_count_ >= options_.capacity_blocks) {
      if (leaf_count_ == 0) return false;
      EvictOne();
    }
    return true;
  }

  void Insert(BlockRef block) {
    entries_[block].held = true;
    ++held_count_;
    ++hits_.inserted_block_count;
    const BlockRef parent = trace_.blocks[block].parent;
    if (parent != kNoBlock) ++entries_[parent].child_count;
    rule_->Insert(block);
  }

  void EvictOne() {
    const BlockRef block = rule_->Victim();
    SetLeaf(block, false);
    rule_->Evict(block);
    entries_[block].held = false;
    --held_count_;
    ++hits_.evicted_block_count;
    const BlockRef parent = trace_.blocks[block].parent;
    if (parent == kNoBlock) return;
    Entry& entry = entries_[parent];
    const bool in_use = request_idx_ != kNoRequest && entry.user == request_idx_;
    if (--entry.child_count == 0 && !in_use) SetLeaf(parent, true);
  }

  void SetLeaf(BlockRef block, bool leaf) {
    Entry& entry = entries_[block];
    if (entry.leaf == leaf) return;
    entry.leaf = leaf;
    if (leaf) {
      ++leaf_count_;
      rule_->AddLeaf(block);
    } else {
      --leaf_count_;
      rule_->RemoveLeaf(block);
    }
  }

  const Trace& trace_;
  const CacheSimOptions options_;
  const std::unique_ptr<CacheRule> rule_;
  std::vector<Entry> entries_;
  uint64_t held_count_ = 0;
  uint64_t leaf_count_ = 0;
  uint32_t request_idx_ = kNoRequest;
  CacheHits hits_;
};

}  // namespace

CacheHits SimulateCache(const Trace& trace, CachePolicy policy, const CacheSimOptions& options) {
  return CacheSim(trace, policy, options).Run();
}

}  // namespace kvtier::sim
