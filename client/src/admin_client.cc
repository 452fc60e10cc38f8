// SPDX-License-Identifier: Apache-2.0
#include "client/src/admin_client.h"

#include "client/src/channel.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier::client {

AdminClient::AdminClient(const Options& options)
    : timeout_ms_(options.timeout_ms),
      stub_(v1::AdminService::NewStub(NewUnixChannel(options.run_dir + "/admin.sock"))) {}

template <typename Request, typename Response>
absl::StatusOr<Response> AdminClient::Call(Method<Request, Response> method,
                                           const Request& request) {
  grpc::ClientContext context;
  SetDeadline(context, timeout_ms_);
  Response response;
  if (absl::Status status = FromGrpc((stub_.get()->*method)(&context, request, &response));
      !status.ok()) {
    return status;
  }
  return response;
}

absl::StatusOr<v1::GetStatusResponse> AdminClient::GetStatus() {
  return Call(&v1::AdminService::Stub::GetStatus, v1::GetStatusRequest());
}

absl::StatusOr<v1::GetTiersResponse> AdminClient::GetTiers() {
  return Call(&v1::AdminService::Stub::GetTiers, v1::GetTiersRequest());
}

absl::StatusOr<v1::ListContextsResponse> AdminClient::ListContexts(uint32_t limit) {
  v1::ListContextsRequest request;
  request.set_limit(limit);
  return Call(&v1::AdminService::Stub::ListContexts, request);
}

absl::StatusOr<v1::WhereResponse> AdminClient::WhereContext(std::string_view context) {
  v1::WhereRequest request;
  request.set_context(std::string(context));
  return Call(&v1::AdminService::Stub::Where, request);
}

absl::StatusOr<v1::WhereResponse> AdminClient::WhereKey(const Key& key) {
  v1::WhereRequest request;
  request.set_key(std::string(key.AsBytes()));
  return Call(&v1::AdminService::Stub::Where, request);
}

absl::StatusOr<v1::FlushResponse> AdminClient::Flush() {
  return Call(&v1::AdminService::Stub::Flush, v1::FlushRequest());
}

}  // namespace kvtier::client
