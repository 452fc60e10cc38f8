// SPDX-License-Identifier: Apache-2.0
//
// ContextStoreService: contexts.
#include "daemon/context_store_service.h"
#include "proto/base/status_util.h"

namespace kvtier {

absl::Status ContextStoreService::Do(const v1::CreateContextRequest& request,
                                     v1::CreateContextResponse* response) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  KVT_RETURN_IF_ERROR(CheckContextName(request.context(), "context"));
  KVT_ASSIGN_OR_RETURN(
      const uint32_t block_count,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects*) {
        return core.CreateContext(session, request.namespace_id(), request.context(), now_ms);
      }));
  response->set_block_count(block_count);
  return absl::OkStatus();
}

absl::Status ContextStoreService::Do(const v1::AppendContextRequest& request,
                                     v1::AppendContextResponse* response) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  KVT_RETURN_IF_ERROR(CheckContextName(request.context(), "context"));
  KVT_ASSIGN_OR_RETURN(const std::vector<Key> keys, ParseKeys(request.keys()));
  KVT_ASSIGN_OR_RETURN(
      const uint32_t block_count,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        return core.AppendContext(session, request.namespace_id(), request.context(),
                                  request.base_block_count(), keys, now_ms, effects);
      }));
  response->set_block_count(block_count);
  return absl::OkStatus();
}

absl::Status ContextStoreService::Do(const v1::ResumeContextRequest& request,
                                     v1::ResumeContextResponse* response) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  KVT_RETURN_IF_ERROR(CheckContextName(request.context(), "context"));
  KVT_ASSIGN_OR_RETURN(
      const core::TicketState state,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        return core.ResumeContext(
            session, request.namespace_id(), request.context(),
            {.needed_in_ms = request.needed_in_ms(),
             .prefill_tokens_per_second = static_cast<double>(request.prefill_tokens_per_second())},
            now_ms, effects);
      }));
  FillTicket(state, response->mutable_ticket());
  return absl::OkStatus();
}

absl::Status ContextStoreService::Do(const v1::ForkContextRequest& request,
                                     v1::ForkContextResponse* response) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  KVT_RETURN_IF_ERROR(CheckContextName(request.parent_context(), "parent_context"));
  KVT_RETURN_IF_ERROR(CheckContextName(request.context(), "context"));
  KVT_ASSIGN_OR_RETURN(
      const uint32_t block_count,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        return core.ForkContext(session, request.namespace_id(), request.parent_context(),
                                request.context(), request.block_count(), now_ms, effects);
      }));
  response->set_block_count(block_count);
  return absl::OkStatus();
}

absl::Status ContextStoreService::Do(const v1::CloseContextRequest& request,
                                     v1::CloseContextResponse* response) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  KVT_RETURN_IF_ERROR(CheckContextName(request.context(), "context"));
  KVT_ASSIGN_OR_RETURN(
      const uint64_t dropped_bytes,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        return core.CloseContext(session, request.namespace_id(), request.context(), request.drop(),
                                 now_ms, effects);
      }));
  response->set_dropped_bytes(dropped_bytes);
  return absl::OkStatus();
}

ContextStoreService::Unary* ContextStoreService::PauseContext(
    Context* context, const v1::PauseContextRequest* request, v1::PauseContextResponse* response) {
  const auto session = AdmitCall(service_, *context, request->session_id());
  if (!session.ok()) return FinishNow(context, session.status(), service_.epoch, response);
  const absl::Status name = CheckContextName(request->context(), "context");
  if (!name.ok()) return FinishNow(context, name, service_.epoch, response);
  response->set_epoch(service_.epoch);
  auto* call = new WaitingCall(context);  // deletes itself
  const core::TimeMs deadline_ms = DeadlineMs(*context, kDefaultTransferDeadlineMs);
  const core::Expectation expectation = {.next = NextStepOf(request->next_step()),
                                         .returns_in_ms = request->expected_resume_ms()};
  auto done = [call, response](absl::StatusOr<core::PauseResult> result) {
    if (result.ok()) {
      response->set_freed_bytes(result->freed_bytes);
      response->set_resident_bytes(result->resident_bytes);
    }
    call->Answer(result.status());
  };
  service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
    core.PauseContext(session->core_id, request->namespace_id(), request->context(), expectation,
                      deadline_ms, now_ms, std::move(done), effects);
  });
  return call;
}

ContextStoreService::Unary* ContextStoreService::CreateContext(
    Context* context, const v1::CreateContextRequest* request,
    v1::CreateContextResponse* response) {
  return AnswerNow(context, *request, response);
}

ContextStoreService::Unary* ContextStoreService::AppendContext(
    Context* context, const v1::AppendContextRequest* request,
    v1::AppendContextResponse* response) {
  return AnswerNow(context, *request, response);
}

ContextStoreService::Unary* ContextStoreService::ResumeContext(
    Context* context, const v1::ResumeContextRequest* request,
    v1::ResumeContextResponse* response) {
  return AnswerNow(context, *request, response);
}

ContextStoreService::Unary* ContextStoreService::ForkContext(Context* context,
                                                             const v1::ForkContextRequest* request,
                                                             v1::ForkContextResponse* response) {
  return AnswerNow(context, *request, response);
}

ContextStoreService::Unary* ContextStoreService::CloseContext(
    Context* context, const v1::CloseContextRequest* request, v1::CloseContextResponse* response) {
  return AnswerNow(context, *request, response);
}

}  // namespace kvtier
