// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/security/auth_context.h>

#include <string>
#include <vector>

namespace kvtier {

// What the certificate of a peer on TCP, verified by then, says who the peer is: the names of the
// first kind that it has of
//   "spiffe://DOMAIN/PATH"  its SPIFFE id, which is one URI among its alternative names
//   "dns:HOST"              each host among its alternative names, in lower case
//   "cn:COMMON NAME"        of its subject
// so that a name of a weaker kind never adds to a stronger one. The kind is part of the name: a
// common name that looks like a SPIFFE id is none. Empty: not a peer with a certificate, or one
// with a malformed SPIFFE id. Pure.
std::vector<std::string> PeerNames(const grpc::AuthContext& peer);

// For logs and errors: the names with ", " between them, or "no name".
std::string JoinPeerNames(const std::vector<std::string>& names);

}  // namespace kvtier
