// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/tiers/host_slots.h"

#include <cstring>
#include <random>
#include <utility>

#include "absl/synchronization/notification.h"
#include "proto/base/crc32c.h"
#include "tests/bench/tiers/meter.h"

namespace kvtier::bench {
namespace {

constexpr uint64_t kSegmentBytes = 64ULL << 20;

}  // namespace

HostSlots::HostSlots(uint32_t block_bytes, SegmentObserver* observer) {
  const uint64_t slots_bytes = 2ULL * kCount * block_bytes;
  absl::Notification is_prepared;
  MemoryTier::Options options;
  options.id = TierId::kHost;
  options.capacity_bytes = (slots_bytes / kSegmentBytes + 2) * kSegmentBytes;
  options.segment_bytes = kSegmentBytes;
  if (observer != nullptr) options.observers = {observer};
  options.prepare_thread_count = 1;
  options.on_prepared = [&](const MemoryTier::Prepared&) { is_prepared.Notify(); };
  auto created = MemoryTier::Create(options);
  MustBeOk(created.status());
  tier = std::move(created).value();
  MustBeOk(tier->Recover([](const BlockMeta&, ReplicaId) {}));
  is_prepared.WaitForNotification();
  std::mt19937_64 random(block_bytes);
  for (int i = 0; i < 2 * kCount; ++i) {
    const auto replica = tier->Reserve(block_bytes, 0);
    MustBeOk(replica.status());
    const std::span<std::byte> bytes = tier->Mapped(*replica);
    for (size_t at = 0; at + sizeof(uint64_t) <= bytes.size(); at += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(bytes.data() + at, &word, sizeof(word));
    }
    const uint32_t crc32c = Crc32c(bytes.first(block_bytes));
    (i < kCount ? sources : targets).push_back({.bytes = bytes, .crc32c = crc32c});
  }
}

}  // namespace kvtier::bench
