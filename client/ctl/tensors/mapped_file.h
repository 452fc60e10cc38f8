// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace kvtier::ctl {

// The whole of a regular file, mapped to read. Immutable, thread-safe. A file that another process
// cuts short while it is mapped ends this one with SIGBUS, as every mapping does.
class MappedFile {
 public:
  // Errors: NOT_FOUND; PERMISSION_DENIED; INVALID_ARGUMENT if it is not a regular file.
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Open(const std::string& path);

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  MappedFile(std::string path, std::span<const std::byte> bytes);

  const std::string path_;
  const std::span<const std::byte> bytes_;
};

}  // namespace kvtier::ctl
