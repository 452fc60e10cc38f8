// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/base/timed_wait.h"
#include "tiers/cuda/driver.h"
#include "tiers/cuda/owned.h"

namespace kvtier::client {

// What this client does on GPUs itself: it maps segments of hbm, and takes checksums of slots. One
// per client; outlives its mappings. Thread-safe.
class DeviceMap {
 public:
  // `driver` null: the driver of this machine, loaded when first needed.
  explicit DeviceMap(std::shared_ptr<CudaDriver> driver) : driver_(std::move(driver)) {}

  struct Mapped {
    std::unique_ptr<CudaMemory> memory = nullptr;
    int device_ordinal = 0;
  };
  // Maps what the daemon exported. Errors: FAILED_PRECONDITION (no driver here, or this process
  // does not see that GPU; the message names it), UNIMPLEMENTED, those of CudaDevice.
  absl::StatusOr<Mapped> Map(const CudaUuid& uuid, int fd, uint64_t bytes);

  // CRC-32C of each of these ranges of mapped memory, as they are once `stream` has done what it
  // was given before. Copies them to host memory in between. Blocks, for at most `timeout`. Errors:
  // DEADLINE_EXCEEDED, those of CudaDevice.
  absl::StatusOr<std::vector<uint32_t>> Crc32cs(int device_ordinal, CudaStream stream,
                                                std::span<const CudaAddress> addresses,
                                                uint64_t bytes, absl::Duration timeout);

 private:
  // Stream, event and buffer of the checksums of one device.
  struct Reader {
    OwnedStream stream;
    OwnedEvent event;
    PinnedPages pages;
  };
  struct Device {
    CudaUuid uuid{};
    std::unique_ptr<CudaDevice> device;
    // One caller at a time has it; there is none before the first and after a failure.
    absl::Mutex reader_mutex;
    std::optional<Reader> reader ABSL_GUARDED_BY(reader_mutex);
  };

  absl::StatusOr<Device*> Find(const CudaUuid& uuid) ABSL_LOCKS_EXCLUDED(mutex_);
  static absl::StatusOr<std::vector<uint32_t>> Read(Device& device, CudaStream stream,
                                                    std::span<const CudaAddress> addresses,
                                                    uint64_t bytes, MonotonicTime deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(device.reader_mutex);

  absl::Mutex mutex_;
  std::shared_ptr<CudaDriver> driver_ ABSL_GUARDED_BY(mutex_);
  // By ordinal. Never removed.
  std::map<int, std::unique_ptr<Device>> devices_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::client
