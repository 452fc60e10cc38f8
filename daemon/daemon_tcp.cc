// SPDX-License-Identifier: Apache-2.0
//
// Daemon: the services on TCP.
#include <grpcpp/server_builder.h>

#include "daemon/admin_auditor.h"
#include "daemon/daemon.h"
#include "daemon/log.h"
#include "daemon/tls_server.h"
#include "proto/base/status_util.h"

namespace kvtier {

AdminService::Options Daemon::AdminOptions() const {
  return {.epoch = epoch_,
          .device = config_.hbm_device.device,
          .write_bytes_per_day_max = config_.nvme.write_bytes_per_day_max};
}

absl::Status Daemon::ListenTcp() {
  const std::string& address = config_.server.tcp_address;
  if (address.empty()) return absl::OkStatus();
  tcp_service_ =
      std::make_unique<ContextStoreService>(ServiceContext{.epoch = epoch_,
                                                           .store = store_.get(),
                                                           .tenants = &tenants_,
                                                           .sessions = &tcp_sessions_,
                                                           .hash_domains = &hash_domains_,
                                                           .rates = &rates_,
                                                           .session_calls = session_calls_.get(),
                                                           .data_calls = data_calls_.get(),
                                                           .watch_calls = watch_calls_.get()});
  tcp_admin_service_ = std::make_unique<AdminService>(AdminOptions(), store_.get(), &tenants_);
  grpc::ServerBuilder builder;
  int port = 0;
  KVT_RETURN_IF_ERROR(AddTlsPort(config_.server, &tenants_, &builder, &port));
  builder.RegisterService(tcp_service_.get());
  builder.RegisterService(tcp_admin_service_.get());
  AuditAdminCalls(&builder, &tenants_);
  SetLimits(&builder);
  tcp_server_ = builder.BuildAndStart();
  if (tcp_server_ == nullptr || port == 0) {
    return Unavailable(
        "server.tcp_address: cannot listen on %s: another process has the port, or "
        "the address is not this machine's",
        address);
  }
  tcp_port_ = static_cast<uint16_t>(port);
  Log(LogLevel::kInfo, "serving TCP with mutual TLS", {{"address", address}, {"port", tcp_port_}});
  return absl::OkStatus();
}

}  // namespace kvtier
