// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer_names.h"

#include <grpc/grpc_security_constants.h>

#include <algorithm>

namespace kvtier {
namespace {

std::vector<std::string> Values(const grpc::AuthContext& peer, const char* property,
                                const char* kind) {
  std::vector<std::string> values;
  for (const grpc::string_ref& value : peer.FindPropertyValues(property)) {
    values.push_back(kind + std::string(value.data(), value.size()));
  }
  return values;
}

}  // namespace

std::vector<std::string> PeerNames(const grpc::AuthContext& peer) {
  std::vector<std::string> names = Values(peer, GRPC_PEER_SPIFFE_ID_PROPERTY_NAME, "");
  if (!names.empty()) return names;
  // gRPC found it malformed, or one of several URIs, which SPIFFE forbids.
  const auto is_spiffe = [](const std::string& uri) { return uri.starts_with("spiffe:"); };
  if (std::ranges::any_of(Values(peer, GRPC_PEER_URI_PROPERTY_NAME, ""), is_spiffe)) return {};
  names = Values(peer, GRPC_PEER_DNS_PROPERTY_NAME, "dns:");
  for (std::string& name : names) {
    std::ranges::transform(name, name.begin(), [](char c) {
      return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    });
  }
  if (!names.empty()) return names;
  return Values(peer, GRPC_X509_CN_PROPERTY_NAME, "cn:");
}

std::string JoinPeerNames(const std::vector<std::string>& names) {
  std::string joined;
  for (const std::string& name : names) {
    if (!joined.empty()) joined += ", ";
    joined += name;
  }
  return joined.empty() ? "no name" : joined;
}

}  // namespace kvtier
