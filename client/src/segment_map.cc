// SPDX-License-Identifier: Apache-2.0
#include "client/src/segment_map.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <limits>
#include <utility>

#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::client {
namespace {

absl::Status Closed() {
  return WithReason(Aborted("the session has ended"), reason::kSessionUnknown);
}

absl::StatusOr<std::span<std::byte>> MapSegment(const SegmentHandle& handle, bool writable) {
  struct stat info;
  if (::fstat(handle.fd.get(), &info) != 0) return ErrnoStatus(errno, "size of a segment");
  // A page beyond the end of the file would be a SIGBUS in the engine.
  if (handle.segment_bytes == 0 ||
      handle.segment_bytes > static_cast<uint64_t>(std::numeric_limits<ptrdiff_t>::max()) ||
      info.st_size < static_cast<off_t>(handle.segment_bytes)) {
    return Internal("the daemon sent a segment of %d bytes for one of %d", info.st_size,
                    handle.segment_bytes);
  }
  void* base = ::mmap(nullptr, handle.segment_bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                      MAP_SHARED, handle.fd.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, "mapping a segment");
  return std::span(static_cast<std::byte*>(base), handle.segment_bytes);
}

}  // namespace

Mapping::~Mapping() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

SegmentMap::SegmentMap(std::shared_ptr<HandleConnection> connection,
                       std::shared_ptr<DeviceMap> devices)
    : devices_(std::move(devices)), connection_(std::move(connection)) {}

absl::StatusOr<UniqueFd> SegmentMap::GetBoard() {
  std::shared_ptr<HandleConnection> connection;
  {
    absl::MutexLock lock(&mutex_);
    if (connection_ == nullptr) return Closed();
    connection = connection_;
  }
  return connection->GetBoard();
}

absl::StatusOr<std::shared_ptr<const Mapping>> SegmentMap::Get(const SegmentId& id) {
  std::shared_ptr<HandleConnection> connection;
  {
    absl::MutexLock lock(&mutex_);
    if (connection_ == nullptr) return Closed();
    if (const auto place = mappings_.find(id); place != mappings_.end()) return place->second;
    connection = connection_;
  }
  KVT_ASSIGN_OR_RETURN(const SegmentHandle handle, connection->GetSegment(id));
  std::shared_ptr<const Mapping> mapping;
  if (handle.device_uuid == CudaUuid{}) {
    KVT_ASSIGN_OR_RETURN(const std::span<std::byte> bytes, MapSegment(handle, id.writable));
    mapping = std::make_shared<const Mapping>(std::move(connection), bytes);
  } else {
    KVT_ASSIGN_OR_RETURN(DeviceMap::Mapped mapped,
                         devices_->Map(handle.device_uuid, handle.fd.get(), handle.segment_bytes));
    mapping = std::make_shared<const Mapping>(std::move(connection), devices_, std::move(mapped));
  }
  absl::MutexLock lock(&mutex_);
  if (connection_ == nullptr) return Closed();
  // Another thread may have been first; its mapping serves as well.
  return mappings_.try_emplace(id, std::move(mapping)).first->second;
}

void SegmentMap::Close() {
  std::shared_ptr<HandleConnection> connection;
  absl::flat_hash_map<SegmentId, std::shared_ptr<const Mapping>> mappings;
  {
    absl::MutexLock lock(&mutex_);
    mappings.swap(mappings_);
    connection = std::exchange(connection_, nullptr);
  }
  // Unmapping and closing happen here, without the lock: mappings first, as locals end in reverse
  // order of their declaration.
}

size_t SegmentMap::segment_count() const {
  absl::MutexLock lock(&mutex_);
  return mappings_.size();
}

}  // namespace kvtier::client
