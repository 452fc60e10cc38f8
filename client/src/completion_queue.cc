// SPDX-License-Identifier: Apache-2.0
#include "kvtier/completion_queue.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "client/src/client_impl.h"
#include "proto/base/reasons.h"

namespace kvtier::client {
namespace {

using SteadyClock = std::chrono::steady_clock;
using CompletionResult = decltype(Completion::result);
using AsyncStub = std::remove_pointer_t<decltype(std::declval<Stub&>().async())>;
template <typename Request, typename Response>
using AsyncMethod = void (AsyncStub::*)(grpc::ClientContext*, const Request*, Response*,
                                        std::function<void(grpc::Status)>);

constexpr uint32_t kInFlightMax = 65'536;

// A StatusOr of one alternative as one of all.
template <typename Value>
absl::StatusOr<CompletionResult> ToResult(absl::StatusOr<Value> value) {
  if (!value.ok()) return std::move(value).status();
  return CompletionResult(std::move(value).value());
}

absl::Status Late() { return DeadlineExceeded("the call has not ended by its deadline"); }

}  // namespace

// A call goes one of two ways. When the session lives and knows the namespace, its request is sent
// at once, and gRPC's thread takes the answer; whatever could block then is left to the worker.
// Else the worker makes the blocking call of that name. Whoever is first to end an operation, one
// of these two, its deadline or Cancel, makes its completion; what comes later is undone.
class CompletionQueue::Impl {
 public:
  Impl(Client* client, const Options& options) : client_(client), options_(options) {
    worker_ = std::jthread([this] {
      ::pthread_setname_np(::pthread_self(), "kvtier-queue");
      Work();
    });
  }
  ~Impl();

  Client::Impl& client_impl() { return *client_->impl_; }
  Client* client() { return client_; }

  // What one call in flight is. Shared by the table and by whoever works on it.
  struct Operation {
    uint64_t tag = 0;
    SteadyClock::time_point deadline = {};
    // Makes the call and waits for it: in the worker.
    std::function<absl::StatusOr<CompletionResult>()> block;
    // Gives back what came too late: in the worker. May be null.
    std::function<void(CompletionResult)> undo = {};
    // Whether a call that lost its session is made again.
    bool repeats = true;
    // Guarded by the queue's mutex_.
    bool has_ended = false;
    std::shared_ptr<grpc::ClientContext> context = {};
  };

  // Adds the operation to those in flight. Its default timeout is `timeout_ms`.
  absl::StatusOr<std::shared_ptr<Operation>> Begin(const Call& call, uint32_t timeout_ms,
                                                   Operation operation);
  // Leaves the whole call to the worker.
  void Block(const std::shared_ptr<Operation>& operation);
  // Sends the request if that can be done at once, and else does as Block. `take(session,
  // response)` makes the result, in the worker if `take_blocks`.
  template <typename Request, typename Response, typename Take>
  void Send(const std::shared_ptr<Operation>& operation, const NamespaceSpec& spec, Request request,
            AsyncMethod<Request, Response> method, Take take, bool take_blocks);

  bool Cancel(uint64_t tag);
  std::optional<Completion> Poll();
  std::optional<Completion> Wait(SteadyClock::time_point deadline);
  size_t in_flight_count() const;

 private:
  using Contexts = std::vector<std::shared_ptr<grpc::ClientContext>>;

  template <typename Response>
  struct Exchange {
    std::shared_ptr<Session> session;
    Response response;
  };

  void Push(std::function<void()> work) ABSL_LOCKS_EXCLUDED(mutex_);
  void Work();
  void End(const std::shared_ptr<Operation>& operation, absl::StatusOr<CompletionResult> result)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void EndLocked(Operation& operation, absl::StatusOr<CompletionResult> result, Contexts* contexts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ExpireLocked(SteadyClock::time_point now, Contexts* contexts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<Completion> PopLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PublishDeadlineLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Not under the lock: gRPC may run the end of the call in here.
  static void CancelAll(const Contexts& contexts) {
    for (const auto& context : contexts) context->TryCancel();
  }

  Client* const client_;
  const Options options_;
  // What Poll looks at first. Hints, set under the lock: nothing is read because of them alone.
  std::atomic<size_t> ready_count_{0};
  std::atomic<SteadyClock::rep> first_deadline_{std::numeric_limits<SteadyClock::rep>::max()};

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Operation>> operations_ ABSL_GUARDED_BY(mutex_);
  // Of operations_.
  std::set<std::pair<SteadyClock::time_point, uint64_t>> deadlines_ ABSL_GUARDED_BY(mutex_);
  std::deque<Completion> ready_ ABSL_GUARDED_BY(mutex_);
  // Of operations_ and ready_.
  absl::flat_hash_set<uint64_t> tags_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mutex_);
  // Requests whose answer gRPC has not given to us yet.
  size_t sent_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // What Wait waits for: ready_ or deadlines_.
  TimedCondition changed_;
  std::jthread worker_;
};

CompletionQueue::Impl::~Impl() {
  Contexts contexts;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [tag, operation] : operations_) {
      operation->has_ended = true;
      if (operation->context != nullptr) contexts.push_back(operation->context);
    }
  }
  CancelAll(contexts);
  {
    const auto all_answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return sent_count_ == 0;
    };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&all_answered));
    stopping_ = true;
  }
  worker_.join();
}

absl::StatusOr<std::shared_ptr<CompletionQueue::Impl::Operation>> CompletionQueue::Impl::Begin(
    const Call& call, uint32_t timeout_ms, Operation operation) {
  auto shared = std::make_shared<Operation>(std::move(operation));
  shared->tag = call.tag;
  shared->deadline = SteadyClock::now() +
                     std::chrono::milliseconds(call.timeout_ms == 0 ? timeout_ms : call.timeout_ms);
  absl::MutexLock lock(&mutex_);
  if (tags_.size() >= options_.in_flight_max) {
    return WithReason(Exhausted("%d calls are in flight, which is the limit", tags_.size()),
                      reason::kLimitReached);
  }
  if (!tags_.insert(call.tag).second) {
    return Invalid("tag %d is that of a call in flight", call.tag);
  }
  operations_.emplace(call.tag, shared);
  deadlines_.emplace(shared->deadline, call.tag);
  PublishDeadlineLocked();
  return shared;
}

void CompletionQueue::Impl::Block(const std::shared_ptr<Operation>& operation) {
  Push([this, operation] {
    {
      absl::MutexLock lock(&mutex_);
      if (operation->has_ended) return;
    }
    End(operation, operation->block());
  });
}

template <typename Request, typename Response, typename Take>
void CompletionQueue::Impl::Send(const std::shared_ptr<Operation>& operation,
                                 const NamespaceSpec& spec, Request request,
                                 AsyncMethod<Request, Response> method, Take take,
                                 bool take_blocks) {
  const std::shared_ptr<Session> session = client_impl().PeekSession();
  const std::optional<uint32_t> namespace_id = session == nullptr || session->lost()
                                                   ? std::nullopt
                                                   : session->NamespaceId(spec.ns.client_idx);
  if (!namespace_id.has_value()) return Block(operation);
  request.set_session_id(session->session_id());
  request.set_namespace_id(*namespace_id);
  const auto context = std::make_shared<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() +
                        std::chrono::duration_cast<std::chrono::system_clock::duration>(
                            operation->deadline - SteadyClock::now()));
  const auto sent_request = std::make_shared<Request>(std::move(request));
  const auto exchange = std::make_shared<Exchange<Response>>();
  exchange->session = session;
  {
    absl::MutexLock lock(&mutex_);
    operation->context = context;
    ++sent_count_;
  }
  auto done = [this, operation, context, sent_request, exchange, take,
               take_blocks](const grpc::Status& grpc_status) {
    absl::Status status = FromGrpc(grpc_status);
    if (status.ok()) status = CheckEpoch(*exchange->session, exchange->response.epoch());
    bool has_ended = false;
    {
      absl::MutexLock lock(&mutex_);
      has_ended = operation->has_ended;
    }
    if (has_ended && !status.ok()) {
      // Cancelled from here, which says nothing of the session.
    } else if (status.ok() && take_blocks) {
      Push([this, operation, exchange, take] {
        End(operation, take(*exchange->session, exchange->response));
      });
    } else if (status.ok()) {
      End(operation, take(*exchange->session, exchange->response));
    } else if (IsSessionLoss(status)) {
      exchange->session->MarkLost();
      if (operation->repeats) {
        Block(operation);
      } else {
        End(operation, SessionGone());
      }
    } else {
      End(operation, status);
    }
    // Who holds a lost session last joins its thread: not here, where gRPC's is.
    if (exchange->session->lost()) Push([exchange] {});
    absl::MutexLock lock(&mutex_);
    operation->context = nullptr;
    --sent_count_;
  };
  (session->stub().async()->*method)(context.get(), sent_request.get(), &exchange->response,
                                     std::move(done));
}

void CompletionQueue::Impl::Push(std::function<void()> work) {
  absl::MutexLock lock(&mutex_);
  work_.push_back(std::move(work));
}

void CompletionQueue::Impl::Work() {
  const auto is_due = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !work_.empty();
  };
  while (true) {
    std::function<void()> work;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&is_due));
      // What is left to do at the end gives back what came late.
      if (work_.empty()) return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    work();
  }
}

void CompletionQueue::Impl::End(const std::shared_ptr<Operation>& operation,
                                absl::StatusOr<CompletionResult> result) {
  absl::MutexLock lock(&mutex_);
  if (!operation->has_ended) {
    EndLocked(*operation, std::move(result), nullptr);
  } else if (result.ok()) {
    // Even without undo, a lease ends with the object, which takes a call.
    auto late = std::make_shared<CompletionResult>(std::move(result).value());
    work_.push_back([operation, late] {
      if (operation->undo) operation->undo(std::move(*late));
    });
  }
}

void CompletionQueue::Impl::EndLocked(Operation& operation, absl::StatusOr<CompletionResult> result,
                                      Contexts* contexts) {
  operation.has_ended = true;
  if (contexts != nullptr && operation.context != nullptr) contexts->push_back(operation.context);
  Completion completion{.tag = operation.tag, .status = result.status(), .result = {}};
  if (result.ok()) completion.result = std::move(result).value();
  ready_.push_back(std::move(completion));
  ready_count_.store(ready_.size(), std::memory_order_relaxed);
  deadlines_.erase({operation.deadline, operation.tag});
  PublishDeadlineLocked();
  // May be the last to hold it.
  operations_.erase(operation.tag);
}

void CompletionQueue::Impl::PublishDeadlineLocked() {
  first_deadline_.store(deadlines_.empty() ? std::numeric_limits<SteadyClock::rep>::max()
                                           : deadlines_.begin()->first.time_since_epoch().count(),
                        std::memory_order_relaxed);
  changed_.NotifyAll();
}

void CompletionQueue::Impl::ExpireLocked(SteadyClock::time_point now, Contexts* contexts) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const std::shared_ptr<Operation> late = operations_.at(deadlines_.begin()->second);
    EndLocked(*late, Late(), contexts);
  }
}

bool CompletionQueue::Impl::Cancel(uint64_t tag) {
  Contexts contexts;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = operations_.find(tag);
    if (found == operations_.end()) return false;
    const std::shared_ptr<Operation> operation = found->second;
    EndLocked(*operation, absl::CancelledError("the call was cancelled"), &contexts);
  }
  CancelAll(contexts);
  return true;
}

std::optional<Completion> CompletionQueue::Impl::PopLocked() {
  if (ready_.empty()) return std::nullopt;
  Completion completion = std::move(ready_.front());
  ready_.pop_front();
  ready_count_.store(ready_.size(), std::memory_order_relaxed);
  tags_.erase(completion.tag);
  return completion;
}

std::optional<Completion> CompletionQueue::Impl::Poll() {
  const SteadyClock::time_point now = SteadyClock::now();
  if (ready_count_.load(std::memory_order_relaxed) == 0 &&
      now.time_since_epoch().count() < first_deadline_.load(std::memory_order_relaxed)) {
    return std::nullopt;
  }
  Contexts contexts;
  std::optional<Completion> completion;
  {
    absl::MutexLock lock(&mutex_);
    ExpireLocked(now, &contexts);
    completion = PopLocked();
  }
  CancelAll(contexts);
  return completion;
}

std::optional<Completion> CompletionQueue::Impl::Wait(SteadyClock::time_point deadline) {
  while (true) {
    const SteadyClock::time_point now = SteadyClock::now();
    Contexts contexts;
    std::optional<Completion> completion;
    bool is_over = false;
    {
      absl::MutexLock lock(&mutex_);
      ExpireLocked(now, &contexts);
      completion = PopLocked();
      is_over = completion.has_value() || operations_.empty() || now >= deadline;
      if (!is_over) {
        const SteadyClock::time_point first = deadlines_.begin()->first;
        const auto is_due = [this, first]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
          return !ready_.empty() || deadlines_.empty() || deadlines_.begin()->first < first;
        };
        changed_.WaitFor(mutex_, absl::FromChrono(std::min(first, deadline) - now), is_due);
      }
    }
    CancelAll(contexts);
    if (is_over) return completion;
  }
}

size_t CompletionQueue::Impl::in_flight_count() const {
  absl::MutexLock lock(&mutex_);
  return tags_.size();
}

CompletionQueue::CompletionQueue(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

CompletionQueue::~CompletionQueue() {
  // As of a client: the thread to join is the parent's.
  if (impl_->client_impl().forked()) {
    [[maybe_unused]] Impl* const left_as_it_is = impl_.release();
  }
}

absl::StatusOr<std::unique_ptr<CompletionQueue>> CompletionQueue::Create(Client* client,
                                                                         const Options& options) {
  if (options.in_flight_max == 0 || options.in_flight_max > kInFlightMax) {
    return Invalid("in_flight_max: %d, allowed 1..%d", options.in_flight_max, kInFlightMax);
  }
  KVT_RETURN_IF_ERROR(client->impl_->CheckProcess());
  return std::unique_ptr<CompletionQueue>(
      new CompletionQueue(std::make_unique<Impl>(client, options)));
}

absl::Status CompletionQueue::Lookup(const Call& call, const Namespace& ns,
                                     std::span<const Key> keys) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->client_impl().SpecOf(ns));
  std::vector<Key> copy(keys.begin(), keys.end());
  v1::LookupRequest request;
  request.set_keys(PackKeys(keys));
  KVT_ASSIGN_OR_RETURN(
      const auto operation,
      impl_->Begin(call, impl_->client_impl().options().control_timeout_ms,
                   {.block = [client = impl_->client(), ns, copy = std::move(copy)] {
                     return ToResult(client->Lookup(ns, copy));
                   }}));
  impl_->Send<v1::LookupRequest, v1::LookupResponse>(
      operation, *spec, std::move(request), &AsyncStub::Lookup,
      [key_count = keys.size()](Session&, const v1::LookupResponse& response) {
        return ToResult(ResidencyFrom(response, key_count));
      },
      /*take_blocks=*/false);
  return absl::OkStatus();
}

absl::Status CompletionQueue::Prefetch(const Call& call, const Namespace& ns,
                                       std::span<const Key> keys) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->client_impl().SpecOf(ns));
  std::vector<Key> copy(keys.begin(), keys.end());
  v1::PrefetchRequest request;
  request.set_keys(PackKeys(keys));
  KVT_ASSIGN_OR_RETURN(
      const auto operation,
      impl_->Begin(call, impl_->client_impl().options().control_timeout_ms,
                   {.block = [client = impl_->client(), ns, copy = std::move(copy)] {
                     return ToResult(client->Prefetch(ns, copy));
                   }}));
  impl_->Send<v1::PrefetchRequest, v1::PrefetchResponse>(
      operation, *spec, std::move(request), &AsyncStub::Prefetch,
      [](Session& session, const v1::PrefetchResponse& response) {
        return ToResult<Ticket>(TicketFrom(response.ticket(), session.Board()));
      },
      /*take_blocks=*/true);
  return absl::OkStatus();
}

absl::Status CompletionQueue::ResumeContext(const Call& call, const Namespace& ns,
                                            std::string_view context, uint32_t needed_in_ms) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->client_impl().SpecOf(ns));
  v1::ResumeContextRequest request;
  request.set_context(std::string(context));
  request.set_needed_in_ms(needed_in_ms);
  KVT_ASSIGN_OR_RETURN(
      const auto operation,
      impl_->Begin(
          call, impl_->client_impl().options().control_timeout_ms,
          {.block = [client = impl_->client(), ns, name = std::string(context), needed_in_ms] {
            return ToResult(client->ResumeContext(ns, name, needed_in_ms));
          }}));
  impl_->Send<v1::ResumeContextRequest, v1::ResumeContextResponse>(
      operation, *spec, std::move(request), &AsyncStub::ResumeContext,
      [](Session& session, const v1::ResumeContextResponse& response) {
        return ToResult<Ticket>(TicketFrom(response.ticket(), session.Board()));
      },
      /*take_blocks=*/true);
  return absl::OkStatus();
}

absl::Status CompletionQueue::PauseContext(const Call& call, const Namespace& ns,
                                           std::string_view context, uint32_t expected_resume_ms) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->client_impl().SpecOf(ns));
  v1::PauseContextRequest request;
  request.set_context(std::string(context));
  request.set_expected_resume_ms(expected_resume_ms);
  KVT_ASSIGN_OR_RETURN(
      const auto operation,
      impl_->Begin(call, impl_->client_impl().options().transfer_timeout_ms,
                   {.block = [client = impl_->client(), ns, name = std::string(context),
                              expected_resume_ms] {
                     return ToResult(client->PauseContext(ns, name, expected_resume_ms));
                   }}));
  impl_->Send<v1::PauseContextRequest, v1::PauseContextResponse>(
      operation, *spec, std::move(request), &AsyncStub::PauseContext,
      [](Session&, const v1::PauseContextResponse& response) {
        return ToResult<PauseResult>(PauseResult{.freed_bytes = response.freed_bytes(),
                                                 .resident_bytes = response.resident_bytes()});
      },
      /*take_blocks=*/false);
  return absl::OkStatus();
}

absl::Status CompletionQueue::Acquire(const Call& call, const Namespace& ns,
                                      std::span<const Key> keys) {
  KVT_RETURN_IF_ERROR(impl_->client_impl().CheckMapped());
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->client_impl().SpecOf(ns));
  Client* const client = impl_->client();
  std::vector<Key> copy(keys.begin(), keys.end());
  v1::AcquireRequest request;
  request.set_keys(PackKeys(keys));
  KVT_ASSIGN_OR_RETURN(const auto operation,
                       impl_->Begin(call, impl_->client_impl().options().transfer_timeout_ms,
                                    {.block = [client, ns, copy = std::move(copy)] {
                                      return ToResult(client->Acquire(ns, copy));
                                    }}));
  impl_->Send<v1::AcquireRequest, v1::AcquireResponse>(
      operation, *spec, std::move(request), &AsyncStub::Acquire,
      [client, spec, key_count = keys.size()](Session& session,
                                              const v1::AcquireResponse& response) {
        return ToResult(client->impl_->TakeLease(client, session, *spec, key_count, response));
      },
      /*take_blocks=*/true);
  return absl::OkStatus();
}

absl::Status CompletionQueue::Reserve(const Call& call, const Namespace& ns,
                                      const std::optional<Key>& parent, std::span<const Key> keys,
                                      uint8_t tier) {
  KVT_RETURN_IF_ERROR(impl_->client_impl().CheckMapped());
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->client_impl().SpecOf(ns));
  KVT_ASSIGN_OR_RETURN(v1::ReserveRequest request, NewReserveRequest(parent, keys, tier));
  Client* const client = impl_->client();
  std::vector<Key> copy(keys.begin(), keys.end());
  KVT_ASSIGN_OR_RETURN(
      const auto operation,
      impl_->Begin(call, impl_->client_impl().options().transfer_timeout_ms,
                   {.block = [client, ns, parent, copy,
                              tier] { return ToResult(client->Reserve(ns, parent, copy, tier)); },
                    .undo =
                        [client, ns](CompletionResult late) {
                          client->Abort(ns, std::get<Fill>(late)).IgnoreError();
                        },
                    .repeats = false}));
  impl_->Send<v1::ReserveRequest, v1::ReserveResponse>(
      operation, *spec, std::move(request), &AsyncStub::Reserve,
      [client, spec, copy](Session& session, const v1::ReserveResponse& response) {
        return ToResult(client->impl_->TakeFill(session, *spec, copy, response));
      },
      /*take_blocks=*/true);
  return absl::OkStatus();
}

absl::Status CompletionQueue::Commit(const Call& call, const Namespace& ns, Fill fill,
                                     std::optional<DeviceStream> stream) {
  KVT_RETURN_IF_ERROR(impl_->client_impl().SpecOf(ns).status());
  auto shared = std::make_shared<Fill>(std::move(fill));
  KVT_ASSIGN_OR_RETURN(const auto operation,
                       impl_->Begin(call, impl_->client_impl().options().transfer_timeout_ms,
                                    {.block = [client = impl_->client(), ns, shared, stream] {
                                      return ToResult(stream.has_value()
                                                          ? client->Commit(ns, *shared, *stream)
                                                          : client->Commit(ns, *shared));
                                    }}));
  impl_->Block(operation);
  return absl::OkStatus();
}

bool CompletionQueue::Cancel(uint64_t tag) { return impl_->Cancel(tag); }

std::optional<Completion> CompletionQueue::Poll() { return impl_->Poll(); }

std::optional<Completion> CompletionQueue::Wait(SteadyClock::time_point deadline) {
  return impl_->Wait(deadline);
}

size_t CompletionQueue::in_flight_count() const { return impl_->in_flight_count(); }

}  // namespace kvtier::client
