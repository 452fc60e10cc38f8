// SPDX-License-Identifier: Apache-2.0
#include "client/src/client_impl.h"

#include <unistd.h>

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "proto/base/reasons.h"
#include "proto/rpc/layout_proto.h"

namespace kvtier::client {
namespace {

constexpr absl::Duration kFirstBackoff = absl::Milliseconds(20);
constexpr absl::Duration kBackoffMax = absl::Milliseconds(200);
// Of repeats for a rate: ten at once, and one for every ten other answers.
constexpr int kRepeatBudgetMax = 100;
constexpr int kRepeatCost = 10;

// A daemon that is starting, restarting or full for the moment may answer the next attempt.
bool IsWorthConnectingAgain(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kNotFound:  // no socket file yet
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kResourceExhausted:
      return true;
    default:
      // The token was given out by the daemon process before this one.
      return ReasonOf(status) == reason::kTokenUnknown;
  }
}

}  // namespace

bool IsSessionLoss(const absl::Status& status) {
  // Answers of a living daemon carry a reason; what gRPC itself reports does not.
  const std::string reason = ReasonOf(status);
  if (reason == reason::kSessionUnknown) return true;
  return reason.empty() && (status.code() == absl::StatusCode::kUnavailable ||
                            status.code() == absl::StatusCode::kCancelled);
}

absl::Status SessionGone() {
  return WithReason(Aborted("the session has ended; start the sequence again"),
                    reason::kSessionUnknown);
}

absl::Status CheckEpoch(const Session& session, uint64_t epoch) {
  return epoch == session.epoch() ? absl::OkStatus() : SessionGone();
}

std::string PackKeys(std::span<const Key> keys) { return PackRecords(keys); }

absl::StatusOr<std::vector<BlockStatus>> UnpackStatuses(const std::string& statuses,
                                                        size_t key_count) {
  if (statuses.size() != key_count) {
    return Internal("the daemon sent %d statuses for %d blocks", statuses.size(), key_count);
  }
  std::vector<BlockStatus> result;
  result.reserve(key_count);
  for (const char byte : statuses) {
    const auto status = static_cast<BlockStatus>(byte);
    if (status < BlockStatus::kOk || status > BlockStatus::kUnavailable) {
      return Internal("the daemon sent block status %d", static_cast<int>(byte));
    }
    result.push_back(status);
  }
  return result;
}

absl::StatusOr<std::vector<uint32_t>> UnpackCrc32cs(const std::string& crc32cs, size_t key_count) {
  if (crc32cs.size() != key_count * sizeof(uint32_t)) {
    return Internal("the daemon sent %d bytes of checksums for %d blocks", crc32cs.size(),
                    key_count);
  }
  return UnpackRecords<uint32_t>(crc32cs, "crc32cs");
}

Client::Impl::Impl(ClientOptions options)
    : options_(std::move(options)),
      pid_(::getpid()),
      devices_(std::make_shared<DeviceMap>(options_.cuda)) {}

Client::Impl::~Impl() {
  closing_.Notify();
  std::shared_ptr<Session> session;
  absl::MutexLock lock(&mutex_);
  session.swap(session_);
}

bool Client::Impl::forked() const { return ::getpid() != pid_; }

absl::Status Client::Impl::CheckProcess() const {
  if (!forked()) return absl::OkStatus();
  return FailedPrecondition("a client does not work in a forked child; connect in process %d",
                            ::getpid());
}

absl::Status Client::Impl::CheckMapped() const {
  if (options_.tcp.address.empty()) return absl::OkStatus();
  return WithReason(
      FailedPrecondition("this client reaches the daemon at %s by TCP, which maps no memory: use "
                         "Write and Read, or the unix sockets of the daemon's node",
                         options_.tcp.address),
      reason::kNotMapped);
}

std::shared_ptr<Session> Client::Impl::PeekSession() const {
  absl::MutexLock lock(&mutex_);
  return session_;
}

std::shared_ptr<const TicketBoard> Client::Impl::Board() const {
  const std::shared_ptr<Session> session = PeekSession();
  return session == nullptr ? nullptr : session->Board();
}

absl::StatusOr<std::shared_ptr<Session>> Client::Impl::CurrentSession() {
  const MonotonicTime deadline =
      MonotonicDeadline(absl::Milliseconds(options_.reconnect_timeout_ms));
  const auto nobody_opens = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !opening_; };
  uint64_t generation = 1;
  {
    absl::MutexLock lock(&mutex_);
    if (!opening_ended_.WaitFor(mutex_, TimeUntil(deadline), nobody_opens)) {
      return Unavailable("another call is still waiting for the daemon at %s", place());
    }
    if (session_ != nullptr) {
      if (!session_->lost()) return session_;
      generation = session_->generation() + 1;
    }
    opening_ = true;
  }
  absl::StatusOr<std::shared_ptr<Session>> opened = OpenUntil(deadline, generation);
  // Ends after the lock is gone: its end joins a thread.
  std::shared_ptr<Session> previous;
  absl::MutexLock lock(&mutex_);
  opening_ = false;
  opening_ended_.NotifyAll();
  if (opened.ok()) previous = std::exchange(session_, *opened);
  return opened;
}

absl::StatusOr<std::shared_ptr<Session>> Client::Impl::OpenUntil(MonotonicTime deadline,
                                                                 uint64_t generation) {
  absl::Duration backoff = kFirstBackoff;
  while (true) {
    const int64_t remaining_ms = absl::ToInt64Milliseconds(TimeUntil(deadline));
    const auto timeout_ms =
        static_cast<uint32_t>(std::clamp<int64_t>(remaining_ms, 1, options_.control_timeout_ms));
    absl::StatusOr<std::shared_ptr<Session>> session =
        Session::Open({.run_dir = options_.run_dir,
                       .tcp = options_.tcp,
                       .client_name = options_.client_name,
                       .timeout_ms = timeout_ms,
                       .generation = generation,
                       .devices = devices_});
    if (session.ok() || !IsWorthConnectingAgain(session.status())) return session;
    if (TimeUntil(deadline) <= backoff) {
      if (session.status().code() == absl::StatusCode::kResourceExhausted) return session;
      return Unavailable("no session with the daemon at %s in %d ms: %s", place(),
                         options_.reconnect_timeout_ms, session.status().ToString());
    }
    if (closing_.WaitFor(backoff)) {
      return absl::CancelledError("the client is being destroyed");
    }
    backoff = std::min(backoff * 2, kBackoffMax);
  }
}

bool Client::Impl::AwaitRate(const absl::Status& status, MonotonicTime patience) {
  if (ReasonOf(status) != reason::kRateLimited) {
    // One repeat in ten calls.
    if (repeat_budget_.load(std::memory_order_relaxed) < kRepeatBudgetMax) ++repeat_budget_;
    return false;
  }
  absl::Duration delay = absl::Milliseconds(RetryDelayMsOf(status).value_or(1));
  // Threads that were told the same do not come back together.
  const auto spread = static_cast<double>(spread_.fetch_add(7, std::memory_order_relaxed) % 16);
  delay *= 1 + spread / 32;
  if (delay > TimeUntil(patience)) return false;
  if (repeat_budget_.fetch_sub(kRepeatCost) < kRepeatCost) {
    repeat_budget_ += kRepeatCost;
    return false;
  }
  return !closing_.WaitFor(delay);
}

absl::Status Client::Impl::InSession(const SessionUse& use,
                                     absl::FunctionRef<absl::Status(Session&)> attempt) {
  KVT_RETURN_IF_ERROR(CheckProcess());
  const MonotonicTime patience = MonotonicDeadline(absl::Milliseconds(options_.control_timeout_ms));
  bool may_repeat = use.repeat;
  while (true) {
    KVT_ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, CurrentSession());
    if (use.generation.has_value() && session->generation() != *use.generation) {
      return SessionGone();
    }
    absl::Status status = attempt(*session);
    if (!IsSessionLoss(status)) {
      if (!AwaitRate(status, patience)) return status;
      continue;
    }
    session->MarkLost();
    if (std::exchange(may_repeat, false)) continue;
    if (use.repeat) {
      return Unavailable("the daemon went away twice during one call: %s", status.ToString());
    }
    KVT_RETURN_IF_ERROR(CurrentSession().status());
    return SessionGone();
  }
}

absl::StatusOr<Namespace> Client::Impl::RegisterLayout(const Layout& layout,
                                                       std::string_view adapter,
                                                       std::string_view salt,
                                                       const HashDomain& hash_domain) {
  KVT_RETURN_IF_ERROR(CheckProcess());
  KVT_RETURN_IF_ERROR(layout.Validate());
  KVT_RETURN_IF_ERROR(ValidateHashDomain(hash_domain));
  auto spec = std::make_shared<NamespaceSpec>();
  spec->layout = layout;
  spec->adapter = std::string(adapter);
  spec->salt = std::string(salt);
  spec->hash_domain = hash_domain;
  spec->ns.layout = layout.Fingerprint();
  spec->ns.block_bytes = layout.BlockBytes();
  {
    absl::MutexLock lock(&mutex_);
    if (const auto known = FindSpec(*spec); known != nullptr) return known->ns;
  }
  uint32_t namespace_id = 0;
  uint64_t generation = 0;
  KVT_RETURN_IF_ERROR(InSession({}, [&](Session& session) {
    generation = session.generation();
    return Register(session, *spec, spec->ns, namespace_id);
  }));
  absl::MutexLock lock(&mutex_);
  if (const auto known = FindSpec(*spec); known != nullptr) return known->ns;
  spec->ns.client_idx = static_cast<uint32_t>(specs_.size());
  specs_.push_back(spec);
  if (session_->generation() == generation) {
    session_->SetNamespaceId(spec->ns.client_idx, namespace_id);
  }
  return spec->ns;
}

std::shared_ptr<const NamespaceSpec> Client::Impl::FindSpec(const NamespaceSpec& spec) const {
  for (const auto& known : specs_) {
    if (known->ns.layout == spec.ns.layout && known->adapter == spec.adapter &&
        known->salt == spec.salt && known->hash_domain == spec.hash_domain) {
      return known;
    }
  }
  return nullptr;
}

absl::Status Client::Impl::Register(Session& session, const NamespaceSpec& spec, Namespace& ns,
                                    uint32_t& namespace_id) {
  v1::RegisterLayoutRequest request;
  *request.mutable_layout() = LayoutToProto(spec.layout);
  request.set_adapter(spec.adapter);
  request.set_salt(spec.salt);
  if (!spec.hash_domain.name.empty()) {
    request.mutable_hash_domain()->set_name(spec.hash_domain.name);
    request.mutable_hash_domain()->set_probe(spec.hash_domain.probe);
  }
  v1::RegisterLayoutResponse response;
  KVT_RETURN_IF_ERROR(Unary(session, &Stub::RegisterLayout, nullptr, request, response,
                            options_.control_timeout_ms));
  const NamespaceHash hash =
      HashNamespace(session.tenant(), ns.layout, spec.adapter, spec.salt, spec.hash_domain);
  if (response.namespace_hash() != hash.AsBytes() ||
      response.layout_fingerprint() != ns.layout.AsBytes() ||
      response.block_bytes() != ns.block_bytes) {
    return Internal("the daemon opened another namespace than the one asked for: %d-byte blocks",
                    response.block_bytes());
  }
  ns.hash = hash;
  ns.hash_domain_differs = response.hash_domain_differs();
  namespace_id = response.namespace_id();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const NamespaceSpec>> Client::Impl::SpecOf(
    const Namespace& ns) const {
  KVT_RETURN_IF_ERROR(CheckProcess());
  absl::MutexLock lock(&mutex_);
  if (ns.client_idx >= specs_.size() || specs_[ns.client_idx]->ns.hash != ns.hash) {
    return Invalid("namespace %s is none of this client", ns.hash.Hex());
  }
  return specs_[ns.client_idx];
}

absl::StatusOr<uint32_t> Client::Impl::NamespaceIdIn(Session& session, const NamespaceSpec& spec) {
  if (const auto known = session.NamespaceId(spec.ns.client_idx); known.has_value()) return *known;
  Namespace ns = spec.ns;
  uint32_t namespace_id = 0;
  KVT_RETURN_IF_ERROR(Register(session, spec, ns, namespace_id));
  if (ns.hash != spec.ns.hash) {
    return FailedPrecondition("the daemon restarted with another tenant for this process: %s",
                              session.tenant());
  }
  session.SetNamespaceId(spec.ns.client_idx, namespace_id);
  return namespace_id;
}

absl::StatusOr<MappedBlocks> Client::Impl::MapBlocks(Session& session, const std::string& results,
                                                     size_t key_count, uint32_t block_bytes,
                                                     bool writable) {
  if (results.size() != key_count * sizeof(BlockResult)) {
    return Internal("the daemon sent %d bytes of results for %d blocks", results.size(), key_count);
  }
  KVT_ASSIGN_OR_RETURN(const std::vector<BlockResult> records,
                       UnpackRecords<BlockResult>(results, "results"));
  MappedBlocks mapped;
  mapped.blocks.reserve(key_count);
  absl::flat_hash_map<SegmentId, std::shared_ptr<const Mapping>> used;
  for (const BlockResult& record : records) {
    if (record.status < BlockStatus::kOk || record.status > BlockStatus::kUnavailable) {
      return Internal("the daemon sent block status %d", static_cast<int>(record.status));
    }
    MappedBlock& block = mapped.blocks.emplace_back(MappedBlock{.status = record.status});
    if (record.status != BlockStatus::kOk) continue;
    if (record.tier != v1::TIER_HBM && record.tier != v1::TIER_HOST) {
      return Internal("the daemon placed a block on tier %d", static_cast<int>(record.tier));
    }
    const SegmentId id = {
        .tier = record.tier, .segment_idx = record.segment_idx, .writable = writable};
    std::shared_ptr<const Mapping>& mapping = used[id];
    if (mapping == nullptr) {
      KVT_ASSIGN_OR_RETURN(mapping, session.segments().Get(id));
      mapped.mappings.push_back(mapping);
    }
    const uint64_t segment_bytes = mapping->segment_bytes();
    if (block_bytes > segment_bytes || record.offset_bytes > segment_bytes - block_bytes) {
      return Internal("the daemon placed a block at byte %d of a segment of %d",
                      record.offset_bytes, segment_bytes);
    }
    block.tier = record.tier;
    if (mapping->device_address() == 0) {
      block.bytes = mapping->bytes().subspan(record.offset_bytes, block_bytes);
    } else {
      block.device_address = mapping->device_address() + record.offset_bytes;
      block.device_ordinal = mapping->device_ordinal();
    }
  }
  return mapped;
}

void Client::Impl::ReleaseLease(uint64_t session_generation, uint64_t lease_id) {
  if (forked()) return;
  const std::shared_ptr<Session> session = PeekSession();
  if (session == nullptr || session->lost() || session->generation() != session_generation) return;
  const absl::Status status = session->ReleaseLease(lease_id, options_.control_timeout_ms);
  if (IsSessionLoss(status)) session->MarkLost();
}

ClientStats Client::Impl::stats() const {
  ClientStats stats;
  stats.copied_bytes = copied_bytes_.load(std::memory_order_relaxed);
  if (const auto session = PeekSession(); session != nullptr) {
    stats.mapped_segment_count = session->segments().segment_count();
    stats.reopen_count = session->generation() - 1;
  }
  return stats;
}

}  // namespace kvtier::client
