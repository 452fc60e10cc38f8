// SPDX-License-Identifier: Apache-2.0
//
// The store core: one owner of truth about blocks, replicas, leases, sessions and contexts. A state
// machine without I/O, threads or clocks: events in (calls, completions, ticks, each with
// `now_ms`), effects out (transfers to start, replies to deliver). The daemon, the model test and
// the crash simulations drive exactly this code.
//
// Life of a block:            Reserve           Commit
//             (absent/ghost) ---------> pending ------> committed --> ... --> ghost/absent
//   pending: one session fills its hbm or host slot; nobody else sees it.
//   committed: at most one memory replica (hbm or host, exclusive) and at most one nvme replica
//   (inclusive: kept on promotion). At most one transfer per block is in flight.
//   ghost: an entry without replica, kept while children or contexts refer to it.
//
// Rules that hold after every event (CheckInvariants):
//   * a replica under lease is neither moved nor freed; a slot is freed only when no transfer, fill
//   or
//     lease touches it, and after its holder's process can no longer reach it (quarantine);
//   * eviction candidates of a tier are exactly the unpinned committed replicas there with no child
//   on
//     that tier or a faster one;
//   * every waiter has a deadline and is answered exactly once.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "policy/miss_table.h"
#include "policy/policy.h"
#include "proto/base/key.h"
#include "proto/base/packed.h"
#include "proto/base/ticket_board.h"
#include "tiers/tier.h"

namespace kvtier::core {

using SessionId = uint64_t;
using NamespaceIdx = uint32_t;
using LeaseId = uint64_t;
using TicketId = uint64_t;
using JobId = uint64_t;
using TimeMs = uint64_t;  // monotonic

// What a tenant may have on each tier, in bytes of slots.
struct TenantLimits {
  // At this it makes room for its blocks by its own blocks only.
  std::array<uint64_t, kTierCount> quota_bytes = {UINT64_MAX, UINT64_MAX, UINT64_MAX};
  // With this or less on a tier it gives up nothing there for others.
  std::array<uint64_t, kTierCount> reserve_bytes{};
};

struct CoreOptions {
  std::array<policy::Watermarks, kTierCount> watermarks;
  policy::Admission nvme_admission = policy::Admission::kAll;
  // Bounds. Reaching one is RESOURCE_EXHAUSTED (LIMIT_REACHED) for the caller.
  uint32_t sessions_max = 1024;
  uint32_t contexts_max = 100'000;
  uint32_t waiters_max = 4096;
  // Of all sessions there ever were, and of what the tiers hold. At most 1 << 24.
  uint32_t namespaces_max = 1U << 24;
  // Transfers in flight per link.
  uint32_t transfers_per_link_max = 32;
  // Blocks that left and are remembered for WhyMiss, 32 bytes each.
  uint32_t departures_max = 1U << 16;
  // By OwnerIdx. Tenants beyond have no quota and no reserve.
  std::vector<TenantLimits> tenants;
  // Events kept for the watchers of a tenant that has some, 80 bytes each. More than 0.
  uint32_t watch_events_max = 1U << 14;
  // First value of session, lease and ticket ids: random, so that ids of an earlier boot are
  // unknown.
  uint64_t first_id = 1;
};

// One transfer for the movers. Both replicas stay put until OnTransferDone(job).
struct Transfer {
  JobId job = 0;
  BlockMeta meta;
  TierId source_tier;
  ReplicaId source = kNoReplica;
  TierId target_tier;
  ReplicaId target = kNoReplica;
  // A read from nvme that nobody waits for yet (Tier::ReadAhead).
  bool is_ahead = false;
};

// What an event asks of the outside. Transfers are started and replies run after the caller has
// left its lock, in any order.
struct Effects {
  std::vector<Transfer> transfers;
  // Replicas on nvme that are being read and that somebody waits for now (Tier::Expedite). Events
  // of several threads may overtake each other: one that comes before its transfer is lost, and
  // the read stays a read ahead.
  std::vector<ReplicaId> expedited;
  std::vector<std::function<void()>> replies;
};

struct PlacedBlock {
  BlockStatus status = BlockStatus::kMiss;
  TierId tier = TierId::kHbm;
  ReplicaId replica = kNoReplica;
  uint32_t crc32c = 0;
};

struct LookupResult {
  // Stored blocks from the start of the chain; the search stops at the first gap.
  std::vector<uint8_t> residency;  // kResidentHbm | ... per block
};

struct AcquireResult {
  LeaseId lease = 0;  // 0 when no block is OK
  std::vector<PlacedBlock> blocks;
};

// What a client says with a prefetch.
struct PrefetchHint {
  // When the blocks are needed, from now; 0: as soon as possible.
  uint64_t needed_in_ms = 0;
  // Tokens that the engine prefills per second where there is no context yet; 0: it does not say.
  double prefill_tokens_per_second = 0;
};

struct TicketState {
  TicketId ticket = 0;
  uint32_t block_count = 0;
  uint32_t covered_block_count = 0;
  uint32_t ready_block_count = 0;
  uint64_t pending_bytes = 0;
  uint32_t eta_ms = 0;
  bool eta_known = false;
  bool done = false;
  // Of the covered blocks, at their end: on nvme and not read, since the engine recomputes them
  // sooner.
  uint32_t recompute_block_count = 0;
  // Of its session's ticket board.
  uint32_t board_slot = 0;
};

// What the client says of a context that it leaves.
struct Expectation {
  policy::NextStep next = policy::NextStep::kUnknown;
  // When it comes back, from now; 0: it does not say.
  uint64_t returns_in_ms = 0;
};

struct PauseResult {
  uint64_t freed_bytes = 0;
  uint64_t resident_bytes = 0;
};

struct NamespaceSpec {
  NamespaceHash hash;
  LayoutFingerprint layout;
  uint32_t block_bytes = 0;
  // 0: not known.
  uint32_t block_tokens = 0;
};

struct TierCounters {
  uint64_t block_count = 0;
  uint64_t pinned_bytes = 0;
  uint64_t quarantined_bytes = 0;
  uint64_t hit_block_count = 0;
  uint64_t evicted_block_count = 0;
  uint64_t corrupt_block_count = 0;
};

// What one tenant has on one tier, and lost there.
struct TenantTierCounters {
  // Slots, footprint and all: stored, being filled or copied to, quarantined.
  uint64_t used_bytes = 0;
  uint64_t pinned_bytes = 0;
  uint64_t block_count = 0;
  // Replicas that left to make room for another tenant.
  uint64_t displaced_block_count = 0;
};

struct TenantCounters {
  std::array<TenantTierCounters, kTierCount> tiers;
  TenantLimits limits;
};

struct TenantsReport {
  // By OwnerIdx; of those seen or configured.
  std::vector<TenantCounters> tenants;
  // Recovered blocks that no session's namespace was opened for yet: nobody's.
  TenantCounters unclaimed;
};

struct LinkCounters {
  uint64_t moved_bytes = 0;
  uint64_t moved_block_count = 0;
  uint64_t failed_block_count = 0;
  uint32_t inflight_count = 0;
};

// Decisions that turned out wrong.
struct RegretCounters {
  // Looked up within an hour after they were evicted, or were not admitted to nvme.
  uint64_t evicted_then_missed_block_count = 0;
  // Read ahead from nvme; and of these, the ones that left memory before anybody used them.
  uint64_t prefetched_block_count = 0;
  uint64_t prefetched_unused_block_count = 0;
};

struct CoreCounters {
  std::array<TierCounters, kTierCount> tiers;
  // [source][target]
  std::array<std::array<LinkCounters, kTierCount>, kTierCount> links;
  uint64_t lookup_block_count = 0;
  uint64_t lookup_hit_block_count = 0;
  uint64_t committed_block_count = 0;
  uint64_t committed_bytes = 0;
  uint64_t acquired_in_place_block_count = 0;
  uint64_t acquired_after_read_block_count = 0;
  uint64_t admission_rejected_block_count = 0;
  RegretCounters regret;
  uint64_t lease_count = 0;
  uint64_t pending_fill_count = 0;
  uint64_t block_count = 0;  // index entries with a replica
  uint32_t session_count = 0;
  uint32_t context_count = 0;
};

struct ContextSummary {
  std::string name;
  OwnerIdx owner = 0;
  bool active = false;
  uint32_t block_count = 0;
  std::array<uint32_t, kTierCount> tier_block_count{};  // by best replica
  uint32_t missing_block_count = 0;
  TimeMs last_use_ms = 0;
};

// Why a block is not found.
struct MissAnswer {
  enum class State : uint8_t { kNeverStored, kStored, kPending, kLeft };
  State state = State::kNeverStored;
  uint8_t residency = 0;  // kStored
  // It is stored, or was, under another namespace than the one that was asked for: with another
  // layout, adapter or salt, or by another tenant.
  bool other_namespace = false;
  policy::Departure departure;  // kLeft
};

// A block can be read on a tier from now on, or no more.
struct BlockEvent {
  NamespaceHash namespace_hash;
  Key key;
  TierId tier = TierId::kHbm;
  // 0: not known.
  uint32_t block_tokens = 0;
  // The block before it in its chain, as far as that is known.
  std::optional<Key> parent = std::nullopt;
  bool is_stored = false;
};

struct WatchedEvents {
  // Of the last one, or the one after which was asked.
  uint64_t sequence = 0;
  // Not all events after that one are kept any more, and none is here.
  bool lost = false;
  std::vector<BlockEvent> events = {};
};

struct WatchedSnapshot {
  std::vector<BlockEvent> events;
  // Where the next part begins.
  uint64_t position = 0;
  bool done = false;
};

struct BlockSummary {
  Key key;
  uint32_t depth = 0;
  uint32_t bytes = 0;
  uint8_t residency = 0;
  uint32_t lease_count = 0;
  uint32_t use_count = 0;
  bool pending = false;
};

// Single-thread: the owner serialises calls (the daemon under one mutex). No call blocks. Times of
// one object never go backwards. Errors of every call taking a session: ABORTED (SESSION_UNKNOWN),
// FAILED_PRECONDITION (NAMESPACE_UNKNOWN). `done` callbacks are put into effects->replies, never
// run inside the call.
class StoreCore {
 public:
  // The tiers outlive the core. `nvme` may be null: no cold tier.
  StoreCore(const CoreOptions& options, SlotSource* hbm, SlotSource* host, SlotSource* nvme,
            std::unique_ptr<policy::EvictionPolicy> eviction);
  ~StoreCore();
  StoreCore(const StoreCore&) = delete;
  StoreCore& operator=(const StoreCore&) = delete;

  // Takes over a replica that Tier::Recover found on nvme. Before any session. False when the core
  // has a replica of that block already, or too many namespaces; the caller frees this one.
  bool Adopt(const BlockMeta& meta, ReplicaId nvme_replica);
  // The same for host; first host, then nvme, which may have the same blocks.
  bool AdoptHost(const BlockMeta& meta, ReplicaId host_replica);
  // The same for nvme at any time: a drive has come back. False also for a block that the core
  // holds on another tier or that is being filled, which may be on its way to nvme.
  bool AdoptLate(const BlockMeta& meta, ReplicaId nvme_replica);

  // See policy::EvictionPolicy.
  std::string SavePolicy() const;
  absl::Status RestorePolicy(std::string_view saved);

  // --- sessions ---
  absl::StatusOr<SessionId> OpenSession(OwnerIdx owner, TimeMs now_ms);
  // The stream ended. Fills become invisible and leases end at once; slots the process can still
  // reach (AttachMapping) stay quarantined until DetachMapping.
  void EndSession(SessionId session, TimeMs now_ms, Effects* effects);
  // The session's process holds its handle connection, and may map slots.
  void AttachMapping(SessionId session);
  // That connection is closed: nothing of the process touches slots any more. Also valid after
  // EndSession.
  void DetachMapping(SessionId session, TimeMs now_ms, Effects* effects);
  // Idempotent: equal specs get equal indices. INVALID_ARGUMENT when the hash is known with another
  // layout or block size, or when a segment of hbm or of host cannot hold a block.
  absl::StatusOr<NamespaceIdx> OpenNamespace(SessionId session, const NamespaceSpec& spec);

  // --- blocks ---
  absl::StatusOr<LookupResult> Lookup(SessionId session, NamespaceIdx ns,
                                      std::span<const Key> keys);
  // Each key's parent is the one before it; the first one's is `parent`. Waits for room until the
  // deadline; per block OK, EXISTS, PENDING, EXHAUSTED or PRECONDITION. `tier` is hbm or host;
  // a fill that hbm can make no room for is placed on host. RESOURCE_EXHAUSTED (QUOTA_REACHED):
  // nothing but the tenant's quota left every block without room.
  void Reserve(SessionId session, NamespaceIdx ns, const std::optional<Key>& parent,
               std::span<const Key> keys, TierId tier, TimeMs deadline_ms, TimeMs now_ms,
               std::function<void(absl::StatusOr<std::vector<PlacedBlock>>)> done,
               Effects* effects);
  // Per key OK or PRECONDITION.
  absl::StatusOr<std::vector<BlockStatus>> Commit(SessionId session, NamespaceIdx ns,
                                                  std::span<const Key> keys,
                                                  std::span<const uint32_t> crc32cs, TimeMs now_ms,
                                                  Effects* effects);
  absl::Status Abort(SessionId session, NamespaceIdx ns, std::span<const Key> keys, TimeMs now_ms,
                     Effects* effects);
  // Leases what is in memory where it is; reads nvme blocks into memory until the deadline.
  void Acquire(SessionId session, NamespaceIdx ns, std::span<const Key> keys, TimeMs deadline_ms,
               TimeMs now_ms, std::function<void(absl::StatusOr<AcquireResult>)> done,
               Effects* effects);
  // Unknown leases are ignored.
  absl::Status Release(SessionId session, std::span<const LeaseId> leases, TimeMs now_ms,
                       Effects* effects);
  absl::StatusOr<uint32_t> ReportBad(SessionId session, NamespaceIdx ns, std::span<const Key> keys,
                                     TimeMs now_ms, Effects* effects);

  // --- prefetch ---
  absl::StatusOr<TicketState> Prefetch(SessionId session, NamespaceIdx ns,
                                       std::span<const Key> keys, const PrefetchHint& hint,
                                       TimeMs now_ms, Effects* effects);
  // NOT_FOUND (TICKET_UNKNOWN).
  absl::StatusOr<TicketState> GetTicket(SessionId session, TicketId ticket);
  absl::Status CancelTicket(SessionId session, TicketId ticket);
  // From now on every ticket that the session is given is shown there, each time it has moved.
  // Ignored when the session has ended.
  void ShowTickets(SessionId session, std::shared_ptr<TicketBoardPage> board);

  // --- contexts: named within a namespace; NOT_FOUND (CONTEXT_UNKNOWN) ---
  absl::StatusOr<uint32_t> CreateContext(SessionId session, NamespaceIdx ns, std::string_view name,
                                         TimeMs now_ms);
  absl::StatusOr<uint32_t> AppendContext(SessionId session, NamespaceIdx ns, std::string_view name,
                                         uint32_t base_block_count, std::span<const Key> keys,
                                         TimeMs now_ms, Effects* effects);
  void PauseContext(SessionId session, NamespaceIdx ns, std::string_view name,
                    const Expectation& expectation, TimeMs deadline_ms, TimeMs now_ms,
                    std::function<void(absl::StatusOr<PauseResult>)> done, Effects* effects);
  absl::StatusOr<TicketState> ResumeContext(SessionId session, NamespaceIdx ns,
                                            std::string_view name, const PrefetchHint& hint,
                                            TimeMs now_ms, Effects* effects);
  absl::StatusOr<uint32_t> ForkContext(SessionId session, NamespaceIdx ns, std::string_view parent,
                                       std::string_view name, uint32_t block_count, TimeMs now_ms,
                                       Effects* effects);
  // Its chain.
  absl::StatusOr<std::vector<Key>> ContextKeys(SessionId session, NamespaceIdx ns,
                                               std::string_view name);
  // Bytes dropped.
  absl::StatusOr<uint64_t> CloseContext(SessionId session, NamespaceIdx ns, std::string_view name,
                                        bool drop, TimeMs now_ms, Effects* effects);

  // --- events ---
  void OnTransferDone(JobId job, const absl::Status& status, TimeMs now_ms, Effects* effects);
  // The contents of a memory tier are gone and it takes nothing any more: every block is a miss
  // there, its fills are void, leases on it last until they are released. What other tiers have
  // stays. For good.
  void LoseTier(TierId tier, TimeMs now_ms, Effects* effects);
  // The nvme tier found this block damaged and dropped it: a miss there, as after a bad read.
  void LoseNvmeBlock(const NamespaceHash& namespace_hash, const Key& key, TimeMs now_ms,
                     Effects* effects);
  // Deadlines, watermarks, retries. At least every 10 ms.
  void Tick(TimeMs now_ms, Effects* effects);
  // Writes every admitted memory block without an nvme replica to nvme; `done` gets the number of
  // blocks written once no such block is left, or at the deadline DEADLINE_EXCEEDED.
  void Flush(TimeMs deadline_ms, TimeMs now_ms, std::function<void(absl::StatusOr<uint64_t>)> done,
             Effects* effects);
  // Answers every waiter with UNAVAILABLE (DRAINING); later waits are refused alike.
  void Drain(TimeMs now_ms, Effects* effects);

  // --- watching: where the blocks of the session's tenant can be read ---
  // Keeps the tenant's events from now on, for all its watchers; their numbers go up by one.
  // Returns that of the last one so far.
  absl::StatusOr<uint64_t> BeginWatch(SessionId session);
  // At most `count_max`, in order.
  absl::StatusOr<WatchedEvents> ReadEvents(SessionId session, uint64_t after, size_t count_max);
  // A part of all blocks that are stored, from position 0 on: of `step` places in the index, which
  // is what it costs. The parts together, and then every
  // event since a BeginWatch before the first part, give what is stored: an event is right
  // whatever the snapshot had of its block.
  absl::StatusOr<WatchedSnapshot> ReadSnapshot(SessionId session, uint64_t position, size_t step);

  // --- looking in ---
  // Something waits for room, a completion or a time: ticks may change something.
  bool Waits() const;
  CoreCounters Counters() const;
  TenantsReport Tenants() const;
  std::vector<ContextSummary> Contexts(size_t limit) const;
  absl::StatusOr<std::vector<BlockSummary>> WhereContext(std::string_view name) const;
  absl::StatusOr<std::vector<BlockSummary>> WhereKey(const Key& key) const;
  // From what is remembered: bounded, the earliest departures are forgotten (never stored, then).
  MissAnswer WhyMiss(const std::optional<NamespaceHash>& asked, const Key& key) const;
  // Aborts with the broken rule. For tests; walks everything.
  void CheckInvariants() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier::core
