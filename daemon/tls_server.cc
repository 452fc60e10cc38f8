// SPDX-License-Identifier: Apache-2.0
#include "daemon/tls_server.h"

#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/audit.h"
#include "daemon/log.h"
#include "daemon/peer_names.h"
#include "proto/base/status_util.h"
#include "proto/base/tls_material.h"

namespace kvtier {
namespace {

// How soon a changed certificate is used.
constexpr unsigned kReloadSeconds = 1;
// When to speak of a certificate that ends: certificates of 30 days are changed by then.
constexpr int64_t kExpiryWarningSeconds = 7 * 86'400;

constexpr std::string_view kOpenSession = "/kvtier.v1.ContextStoreService/OpenSession";
constexpr std::string_view kContextStore = "/kvtier.v1.ContextStoreService/";
constexpr std::string_view kHealth = "/grpc.health.v1.Health/";

// Closed by default: a service that is added is the admins' until it is named here.
class CallGate final : public grpc::AuthMetadataProcessor {
 public:
  explicit CallGate(const TenantTable* tenants) : tenants_(tenants) {}

  // Looks into tables only.
  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* peer,
                       OutputMetadata* /*consumed*/, OutputMetadata* /*response*/) override {
    const auto found = metadata.find(":path");
    const std::string_view method =
        found == metadata.end() ? std::string_view()
                                : std::string_view(found->second.data(), found->second.size());
    if (method == kOpenSession || method.starts_with(kHealth)) return grpc::Status::OK;
    const std::vector<std::string> names = PeerNames(*peer);
    const bool is_admitted = method.starts_with(kContextStore)
                                 ? tenants_->OwnerOf(names).has_value()
                                 : !tenants_->AdminOf(names).empty();
    if (is_admitted) return grpc::Status::OK;
    // gRPC does not tell a gate from where the peer comes.
    AuditRefusal({.who = JoinPeerNames(names),
                  .peer = "tcp",
                  .what = std::string(method.substr(method.rfind('/') + 1)),
                  .outcome = "PERMISSION_DENIED"});
    return grpc::Status(grpc::StatusCode::PERMISSION_DENIED,
                        absl::StrFormat("the certificate (%s) may not call %s: see [[tenant]] and "
                                        "[[admin]] of the daemon's configuration",
                                        JoinPeerNames(names), method));
  }

 private:
  const TenantTable* const tenants_;
};

void WarnAboutMaterial(const ServerConfig& config, const TlsMaterial& material) {
  if (material.key_is_group_readable) {
    Log(LogLevel::kWarning,
        "server.tls_key can be read by its group; chmod 0600 unless that is so "
        "by intent",
        {{"path", config.tls_key}});
  }
  const int64_t left_seconds = material.first_expiry_seconds - std::time(nullptr);
  if (left_seconds < kExpiryWarningSeconds) {
    Log(left_seconds < 0 ? LogLevel::kError : LogLevel::kWarning,
        "a certificate of server.tls_cert or server.tls_ca has expired or will soon",
        {{"left_seconds", left_seconds}});
  }
}

}  // namespace

absl::Status AddTlsPort(const ServerConfig& config, const TenantTable* tenants,
                        grpc::ServerBuilder* builder, int* port) {
  // What is wrong now is said now; gRPC reads the files again by itself.
  const auto material =
      ReadTlsMaterial({.cert = config.tls_cert, .key = config.tls_key, .ca = config.tls_ca});
  if (!material.ok()) {
    return Annotate(material.status(), "server.tls_cert, server.tls_key, server.tls_ca");
  }
  WarnAboutMaterial(config, *material);
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          config.tls_key, config.tls_cert, config.tls_ca, kReloadSeconds));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  const std::shared_ptr<grpc::ServerCredentials> credentials =
      grpc::experimental::TlsServerCredentials(options);
  credentials->SetAuthMetadataProcessor(std::make_shared<CallGate>(tenants));
  builder->AddListeningPort(config.tcp_address, credentials, port);
  // A machine that is gone says nothing: its sessions end within this, as those of a process that
  // is gone do at once on a unix socket.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  // What the client library does; more often is refused.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 20'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // Or a second daemon would take half of the connections.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  return absl::OkStatus();
}

}  // namespace kvtier
