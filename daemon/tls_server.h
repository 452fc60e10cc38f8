// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_builder.h>

#include "absl/status/status.h"
#include "daemon/config.h"
#include "daemon/tenants.h"

namespace kvtier {

// Has the server listen at server.tcp_address: TLS 1.2 or newer, with a certificate of each client
// that server.tls_ca has issued. The files are looked at every second; what they hold then is used
// for new connections. Every call is held against the names in its certificate before it is served:
//   ContextStoreService  those of tenants; OpenSession refuses others itself, with a reason
//   Health               every certificate
//   all else             those of admins
// Refused calls end with PERMISSION_DENIED. Once the server has started, `port` is its port, or 0.
// `tenants` outlives the server. Blocks for reading the files. Errors: those of ReadTlsMaterial,
// with the keys that name the files.
absl::Status AddTlsPort(const ServerConfig& config, const TenantTable* tenants,
                        grpc::ServerBuilder* builder, int* port);

}  // namespace kvtier
