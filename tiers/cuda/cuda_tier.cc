// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/cuda_tier.h"

#include <pthread.h>

#include <utility>

#include "absl/time/time.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"
#include "tiers/cuda/result.h"

namespace kvtier {
namespace {

constexpr uint64_t kSegmentBytesMin = 64ULL << 10;
// Zeroing runs at the speed of the memory; this is a device that does nothing.
constexpr absl::Duration kZeroTimeout = absl::Seconds(30);
// After a failure to replace a segment: the memory may be another process's for long.
constexpr absl::Duration kReplaceRetry = absl::Milliseconds(200);

absl::Status CheckSizes(const CudaTier::Options& options, uint64_t granularity_bytes,
                        const CudaDeviceInfo& info) {
  if (options.segment_bytes < kSegmentBytesMin || options.segment_bytes % granularity_bytes != 0) {
    return Invalid("hbm: segment_bytes %d: must be a multiple of %d on %s, %d or more",
                   options.segment_bytes, granularity_bytes, info.name, kSegmentBytesMin);
  }
  const uint64_t capacity_bytes_max = (1ULL << SlotAllocator::kSlotBits) * kSlotAlignBytes;
  if (options.capacity_bytes < options.segment_bytes ||
      options.capacity_bytes > capacity_bytes_max) {
    return Invalid("hbm: capacity_bytes %d: must be %d (one segment) to %d", options.capacity_bytes,
                   options.segment_bytes, capacity_bytes_max);
  }
  if (options.capacity_bytes > info.total_bytes) {
    return FailedPrecondition("hbm: capacity_bytes %d is more than the %d bytes of CUDA device %d",
                              options.capacity_bytes, info.total_bytes, info.ordinal);
  }
  for (const uint64_t bytes : {options.piece_bytes, options.pin_chunk_bytes}) {
    if (bytes == 0 || bytes % kSlotAlignBytes != 0) {
      return Invalid("hbm: pieces and chunks of %d bytes: must be a multiple of %d", bytes,
                     kSlotAlignBytes);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaTier>> CudaTier::Create(std::unique_ptr<CudaDevice> device,
                                                           const Options& options) {
  KVT_RETURN_IF_ERROR(CheckSharable(device->info()));
  KVT_ASSIGN_OR_RETURN(const uint64_t granularity_bytes, device->Granularity());
  KVT_RETURN_IF_ERROR(CheckSizes(options, granularity_bytes, device->info()));
  KVT_ASSIGN_OR_RETURN(OwnedStream stream,
                       OwnedStream::Create(device.get(), CudaDevice::Priority::kLow));
  KVT_ASSIGN_OR_RETURN(OwnedEvent event, OwnedEvent::Create(device.get()));
  std::unique_ptr<CudaTier> tier(
      new CudaTier(std::move(device), options, std::move(stream), std::move(event)));
  KVT_RETURN_IF_ERROR(tier->AllocateAll());
  KVT_RETURN_IF_ERROR(tier->StartLanes());
  tier->keeper_ = std::jthread([raw = tier.get()] {
    pthread_setname_np(pthread_self(), "kvtier-hbm");
    raw->Keep();
  });
  return tier;
}

CudaTier::CudaTier(std::unique_ptr<CudaDevice> device, const Options& options,
                   OwnedStream zero_stream, OwnedEvent zeroed)
    : device_(std::move(device)),
      options_(options),
      zero_stream_(std::move(zero_stream)),
      zeroed_(std::move(zeroed)),
      allocator_(
          {.frame_bytes = options.segment_bytes,
           .frame_count = static_cast<uint32_t>(options.capacity_bytes / options.segment_bytes)}),
      pinned_(device_.get(),
              {.chunk_bytes = options.pin_chunk_bytes, .on_failure = options.on_pin_failure}) {}

void CudaTier::Wake() {
  woken_ = true;
  wake_.NotifyAll();
}

CudaTier::~CudaTier() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    Wake();
  }
  if (keeper_.joinable()) keeper_.join();
  // Before the segments go: copies may still touch them. Either lane may find the device lost, and
  // tells the other one.
  if (to_device_ != nullptr) to_device_->Stop();
  if (to_host_ != nullptr) to_host_->Stop();
}

absl::Status CudaTier::AllocateAll() {
  const uint64_t segment_count = options_.capacity_bytes / options_.segment_bytes;
  std::vector<std::shared_ptr<CudaMemory>> segments;
  for (uint64_t i = 0; i < segment_count; ++i) {
    absl::StatusOr<std::unique_ptr<CudaMemory>> memory = NewSegment();
    if (memory.ok()) {
      segments.push_back(std::move(memory).value());
      continue;
    }
    if (!absl::IsResourceExhausted(memory.status())) return memory.status();
    return FailedPrecondition(
        "hbm: CUDA device %d (%s) has room for only %d of %d segments of %d bytes: lower "
        "hbm.capacity_bytes, or start before what uses the device (%s)",
        device_->info().ordinal, device_->info().name, i, segment_count, options_.segment_bytes,
        memory.status().ToString());
  }
  KVT_RETURN_IF_ERROR(AwaitZeroed());
  absl::MutexLock lock(&mutex_);
  spares_ = std::move(segments);
  return absl::OkStatus();
}

absl::Status CudaTier::StartLanes() {
  CopyLane::Options lane{.piece_bytes = options_.piece_bytes,
                         .late_ms = options_.late_ms,
                         .hung_ms = options_.hung_ms,
                         .abandon_ms = options_.abandon_ms,
                         .pinned = &pinned_,
                         .now_ms = options_.now_ms};
  const auto callbacks = [this] {
    return CopyLane::Callbacks{.released = [this](ReplicaId replica) { Released(replica); },
                               .lost = [this](const absl::Status& reason) { MarkLost(reason); }};
  };
  lane.direction = CopyLane::Direction::kToDevice;
  KVT_ASSIGN_OR_RETURN(to_device_, CopyLane::Start(device_.get(), lane, callbacks()));
  lane.direction = CopyLane::Direction::kToHost;
  lane.bytes_per_second = options_.demote_bytes_per_second;
  KVT_ASSIGN_OR_RETURN(to_host_, CopyLane::Start(device_.get(), lane, callbacks()));
  return absl::OkStatus();
}

// The memory, and its zeroing begun.
absl::StatusOr<std::unique_ptr<CudaMemory>> CudaTier::NewSegment() {
  KVT_ASSIGN_OR_RETURN(std::unique_ptr<CudaMemory> memory,
                       CudaMemory::Allocate(device_.get(), options_.segment_bytes));
  KVT_RETURN_IF_ERROR(device_->Zero(memory->address(), options_.segment_bytes, zero_stream_.get()));
  return memory;
}

absl::Status CudaTier::AwaitZeroed() {
  KVT_RETURN_IF_ERROR(device_->RecordEvent(zeroed_.get(), zero_stream_.get()));
  return AwaitDone(*device_, zeroed_.get(), kZeroTimeout);
}

absl::StatusOr<ReplicaId> CudaTier::Reserve(uint32_t payload_bytes, OwnerIdx owner) {
  absl::MutexLock lock(&mutex_);
  if (!lost_.ok()) return lost_;
  KVT_ASSIGN_OR_RETURN(const SlotAllocator::Reservation reservation,
                       allocator_.Reserve(payload_bytes, owner));
  if (reservation.retired_segment_idx) {
    const auto retired = segments_.extract(*reservation.retired_segment_idx);
    if (!retired.empty()) {
      retired_.push_back(retired.mapped().memory);
      ++due_count_;
      Wake();
    }
  }
  const uint32_t segment_idx = reservation.slot.place.segment_idx;
  if (segments_.contains(segment_idx)) return reservation.replica;
  if (spares_.empty()) {
    allocator_.Free(reservation.replica);
    return Unavailable("hbm: a segment changes its owner and is not ready yet");
  }
  segments_.emplace(segment_idx, Segment{.memory = std::move(spares_.back()), .owner = owner});
  spares_.pop_back();
  return reservation.replica;
}

void CudaTier::Free(ReplicaId replica) {
  absl::MutexLock lock(&mutex_);
  if (copy_count_.contains(replica)) {
    KVT_CHECK(freed_.insert(replica).second);
  } else {
    allocator_.Free(replica);
  }
}

uint64_t CudaTier::FootprintBytes(uint32_t payload_bytes) const {
  return SlotAllocator::SlotBytes(payload_bytes);
}

uint64_t CudaTier::OwnerSegmentBytes(OwnerIdx owner) const {
  absl::MutexLock lock(&mutex_);
  return allocator_.owner_bytes(owner);
}

TierUsage CudaTier::Usage() const {
  absl::MutexLock lock(&mutex_);
  return {.capacity_bytes = allocator_.capacity_bytes(),
          .used_bytes = allocator_.used_bytes(),
          .physical_bytes =
              (segments_.size() + spares_.size() + retired_.size()) * options_.segment_bytes};
}

absl::Status CudaTier::CheckRoom(const SlotAllocator::Slot& slot, const BlockMeta& meta,
                                 size_t host_bytes) const {
  if (meta.payload_bytes == 0 || meta.payload_bytes > slot.slot_bytes) {
    return DataLoss("hbm: block %s of %d bytes does not fit its slot of %d bytes", meta.key.Hex(),
                    meta.payload_bytes, slot.slot_bytes);
  }
  if (host_bytes < meta.payload_bytes) {
    return Invalid("hbm: block %s of %d bytes: the caller's buffer has %d bytes", meta.key.Hex(),
                   meta.payload_bytes, host_bytes);
  }
  return absl::OkStatus();
}

void CudaTier::Copy(CopyLane* lane, ReplicaId replica, const BlockMeta& meta,
                    std::span<std::byte> host, size_t host_bytes, Done done) {
  absl::Status status;
  CudaAddress address = 0;
  {
    absl::MutexLock lock(&mutex_);
    const SlotAllocator::Slot slot = allocator_.Find(replica);
    status = lost_.ok() ? CheckRoom(slot, meta, host_bytes) : lost_;
    if (status.ok()) {
      address = segments_.at(slot.place.segment_idx).memory->address() + slot.place.offset_bytes;
      ++copy_count_[replica];
    }
  }
  if (!status.ok()) return std::move(done)(std::move(status));
  lane->Submit({.replica = replica,
                .address = address,
                .host = host.first(meta.payload_bytes),
                .crc32c = meta.crc32c,
                .name = meta.key.Hex(),
                .done = std::move(done)});
}

void CudaTier::Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
                     Done done) {
  // A copy to the device only reads it.
  const std::span<std::byte> host(const_cast<std::byte*>(source.data()), source.size());
  Copy(to_device_.get(), replica, meta, host, source.size(), std::move(done));
}

void CudaTier::Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                    Done done) {
  Copy(to_host_.get(), replica, meta, target, target.size(), std::move(done));
}

void CudaTier::Released(ReplicaId replica) {
  absl::MutexLock lock(&mutex_);
  const auto found = copy_count_.find(replica);
  KVT_CHECK(found != copy_count_.end());
  if (--found->second > 0) return;
  copy_count_.erase(found);
  if (freed_.erase(replica) > 0) allocator_.Free(replica);
}

absl::Status CudaTier::Recover(const std::function<void(const BlockMeta&, ReplicaId)>&) {
  return absl::OkStatus();
}

TierHealth CudaTier::Health() const {
  absl::MutexLock lock(&mutex_);
  if (!lost_.ok()) return {.degraded = true, .reason = std::string(FromAbsl(lost_.message()))};
  if (!allocation_status_.ok()) {
    return {.degraded = true,
            .reason = absl::StrFormat("%d segments cannot be replaced: %s", due_count_,
                                      FromAbsl(allocation_status_.message()))};
  }
  return {};
}

SlotPlace CudaTier::Place(ReplicaId replica) const {
  absl::MutexLock lock(&mutex_);
  if (!allocator_.IsReserved(replica)) return {};
  return allocator_.Find(replica).place;
}

CudaAddress CudaTier::AddressOf(ReplicaId replica) const {
  absl::MutexLock lock(&mutex_);
  const SlotPlace place = allocator_.Find(replica).place;
  return segments_.at(place.segment_idx).memory->address() + place.offset_bytes;
}

absl::StatusOr<SegmentHandle> CudaTier::ExportSegment(uint32_t segment_idx,
                                                      bool /*writable*/) const {
  Segment segment;
  {
    absl::MutexLock lock(&mutex_);
    if (!lost_.ok()) return lost_;
    const auto found = segments_.find(segment_idx);
    if (found == segments_.end()) return NotFound("hbm: no segment %d", segment_idx);
    segment = found->second;
  }
  KVT_ASSIGN_OR_RETURN(const int fd, segment.memory->ExportFd());
  return SegmentHandle{.fd = fd,
                       .segment_bytes = segment.memory->bytes(),
                       .owner = segment.owner,
                       .device_uuid = device_->info().uuid};
}

void CudaTier::MarkLost(const absl::Status& reason) {
  {
    absl::MutexLock lock(&mutex_);
    if (!lost_.ok()) return;
    lost_ =
        Unavailable("hbm: CUDA device %d is lost: %s", device_->info().ordinal, reason.ToString());
    Wake();
  }
  pinned_.Abandon();
  to_device_->Fail(reason);
  to_host_->Fail(reason);
}

void CudaTier::Keep() {
  while (true) {
    std::vector<std::shared_ptr<CudaMemory>> retired;
    absl::Status lost;
    bool due = false;
    {
      absl::MutexLock lock(&mutex_);
      wake_.WaitFor(mutex_, due_count_ > 0 ? kReplaceRetry : absl::Milliseconds(options_.probe_ms),
                    [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return woken_; });
      if (stopping_) return;
      woken_ = false;
      retired.swap(retired_);
      lost = lost_;
      due = due_count_ > 0;
    }
    if (!lost.ok()) {
      if (options_.on_lost) options_.on_lost(lost);
      return;
    }
    if (due) {
      Replace(std::move(retired));
    } else if (const auto done = device_->IsDone(zeroed_.get()); !done.ok()) {
      MarkLost(done.status());
    }
  }
}

void CudaTier::Replace(std::vector<std::shared_ptr<CudaMemory>> retired) {
  // Old memory first: the new may need its room.
  retired.clear();
  std::unique_ptr<CudaMemory> memory;
  absl::Status status;
  if (auto made = NewSegment(); made.ok()) {
    memory = std::move(made).value();
    status = AwaitZeroed();
  } else {
    status = made.status();
  }
  const bool lost = IsDeviceLost(status) || absl::IsDeadlineExceeded(status);
  {
    absl::MutexLock lock(&mutex_);
    allocation_status_ = status;
    if (status.ok()) {
      spares_.push_back(std::move(memory));
      --due_count_;
    }
    // More may be due; after a failure, only later.
    if (status.ok() && due_count_ > 0) Wake();
  }
  if (!lost) return;
  // The device may be zeroing it yet, for all that is known.
  [[maybe_unused]] CudaMemory* const abandoned = memory.release();
  MarkLost(status);
}

}  // namespace kvtier
