// SPDX-License-Identifier: Apache-2.0
//
// The library an inference engine links against: sessions, mapped tiers, zero-copy leases,
// contexts.
//
//   auto client = kvtier::client::Client::Connect({.run_dir = "/run/kvtierd"});
//   auto ns = (*client)->RegisterLayout(layout);
//   auto fill = (*client)->Reserve(*ns, parent, keys);        // slots, mapped into this process
//   ... seal into fill->blocks[i].bytes ...
//   (*client)->Commit(*ns, *fill);
//   auto lease = (*client)->Acquire(*ns, keys);               // bytes in place, no copy
//   ... decode over lease->blocks()[i].bytes ...
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtier/tls.h"
#include "proto/base/key.h"
#include "proto/base/layout.h"
#include "proto/base/packed.h"

namespace kvtier {
class CudaDriver;  // tiers/cuda/driver.h
}

namespace kvtier::client {

struct ClientOptions {
  // Directory of the daemon's sockets: kvtierd.sock, handles.sock.
  std::string run_dir = "/run/kvtierd";
  // With an address, the daemon there instead of the sockets.
  TcpOptions tcp = {};
  // Shown to operators, e.g. "vllm rank 0". At most 128 bytes.
  std::string client_name = "kvtier-client";
  // Deadline of calls that only touch the index.
  uint32_t control_timeout_ms = 1000;
  // Deadline of calls that may move bytes: Acquire, Reserve, PauseContext.
  uint32_t transfer_timeout_ms = 10'000;
  // How long Connect, and a call that finds the daemon gone, wait for it to answer again.
  uint32_t reconnect_timeout_ms = 10'000;
  // For a daemon whose hbm is on a GPU; null: the CUDA driver of this machine is loaded when the
  // first such slot is to be mapped. For tests.
  std::shared_ptr<CudaDriver> cuda = nullptr;
};

// A namespace this client opened. Cheap to copy; stays valid over daemon restarts (the client opens
// it again in each new session). Keys are built with HashBlock(hash, ...) or, of an engine's own
// hashes, with HashEngineBlock(hash, ...).
struct Namespace {
  uint32_t client_idx = 0;
  NamespaceHash hash;
  LayoutFingerprint layout;
  uint32_t block_bytes = 0;
  // Another engine of this tenant gave another probe for the same hash domain: what it stored is
  // not found here. Its hashes have another seed, usually.
  bool hash_domain_differs = false;
};

enum class Residency : uint8_t { kHbm = 1, kHost = 2, kNvme = 4 };

// One block of a fill or lease. `bytes` is the slot in the mapped tier: writable in a fill,
// read-only by contract (and by mapping) in a lease; empty unless status is kOk.
//
// A slot on a GPU has a `device_address` in its place: a device pointer (CUdeviceptr) of this
// process, valid in the primary context of `device_ordinal`, for kernels on the caller's own
// streams. There, read-only is a contract alone.
struct MappedBlock {
  BlockStatus status = BlockStatus::kMiss;
  // 1 hbm, 2 host.
  uint8_t tier = 0;
  std::span<std::byte> bytes{};
  uint32_t crc32c = 0;
  // 0: not on a GPU. Namespace::block_bytes of it are the slot's.
  uint64_t device_address = 0;
  int device_ordinal = 0;
};

// A stream of the caller's: what cudaStream_t or CUstream is. Null: the legacy default stream.
struct DeviceStream {
  void* handle = nullptr;
};

// Slots reserved for filling. Void after the daemon restarts: Commit then answers ABORTED, but
// writing into the slots stays harmless for as long as the Fill, or a copy of it, lives. Slots of a
// session that ended are reused only after that, so a Fill is destroyed when it is committed or
// given up.
struct Fill {
  uint64_t session_generation = 0;
  std::vector<Key> keys;
  std::vector<MappedBlock> blocks;
  // Keeps the mappings alive that the spans point into.
  std::vector<std::shared_ptr<const void>> mappings;
};

class Client;
class CompletionQueue;
class ReadTarget;

// Blocks leased for reading. Move-only; ends the lease when destroyed. Must not outlive its Client.
// After the daemon restarted, the mapped bytes stay readable until the Lease is destroyed, and are
// still those of the blocks: memory of a dead daemon is reused by nobody.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease();

  // One per key asked for, in order.
  std::span<const MappedBlock> blocks() const { return blocks_; }
  // Blocks from the start whose status is kOk.
  size_t ok_prefix_count() const;
  // Ends the lease now. Idempotent. Errors are of no consequence to the caller: the session's end
  // releases what a lost message did not.
  void Release();

 private:
  friend class Client;
  Client* client_ = nullptr;
  uint64_t session_generation_ = 0;
  uint64_t lease_id_ = 0;
  std::vector<MappedBlock> blocks_;
  // Keeps the mappings alive that the spans point into.
  std::vector<std::shared_ptr<const void>> mappings_;
};

class TicketBoard;

// What Ticket::Poll answers.
enum class TicketPoll : uint8_t {
  kMoving,
  // Nothing moves now: see Ticket::done.
  kDone,
  // It cannot be told without a call (Client::GetTicket): the daemon shows no tickets, the session
  // has ended, or the ticket is older than the last 256.
  kAsk,
};

// Answer to a prefetch or resume; see kvtier.v1.Ticket.
struct Ticket {
  uint64_t ticket_id = 0;
  uint32_t block_count = 0;
  uint32_t covered_block_count = 0;
  uint32_t ready_block_count = 0;
  uint64_t pending_bytes = 0;
  uint32_t eta_ms = 0;
  bool eta_known = false;
  // Nothing moves now. May become false again when blocks that other tickets hold are used.
  bool done = false;
  // Of the covered blocks, at their end: on nvme and left there, since the engine recomputes them
  // sooner.
  uint32_t recompute_block_count = 0;
  // Where Poll looks. Null: nowhere.
  uint32_t board_slot = 0;
  std::shared_ptr<const TicketBoard> board = nullptr;

  // How it stands now, by two loads from memory that the daemon writes: no call, no lock, no
  // waiting. `moved_block_count`, if given, is set to the blocks that have arrived since the ticket
  // was given out (not with kAsk). Thread-safe; works on copies, and after the client's end.
  TicketPoll Poll(uint32_t* moved_block_count = nullptr) const;
};

// What became of one action of an envelope of hints.
struct HintOutcome {
  std::string action_id;
  // "accepted", "clipped" (a part of it), "deferred" (later), "rejected" (not understood, or not
  // possible), "missing" (nothing here that it is about).
  std::string outcome;
  // Why, in words; empty if accepted.
  std::string detail;
  // To be asked about with GetTicket; 0: nothing moves for it.
  uint64_t ticket_id = 0;
};

struct PauseResult {
  uint64_t freed_bytes = 0;
  uint64_t resident_bytes = 0;
};

struct ClientStats {
  // Payload bytes this library copied: by Write and Read, never for fills and leases.
  uint64_t copied_bytes = 0;
  // Segments mapped in the present session, read-only and writable ones apart.
  uint64_t mapped_segment_count = 0;
  // Sessions opened after the first.
  uint64_t reopen_count = 0;
};

// A connection to one daemon. Thread-safe; calls block until answered or until their deadline.
// Destroyed after the last call has returned and the last Lease has ended; that takes no waiting
// for the daemon.
//
// When the daemon restarts, the call that notices re-opens the session (within
// reconnect_timeout_ms) and namespaces. Lookup, Acquire, Prefetch and context calls are then
// repeated once; Reserve and Commit of an old session answer ABORTED (SESSION_UNKNOWN), and the
// caller starts its sequence again. A call that the daemon refuses for the tenant's rate is made
// again when the daemon says, for up to control_timeout_ms and for one call in ten (ten at once);
// else it answers RESOURCE_EXHAUSTED (RATE_LIMITED). Contexts are gone after a restart: context
// calls answer NOT_FOUND. Errors of every call: UNAVAILABLE (daemon not reachable in time),
// DEADLINE_EXCEEDED, INVALID_ARGUMENT, INTERNAL (the daemon's answer is malformed), and those of
// the daemon, with a reason (proto/base/reasons.h). Not usable in a child after fork(): every call
// there answers FAILED_PRECONDITION.
class Client {
 public:
  static absl::StatusOr<std::unique_ptr<Client>> Connect(ClientOptions options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // `hash_domain`: for an engine that brings its own block hashes.
  absl::StatusOr<Namespace> RegisterLayout(const Layout& layout, std::string_view adapter = {},
                                           std::string_view salt = {},
                                           const HashDomain& hash_domain = {});

  // One byte (Residency bits) per block from the start of the chain, up to the first gap.
  absl::StatusOr<std::vector<uint8_t>> Lookup(const Namespace& ns, std::span<const Key> keys);

  // Not over TCP: FAILED_PRECONDITION (NOT_MAPPED), as Acquire.
  // `tier`: 1 hbm, 2 host. A block that hbm can make no room for is placed on host. A chain of at
  // most 4,096 keys, as in every call that takes keys.
  absl::StatusOr<Fill> Reserve(const Namespace& ns, const std::optional<Key>& parent,
                               std::span<const Key> keys, uint8_t tier = 1);
  // Publishes the OK blocks of a fill; computes their CRC-32C from the mapped bytes. Per block of
  // the fill: kOk, or what the fill said, or kPrecondition. FAILED_PRECONDITION when a slot is on a
  // GPU: name the stream that fills it.
  absl::StatusOr<std::vector<BlockStatus>> Commit(const Namespace& ns, const Fill& fill);
  // The same for a fill on a GPU: the bytes are those that are there once `stream` has done all it
  // was given before this call. Waits for that (at most transfer_timeout_ms), and reads them back
  // for their CRC-32C. DEADLINE_EXCEEDED: nothing is published; Commit again, or Abort.
  absl::StatusOr<std::vector<BlockStatus>> Commit(const Namespace& ns, const Fill& fill,
                                                  DeviceStream stream);
  absl::Status Abort(const Namespace& ns, const Fill& fill);

  absl::StatusOr<Lease> Acquire(const Namespace& ns, std::span<const Key> keys);
  // Checks a leased block against the CRC-32C of its commit; reports and answers DATA_LOSS when it
  // does not match. Reads a slot on a GPU back for that.
  absl::Status Verify(const Namespace& ns, const Key& key, const MappedBlock& block);
  absl::Status ReportBad(const Namespace& ns, std::span<const Key> keys);

  absl::StatusOr<Ticket> Prefetch(const Namespace& ns, std::span<const Key> keys);
  absl::StatusOr<Ticket> GetTicket(uint64_t ticket_id);
  absl::Status CancelPrefetch(uint64_t ticket_id);

  // By value, for callers that cannot map the tiers: `payloads` holds keys.size() blocks.
  absl::StatusOr<std::vector<BlockStatus>> Write(const Namespace& ns,
                                                 const std::optional<Key>& parent,
                                                 std::span<const Key> keys,
                                                 std::span<const std::byte> payloads);
  // The payloads of the blocks from the start up to the first that is not OK.
  absl::StatusOr<std::vector<std::byte>> Read(const Namespace& ns, std::span<const Key> keys);
  // The same into memory of the caller's, which spares the pages of a new vector; returns the
  // number of blocks. What lies behind them, and all of it after an error, is unspecified.
  // Requires: memory.size() >= keys.size() blocks (INVALID_ARGUMENT).
  absl::StatusOr<size_t> ReadInto(const Namespace& ns, std::span<const Key> keys,
                                  std::span<std::byte> memory);

  absl::StatusOr<uint32_t> CreateContext(const Namespace& ns, std::string_view context);
  absl::StatusOr<uint32_t> AppendContext(const Namespace& ns, std::string_view context,
                                         uint32_t base_block_count, std::span<const Key> keys);
  // expected_resume_ms: from now on; 0 unknown. A hint for what leaves next.
  absl::StatusOr<PauseResult> PauseContext(const Namespace& ns, std::string_view context,
                                           uint32_t expected_resume_ms = 0);
  // needed_in_ms: 0 as soon as possible. Reads with earlier deadlines go first.
  absl::StatusOr<Ticket> ResumeContext(const Namespace& ns, std::string_view context,
                                       uint32_t needed_in_ms = 0);
  absl::StatusOr<uint32_t> ForkContext(const Namespace& ns, std::string_view parent,
                                       std::string_view context, uint32_t block_count);
  absl::StatusOr<uint64_t> CloseContext(const Namespace& ns, std::string_view context, bool drop);

  // What a router or an agent platform knows of the future, as the KvHintsEnvelope that engines
  // take: JSON with protocol_version, message_id and actions (action_id, action_type,
  // action_version, payload). Advice: no answer depends on it. One outcome per action, in order;
  // the types are those of kvtier.v1 ApplyHints. INVALID_ARGUMENT: it is no such JSON, or has more
  // than 64 actions.
  absl::StatusOr<std::vector<HintOutcome>> ApplyHints(const Namespace& ns,
                                                      std::string_view envelope_json);

  // The daemon's boot id in the present session.
  uint64_t epoch() const;
  ClientStats stats() const;

 private:
  friend class CompletionQueue;
  friend class Lease;
  friend class Watch;  // watch.h
  class Impl;
  explicit Client(std::unique_ptr<Impl> impl);

  absl::Status ReadChecked(const Namespace& ns, std::span<const Key> keys, ReadTarget& target);

  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier::client
