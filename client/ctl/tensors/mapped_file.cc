// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/tensors/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

// The bytes of `fd`, mapped; an empty file maps nothing.
absl::StatusOr<std::span<const std::byte>> Map(int fd, const std::string& path) {
  struct stat info{};
  if (fstat(fd, &info) != 0) return ErrnoStatus(errno, path);
  if (!S_ISREG(info.st_mode)) return Invalid("%s: not a regular file", path);
  const auto size = static_cast<size_t>(info.st_size);
  if (size == 0) return std::span<const std::byte>();
  void* start = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (start == MAP_FAILED) return ErrnoStatus(errno, "map " + path);
  return std::span<const std::byte>(static_cast<const std::byte*>(start), size);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const MappedFile>> MappedFile::Open(const std::string& path) {
  // Without O_NONBLOCK, opening a FIFO would wait for its writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ErrnoStatus(errno, path);
  auto bytes = Map(fd, path);
  close(fd);
  KVT_RETURN_IF_ERROR(bytes.status());
  return std::shared_ptr<const MappedFile>(new MappedFile(path, *bytes));
}

MappedFile::MappedFile(std::string path, std::span<const std::byte> bytes)
    : path_(std::move(path)), bytes_(bytes) {}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace kvtier::ctl
