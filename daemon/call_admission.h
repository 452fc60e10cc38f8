// SPDX-License-Identifier: Apache-2.0
//
// Whether a call of an engine may be served: who calls, and in whose session.
#pragma once

#include <grpcpp/server_context.h>

#include "absl/status/statusor.h"
#include "daemon/service_context.h"

namespace kvtier {

// The session of a call. Errors: ABORTED (SESSION_UNKNOWN); PERMISSION_DENIED (IDENTITY_UNKNOWN)
// when the caller's certificate is not that of the session's tenant; RESOURCE_EXHAUSTED
// (RATE_LIMITED), unless the call gives something back: what is held longer helps nobody. Never
// blocks.
absl::StatusOr<SessionTable::Session> AdmitCall(const ServiceContext& service,
                                                const grpc::CallbackServerContext& context,
                                                uint64_t session_id, bool gives_back = false);

// The tenant of a caller on TCP. PERMISSION_DENIED (IDENTITY_UNKNOWN) naming the certificate.
absl::StatusOr<OwnerIdx> TenantOfPeer(const TenantTable& tenants, const grpc::AuthContext& peer);

// What Reserve and Acquire answer to callers on TCP: FAILED_PRECONDITION (NOT_MAPPED).
absl::Status NotMapped();

}  // namespace kvtier
