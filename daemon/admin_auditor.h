// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_builder.h>

#include "daemon/tenants.h"

namespace kvtier {

// Has each call of AdminService that the server serves written to the audit log (daemon/audit.h)
// when it ends, except for those that only look. `tenants` outlives the server.
void AuditAdminCalls(grpc::ServerBuilder* builder, const TenantTable* tenants);

}  // namespace kvtier
