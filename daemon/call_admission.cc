// SPDX-License-Identifier: Apache-2.0
#include "daemon/call_admission.h"

#include "daemon/peer_names.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier {

absl::StatusOr<OwnerIdx> TenantOfPeer(const TenantTable& tenants, const grpc::AuthContext& peer) {
  const std::vector<std::string> names = PeerNames(peer);
  const std::optional<OwnerIdx> owner = tenants.OwnerOf(names);
  if (owner.has_value()) return *owner;
  return WithReason(
      PermissionDenied("the certificate (%s) is no tenant's, or that of several: name it once in "
                       "certificates of a [[tenant]]",
                       JoinPeerNames(names)),
      reason::kIdentityUnknown);
}

absl::StatusOr<SessionTable::Session> AdmitCall(const ServiceContext& service,
                                                const grpc::CallbackServerContext& context,
                                                uint64_t session_id, bool gives_back) {
  KVT_ASSIGN_OR_RETURN(const SessionTable::Session session, service.sessions->Find(session_id));
  if (service.is_tcp()) {
    KVT_ASSIGN_OR_RETURN(const OwnerIdx owner,
                         TenantOfPeer(*service.tenants, *context.auth_context()));
    if (owner != session.owner) {
      return WithReason(PermissionDenied("the session is of another tenant than the certificate"),
                        reason::kIdentityUnknown);
    }
  }
  if (service.rates != nullptr && !gives_back) {
    KVT_RETURN_IF_ERROR(service.rates->Take(session.owner));
  }
  return session;
}

absl::Status NotMapped() {
  return WithReason(
      FailedPrecondition("Reserve and Acquire give out mapped memory, which TCP cannot carry: use "
                         "Write and Read, or the unix sockets of the daemon's node"),
      reason::kNotMapped);
}

}  // namespace kvtier
