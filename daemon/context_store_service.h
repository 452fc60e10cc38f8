// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <type_traits>

#include "daemon/answer.h"
#include "daemon/call_admission.h"
#include "daemon/requests.h"
#include "daemon/service_context.h"
#include "kvtier/v1/context_store.grpc.pb.h"

namespace kvtier {

// kvtier.v1.ContextStoreService: checks requests, runs the store, packs answers. Thread-safe; no
// method waits (gRPC callback API). By topic: context_store_session.cc, context_store_blocks.cc,
// context_store_contexts.cc, context_store_hints.cc; streams have classes of their own.
//
// The messages of Write and Read come and go as bytes (proto/rpc/chunk_message.h).
class ContextStoreService final : public v1::ContextStoreService::WithRawCallbackMethod_Write<
                                      v1::ContextStoreService::WithRawCallbackMethod_Read<
                                          v1::ContextStoreService::CallbackService>> {
 public:
  // What `context` names outlives the service and its calls.
  explicit ContextStoreService(const ServiceContext& context) : service_(context) {}

  using Context = grpc::CallbackServerContext;
  using Unary = grpc::ServerUnaryReactor;

  grpc::ServerWriteReactor<v1::OpenSessionResponse>* OpenSession(
      Context* context, const v1::OpenSessionRequest* request) override;
  Unary* RegisterLayout(Context* context, const v1::RegisterLayoutRequest* request,
                        v1::RegisterLayoutResponse* response) override;

  Unary* Lookup(Context* context, const v1::LookupRequest* request,
                v1::LookupResponse* response) override;
  Unary* Reserve(Context* context, const v1::ReserveRequest* request,
                 v1::ReserveResponse* response) override;
  Unary* Commit(Context* context, const v1::CommitRequest* request,
                v1::CommitResponse* response) override;
  Unary* Abort(Context* context, const v1::AbortRequest* request,
               v1::AbortResponse* response) override;
  Unary* Acquire(Context* context, const v1::AcquireRequest* request,
                 v1::AcquireResponse* response) override;
  Unary* Release(Context* context, const v1::ReleaseRequest* request,
                 v1::ReleaseResponse* response) override;
  Unary* Prefetch(Context* context, const v1::PrefetchRequest* request,
                  v1::PrefetchResponse* response) override;
  Unary* GetTicket(Context* context, const v1::GetTicketRequest* request,
                   v1::GetTicketResponse* response) override;
  Unary* CancelPrefetch(Context* context, const v1::CancelPrefetchRequest* request,
                        v1::CancelPrefetchResponse* response) override;
  Unary* ReportBad(Context* context, const v1::ReportBadRequest* request,
                   v1::ReportBadResponse* response) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* Write(Context* context,
                                                   grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Read(Context* context,
                                                   const grpc::ByteBuffer* request) override;

  grpc::ServerWriteReactor<v1::WatchResponse>* Watch(Context* context,
                                                     const v1::WatchRequest* request) override;

  Unary* CreateContext(Context* context, const v1::CreateContextRequest* request,
                       v1::CreateContextResponse* response) override;
  Unary* AppendContext(Context* context, const v1::AppendContextRequest* request,
                       v1::AppendContextResponse* response) override;
  Unary* PauseContext(Context* context, const v1::PauseContextRequest* request,
                      v1::PauseContextResponse* response) override;
  Unary* ResumeContext(Context* context, const v1::ResumeContextRequest* request,
                       v1::ResumeContextResponse* response) override;
  Unary* ForkContext(Context* context, const v1::ForkContextRequest* request,
                     v1::ForkContextResponse* response) override;
  Unary* ApplyHints(Context* context, const v1::ApplyHintsRequest* request,
                    v1::ApplyHintsResponse* response) override;
  Unary* CloseContext(Context* context, const v1::CloseContextRequest* request,
                      v1::CloseContextResponse* response) override;

 private:
  // A call that never waits: admits it, has its body done, and ends it.
  template <typename Request, typename Response>
  Unary* AnswerNow(Context* context, const Request& request, Response* response) {
    constexpr bool kGivesBack = std::is_same_v<Request, v1::ReleaseRequest> ||
                                std::is_same_v<Request, v1::AbortRequest> ||
                                std::is_same_v<Request, v1::CancelPrefetchRequest>;
    absl::Status status = AdmitCall(service_, *context, request.session_id(), kGivesBack).status();
    if (status.ok()) status = Do(request, response);
    return FinishNow(context, status, service_.epoch, response);
  }

  // The bodies of calls that never wait: fill the response, except for its epoch.
  absl::Status Do(const v1::RegisterLayoutRequest& request, v1::RegisterLayoutResponse* response);
  absl::Status Do(const v1::LookupRequest& request, v1::LookupResponse* response);
  absl::Status Do(const v1::CommitRequest& request, v1::CommitResponse* response);
  absl::Status Do(const v1::AbortRequest& request, v1::AbortResponse* response);
  absl::Status Do(const v1::ReleaseRequest& request, v1::ReleaseResponse* response);
  absl::Status Do(const v1::PrefetchRequest& request, v1::PrefetchResponse* response);
  absl::Status Do(const v1::GetTicketRequest& request, v1::GetTicketResponse* response);
  absl::Status Do(const v1::CancelPrefetchRequest& request, v1::CancelPrefetchResponse* response);
  absl::Status Do(const v1::ReportBadRequest& request, v1::ReportBadResponse* response);
  absl::Status Do(const v1::CreateContextRequest& request, v1::CreateContextResponse* response);
  absl::Status Do(const v1::AppendContextRequest& request, v1::AppendContextResponse* response);
  absl::Status Do(const v1::ResumeContextRequest& request, v1::ResumeContextResponse* response);
  absl::Status Do(const v1::ApplyHintsRequest& request, v1::ApplyHintsResponse* response);
  absl::Status Do(const v1::ForkContextRequest& request, v1::ForkContextResponse* response);
  absl::Status Do(const v1::CloseContextRequest& request, v1::CloseContextResponse* response);

  // The core's number of the session.
  absl::StatusOr<core::SessionId> CoreSession(uint64_t session_id) const;
  // Packed BlockResult records.
  std::string PackPlaces(const std::vector<core::PlacedBlock>& blocks) const;

  const ServiceContext service_;
};

}  // namespace kvtier
