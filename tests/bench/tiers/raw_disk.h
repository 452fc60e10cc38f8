// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <liburing.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/bench/tiers/host_slots.h"

namespace kvtier::bench {

// The reference: one file, written over once, read and written with O_DIRECT by the shortest
// io_uring loop there is: registered buffers, one issuer, no checksum. From and to the
// same memory as the tier: whether its pages are huge can make a factor of three.
// Owns the file (removed at the end) and the ring. Thread-compatible.
class RawDisk {
 public:
  static constexpr int kDepthMax = 32;

  // `slots` of at least block_bytes_max outlive this.
  RawDisk(const std::string& path, uint64_t file_bytes, uint32_t block_bytes_max,
          const HostSlots& slots);
  ~RawDisk();
  RawDisk(const RawDisk&) = delete;
  RawDisk& operator=(const RawDisk&) = delete;

  // Seconds for `count` blocks at random places, `depth` in flight.
  double ReadRandom(uint32_t block_bytes, uint64_t count, int depth);
  // Seconds for `count` blocks one behind the other, from the start of the file. They may be in the
  // disk's own cache then.
  double WriteSequential(uint32_t block_bytes, uint64_t count, int depth);
  // Seconds of an fdatasync: until the disk's cache is empty, whoever filled it.
  double Sync();

 private:
  double Run(bool is_read, uint32_t block_bytes, uint64_t count, int depth);

  const std::string path_;
  const uint64_t file_bytes_;
  const HostSlots& slots_;
  int fd_ = -1;
  io_uring ring_ = {};
  uint64_t random_state_ = 88172645463325252ULL;
};

}  // namespace kvtier::bench
