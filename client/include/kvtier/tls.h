// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace kvtier::client {

// A daemon that is reached by TCP with mutual TLS, for processes that cannot have its unix sockets:
// on another machine, or in a container without its directory. Nothing is mapped over TCP: blocks
// go by value (Write, Read), and calls that give out mapped memory answer FAILED_PRECONDITION
// (NOT_MAPPED). The files are PEM and are read anew for each session. A plain value.
struct TcpOptions {
  // "host:port", "10.0.0.1:7443" or "[::1]:7443". Empty: not by TCP.
  std::string address = {};
  // The certificate of this process, followed by those between it and its authority, and its key,
  // which only the key's owner (and its group) may read.
  std::string cert_path = {};
  std::string key_path = {};
  // The authorities that the daemon's certificate may come from.
  std::string ca_path = {};
  // The name that the daemon's certificate must have. Empty: the host of `address`.
  std::string server_name = {};
};

}  // namespace kvtier::client
