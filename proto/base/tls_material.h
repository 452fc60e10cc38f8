// SPDX-License-Identifier: Apache-2.0
//
// The three files of one side of a mutual TLS connection, read and held against each other before
// anything is done with them: what gRPC says of a wrong file names neither the file nor the fault.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvtier {

// PEM files.
struct TlsPaths {
  // This side's certificate, followed by those between it and its authority.
  std::string cert;
  // The private key of that certificate, not encrypted.
  std::string key;
  // The authorities whose certificates are believed of the other side.
  std::string ca;
};

struct TlsMaterial {
  // The texts of the files.
  std::string certificate_chain;
  std::string private_key;
  std::string roots;
  // Seconds since 1970. Of the certificate, and the earliest of all certificates in both files.
  int64_t not_before_seconds = 0;
  int64_t first_expiry_seconds = 0;
  // The key's group may read it. Kubernetes mounts secrets like that, elsewhere it is an oversight.
  bool key_is_group_readable = false;
};

// Reads the files; blocks for that. Errors begin with the path: NOT_FOUND and PERMISSION_DENIED of
// the file system; PERMISSION_DENIED, too, when others than the key's owner and group may read it,
// or others than its owner may write it; INVALID_ARGUMENT when a file is not what it should be, or
// the key is not the certificate's. What has expired is no error.
absl::StatusOr<TlsMaterial> ReadTlsMaterial(const TlsPaths& paths);

}  // namespace kvtier
