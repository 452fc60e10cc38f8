// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/tiers/raw_disk.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "tests/bench/tiers/meter.h"

namespace kvtier::bench {

RawDisk::RawDisk(const std::string& path, uint64_t file_bytes, uint32_t block_bytes_max,
                 const HostSlots& slots)
    : path_(path), file_bytes_(file_bytes), slots_(slots) {
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
  if (fd_ < 0) Die("open " + path + " with O_DIRECT: " + std::strerror(errno));
  if (fallocate(fd_, 0, 0, static_cast<off_t>(file_bytes)) != 0) {
    Die("allocate " + path + ": " + std::strerror(errno));
  }
  constexpr unsigned kFlags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
  int error = io_uring_queue_init(kDepthMax, &ring_, kFlags);
  if (error == -EINVAL) error = io_uring_queue_init(kDepthMax, &ring_, 0);
  if (error != 0) Die(std::string("io_uring: ") + std::strerror(-error));
  // Sources first, then targets.
  iovec buffers[2 * kDepthMax];
  for (size_t i = 0; i < kDepthMax; ++i) {
    buffers[i] = {slots.sources[i].bytes.data(), block_bytes_max};
    buffers[kDepthMax + i] = {slots.targets[i].bytes.data(), block_bytes_max};
  }
  error = io_uring_register_buffers(&ring_, buffers, 2 * kDepthMax);
  if (error != 0) Die(std::string("register buffers: ") + std::strerror(-error));
  WriteSequential(block_bytes_max, file_bytes_ / block_bytes_max, kDepthMax);
  Sync();
}

RawDisk::~RawDisk() {
  io_uring_queue_exit(&ring_);
  close(fd_);
  unlink(path_.c_str());
}

double RawDisk::ReadRandom(uint32_t block_bytes, uint64_t count, int depth) {
  return Run(true, block_bytes, count, depth);
}

double RawDisk::WriteSequential(uint32_t block_bytes, uint64_t count, int depth) {
  return Run(false, block_bytes, count, depth);
}

double RawDisk::Sync() {
  const double begin = WallSeconds();
  if (fdatasync(fd_) != 0) Die("fdatasync " + path_ + ": " + std::strerror(errno));
  return WallSeconds() - begin;
}

double RawDisk::Run(bool is_read, uint32_t block_bytes, uint64_t count, int depth) {
  const uint64_t place_count = file_bytes_ / block_bytes;
  uint64_t started = 0;
  uint64_t ended = 0;
  const auto start = [&](int slot) {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    uint64_t place = started % place_count;
    if (is_read) {
      random_state_ ^= random_state_ << 13;
      random_state_ ^= random_state_ >> 7;
      random_state_ ^= random_state_ << 17;
      place = random_state_ % place_count;
      io_uring_prep_read_fixed(sqe, fd_, slots_.targets[static_cast<size_t>(slot)].bytes.data(),
                               block_bytes, place * block_bytes, kDepthMax + slot);
    } else {
      io_uring_prep_write_fixed(sqe, fd_, slots_.sources[static_cast<size_t>(slot)].bytes.data(),
                                block_bytes, place * block_bytes, slot);
    }
    sqe->user_data = static_cast<uint64_t>(slot);
    ++started;
  };
  const double begin = WallSeconds();
  for (int slot = 0; slot < depth && started < count; ++slot) start(slot);
  while (ended < count) {
    io_uring_submit_and_wait(&ring_, 1);
    unsigned head;
    unsigned seen = 0;
    io_uring_cqe* cqe;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++seen;
      if (cqe->res != static_cast<int>(block_bytes)) {
        Die("raw transfer: " + std::string(cqe->res < 0 ? std::strerror(-cqe->res) : "short"));
      }
      if (started < count) start(static_cast<int>(cqe->user_data));
    }
    io_uring_cq_advance(&ring_, seen);
    ended += seen;
  }
  return WallSeconds() - begin;
}

}  // namespace kvtier::bench
