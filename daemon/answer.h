// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier {

// Ends a unary call that did not wait. `status` decides; the response carries the epoch.
template <typename Response>
grpc::ServerUnaryReactor* FinishNow(grpc::CallbackServerContext* context,
                                    const absl::Status& status, uint64_t epoch,
                                    Response* response) {
  response->set_epoch(epoch);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

// A unary call whose answer comes later. Whoever answers calls Answer exactly once, from any
// thread; until then the request's context and the response stay valid, whatever the client does.
// If the client is gone by then, `undo` gives back what the answer would have given.
class WaitingCall final : public grpc::ServerUnaryReactor {
 public:
  explicit WaitingCall(grpc::CallbackServerContext* context) : context_(context) {}

  void Answer(const absl::Status& status, std::function<void()> undo = nullptr) {
    undo_ = std::move(undo);
    Finish(ToGrpc(status));
  }

  // The reactions of our calls are short and never wait, so gRPC may run them where it stands. It
  // would else queue them on an executor thread, behind a poller that can sit there for ten seconds
  // (seen with 1.51): too long for the end of a session, and for stopping.
  bool InternalInlineable() override { return true; }

  void OnDone() override {
    if (undo_ && context_->IsCancelled()) undo_();
    delete this;
  }

 private:
  grpc::CallbackServerContext* const context_;
  std::function<void()> undo_;
};

}  // namespace kvtier
