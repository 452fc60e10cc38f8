// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <liburing.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kvtier::bench {

// The reference: one file, written over once, read and written with O_DIRECT by the shortest
// io_uring loop there is: registered buffers, one issuer, no checksum, no sync.
// Owns the file (removed at the end), the ring and the buffers. Thread-compatible.
class RawDisk {
 public:
  static constexpr int kDepthMax = 32;

  RawDisk(const std::string& path, uint64_t file_bytes, uint32_t block_bytes_max);
  ~RawDisk();
  RawDisk(const RawDisk&) = delete;
  RawDisk& operator=(const RawDisk&) = delete;

  // Seconds for `count` blocks at random places, `depth` in flight.
  double ReadRandom(uint32_t block_bytes, uint64_t count, int depth);
  // Seconds for `count` blocks one behind the other, from the start of the file.
  double WriteSequential(uint32_t block_bytes, uint64_t count, int depth);

 private:
  double Run(bool is_read, uint32_t block_bytes, uint64_t count, int depth);
  std::byte* Buffer(int slot) const;

  const std::string path_;
  const uint64_t file_bytes_;
  const uint32_t block_bytes_max_;
  int fd_ = -1;
  io_uring ring_ = {};
  std::byte* memory_ = nullptr;
  uint64_t random_state_ = 88172645463325252ULL;
};

}  // namespace kvtier::bench
