// SPDX-License-Identifier: Apache-2.0
//
// Contexts: what a conversation holds, and what pausing and resuming it moves.
#include <algorithm>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::core {

absl::StatusOr<Context*> StoreCore::Impl::FindContext(SessionId session, NamespaceIdx ns,
                                                      std::string_view name) {
  KVT_RETURN_IF_ERROR(FindSession(session, ns).status());
  const auto it = contexts_.find(std::pair(ns, std::string(name)));
  if (it == contexts_.end()) {
    return WithReason(NotFound("no context \"%s\" in this namespace; create it first", name),
                      reason::kContextUnknown);
  }
  return &it->second;
}

absl::StatusOr<uint32_t> StoreCore::Impl::CreateContext(SessionId session_id, NamespaceIdx ns,
                                                        std::string_view name, TimeMs now_ms) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, ns));
  const auto key = std::pair(ns, std::string(name));
  const auto known = contexts_.find(key);
  if (known != contexts_.end()) return static_cast<uint32_t>(known->second.chain.size());
  if (contexts_.size() >= options_.contexts_max) {
    return WithReason(
        Exhausted("%d contexts exist, which is the limit; close some", contexts_.size()),
        reason::kLimitReached);
  }
  Context context{.name = key.second, .ns = ns, .owner = session->owner};
  context.last_use_ms = now_ms;
  contexts_.emplace(key, std::move(context));
  return 0;
}

void StoreCore::Impl::Hold(Context* context, EntryIdx idx) {
  Entry& entry = At(idx);
  ++entry.context_refs;
  if (context->active) ++entry.active_count;
  context->chain.push_back(idx);
  Refresh(idx);
}

void StoreCore::Impl::DropRef(EntryIdx idx) {
  Entry& entry = At(idx);
  KVT_CHECK(entry.context_refs > 0);
  --entry.context_refs;
  Refresh(idx);
  EraseIfUnused(idx);
}

void StoreCore::Impl::LetGo(Context* context, size_t from) {
  while (context->chain.size() > from) {
    const EntryIdx idx = context->chain.back();
    context->chain.pop_back();
    if (context->active) --At(idx).active_count;
    DropRef(idx);
  }
}

void StoreCore::Impl::SetActive(Context* context, bool active) {
  if (context->active == active) return;
  context->active = active;
  for (const EntryIdx idx : context->chain) {
    At(idx).active_count += active ? 1U : -1U;
    Refresh(idx);
  }
}

void StoreCore::Impl::Announce(const Context& context, const Expectation& expectation,
                               TimeMs now_ms) {
  if (expectation.next == policy::NextStep::kUnknown && expectation.returns_in_ms == 0) return;
  const bool finished = expectation.next == policy::NextStep::kFinished;
  for (const EntryIdx idx : context.chain) {
    const Entry& entry = At(idx);
    // What another context uses now, or may come back to, is not for this one to give up.
    if (entry.active_count > 0 || (finished && entry.context_refs > 1)) continue;
    if (Visible(entry)) {
      eviction_->Expect(idx, expectation.next, now_ms, expectation.returns_in_ms);
    }
  }
}

absl::StatusOr<uint32_t> StoreCore::Impl::AppendContext(SessionId session, NamespaceIdx ns,
                                                        std::string_view name,
                                                        uint32_t base_block_count,
                                                        std::span<const Key> keys, TimeMs now_ms,
                                                        Effects* effects) {
  KVT_ASSIGN_OR_RETURN(Context * context, FindContext(session, ns, name));
  if (base_block_count > context->chain.size()) {
    return WithReason(OutOfRange("context \"%s\" has %d blocks, fewer than base_block_count %d",
                                 name, context->chain.size(), base_block_count),
                      reason::kContextRange);
  }
  if (base_block_count < context->chain.size()) {
    StopTicket(context->ticket);
    CancelPause(*context, effects);
  }
  const EntryIdx parent = base_block_count == 0 ? kNoEntry : context->chain[base_block_count - 1];
  // New entries are held before the old ones go, so that shared ones stay.
  std::vector<EntryIdx> added = ChainEntries(ns, parent, keys);
  for (const EntryIdx idx : added) ++At(idx).context_refs;
  LetGo(context, base_block_count);
  for (const EntryIdx idx : added) {
    Hold(context, idx);
    DropRef(idx);
  }
  context->last_use_ms = now_ms;
  Pump(now_ms, effects);
  return static_cast<uint32_t>(context->chain.size());
}

uint64_t StoreCore::Impl::HbmBytes(const Context& context) const {
  uint64_t bytes = 0;
  for (const EntryIdx idx : context.chain) {
    if (At(idx).replica[kHbm] != kNoReplica) bytes += BlockBytes(At(idx));
  }
  return bytes;
}

void StoreCore::Impl::PauseContext(SessionId session, NamespaceIdx ns, std::string_view name,
                                   const Expectation& expectation, TimeMs deadline_ms,
                                   TimeMs now_ms,
                                   std::function<void(absl::StatusOr<PauseResult>)> done,
                                   Effects* effects) {
  const auto found = FindContext(session, ns, name);
  absl::Status refusal = found.ok() ? CheckWaiterRoom() : found.status();
  if (!refusal.ok()) {
    effects->replies.push_back(
        [done = std::move(done), refusal = std::move(refusal)] { done(refusal); });
    return;
  }
  Context* context = *found;
  StopTicket(context->ticket);
  CancelPause(*context, effects);
  SetActive(context, false);
  Announce(*context, expectation, now_ms);
  PauseWork pause{.context = {ns, context->name}, .session = session, .deadline_ms = deadline_ms};
  pause.done = std::move(done);
  for (const EntryIdx idx : context->chain) {
    if (At(idx).replica[kHbm] != kNoReplica) pause.to_demote.push_back(idx);
  }
  pauses_.emplace(NextId(), std::move(pause));
  if (expectation.returns_in_ms > 0) OpenGuess(context, expectation.returns_in_ms, now_ms);
  context->last_use_ms = now_ms;
  Pump(now_ms, effects);
}

void StoreCore::Impl::AnswerPause(PauseWork* pause, Effects* effects) {
  PauseResult result{.freed_bytes = pause->freed_bytes};
  const auto context = contexts_.find(pause->context);
  if (context != contexts_.end()) result.resident_bytes = HbmBytes(context->second);
  effects->replies.push_back([done = std::move(pause->done), result] { done(result); });
  pause->done = nullptr;
}

void StoreCore::Impl::CancelPause(const Context& context, Effects* effects) {
  for (auto& [id, pause] : pauses_) {
    if (pause.context.first != context.ns || pause.context.second != context.name) continue;
    pause.to_demote.clear();
    if (pause.done) AnswerPause(&pause, effects);
  }
}

void StoreCore::Impl::FinishPauses(Effects* effects) {
  for (auto it = pauses_.begin(); it != pauses_.end();) {
    PauseWork& pause = it->second;
    if (!pause.to_demote.empty() || pause.inflight > 0) {
      ++it;
      continue;
    }
    if (pause.done) AnswerPause(&pause, effects);
    it = pauses_.erase(it);
  }
}

absl::StatusOr<TicketState> StoreCore::Impl::ResumeContext(SessionId session_id, NamespaceIdx ns,
                                                           std::string_view name,
                                                           const PrefetchHint& hint, TimeMs now_ms,
                                                           Effects* effects) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, ns));
  KVT_ASSIGN_OR_RETURN(Context * context, FindContext(session_id, ns, name));
  StopTicket(context->ticket);
  CancelPause(*context, effects);
  SetActive(context, true);
  context->last_use_ms = now_ms;
  TicketWork* ticket = OpenTicket(session, context->chain,
                                  static_cast<uint32_t>(context->chain.size()), hint, now_ms);
  context->ticket = ticket->id;
  Pump(now_ms, effects);
  return StateOf(*ticket);
}

absl::StatusOr<uint32_t> StoreCore::Impl::ForkContext(SessionId session, NamespaceIdx ns,
                                                      std::string_view parent_name,
                                                      std::string_view name, uint32_t block_count,
                                                      TimeMs now_ms, Effects* effects) {
  KVT_ASSIGN_OR_RETURN(Context * parent, FindContext(session, ns, parent_name));
  if (block_count > parent->chain.size()) {
    return WithReason(OutOfRange("context \"%s\" has %d blocks, fewer than %d", parent_name,
                                 parent->chain.size(), block_count),
                      reason::kContextRange);
  }
  if (contexts_.contains(std::pair(ns, std::string(name)))) {
    return WithReason(Invalid("context \"%s\" exists already; fork under a new name", name),
                      reason::kBadArgument);
  }
  const std::vector<EntryIdx> shared(parent->chain.begin(), parent->chain.begin() + block_count);
  KVT_RETURN_IF_ERROR(CreateContext(session, ns, name, now_ms).status());
  Context& context = contexts_.find(std::pair(ns, std::string(name)))->second;
  for (const EntryIdx idx : shared) Hold(&context, idx);
  Pump(now_ms, effects);
  return block_count;
}

absl::StatusOr<std::vector<Key>> StoreCore::Impl::ContextKeys(SessionId session, NamespaceIdx ns,
                                                              std::string_view name) {
  KVT_ASSIGN_OR_RETURN(const Context* context, FindContext(session, ns, name));
  std::vector<Key> keys;
  keys.reserve(context->chain.size());
  for (const EntryIdx idx : context->chain) keys.push_back(At(idx).key);
  return keys;
}

absl::StatusOr<uint64_t> StoreCore::Impl::CloseContext(SessionId session, NamespaceIdx ns,
                                                       std::string_view name, bool drop,
                                                       TimeMs now_ms, Effects* effects) {
  KVT_ASSIGN_OR_RETURN(Context * context, FindContext(session, ns, name));
  StopTicket(context->ticket);
  CancelPause(*context, effects);
  SetActive(context, false);
  Announce(*context, {.next = policy::NextStep::kFinished}, now_ms);
  uint64_t dropped_bytes = 0;
  while (!context->chain.empty()) {
    const EntryIdx idx = context->chain.back();
    Entry& entry = At(idx);
    const bool shared = entry.context_refs > 1 || entry.child_count[kNvme] > 0 ||
                        entry.lease_count > 0 || entry.has_readers;
    if (drop && !shared && Visible(entry)) {
      dropped_bytes += BlockBytes(entry);
      entry.leaves_for = policy::MissReason::kDropped;
      Drop(idx);
    }
    LetGo(context, context->chain.size() - 1);
  }
  contexts_.erase(std::pair(ns, std::string(name)));
  Pump(now_ms, effects);
  return dropped_bytes;
}

}  // namespace kvtier::core
