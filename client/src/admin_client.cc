// SPDX-License-Identifier: Apache-2.0
#include "client/src/admin_client.h"

#include <unistd.h>

#include <cerrno>

#include "client/src/channel.h"
#include "proto/base/status_util.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier::client {
namespace {

// Why nobody answers, in words that say what to do.
absl::Status ExplainUnreachable(const std::string& socket_path, const absl::Status& status) {
  if (access(socket_path.c_str(), R_OK | W_OK) == 0) return status;
  if (errno == EACCES) {
    return PermissionDenied("%s belongs to the daemon's user; run as that user or as root",
                            socket_path);
  }
  if (errno != ENOENT) return status;
  return Unavailable("no kvtierd serves %s; start one, or name its server.run_dir", socket_path);
}

}  // namespace

AdminClient::AdminClient(const Options& options)
    : timeout_ms_(options.timeout_ms),
      socket_path_(options.tcp.address.empty() ? options.run_dir + "/admin.sock" : "") {
  if (!socket_path_.empty()) {
    stub_ = v1::AdminService::NewStub(NewUnixChannel(socket_path_));
    return;
  }
  const auto channel = NewTcpChannel(options.tcp);
  channel_status_ = channel.status();
  if (channel.ok()) stub_ = v1::AdminService::NewStub(*channel);
}

template <typename Request, typename Response>
absl::StatusOr<Response> AdminClient::Call(Method<Request, Response> method,
                                           const Request& request) {
  KVT_RETURN_IF_ERROR(channel_status_);
  grpc::ClientContext context;
  SetDeadline(context, timeout_ms_);
  Response response;
  if (absl::Status status = FromGrpc((stub_.get()->*method)(&context, request, &response));
      !status.ok()) {
    return absl::IsUnavailable(status) && !socket_path_.empty()
               ? ExplainUnreachable(socket_path_, status)
               : status;
  }
  return response;
}

absl::StatusOr<v1::GetStatusResponse> AdminClient::GetStatus() {
  return Call(&v1::AdminService::Stub::GetStatus, v1::GetStatusRequest());
}

absl::StatusOr<v1::GetTiersResponse> AdminClient::GetTiers() {
  return Call(&v1::AdminService::Stub::GetTiers, v1::GetTiersRequest());
}

absl::StatusOr<v1::ListTenantsResponse> AdminClient::ListTenants() {
  return Call(&v1::AdminService::Stub::ListTenants, v1::ListTenantsRequest());
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

absl::StatusOr<v1::WhyMissResponse> AdminClient::WhyMiss(const Key& key) {
  v1::WhyMissRequest request;
  request.set_keys(std::string(key.AsBytes()));
  return Call(&v1::AdminService::Stub::WhyMiss, request);
}

absl::StatusOr<v1::FlushResponse> AdminClient::Flush() {
  return Call(&v1::AdminService::Stub::Flush, v1::FlushRequest());
}

}  // namespace kvtier::client
