// SPDX-License-Identifier: Apache-2.0
//
// Calls of a service's methods without a server, for tests: what gRPC does between the wire and a
// reactor, in the caller's thread. Nothing here can cancel a call.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <deque>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace kvtier {

// The reactions to come, and how many calls are open. Thread-safe; Run and RunUntilAllEnd from one
// thread. Outlives its calls.
class CallQueue {
 public:
  void Begin() {
    absl::MutexLock lock(&mutex_);
    ++open_count_;
  }
  void End() {
    absl::MutexLock lock(&mutex_);
    --open_count_;
  }
  void Push(std::function<void()> reaction) {
    absl::MutexLock lock(&mutex_);
    reactions_.push_back(std::move(reaction));
  }

  // What is due.
  void Run() {
    while (RunOne(false)) {
    }
  }
  void RunUntilAllEnd() {
    while (RunOne(true)) {
    }
  }

 private:
  bool RunOne(bool waits) {
    std::function<void()> reaction;
    {
      absl::MutexLock lock(&mutex_);
      const auto is_due = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !reactions_.empty() || open_count_ == 0;
      };
      if (waits) mutex_.Await(absl::Condition(&is_due));
      if (reactions_.empty()) return false;
      reaction = std::move(reactions_.front());
      reactions_.pop_front();
    }
    reaction();
    return true;
  }

  absl::Mutex mutex_;
  std::deque<std::function<void()>> reactions_ ABSL_GUARDED_BY(mutex_);
  size_t open_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

// One call with a reactor `Reactor` as seen from its other side `Side`. Owns itself until its end.
template <typename Side, typename Reactor, typename Request, typename Response>
class DirectCall : public Side {
 public:
  explicit DirectCall(CallQueue* queue) : queue_(queue) { queue_->Begin(); }

  void Finish(grpc::Status /*status*/) override {
    queue_->Push([this] {
      reactor_->OnDone();
      queue_->End();
      delete this;
    });
  }
  void SendInitialMetadata() override {}

  Request request;
  Response response;

 protected:
  grpc::CallbackServerContext* context() { return &context_; }
  void Bind(Reactor* reactor) {
    reactor_ = reactor;
    this->BindReactor(reactor);
  }
  // From the queue, as a message may be done before the reactor is bound.
  void React(std::function<void(Reactor*)> reaction) {
    queue_->Push([this, reaction = std::move(reaction)] { reaction(reactor_); });
  }

 private:
  grpc::internal::ServerReactor* reactor() override { return reactor_; }
  void CallOnDone() override {}

  CallQueue* const queue_;
  grpc::CallbackServerContext context_;
  Reactor* reactor_ = nullptr;
};

template <typename Request, typename Response>
class DirectUnary final
    : public DirectCall<grpc::ServerCallbackUnary, grpc::ServerUnaryReactor, Request, Response> {
 public:
  using DirectUnary::DirectCall::DirectCall;
  // method(context, request, response) -> reactor
  template <typename Method>
  void Start(Method&& method) {
    this->Bind(method(this->context(), &this->request, &this->response));
  }
};

// The daemon writes; every message is taken.
template <typename Request, typename Response>
class DirectWriter final
    : public DirectCall<grpc::ServerCallbackWriter<Response>, grpc::ServerWriteReactor<Response>,
                        Request, Response> {
 public:
  using Reactor = grpc::ServerWriteReactor<Response>;
  using DirectWriter::DirectCall::DirectCall;
  template <typename Method>
  void Start(Method&& method) {
    this->Bind(method(this->context(), &this->request));
  }
  void Write(const Response* /*message*/, grpc::WriteOptions /*options*/) override {
    this->React([](Reactor* reactor) { reactor->OnWriteDone(true); });
  }
  void WriteAndFinish(const Response* message, grpc::WriteOptions options,
                      grpc::Status status) override {
    Write(message, options);
    this->Finish(std::move(status));
  }
};

// The daemon reads; `next` fills a message, or says that there is none.
template <typename Request, typename Response>
class DirectReader final : public DirectCall<grpc::ServerCallbackReader<Request>,
                                             grpc::ServerReadReactor<Request>, Request, Response> {
 public:
  using Reactor = grpc::ServerReadReactor<Request>;
  DirectReader(CallQueue* queue, std::function<bool(Request*)> next)
      : DirectReader::DirectCall(queue), next_(std::move(next)) {}
  template <typename Method>
  void Start(Method&& method) {
    this->Bind(method(this->context(), &this->response));
  }
  void Read(Request* message) override {
    this->React([this, message](Reactor* reactor) { reactor->OnReadDone(next_(message)); });
  }

 private:
  const std::function<bool(Request*)> next_;
};

}  // namespace kvtier
