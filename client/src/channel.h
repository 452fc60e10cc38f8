// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvtier/tls.h"

namespace kvtier::client {

// A channel to a daemon's unix socket that shares nothing with other channels, so that its first
// connection attempt is made at once, whatever became of earlier ones. Connects lazily; tries again
// 20 to 200 ms after a failure.
std::shared_ptr<grpc::Channel> NewUnixChannel(const std::string& socket_path);

// The same to a daemon on TCP. Reads the files. FAILED_PRECONDITION that names the file when one is
// not there, not readable, or not what it should be.
absl::StatusOr<std::shared_ptr<grpc::Channel>> NewTcpChannel(const TcpOptions& options);

// Gives the call `timeout_ms` from now and makes it fail at once while the daemon is away.
void SetDeadline(grpc::ClientContext& context, uint32_t timeout_ms);

}  // namespace kvtier::client
