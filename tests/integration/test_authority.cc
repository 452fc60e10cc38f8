// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/test_authority.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/str_format.h"

namespace kvtier {
namespace {

constexpr char kNewKey[] = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";

}  // namespace

int RunQuietly(const std::string& command) {
  const int status = std::system(("exec >/dev/null 2>&1 </dev/null; " + command).c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TestAuthority::TestAuthority(std::string folder, std::string name)
    : folder_(std::move(folder)), name_(std::move(name)), path_(folder_ + "/" + name_ + ".crt") {
  EXPECT_EQ(RunQuietly(absl::StrFormat(
                "openssl req -x509 %s -keyout %s/%s.key -out %s -subj '/CN=%s' -days 30", kNewKey,
                folder_, name_, path_, name_)),
            0);
}

TlsPaths TestAuthority::Issue(const std::string& file, const Subject& subject) {
  const std::string stem = folder_ + "/" + file;
  const std::string names =
      subject.alternative_names.empty()
          ? ""
          : absl::StrFormat("-addext 'subjectAltName=%s'", subject.alternative_names);
  EXPECT_EQ(RunQuietly(absl::StrFormat(
                "set -e; openssl req %s %s -keyout %s.new.key -out %s.csr -subj '/CN=%s'; "
                "openssl x509 -req -in %s.csr -CA %s -CAkey %s/%s.key -days %d "
                "-copy_extensions copy -out %s.new.crt; "
                "mv %s.new.key %s.key; mv %s.new.crt %s.crt",
                kNewKey, names, stem, stem, subject.common_name, stem, path_, folder_, name_,
                subject.days, stem, stem, stem, stem, stem)),
            0);
  return {.cert = stem + ".crt", .key = stem + ".key", .ca = path_};
}

}  // namespace kvtier
