// SPDX-License-Identifier: Apache-2.0
//
// State and inner operations of StoreCore. Each topic has its own .cc:
//   index.cc     entries, links, residency, candidates        sessions.cc  sessions, namespaces
//   fills.cc     Reserve, Commit, Abort                       reads.cc     Lookup, Acquire, Release
//   movement.cc  room, demotion, starting transfers           pump.cc      what can start now
//   settle.cc    completions                                  contexts.cc  contexts, pause
//   tickets.cc   prefetch and resume                          looking.cc   counters, invariants
//   holds.cc     what prefetch keeps until it is used         loss.cc      a lost memory tier
//   tenancy.cc   quotas, reserves, whose block leaves         watch.cc     events for watchers
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "daemon/core/entry.h"
#include "daemon/core/entry_index.h"
#include "daemon/core/event_ring.h"
#include "daemon/core/store_core.h"
#include "policy/prefetch.h"

namespace kvtier::core {

struct NamespaceInfo {
  NamespaceSpec spec;
  // Known once a session of the tenant opened it.
  std::optional<OwnerIdx> owner;
};

struct Quarantined {
  size_t tier;
  ReplicaId replica;
  uint64_t bytes;
};

struct Session {
  SessionId id = 0;
  OwnerIdx owner = 0;
  bool mapped = false;
  bool ended = false;
  absl::flat_hash_set<NamespaceIdx> namespaces;
  absl::flat_hash_map<LeaseId, std::vector<EntryIdx>> leases;
  absl::flat_hash_set<EntryIdx> fills;
  std::vector<Quarantined> quarantine;
  std::deque<TicketId> tickets;  // oldest first
  // Null: its tickets are shown nowhere.
  std::shared_ptr<TicketBoardPage> board;
  uint32_t next_board_slot = 0;
};

struct Context {
  std::string name;
  NamespaceIdx ns = 0;
  OwnerIdx owner = 0;
  bool active = true;
  std::vector<EntryIdx> chain = {};
  TicketId ticket = 0;
  TimeMs last_use_ms = 0;
};

// A call that waits for room for its fills.
struct ReserveWaiter {
  SessionId session;
  NamespaceIdx ns;
  std::optional<Key> parent;
  std::vector<Key> keys;
  size_t tier;
  TimeMs deadline_ms;
  size_t next = 0;  // first key without an answer
  // Nothing that could make room for it is under way: it holds nobody else up.
  bool stuck = false;
  std::vector<PlacedBlock> blocks = {};
  std::function<void(absl::StatusOr<std::vector<PlacedBlock>>)> done = {};
};

// A call that waits for reads from nvme.
struct AcquireWaiter {
  SessionId session;
  TimeMs deadline_ms;
  size_t remaining = 0;
  std::vector<EntryIdx> leased = {};
  std::vector<EntryIdx> waiting = {};  // per block, kNoEntry when answered
  AcquireResult result = {};
  std::function<void(absl::StatusOr<AcquireResult>)> done = {};
};
using AcquireWaiterId = uint64_t;

// Block `position` of a waiting Acquire.
struct Reader {
  AcquireWaiterId waiter;
  size_t position;
};

// A pause under way. Outlives its answer, so that what was begun is ended.
struct PauseWork {
  std::pair<NamespaceIdx, std::string> context;
  SessionId session = 0;
  TimeMs deadline_ms = 0;
  std::vector<EntryIdx> to_demote = {};  // back first
  size_t inflight = 0;
  uint64_t freed_bytes = 0;
  std::function<void(absl::StatusOr<PauseResult>)> done = {};  // empty once answered
};
using PauseId = uint64_t;

struct FlushWork {
  TimeMs deadline_ms = 0;
  std::deque<EntryIdx> to_write = {};
  size_t inflight = 0;
  uint64_t written_count = 0;
  std::function<void(absl::StatusOr<uint64_t>)> done = {};
};

struct TicketWork {
  TicketId id = 0;
  std::vector<EntryIdx> chain;  // referred to (context_refs) until closed
  uint32_t asked_count = 0;
  // Stored blocks after the chain that are not worth reading.
  uint32_t recompute_count = 0;
  TimeMs deadline_ms = 0;
  // Nobody asked: the client only said when it comes back.
  bool is_guess = false;
  TimeMs early_ms = 0;
  TimeMs start_ms = 0;
  size_t next = 0;
  size_t inflight = 0;
  bool queued = false;
  // Of the chain, from its start: blocks that do not leave host before they are used.
  size_t held = 0;
  TimeMs held_until_ms = 0;
  std::optional<TicketState> closed;  // the last word on it
  // Null: it is shown nowhere.
  std::shared_ptr<TicketBoardPage> board;
  uint32_t board_slot = 0;
  // Since it was given out.
  uint32_t moved_count = 0;
};

enum class Purpose : uint8_t { kDemote, kPause, kFlush, kDemandRead, kPromote, kGuess };

struct Job {
  EntryIdx entry = kNoEntry;
  Purpose purpose = Purpose::kDemote;
  size_t source = 0;
  size_t target = 0;
  ReplicaId target_replica = kNoReplica;
  uint64_t footprint = 0;  // on the source tier
  PauseId pause = 0;
  TicketId ticket = 0;
  uint64_t flush = 0;
};

struct LinkState {
  LinkCounters counters;
  TimeMs busy_since_ms = 0;
  uint64_t busy_ms = 0;
  uint64_t measured_bytes = 0;
};

// A tenant's, which is OwnerIdx + 1, or kUnclaimed.
using AccountIdx = uint32_t;
inline constexpr AccountIdx kUnclaimed = 0;

struct Account {
  TenantCounters counters;
  // Source bytes of demotions in flight.
  std::array<uint64_t, kTierCount> leaving_bytes{};
};

// Who wants room on a tier, and how.
struct RoomFor {
  AccountIdx account = kUnclaimed;
  // Of one block there; 0: for nothing new, the tier is to become emptier.
  uint64_t footprint = 0;
  // It displaces no block of an active context.
  bool idle_only = false;
};

class StoreCore::Impl {
 public:
  Impl(const CoreOptions& options, SlotSource* hbm, SlotSource* host, SlotSource* nvme,
       std::unique_ptr<policy::EvictionPolicy> eviction)
      : options_(options),
        tiers_{hbm, host, nvme},
        eviction_(std::move(eviction)),
        departures_(options.departures_max),
        next_id_(options.first_id) {
    accounts_.resize(options.tenants.size() + 1);
    for (size_t owner = 0; owner < options.tenants.size(); ++owner) {
      accounts_[owner + 1].counters.limits = options.tenants[owner];
    }
  }

  std::string SavePolicy() const { return eviction_->Save(); }
  absl::Status RestorePolicy(std::string_view saved) { return eviction_->Restore(saved); }

  // --- index.cc ---
  Entry& At(EntryIdx idx) { return index_.At(idx); }
  const Entry& At(EntryIdx idx) const { return index_.At(idx); }
  EntryIdx Find(NamespaceIdx ns, const Key& key) const { return index_.Find(ns, key); }
  // Finds or makes a ghost; links it to `parent` when it has no parent yet.
  EntryIdx FindOrAdd(NamespaceIdx ns, const Key& key, EntryIdx parent, uint32_t depth);
  // The chain `keys` after `parent` as entries, ghosts where unknown.
  std::vector<EntryIdx> ChainEntries(NamespaceIdx ns, EntryIdx parent, std::span<const Key> keys);
  static size_t FastestTier(const Entry& entry);
  // The tier on which its parent counts it.
  static size_t CountedTier(const Entry& entry);
  uint32_t BlockBytes(const Entry& entry) const { return namespaces_[entry.ns].spec.block_bytes; }
  static uint8_t Residency(const Entry& entry);
  static bool Visible(const Entry& entry);
  // The memory tier that holds it, or kNowhere.
  static size_t MemoryTier(const Entry& entry);
  bool IsCandidate(const Entry& entry, size_t tier) const;
  static bool IsPinned(const Entry& entry, size_t tier);
  policy::BlockFacts Facts(const Entry& entry) const;
  BlockMeta Meta(const Entry& entry) const;
  void LinkParent(EntryIdx idx, EntryIdx parent);
  void SetReplica(EntryIdx idx, size_t tier, ReplicaId replica);
  void SetLeaving(EntryIdx idx, size_t leaving_to);
  void CountInParent(EntryIdx parent, size_t old_tier, size_t new_tier);
  // Tells policy and counters what changed. After every change of an entry.
  void Refresh(EntryIdx idx);
  void Touch(EntryIdx idx, uint64_t seq, TimeMs now_ms);
  static void SetLastUse(Entry* entry, uint64_t seq);
  static uint64_t PolicyKey(const Key& key);
  void FreeReplica(EntryIdx idx, size_t tier);
  // Remembers why a committed block left its last tier, which was `tier`.
  void RecordDeparture(const Entry& entry, size_t tier);
  // Counts lookups of blocks that should not have left.
  void CountRegret(const Key& key);
  // Frees every replica, or marks the entry doomed when something still touches it.
  void Drop(EntryIdx idx);
  void DropIfDoomed(EntryIdx idx);
  // Removes ghosts nobody refers to, from `idx` towards the root.
  void EraseIfUnused(EntryIdx idx);

  // --- sessions.cc ---
  absl::StatusOr<Session*> FindSession(SessionId session);
  absl::StatusOr<Session*> FindSession(SessionId session, NamespaceIdx ns);
  absl::StatusOr<SessionId> OpenSession(OwnerIdx owner);
  void EndSession(SessionId session, TimeMs now_ms, Effects* effects);
  void DetachMapping(SessionId session, TimeMs now_ms, Effects* effects);
  void EndLeases(Session* session);
  void FreeQuarantine(Session* session);
  absl::StatusOr<NamespaceIdx> OpenNamespace(SessionId session, const NamespaceSpec& spec);
  // RESOURCE_EXHAUSTED (LIMIT_REACHED).
  absl::StatusOr<NamespaceIdx> AddNamespace(const NamespaceSpec& spec);
  absl::Status CheckWaiterRoom() const;
  uint64_t NextId() { return next_id_++; }

  // --- fills.cc ---
  void Reserve(ReserveWaiter waiter, TimeMs now_ms, Effects* effects);
  // True when every key has its answer; false when it waits for room.
  bool AdvanceReserve(ReserveWaiter* waiter, Effects* effects);
  // The answer for the next key if it needs no slot.
  std::optional<BlockStatus> AnswerWithoutSlot(const ReserveWaiter& waiter) const;
  EntryIdx ParentOfNext(const ReserveWaiter& waiter) const;
  PlacedBlock TakeFillSlot(ReserveWaiter* waiter, Effects* effects);
  void BeginFill(ReserveWaiter* waiter, const PlacedBlock& slot);
  void FinishReserve(ReserveWaiter* waiter, BlockStatus rest, Effects* effects) const;
  absl::StatusOr<std::vector<BlockStatus>> Commit(SessionId session, NamespaceIdx ns,
                                                  std::span<const Key> keys,
                                                  std::span<const uint32_t> crc32cs, TimeMs now_ms,
                                                  Effects* effects);
  absl::Status Abort(SessionId session, NamespaceIdx ns, std::span<const Key> keys, TimeMs now_ms,
                     Effects* effects);
  void AbandonFill(Session* session, EntryIdx idx, bool quarantine);

  // --- reads.cc ---
  absl::StatusOr<LookupResult> Lookup(SessionId session, NamespaceIdx ns,
                                      std::span<const Key> keys);
  void Acquire(SessionId session, NamespaceIdx ns, std::span<const Key> keys, TimeMs deadline_ms,
               TimeMs now_ms, std::function<void(absl::StatusOr<AcquireResult>)> done,
               Effects* effects);
  // Pins the memory replica and says where it is.
  PlacedBlock LeaseBlock(EntryIdx idx, std::vector<EntryIdx>* leased);
  // Answers whoever waits for a read of this entry.
  void WakeReaders(EntryIdx idx, BlockStatus failure, Effects* effects);
  void FinishAcquire(AcquireWaiterId id, BlockStatus rest, Effects* effects);
  void StopReading(EntryIdx idx, AcquireWaiterId id);
  absl::Status Release(SessionId session, std::span<const LeaseId> leases, TimeMs now_ms,
                       Effects* effects);
  void Unlease(EntryIdx idx);
  absl::StatusOr<uint32_t> ReportBad(SessionId session, NamespaceIdx ns, std::span<const Key> keys,
                                     TimeMs now_ms, Effects* effects);

  // --- pump.cc ---
  // Starts whatever can start now. After every event.
  void Pump(TimeMs now_ms, Effects* effects);
  void PumpReads(Effects* effects);
  void PumpReserves(Effects* effects);
  void PumpPauses(Effects* effects);
  void PumpTickets(Effects* effects);
  void PumpWatermarks(Effects* effects);
  void PumpFlush(Effects* effects);
  void Tick(TimeMs now_ms, Effects* effects);
  void ExpireWaiters(TimeMs now_ms, Effects* effects);
  void Flush(TimeMs deadline_ms, std::function<void(absl::StatusOr<uint64_t>)> done);
  void FinishFlushes(Effects* effects);
  void Drain(Effects* effects);

  // --- movement.cc ---
  // A slot on a memory tier for a block of `ns`, dropping at once what can go at once.
  // RESOURCE_EXHAUSTED: something must move first. UNAVAILABLE: the tier takes nothing now, however
  // much moves.
  absl::StatusOr<ReplicaId> TakeSlot(size_t tier, NamespaceIdx ns, const RoomFor& room);
  // Puts so many blocks of a memory tier on their way out.
  enum class Room {
    kFreed,    // something went at once: try again
    kLeaving,  // wait for a completion
    kNone,     // nothing can leave
  };
  Room MakeRoom(size_t tier, const RoomFor& room_for, size_t block_count, Effects* effects);
  // What is on its way out that will be room for it.
  uint64_t LeavingBytes(size_t tier, const RoomFor& room) const;
  // TakeSlot, with MakeRoom as long as that frees at once. `blocks_wanted`: how many slots the
  // caller will take in all, so that a long fill or read does not wait once a block.
  struct SlotOrRoom {
    ReplicaId replica = kNoReplica;
    Room room = Room::kNone;
  };
  SlotOrRoom TakeSlotOrMakeRoom(size_t tier, NamespaceIdx ns, bool idle_only, size_t blocks_wanted,
                                Effects* effects);
  enum class Demotion {
    kFreed,
    kStarted,
    kBlocked,  // wait for a completion
    kStuck,    // the tier below can make no room
  };
  Demotion Demote(size_t tier, EntryIdx idx, const RoomFor& room, size_t blocks_wanted,
                  Effects* effects);
  Demotion DemoteFromHbm(EntryIdx idx, Purpose purpose, PauseId pause, size_t blocks_wanted,
                         Effects* effects);
  // Off a memory tier: dropped at once if nvme has it or takes nothing, else written there first.
  Demotion DemoteToNvme(size_t source, EntryIdx idx, Purpose purpose, PauseId pause,
                        Effects* effects);
  // Frees the replica; a block that is on no other tier is lost, which is counted.
  void EvictReplica(EntryIdx idx, size_t tier);
  // Drops the coldest blocks of nvme as needed; kNoReplica when nvme takes nothing.
  ReplicaId TakeNvmeSlot(EntryIdx idx);
  enum class ReadStart { kStarted, kWait, kNoRoom };
  // To hbm if it has room for it, else to host; a guess to host only.
  ReadStart StartRead(EntryIdx idx, Purpose purpose, TicketId ticket, Effects* effects);
  bool AboveHighWatermark(size_t tier, uint64_t more_bytes) const;
  uint64_t Footprint(size_t tier, NamespaceIdx ns) const;
  bool LinkFull(size_t source, size_t target, bool background) const;
  // Bytes per millisecond; 0: not measured yet.
  double SpeedOf(size_t source, size_t target) const;
  void StartTransfer(Job job, Effects* effects);

  // --- settle.cc ---
  void OnTransferDone(JobId job, const absl::Status& status, TimeMs now_ms, Effects* effects);
  void FinishMemoryMove(const Job& job, const absl::Status& status);
  void FinishNvmeWrite(const Job& job, const absl::Status& status);
  void FinishNvmeRead(const Job& job, const absl::Status& status, Effects* effects);
  // The bytes of a memory replica are not what was committed.
  void OnBadSource(EntryIdx idx, size_t tier);
  void CountTransfer(const Job& job, const absl::Status& status, TimeMs now_ms);
  // Tells the pause, ticket or flush that asked for it.
  void SettleJob(const Job& job, bool left_hbm);

  // --- loss.cc ---
  void LoseTier(size_t tier, TimeMs now_ms, Effects* effects);
  void LoseNvmeBlock(const NamespaceHash& namespace_hash, const Key& key, TimeMs now_ms,
                     Effects* effects);

  // --- contexts.cc ---
  absl::StatusOr<Context*> FindContext(SessionId session, NamespaceIdx ns, std::string_view name);
  absl::StatusOr<uint32_t> CreateContext(SessionId session, NamespaceIdx ns, std::string_view name,
                                         TimeMs now_ms);
  absl::StatusOr<uint32_t> AppendContext(SessionId session, NamespaceIdx ns, std::string_view name,
                                         uint32_t base_block_count, std::span<const Key> keys,
                                         TimeMs now_ms, Effects* effects);
  void Hold(Context* context, EntryIdx idx);
  void LetGo(Context* context, size_t from);
  void DropRef(EntryIdx idx);
  void SetActive(Context* context, bool active);
  // Tells the policy what the client said of a context that is not active any more.
  void Announce(const Context& context, const Expectation& expectation, TimeMs now_ms);
  void PauseContext(SessionId session, NamespaceIdx ns, std::string_view name,
                    const Expectation& expectation, TimeMs deadline_ms, TimeMs now_ms,
                    std::function<void(absl::StatusOr<PauseResult>)> done, Effects* effects);
  void CancelPause(const Context& context, Effects* effects);
  void FinishPauses(Effects* effects);
  void AnswerPause(PauseWork* pause, Effects* effects);
  uint64_t HbmBytes(const Context& context) const;
  absl::StatusOr<TicketState> ResumeContext(SessionId session, NamespaceIdx ns,
                                            std::string_view name, const PrefetchHint& hint,
                                            TimeMs now_ms, Effects* effects);
  absl::StatusOr<uint32_t> ForkContext(SessionId session, NamespaceIdx ns, std::string_view parent,
                                       std::string_view name, uint32_t block_count, TimeMs now_ms,
                                       Effects* effects);
  absl::StatusOr<std::vector<Key>> ContextKeys(SessionId session, NamespaceIdx ns,
                                               std::string_view name);
  absl::StatusOr<uint64_t> CloseContext(SessionId session, NamespaceIdx ns, std::string_view name,
                                        bool drop, TimeMs now_ms, Effects* effects);

  // --- tickets.cc ---
  absl::StatusOr<TicketState> Prefetch(SessionId session, NamespaceIdx ns,
                                       std::span<const Key> keys, const PrefetchHint& hint,
                                       TimeMs now_ms, Effects* effects);
  TicketWork* OpenTicket(Session* session, std::vector<EntryIdx> chain, uint32_t asked_count,
                         const PrefetchHint& hint, TimeMs now_ms);
  // A ticket of nobody: brings a paused context's blocks from nvme to host shortly before it comes
  // back.
  void OpenGuess(Context* context, uint64_t returns_in_ms, TimeMs now_ms);
  TicketWork* AddTicket(std::vector<EntryIdx> chain, TimeMs deadline_ms);
  void Enqueue(TicketWork* ticket);
  // The blocks at the end of a chain that are read from nvme only if that is faster.
  size_t WorthReading(const std::vector<EntryIdx>& chain, double prefill_tokens_per_second) const;
  policy::ReadSpeeds Speeds() const;
  policy::PrefetchTask TaskOf(const TicketWork& ticket) const;
  // When guesses may begin, now and then.
  void PlanGuesses();
  absl::StatusOr<TicketState> GetTicket(SessionId session, TicketId ticket);
  absl::Status CancelTicket(SessionId session, TicketId ticket);
  void StopTicket(TicketId ticket);
  TicketState StateOf(const TicketWork& ticket) const;
  // Nothing of it moves, and nothing will that does not depend on others.
  bool IsDone(const TicketWork& ticket) const;
  void Show(const TicketWork& ticket) const;
  // Those that may have moved since the last time.
  void ShowOpenTickets();
  // False when it must wait for a transfer or a place on a link.
  bool AdvanceTicket(TicketWork* ticket, Effects* effects);
  // A guess may bring the block to host: it is worth more than what leaves for it.
  bool GuessHasRoom(EntryIdx idx);
  bool PromoteFromHost(TicketWork* ticket, EntryIdx idx, Effects* effects);
  // Keeps the last state and lets the chain go once nothing more will move.
  void CloseTicketIfDone(TicketWork* ticket);
  void EstimateArrival(const TicketWork& ticket, TicketState* state) const;

  // --- holds.cc ---
  // Begins to hold the blocks of a ticket, where earlier deadlines leave room.
  void BeginHold(TicketWork* ticket, TimeMs now_ms);
  // Lets its blocks leave as they may.
  void EndHold(TicketWork* ticket);
  // Stops tickets whose blocks were used, or were not used in time.
  void EndHolds();
  // Gives what may be held to the earliest deadlines.
  void ShareHolds();
  // False: as much is held as may be.
  bool HoldNext(TicketWork* ticket, uint64_t held_bytes_max);
  void LetLastGo(TicketWork* ticket);
  // Lets the last held block of a ticket go to others; it is read again when they are done.
  void GiveUpLast(TicketWork* ticket);
  // The latest deadline of those whose blocks may leave for `room` gives one up, so that something
  // can leave host. False: there is none.
  bool YieldHold(const RoomFor& room);
  uint64_t HeldBytesMax() const;
  // Making room on hbm for a background read would not take from a block that is needed sooner.
  bool HbmHasRoomFor(NamespaceIdx ns);

  // --- tenancy.cc ---
  AccountIdx AccountOf(NamespaceIdx ns) const;
  AccountIdx AccountOf(const Entry& entry) const {
    return entry.is_unclaimed ? kUnclaimed : AccountOf(entry.ns);
  }
  Account& AccountAt(AccountIdx account);
  // Blocks that are found on its tiers now are nobody's: no tenant has opened it.
  bool IsUnclaimed(NamespaceIdx ns) const;
  // A slot was taken, or is given back.
  void Charge(size_t tier, AccountIdx account, uint64_t footprint);
  void ChargeAdopted(size_t tier, AccountIdx account, uint64_t footprint);
  void GiveBack(size_t tier, ReplicaId replica, AccountIdx account, uint32_t block_bytes);
  // The account has no room for one more such block.
  bool OverQuota(size_t tier, const RoomFor& room) const;
  // What others may not take from it, were a block of this footprint to leave.
  bool IsProtected(size_t tier, AccountIdx account, uint64_t footprint) const;
  // Whose block leaves for `room`, and which: over quota one of its own; else of the account that
  // is most above its fair share, by the policy's order within it.
  std::optional<EntryIdx> PickVictim(size_t tier, const RoomFor& room) const;
  void CountDisplaced(size_t tier, AccountIdx victim, AccountIdx taker);
  // Gives a recovered block to the tenant that has opened its namespace.
  void Claim(EntryIdx idx);
  void ClaimSome();
  // Makes accounts smaller that came to be over quota, as by Claim.
  void PumpQuotas(Effects* effects);
  absl::Status QuotaReached(AccountIdx account) const;
  TenantsReport Tenants() const;
  void CheckAccounts() const;

  // --- watch.cc ---
  // Null: nobody of the tenant has watched yet.
  EventRing* RingOf(AccountIdx account) const;
  void TellWatchers(EntryIdx idx, uint8_t residency);
  BlockEvent Expand(const RingEvent& event) const;
  absl::StatusOr<uint64_t> BeginWatch(SessionId session);
  absl::StatusOr<WatchedEvents> ReadEvents(SessionId session, uint64_t after, size_t count_max);
  absl::StatusOr<WatchedSnapshot> ReadSnapshot(SessionId session, uint64_t position, size_t step);

  // --- looking.cc ---
  bool Waits() const;
  bool Adopt(const BlockMeta& meta, size_t tier, ReplicaId replica);
  bool AdoptLate(const BlockMeta& meta, ReplicaId nvme_replica);
  CoreCounters Counters() const;
  std::vector<ContextSummary> Contexts(size_t limit) const;
  BlockSummary Summary(const Entry& entry) const;
  absl::StatusOr<std::vector<BlockSummary>> WhereContext(std::string_view name) const;
  absl::StatusOr<std::vector<BlockSummary>> WhereKey(const Key& key) const;
  MissAnswer WhyMiss(const std::optional<NamespaceHash>& asked, const Key& key) const;
  void CheckInvariants() const;
  void CheckHolds() const;
  void CheckEntry(EntryIdx idx, const std::vector<std::array<uint32_t, kTierCount>>& child_count,
                  const std::vector<uint32_t>& child_links) const;

  const CoreOptions options_;
  const std::array<SlotSource*, kTierCount> tiers_;
  const std::unique_ptr<policy::EvictionPolicy> eviction_;

  policy::MissTable departures_;

  EntryIndex index_;
  std::vector<NamespaceInfo> namespaces_;
  absl::flat_hash_map<NamespaceHash, NamespaceIdx> namespace_of_hash_;

  absl::flat_hash_map<SessionId, std::unique_ptr<Session>> sessions_;
  std::map<std::pair<NamespaceIdx, std::string>, Context, std::less<>> contexts_;

  std::list<ReserveWaiter> reserve_waiters_;  // first come, first served
  std::map<AcquireWaiterId, AcquireWaiter> acquire_waiters_;
  absl::flat_hash_map<EntryIdx, std::vector<Reader>> readers_of_;
  // The session that fills a pending block.
  absl::flat_hash_map<EntryIdx, SessionId> filler_of_;
  std::deque<EntryIdx> reads_wanted_;
  std::map<PauseId, PauseWork> pauses_;
  std::map<uint64_t, FlushWork> flushes_;
  std::map<TicketId, TicketWork> tickets_;
  // Earliest deadline first.
  std::deque<TicketId> ticket_queue_;
  // Not closed, and shown on a board.
  absl::flat_hash_set<TicketId> shown_tickets_;
  bool tickets_moved_ = false;
  // Tickets that hold blocks or wait for it.
  std::set<std::pair<TimeMs, TicketId>> holds_;
  // By the last block of its chain: its use is that of the ticket.
  absl::flat_hash_map<EntryIdx, std::vector<TicketId>> holds_of_last_;
  std::vector<TicketId> used_tickets_;
  std::vector<TicketId> gave_up_;                       // a block, and have to wait again
  absl::flat_hash_map<EntryIdx, uint32_t> held_count_;  // tickets that hold a block
  uint64_t held_bytes_ = 0;
  TimeMs next_hold_end_ms_ = 0;
  bool holds_ended_ = false;  // since they were shared last
  TimeMs planned_at_ms_ = 0;

  absl::flat_hash_map<JobId, Job> jobs_;
  std::array<std::array<LinkState, kTierCount>, kTierCount> links_;
  // Source bytes of demotions in flight.
  std::array<uint64_t, kTierCount> leaving_bytes_{};
  std::array<bool, kTierCount> draining_tier_{};
  std::array<bool, kTierCount> lost_tier_{};

  std::vector<Account> accounts_;                  // by AccountIdx
  std::vector<std::unique_ptr<EventRing>> rings_;  // by AccountIdx
  // Who took the last slot: what leaves at a watermark leaves for it.
  std::array<AccountIdx, kTierCount> last_taker_{};
  bool over_quota_ = false;
  // The first entry that may be unclaimed though its namespace is not.
  EntryIdx claim_next_ = kNoEntry;
  // Of the reads wanted, those at the front that wait for their own tenant's blocks to leave.
  size_t limited_read_count_ = 0;

  CoreCounters counters_;
  uint64_t next_id_;
  uint64_t use_seq_ = 0;
  TimeMs now_ms_ = 0;
  bool draining_ = false;
};

}  // namespace kvtier::core
