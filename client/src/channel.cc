// SPDX-License-Identifier: Apache-2.0
#include "client/src/channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <chrono>

#include "proto/base/status_util.h"
#include "proto/base/tls_material.h"

namespace kvtier::client {
namespace {

// Replies hold 16 bytes a block; payloads by value come in chunks of 1 MiB.
constexpr int kMessageBytesMax = 4 << 20;

grpc::ChannelArguments NewArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  // gRPC takes this as the time that one attempt to connect may last: a busy daemon is not an
  // absent one.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  arguments.SetMaxSendMessageSize(kMessageBytesMax);
  return arguments;
}

}  // namespace

std::shared_ptr<grpc::Channel> NewUnixChannel(const std::string& socket_path) {
  return grpc::CreateCustomChannel("unix:" + socket_path, grpc::InsecureChannelCredentials(),
                                   NewArguments());
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> NewTcpChannel(const TcpOptions& options) {
  if (options.cert_path.empty() || options.key_path.empty() || options.ca_path.empty()) {
    return FailedPrecondition(
        "TCP to %s needs three files: a certificate of your own, its key, and the authority of "
        "the daemon's",
        options.address);
  }
  const auto material =
      ReadTlsMaterial({.cert = options.cert_path, .key = options.key_path, .ca = options.ca_path});
  // Other codes would be taken for a daemon that is away.
  if (!material.ok()) return FailedPrecondition("TLS: %s", material.status().message());
  grpc::ChannelArguments arguments = NewArguments();
  if (!options.server_name.empty()) arguments.SetSslTargetNameOverride(options.server_name);
  // A connection that leads nowhere is found out; the daemon allows pings as often as this.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // A name's records may not configure this client.
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  return grpc::CreateCustomChannel(
      "dns:///" + options.address,
      grpc::SslCredentials({.pem_root_certs = material->roots,
                            .pem_private_key = material->private_key,
                            .pem_cert_chain = material->certificate_chain}),
      arguments);
}

void SetDeadline(grpc::ClientContext& context, uint32_t timeout_ms) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
  context.set_wait_for_ready(false);
}

}  // namespace kvtier::client
