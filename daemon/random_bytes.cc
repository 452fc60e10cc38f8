// SPDX-License-Identifier: Apache-2.0
#include "daemon/random_bytes.h"

#include <sys/random.h>

#include <cerrno>

#include "proto/base/check.h"

namespace kvtier {

void FillRandom(std::span<uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = getrandom(bytes.data(), bytes.size(), 0);
    // Only EINTR is possible for a valid buffer on a kernel that has the call.
    KVT_CHECK(got > 0 || errno == EINTR);
    if (got > 0) bytes = bytes.subspan(static_cast<size_t>(got));
  }
}

uint64_t RandomNonZero() {
  uint64_t value = 0;
  while (value == 0) FillRandom({reinterpret_cast<uint8_t*>(&value), sizeof(value)});
  return value;
}

}  // namespace kvtier
