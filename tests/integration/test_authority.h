// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "proto/base/tls_material.h"

namespace kvtier {

// A certificate authority for tests, made with the command openssl: NAME.crt in a folder, and what
// it issues beside it. A broken expectation fails the test.
class TestAuthority {
 public:
  TestAuthority(std::string folder, std::string name);

  struct Subject {
    std::string common_name = "test";
    // As openssl takes them: "URI:spiffe://test/engine,DNS:engine.test". May be empty.
    std::string alternative_names = {};
    // Negative: over by then.
    int days = 30;
  };
  // Makes FILE.key and FILE.crt in the folder, in the place of what is there.
  TlsPaths Issue(const std::string& file, const Subject& subject);

  const std::string& path() const { return path_; }

 private:
  const std::string folder_;
  const std::string name_;
  const std::string path_;
};

// Runs a command of the shell without its output; its exit status.
int RunQuietly(const std::string& command);

}  // namespace kvtier
