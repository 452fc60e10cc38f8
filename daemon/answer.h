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

  void OnDone() override {
    if (undo_ && context_->IsCancelled()) undo_();
    delete this;
  }

 private:
  grpc::CallbackServerContext* const context_;
  std::function<void()> undo_;
};

}  // namespace kvtier
