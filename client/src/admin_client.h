// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "kvtier/tls.h"
#include "kvtier/v1/admin.grpc.pb.h"
#include "proto/base/key.h"

namespace kvtier::client {

// kvtier.v1.AdminService over `<run_dir>/admin.sock` or TCP, one method a call. Thread-safe; calls
// block until answered or for `timeout_ms`. Connects at the first call. Errors of every call:
// UNAVAILABLE (no daemon there), DEADLINE_EXCEEDED, FAILED_PRECONDITION (a file of TcpOptions), and
// those of the service with their reason (proto/base/reasons.h).
class AdminClient {
 public:
  struct Options {
    std::string run_dir = "/run/kvtierd";
    uint32_t timeout_ms = 10'000;
    // With an address: by TCP instead, for a certificate that is an [[admin]] of the daemon.
    TcpOptions tcp = {};
  };
  explicit AdminClient(const Options& options);

  absl::StatusOr<v1::GetStatusResponse> GetStatus();
  absl::StatusOr<v1::GetTiersResponse> GetTiers();
  absl::StatusOr<v1::ListTenantsResponse> ListTenants();
  // `limit` 0: the daemon's default.
  absl::StatusOr<v1::ListContextsResponse> ListContexts(uint32_t limit = 0);
  absl::StatusOr<v1::WhereResponse> WhereContext(std::string_view context);
  absl::StatusOr<v1::WhereResponse> WhereKey(const Key& key);
  absl::StatusOr<v1::WhyMissResponse> WhyMiss(const Key& key);
  absl::StatusOr<v1::FlushResponse> Flush();

 private:
  template <typename Request, typename Response>
  using Method = grpc::Status (v1::AdminService::Stub::*)(grpc::ClientContext*, const Request&,
                                                          Response*);
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(Method<Request, Response> method, const Request& request);

  const uint32_t timeout_ms_;
  // Empty over TCP.
  const std::string socket_path_;
  absl::Status channel_status_;
  // Null when that is an error.
  std::unique_ptr<v1::AdminService::Stub> stub_;
};

}  // namespace kvtier::client
