// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/include/kvtier/client.h"
#include "client/src/channel.h"
#include "client/src/session.h"
#include "proto/base/status_util.h"
#include "proto/base/timed_wait.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier::client {

using Stub = v1::ContextStoreService::Stub;

template <typename Request, typename Response>
using Method = grpc::Status (Stub::*)(grpc::ClientContext*, const Request&, Response*);

// What a namespace is made of, to open it in each new session. Immutable.
struct NamespaceSpec {
  Layout layout;
  std::string adapter;
  std::string salt;
  HashDomain hash_domain;
  Namespace ns;
};

// What a call does when it finds that its session is lost.
struct SessionUse {
  // Once more in a new session. Otherwise ABORTED with SESSION_UNKNOWN.
  bool repeat = true;
  // The only session it makes sense in, if there is one.
  std::optional<uint64_t> generation = std::nullopt;
};

// Blocks of a Reserve or Acquire reply, checked and mapped.
struct MappedBlocks {
  std::vector<MappedBlock> blocks;
  std::vector<std::shared_ptr<const void>> mappings;
};

class ReadTarget;

// Sessions, namespaces and the one way to make a call. Thread-safe.
class Client::Impl {
 public:
  explicit Impl(ClientOptions options);
  ~Impl();

  const ClientOptions& options() const { return options_; }
  DeviceMap& devices() { return *devices_; }
  // This process is a child forked from the one that connected: neither the locks nor the threads
  // here can be relied on.
  bool forked() const;
  // FAILED_PRECONDITION in such a child. Comes before any lock is taken.
  absl::Status CheckProcess() const;

  // FAILED_PRECONDITION (NOT_MAPPED) over TCP.
  absl::Status CheckMapped() const;

  // The present session; opens one if there is none or it is lost. Blocks for up to
  // reconnect_timeout_ms.
  absl::StatusOr<std::shared_ptr<Session>> CurrentSession();
  // The present session, lost or not, or null. Does not block.
  std::shared_ptr<Session> PeekSession() const;
  // Of the present session; null: it has none.
  std::shared_ptr<const TicketBoard> Board() const;

  // Runs `attempt` in the present session, and again as `use` says if the session turns out lost.
  absl::Status InSession(const SessionUse& use, absl::FunctionRef<absl::Status(Session&)> attempt);

  absl::StatusOr<Namespace> RegisterLayout(const Layout& layout, std::string_view adapter,
                                           std::string_view salt, const HashDomain& hash_domain);
  // INVALID_ARGUMENT unless RegisterLayout of this client returned `ns`.
  absl::StatusOr<std::shared_ptr<const NamespaceSpec>> SpecOf(const Namespace& ns) const;
  // The namespace's id in the session; opens it there first if need be.
  absl::StatusOr<uint32_t> NamespaceIdIn(Session& session, const NamespaceSpec& spec);

  // One unary call in the session. `spec` is null for requests without namespace.
  template <typename Request, typename Response>
  absl::Status Unary(Session& session, Method<Request, Response> method, const NamespaceSpec* spec,
                     Request& request, Response& response, uint32_t timeout_ms);
  // The same in the present session, repeated once in a new one.
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(Method<Request, Response> method, const Namespace* ns,
                                Request request, uint32_t timeout_ms);

  // The call Read: the OK prefix of the chain into `target`. Returns the CRC-32C of each commit.
  absl::StatusOr<std::vector<uint32_t>> Receive(const NamespaceSpec& spec,
                                                std::span<const Key> keys, ReadTarget& target);

  // Checks the packed BlockResults of `key_count` blocks and maps their slots.
  absl::StatusOr<MappedBlocks> MapBlocks(Session& session, const std::string& results,
                                         size_t key_count, uint32_t block_bytes, bool writable);

  // What an answer gives, mapped. After an error nothing is held: the slots or the lease are given
  // back, which takes a call. Errors: those of MapBlocks; INTERNAL.
  absl::StatusOr<Fill> TakeFill(Session& session, const NamespaceSpec& spec,
                                std::span<const Key> keys, const v1::ReserveResponse& response);
  absl::StatusOr<Lease> TakeLease(Client* client, Session& session, const NamespaceSpec& spec,
                                  size_t key_count, const v1::AcquireResponse& response);

  void ReleaseLease(uint64_t session_generation, uint64_t lease_id);

  void AddCopiedBytes(uint64_t bytes) { copied_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  ClientStats stats() const;

 private:
  absl::StatusOr<std::shared_ptr<Session>> OpenUntil(MonotonicTime deadline, uint64_t generation);
  absl::Status Register(Session& session, const NamespaceSpec& spec, Namespace& ns,
                        uint32_t& namespace_id);
  std::shared_ptr<const NamespaceSpec> FindSpec(const NamespaceSpec& spec) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Where the daemon is, for errors.
  const std::string& place() const {
    return options_.tcp.address.empty() ? options_.run_dir : options_.tcp.address;
  }

  // Whether to make a call again that was answered so: after waiting for what a rate demands, if
  // that is before `patience` and within the budget.
  bool AwaitRate(const absl::Status& status, MonotonicTime patience);

  const ClientOptions options_;
  const pid_t pid_;
  const std::shared_ptr<DeviceMap> devices_;
  // Ends the wait between two attempts to connect.
  TimedNotification closing_;
  // A count on its own.
  std::atomic<uint64_t> copied_bytes_ = 0;
  // What repeats cost, and other answers earn. Counts on their own.
  std::atomic<int> repeat_budget_ = 100;
  std::atomic<uint32_t> spread_ = 0;

  mutable absl::Mutex mutex_;
  std::shared_ptr<Session> session_ ABSL_GUARDED_BY(mutex_);
  // A thread is opening a session; others wait for it.
  bool opening_ ABSL_GUARDED_BY(mutex_) = false;
  TimedCondition opening_ended_;
  std::vector<std::shared_ptr<const NamespaceSpec>> specs_ ABSL_GUARDED_BY(mutex_);
};

// ABORTED with SESSION_UNKNOWN.
absl::Status SessionGone();

// The call failed because its session, or the daemon, is gone.
bool IsSessionLoss(const absl::Status& status);

// OK if a reply comes from the daemon process that the session belongs to.
absl::Status CheckEpoch(const Session& session, uint64_t epoch);

std::string PackKeys(std::span<const Key> keys);

// Without session and namespace. INVALID_ARGUMENT for another tier than hbm and host.
absl::StatusOr<v1::ReserveRequest> NewReserveRequest(const std::optional<Key>& parent,
                                                     std::span<const Key> keys, uint8_t tier);

Ticket TicketFrom(const v1::Ticket& ticket, std::shared_ptr<const TicketBoard> board);

// INTERNAL if the answer contradicts itself.
absl::StatusOr<std::vector<uint8_t>> ResidencyFrom(const v1::LookupResponse& response,
                                                   size_t key_count);

// One BlockStatus per key. INTERNAL if `statuses` is anything else.
absl::StatusOr<std::vector<BlockStatus>> UnpackStatuses(const std::string& statuses,
                                                        size_t key_count);

// One CRC-32C per key. INTERNAL if `crc32cs` is anything else.
absl::StatusOr<std::vector<uint32_t>> UnpackCrc32cs(const std::string& crc32cs, size_t key_count);

template <typename Request, typename Response>
absl::Status Client::Impl::Unary(Session& session, Method<Request, Response> method,
                                 const NamespaceSpec* spec, Request& request, Response& response,
                                 uint32_t timeout_ms) {
  request.set_session_id(session.session_id());
  if constexpr (requires { request.set_namespace_id(0); }) {
    KVT_ASSIGN_OR_RETURN(const uint32_t namespace_id, NamespaceIdIn(session, *spec));
    request.set_namespace_id(namespace_id);
  }
  grpc::ClientContext context;
  SetDeadline(context, timeout_ms);
  response.Clear();
  KVT_RETURN_IF_ERROR(FromGrpc((session.stub().*method)(&context, request, &response)));
  return CheckEpoch(session, response.epoch());
}

template <typename Request, typename Response>
absl::StatusOr<Response> Client::Impl::Call(Method<Request, Response> method, const Namespace* ns,
                                            Request request, uint32_t timeout_ms) {
  std::shared_ptr<const NamespaceSpec> spec;
  if (ns != nullptr) {
    KVT_ASSIGN_OR_RETURN(spec, SpecOf(*ns));
  }
  Response response;
  KVT_RETURN_IF_ERROR(InSession({}, [&](Session& session) {
    return Unary(session, method, spec.get(), request, response, timeout_ms);
  }));
  return response;
}

}  // namespace kvtier::client
