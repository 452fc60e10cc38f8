// SPDX-License-Identifier: Apache-2.0
//
// Prefetch: blocks on their way to hbm, in chain order, behind demanded reads.
#include <algorithm>
#include <utility>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::core {
namespace {

// Closed tickets a session may still ask about.
constexpr size_t kTicketsKept = 256;
static_assert(kTicketsKept <= kTicketSlotCount);
// Guesses are planned anew this often.
constexpr TimeMs kPlanEveryMs = 100;
// Those that are due later are not looked at: no context takes as long to read.
constexpr TimeMs kPlanAheadMs = 60'000;
// Clients err about their return by about this share of the time away.
constexpr double kReturnError = 0.25;

}  // namespace

absl::StatusOr<TicketState> StoreCore::Impl::Prefetch(SessionId session_id, NamespaceIdx ns,
                                                      std::span<const Key> keys,
                                                      const PrefetchHint& hint, TimeMs now_ms,
                                                      Effects* effects) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, ns));
  std::vector<EntryIdx> chain;
  for (const Key& key : keys) {
    const EntryIdx idx = Find(ns, key);
    if (idx == kNoEntry || !Visible(At(idx))) break;
    chain.push_back(idx);
  }
  TicketWork* ticket =
      OpenTicket(session, std::move(chain), static_cast<uint32_t>(keys.size()), hint, now_ms);
  Pump(now_ms, effects);
  return StateOf(*ticket);
}

TicketWork* StoreCore::Impl::AddTicket(std::vector<EntryIdx> chain, TimeMs deadline_ms) {
  const TicketId id = NextId();
  TicketWork& ticket = tickets_[id];
  ticket.id = id;
  ticket.deadline_ms = deadline_ms;
  ticket.chain = std::move(chain);
  for (const EntryIdx idx : ticket.chain) ++At(idx).context_refs;
  Enqueue(&ticket);
  return &ticket;
}

void StoreCore::Impl::Enqueue(TicketWork* ticket) {
  const auto before = [this](TicketId a, TicketId b) {
    const TimeMs a_ms = tickets_.at(a).deadline_ms;
    const TimeMs b_ms = tickets_.at(b).deadline_ms;
    return a_ms != b_ms ? a_ms < b_ms : a < b;
  };
  const auto later =
      std::upper_bound(ticket_queue_.begin(), ticket_queue_.end(), ticket->id, before);
  ticket_queue_.insert(later, ticket->id);
  tickets_moved_ = true;
  ticket->queued = true;
}

TicketWork* StoreCore::Impl::OpenTicket(Session* session, std::vector<EntryIdx> chain,
                                        uint32_t asked_count, const PrefetchHint& hint,
                                        TimeMs now_ms) {
  while (session->tickets.size() >= kTicketsKept) {
    const TicketId oldest = session->tickets.front();
    StopTicket(oldest);
    tickets_.erase(oldest);
    session->tickets.pop_front();
  }
  const size_t read_count = WorthReading(chain, hint.prefill_tokens_per_second);
  const auto recompute_count = static_cast<uint32_t>(chain.size() - read_count);
  chain.resize(read_count);
  TicketWork* ticket = AddTicket(std::move(chain), now_ms + hint.needed_in_ms);
  ticket->asked_count = asked_count;
  ticket->recompute_count = recompute_count;
  session->tickets.push_back(ticket->id);
  if (session->board != nullptr) {
    ticket->board = session->board;
    ticket->board_slot = session->next_board_slot++ % kTicketSlotCount;
    shown_tickets_.insert(ticket->id);
  }
  BeginHold(ticket, now_ms);
  return ticket;
}

void StoreCore::Impl::OpenGuess(Context* context, uint64_t returns_in_ms, TimeMs now_ms) {
  TicketWork* ticket = AddTicket(context->chain, now_ms + returns_in_ms);
  ticket->is_guess = true;
  ticket->early_ms = static_cast<TimeMs>(kReturnError * static_cast<double>(returns_in_ms));
  ticket->start_ms = ticket->deadline_ms - ticket->early_ms;
  ticket->held_until_ms = policy::HeldUntilMs(ticket->deadline_ms, now_ms);
  context->ticket = ticket->id;
}

size_t StoreCore::Impl::WorthReading(const std::vector<EntryIdx>& chain,
                                     double prefill_tokens_per_second) const {
  if (chain.empty()) return 0;
  size_t stored_count = 0;
  size_t first_cold = chain.size();
  uint64_t cold_count = 0;
  for (; stored_count < chain.size() && Visible(At(chain[stored_count])); ++stored_count) {
    if (MemoryTier(At(chain[stored_count])) != kNowhere) continue;
    first_cold = std::min(first_cold, stored_count);
    ++cold_count;
  }
  if (cold_count == 0) return chain.size();
  const NamespaceSpec& spec = namespaces_[At(chain.front()).ns].spec;
  const policy::LoadOrRecompute blocks = {
      .first_position_tokens = first_cold * spec.block_tokens,
      .block_count = cold_count,
      .block_tokens = spec.block_tokens,
      .block_bytes = spec.block_bytes,
  };
  return policy::ReadingIsFaster(blocks, Speeds()[kNvme], prefill_tokens_per_second) ? chain.size()
                                                                                     : first_cold;
}

policy::ReadSpeeds StoreCore::Impl::Speeds() const {
  // Blocks from nvme go to hbm or, where that has no room, to host.
  const double to_hbm = SpeedOf(kNvme, kHbm);
  return {0, SpeedOf(kHost, kHbm), to_hbm > 0 ? to_hbm : SpeedOf(kNvme, kHost)};
}

policy::PrefetchTask StoreCore::Impl::TaskOf(const TicketWork& ticket) const {
  policy::PrefetchTask task = {.id = ticket.id,
                               .deadline_ms = ticket.deadline_ms,
                               .is_guess = ticket.is_guess,
                               .early_ms = ticket.early_ms};
  for (size_t i = 0; i < ticket.chain.size(); ++i) {
    const Entry& entry = At(ticket.chain[i]);
    if (!Visible(entry)) break;
    if (entry.replica[kHbm] != kNoReplica || (i < ticket.next && !entry.in_transfer)) continue;
    const size_t tier = FastestTier(entry);
    if (ticket.is_guess && tier == kHost) continue;
    task.pending_bytes[tier] += BlockBytes(entry);
  }
  return task;
}

void StoreCore::Impl::PlanGuesses() {
  if (planned_at_ms_ != 0 && now_ms_ < planned_at_ms_ + kPlanEveryMs) return;
  planned_at_ms_ = now_ms_;
  std::vector<policy::PrefetchTask> tasks;
  bool any_guess = false;
  for (const TicketId id : ticket_queue_) {
    const TicketWork& ticket = tickets_.at(id);
    if (ticket.is_guess && ticket.deadline_ms - ticket.early_ms > now_ms_ + kPlanAheadMs) continue;
    any_guess |= ticket.is_guess;
    tasks.push_back(TaskOf(ticket));
  }
  if (!any_guess) return;
  for (const policy::PrefetchSlot& slot : policy::PlanPrefetch(tasks, Speeds(), now_ms_)) {
    TicketWork& ticket = tickets_.at(slot.id);
    if (ticket.is_guess) ticket.start_ms = slot.start_ms;
  }
}

bool StoreCore::Impl::AdvanceTicket(TicketWork* ticket, Effects* effects) {
  if (ticket->is_guess && now_ms_ >= ticket->held_until_ms) ticket->next = ticket->chain.size();
  for (; ticket->next < ticket->chain.size(); ++ticket->next) {
    const EntryIdx idx = ticket->chain[ticket->next];
    const Entry& entry = At(idx);
    if (!ticket->is_guess && ticket->next >= ticket->held) {
      // More than may be held at all is not read; else it waits for those before it.
      if (*holds_.begin() != std::pair(ticket->deadline_ms, ticket->id)) return false;
      ticket->next = ticket->chain.size();
      return true;
    }
    if (!Visible(entry)) {
      ticket->next = ticket->chain.size();  // what follows a gap is of no use
      return true;
    }
    if (entry.replica[kHbm] != kNoReplica && !entry.in_transfer) continue;
    if (entry.in_transfer) return false;  // look again when that transfer has ended
    if (MemoryTier(entry) == kHost) {
      if (!ticket->is_guess && !PromoteFromHost(ticket, idx, effects)) return false;
      continue;
    }
    if (ticket->is_guess && !GuessHasRoom(idx)) {
      ticket->start_ms = now_ms_ + kPlanEveryMs;  // it is worth more later
      return false;
    }
    const Purpose purpose = ticket->is_guess ? Purpose::kGuess : Purpose::kPromote;
    const ReadStart start = StartRead(idx, purpose, ticket->id, effects);
    if (start == ReadStart::kWait) return false;
    if (start == ReadStart::kStarted) ++ticket->inflight;
  }
  return true;
}

bool StoreCore::Impl::GuessHasRoom(EntryIdx idx) {
  const RoomFor room{
      .account = AccountOf(At(idx)), .footprint = Footprint(kHost, At(idx).ns), .idle_only = true};
  if (!AboveHighWatermark(kHost, room.footprint) && !OverQuota(kHost, room)) return true;
  const auto victim = PickVictim(kHost, room);
  const AccountIdx pool = victim.has_value() ? AccountOf(At(*victim)) : room.account;
  return eviction_->BeatsIdleVictim(static_cast<policy::TierIdx>(kHost), pool, idx);
}

bool StoreCore::Impl::PromoteFromHost(TicketWork* ticket, EntryIdx idx, Effects* effects) {
  Claim(idx);
  const Entry& entry = At(idx);
  if (entry.lease_count > 0) return true;  // read in place
  if (LinkFull(kHost, kHbm, true)) return false;
  if (!HbmHasRoomFor(entry.ns)) return true;
  const SlotOrRoom slot = TakeSlotOrMakeRoom(kHbm, entry.ns, true, 1, effects);
  // Without room it stays on host.
  if (slot.replica == kNoReplica) return slot.room != Room::kLeaving;
  if (MemoryTier(entry) != kHost || entry.in_transfer) {
    // Making room moved the block itself.
    GiveBack(kHbm, slot.replica, AccountOf(entry), BlockBytes(entry));
    return false;
  }
  StartTransfer({.entry = idx,
                 .purpose = Purpose::kPromote,
                 .source = kHost,
                 .target = kHbm,
                 .target_replica = slot.replica,
                 .ticket = ticket->id},
                effects);
  ++ticket->inflight;
  return true;
}

void StoreCore::Impl::CloseTicketIfDone(TicketWork* ticket) {
  if (ticket->closed.has_value() || ticket->next < ticket->chain.size() || ticket->inflight > 0 ||
      holds_.contains({ticket->deadline_ms, ticket->id})) {
    return;
  }
  const std::vector<EntryIdx> chain = std::move(ticket->chain);
  if (ticket->is_guess) {
    tickets_.erase(ticket->id);  // nobody asks for it
  } else {
    ticket->chain = chain;
    ticket->closed = StateOf(*ticket);
    ticket->chain.clear();
    ticket->next = 0;
    shown_tickets_.erase(ticket->id);
    Show(*ticket);
  }
  for (const EntryIdx idx : chain) DropRef(idx);
}

void StoreCore::Impl::StopTicket(TicketId id) {
  const auto it = tickets_.find(id);
  if (it == tickets_.end()) return;
  std::erase(ticket_queue_, id);
  it->second.queued = false;
  EndHold(&it->second);
  it->second.next = it->second.chain.size();
  it->second.inflight = 0;  // what is under way arrives, unattended
  CloseTicketIfDone(&it->second);
}

absl::StatusOr<TicketState> StoreCore::Impl::GetTicket(SessionId session_id, TicketId id) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(session_id));
  const auto it = tickets_.find(id);
  if (it == tickets_.end() ||
      std::find(session->tickets.begin(), session->tickets.end(), id) == session->tickets.end()) {
    return WithReason(NotFound("no ticket %d in this session (any more)", id),
                      reason::kTicketUnknown);
  }
  return StateOf(it->second);
}

absl::Status StoreCore::Impl::CancelTicket(SessionId session_id, TicketId id) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(session_id));
  if (std::find(session->tickets.begin(), session->tickets.end(), id) != session->tickets.end()) {
    StopTicket(id);
  }
  return absl::OkStatus();
}

bool StoreCore::Impl::IsDone(const TicketWork& ticket) const {
  if (ticket.closed.has_value()) return true;
  // One that may hold no more reads on when others are done; whoever waits for it must not wait for
  // them, whose blocks he may be the one to use.
  const bool waits_for_others = !ticket.is_guess && ticket.next >= ticket.held;
  return ticket.inflight == 0 && (ticket.next >= ticket.chain.size() || waits_for_others);
}

void StoreCore::Impl::Show(const TicketWork& ticket) const {
  if (ticket.board == nullptr) return;
  ticket.board->Show(ticket.board_slot, ticket.id,
                     {.done = IsDone(ticket), .moved_block_count = ticket.moved_count});
}

void StoreCore::Impl::ShowOpenTickets() {
  if (!std::exchange(tickets_moved_, false)) return;
  for (const TicketId id : shown_tickets_) Show(tickets_.at(id));
}

TicketState StoreCore::Impl::StateOf(const TicketWork& ticket) const {
  if (ticket.closed.has_value()) return *ticket.closed;
  TicketState state{
      .ticket = ticket.id, .block_count = ticket.asked_count, .board_slot = ticket.board_slot};
  for (const EntryIdx idx : ticket.chain) {
    const Entry& entry = At(idx);
    if (!Visible(entry)) break;
    ++state.covered_block_count;
    if (entry.replica[kHbm] != kNoReplica) ++state.ready_block_count;
  }
  // What follows a gap is of no use.
  if (state.covered_block_count == ticket.chain.size()) {
    state.covered_block_count += ticket.recompute_count;
    state.recompute_block_count = ticket.recompute_count;
  }
  state.done = IsDone(ticket);
  EstimateArrival(ticket, &state);
  return state;
}

void StoreCore::Impl::EstimateArrival(const TicketWork& ticket, TicketState* state) const {
  const policy::PrefetchTask own = TaskOf(ticket);
  for (const uint64_t bytes : own.pending_bytes) state->pending_bytes += bytes;
  state->eta_known = true;
  if (state->pending_bytes == 0) return;
  std::vector<policy::PrefetchTask> tasks;
  for (const auto& [id, other] : tickets_) {
    if (id == ticket.id) {
      tasks.push_back(own);
    } else if (!other.closed.has_value() && other.start_ms <= now_ms_ &&
               (other.next < other.chain.size() || other.inflight > 0)) {
      tasks.push_back(TaskOf(other));
    }
  }
  for (const policy::PrefetchSlot& slot : policy::PlanPrefetch(tasks, Speeds(), now_ms_)) {
    if (slot.id != ticket.id) continue;
    state->eta_known = slot.eta_known;
    if (slot.eta_known) {
      state->eta_ms = static_cast<uint32_t>(std::min<uint64_t>(slot.ready_ms - now_ms_, 3'600'000));
    }
  }
}

}  // namespace kvtier::core
