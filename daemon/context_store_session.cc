// SPDX-License-Identifier: Apache-2.0
//
// ContextStoreService: sessions, layouts, streams.
#include "daemon/context_store_service.h"
#include "daemon/log.h"
#include "daemon/read_stream.h"
#include "daemon/session_stream.h"
#include "daemon/watch_stream.h"
#include "daemon/write_stream.h"
#include "proto/base/layout.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/rpc/layout_proto.h"

namespace kvtier {
namespace {

constexpr size_t kAdapterBytesMax = 256;
constexpr size_t kSaltBytesMax = 256;

absl::Status CheckHashDomain(const HashDomain& domain) {
  if (domain.name.empty()) return WithReason(Invalid("hash_domain: no name"), reason::kBadArgument);
  return WithReason(ValidateHashDomain(domain), reason::kBadArgument);
}

void WarnAboutHashes(const std::string& tenant, const HashDomain& domain) {
  Log(LogLevel::kWarning,
      "engines hash blocks differently under one hash domain and share nothing: is PYTHONHASHSEED "
      "the same for all of them?",
      {{"tenant", tenant}, {"hash_domain", domain.name}});
}

}  // namespace

grpc::ServerWriteReactor<v1::OpenSessionResponse>* ContextStoreService::OpenSession(
    Context* context, const v1::OpenSessionRequest* request) {
  return SessionStream::Start(service_, *context, *request);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* ContextStoreService::Write(Context* context,
                                                                      grpc::ByteBuffer* response) {
  return WriteStream::Start(service_, context, response);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* ContextStoreService::Read(
    Context* context, const grpc::ByteBuffer* request) {
  return ReadStream::Start(service_, context, *request);
}

grpc::ServerWriteReactor<v1::WatchResponse>* ContextStoreService::Watch(
    Context* context, const v1::WatchRequest* request) {
  return WatchStream::Start(service_, *context, *request);
}

absl::StatusOr<core::SessionId> ContextStoreService::CoreSession(uint64_t session_id) const {
  KVT_ASSIGN_OR_RETURN(const SessionTable::Session session, service_.sessions->Find(session_id));
  return session.core_id;
}

absl::Status ContextStoreService::Do(const v1::RegisterLayoutRequest& request,
                                     v1::RegisterLayoutResponse* response) {
  KVT_ASSIGN_OR_RETURN(const SessionTable::Session session,
                       service_.sessions->Find(request.session_id()));
  KVT_RETURN_IF_ERROR(CheckTextBytes(request.adapter(), kAdapterBytesMax, "adapter"));
  KVT_RETURN_IF_ERROR(CheckTextBytes(request.salt(), kSaltBytesMax, "salt"));
  const HashDomain domain = {.name = request.hash_domain().name(),
                             .probe = request.hash_domain().probe()};
  if (request.has_hash_domain()) KVT_RETURN_IF_ERROR(CheckHashDomain(domain));
  absl::StatusOr<Layout> layout = LayoutFromProto(request.layout());
  if (!layout.ok()) return WithReason(layout.status(), reason::kBadArgument);
  core::NamespaceSpec spec;
  spec.layout = layout->Fingerprint();
  spec.block_bytes = layout->BlockBytes();
  spec.block_tokens = request.layout().block_tokens();
  spec.hash = HashNamespace(service_.tenants->Name(session.owner), spec.layout, request.adapter(),
                            request.salt(), domain);
  KVT_ASSIGN_OR_RETURN(
      const core::NamespaceIdx ns,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
        return core.OpenNamespace(session.core_id, spec);
      }));
  KVT_RETURN_IF_ERROR(service_.sessions->AddNamespace(request.session_id(), ns, spec));
  response->set_namespace_id(ns);
  response->set_namespace_hash(std::string(spec.hash.AsBytes()));
  response->set_layout_fingerprint(std::string(spec.layout.AsBytes()));
  response->set_block_bytes(spec.block_bytes);
  if (request.has_hash_domain()) {
    const bool differs = service_.hash_domains->Differs(session.owner, spec.layout, domain);
    if (differs) WarnAboutHashes(service_.tenants->Name(session.owner), domain);
    response->set_hash_domain_differs(differs);
  }
  return absl::OkStatus();
}

ContextStoreService::Unary* ContextStoreService::RegisterLayout(
    Context* context, const v1::RegisterLayoutRequest* request,
    v1::RegisterLayoutResponse* response) {
  return AnswerNow(context, *request, response);
}

}  // namespace kvtier
