// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/src/device_map.h"
#include "client/src/handle_connection.h"

namespace kvtier::client {

// One segment mapped into this process: its memory, or that of a GPU. Immutable; unmapped when
// destroyed, and only then is its hold on the handle connection given up.
class Mapping {
 public:
  // Requires: `bytes` lie in one mmap region, which this object takes over.
  Mapping(std::shared_ptr<HandleConnection> connection, std::span<std::byte> bytes)
      : connection_(std::move(connection)), bytes_(bytes), segment_bytes_(bytes.size()) {}
  Mapping(std::shared_ptr<HandleConnection> connection, std::shared_ptr<DeviceMap> devices,
          DeviceMap::Mapped mapped)
      : connection_(std::move(connection)),
        segment_bytes_(mapped.memory->bytes()),
        devices_(std::move(devices)),
        mapped_(std::move(mapped)) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  uint64_t segment_bytes() const { return segment_bytes_; }
  // Empty for the memory of a GPU.
  std::span<std::byte> bytes() const { return bytes_; }
  // Of the segment on its GPU; 0 when it is not there.
  CudaAddress device_address() const {
    return mapped_.memory == nullptr ? 0 : mapped_.memory->address();
  }
  int device_ordinal() const { return mapped_.device_ordinal; }

 private:
  const std::shared_ptr<HandleConnection> connection_;
  const std::span<std::byte> bytes_;
  const uint64_t segment_bytes_;
  // Owns the device that the mapping is on.
  const std::shared_ptr<DeviceMap> devices_;
  const DeviceMap::Mapped mapped_;
};

// The segments that one session has mapped. Thread-safe. Keeps each mapping until Close; those that
// leases and fills share live on with them.
class SegmentMap {
 public:
  SegmentMap(std::shared_ptr<HandleConnection> connection, std::shared_ptr<DeviceMap> devices);

  // Maps the segment, unless it is mapped. Blocks for one exchange on the handle socket. Errors:
  // those of HandleConnection::GetSegment and DeviceMap::Map; RESOURCE_EXHAUSTED (no address
  // space); INTERNAL (a descriptor that does not hold what the daemon says); ABORTED after Close.
  absl::StatusOr<std::shared_ptr<const Mapping>> Get(const SegmentId& id);
  // See HandleConnection::GetBoard; ABORTED after Close.
  absl::StatusOr<UniqueFd> GetBoard();
  // Drops all mappings and the connection. Idempotent.
  void Close();
  size_t segment_count() const;

 private:
  const std::shared_ptr<DeviceMap> devices_;
  mutable absl::Mutex mutex_;
  // Null once closed.
  std::shared_ptr<HandleConnection> connection_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<SegmentId, std::shared_ptr<const Mapping>> mappings_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::client
