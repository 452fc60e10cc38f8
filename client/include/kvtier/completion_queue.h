// SPDX-License-Identifier: Apache-2.0
//
// Calls of a Client that do not block, for an engine's step loop.
//
//   auto queue = kvtier::client::CompletionQueue::Create(client.get(), {});
//   (*queue)->Acquire({.tag = request}, ns, keys);
//   ... every step ...
//   while (auto completion = (*queue)->Poll()) {
//     if (completion->status.ok()) Begin(completion->tag, std::get<Lease>(completion->result));
//   }
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtier/client.h"

namespace kvtier::client {

// How an asynchronous call ended. Move-only.
struct Completion {
  // As it was given.
  uint64_t tag = 0;
  // An error of the call of that name in Client; CANCELLED after Cancel; DEADLINE_EXCEEDED.
  absl::Status status;
  // What the call of that name returns, once status is OK; else nothing. A Lease must not outlive
  // the client.
  std::variant<std::monostate, std::vector<uint8_t>, Fill, std::vector<BlockStatus>, Lease, Ticket,
               PauseResult>
      result;
};

// Calls in flight, and those that have ended and were not asked for yet. Thread-safe. Submitting
// and polling never block: they neither wait for the daemon nor for a thread that does. What may
// take time besides (checksums of a commit, mapping new memory, opening a session anew) is done by
// the one thread that a queue has.
//
// Every call that was submitted comes out of Poll or Wait once, by its deadline at the latest; in
// which order is not said. What a call brings after its deadline, or after Cancel, is given back to
// the daemon; but where the answer crosses the end of the call on the wire, as also happens to
// calls of Client, the daemon holds that lease or fill until the session ends. Arguments are copied
// before a submitting call returns. Errors of submitting: INVALID_ARGUMENT (the tag is in use, a
// namespace of another client), RESOURCE_EXHAUSTED (in_flight_max), FAILED_PRECONDITION (a forked
// child; NOT_MAPPED over TCP). Then nothing was submitted.
//
// A daemon that goes away fails no call but Reserve and Commit, which answer ABORTED
// (SESSION_UNKNOWN); the others are repeated in a new session, within their deadline. Calls that
// the daemon refuses for a rate (RATE_LIMITED) are not repeated.
class CompletionQueue {
 public:
  struct Options {
    // Submitted, and not out of Poll or Wait yet. 1..65536.
    uint32_t in_flight_max = 256;
  };
  // `client` outlives the queue.
  static absl::StatusOr<std::unique_ptr<CompletionQueue>> Create(Client* client,
                                                                 const Options& options);
  // Cancels what is in flight. Blocks until the thread is done with the call it is at: briefly, but
  // for up to reconnect_timeout_ms of the client while the daemon is away.
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  struct Call {
    // Any number that no other call in flight has.
    uint64_t tag = 0;
    // From now. 0: control_timeout_ms or transfer_timeout_ms of the client, as the call of that
    // name has.
    uint32_t timeout_ms = 0;
  };

  // As the calls of these names in Client.
  absl::Status Lookup(const Call& call, const Namespace& ns, std::span<const Key> keys);
  absl::Status Acquire(const Call& call, const Namespace& ns, std::span<const Key> keys);
  absl::Status Prefetch(const Call& call, const Namespace& ns, std::span<const Key> keys);
  absl::Status Reserve(const Call& call, const Namespace& ns, const std::optional<Key>& parent,
                       std::span<const Key> keys, uint8_t tier = 1);
  // Takes the fill: its slots must not be written from here on, except by `stream`, for a fill on
  // a GPU. A commit that was cancelled or is late may be done all the same.
  absl::Status Commit(const Call& call, const Namespace& ns, Fill fill,
                      std::optional<DeviceStream> stream = std::nullopt);
  absl::Status PauseContext(const Call& call, const Namespace& ns, std::string_view context,
                            uint32_t expected_resume_ms = 0);
  absl::Status ResumeContext(const Call& call, const Namespace& ns, std::string_view context,
                             uint32_t needed_in_ms = 0);

  // The call in flight with this tag ends now, with CANCELLED. False: there is none; it may have
  // ended already and be waiting to come out.
  bool Cancel(uint64_t tag);

  // A call that has ended, if there is one. Costs two loads and a look at the clock if there is
  // none.
  std::optional<Completion> Poll();
  // The same, but blocks until there is one, `deadline`, or the end of the last call in flight.
  std::optional<Completion> Wait(std::chrono::steady_clock::time_point deadline);

  // Submitted, and not out of Poll or Wait yet.
  size_t in_flight_count() const;

 private:
  class Impl;
  explicit CompletionQueue(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier::client
