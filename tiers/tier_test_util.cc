// SPDX-License-Identifier: Apache-2.0
#include "tiers/tier_test_util.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <system_error>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr size_t kPageBytes = 4096;

Digest DigestOf(std::string_view what, uint64_t seed) {
  return FieldHasher().Add(what).AddU64(seed).Finish();
}

// Shared with `done`, which a broken tier may call again after the waiter has gone.
struct Waiter {
  // Not absl::Notification, whose fast path ThreadSanitizer does not see in Debian's build.
  absl::Mutex mutex;
  std::optional<absl::Status> result ABSL_GUARDED_BY(mutex);

  static Tier::Done DoneOf(const std::shared_ptr<Waiter>& waiter) {
    return [waiter](absl::Status status) {
      absl::MutexLock lock(&waiter->mutex);
      KVT_CHECK(!waiter->result.has_value());
      waiter->result = std::move(status);
    };
  }
  absl::Status Wait() {
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(
        +[](std::optional<absl::Status>* value) { return value->has_value(); }, &result));
    return *result;
  }
};

}  // namespace

PageBuffer::PageBuffer(size_t size_bytes)
    : size_bytes_(size_bytes),
      data_(static_cast<std::byte*>(std::aligned_alloc(
          kPageBytes, (size_bytes + kPageBytes - 1) / kPageBytes * kPageBytes))) {
  KVT_CHECK(data_ != nullptr);
}

void PageBuffer::Freer::operator()(std::byte* data) const { std::free(data); }

TestBlock MakeBlock(uint64_t seed, uint32_t payload_bytes) {
  TestBlock block{.meta = {.namespace_hash = DigestOf("namespace", seed % 3),
                           .key = DigestOf("key", seed),
                           .parent = DigestOf("parent", seed),
                           .layout = DigestOf("layout", payload_bytes),
                           .depth = static_cast<uint32_t>(seed % 1000),
                           .payload_bytes = payload_bytes},
                  .payload = PageBuffer(payload_bytes)};
  std::mt19937_64 random(seed);
  const std::span<std::byte> bytes = block.payload.bytes();
  for (size_t i = 0; i < bytes.size(); i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(&bytes[i], &word, std::min(sizeof(word), bytes.size() - i));
  }
  block.meta.crc32c = Crc32c(bytes);
  return block;
}

absl::Status WriteAndWait(Tier& tier, ReplicaId replica, const BlockMeta& meta,
                          std::span<const std::byte> source) {
  auto waiter = std::make_shared<Waiter>();
  tier.Write(replica, meta, source, Waiter::DoneOf(waiter));
  return waiter->Wait();
}

absl::Status ReadAndWait(Tier& tier, ReplicaId replica, const BlockMeta& meta,
                         std::span<std::byte> target) {
  auto waiter = std::make_shared<Waiter>();
  tier.Read(replica, meta, target, Waiter::DoneOf(waiter));
  return waiter->Wait();
}

absl::Status ReadAndCompare(Tier& tier, ReplicaId replica, const TestBlock& block) {
  PageBuffer target(block.meta.payload_bytes);
  std::memset(target.bytes().data(), 0x7F, target.bytes().size());
  KVT_RETURN_IF_ERROR(ReadAndWait(tier, replica, block.meta, target.bytes()));
  if (std::memcmp(target.bytes().data(), block.payload.bytes().data(), target.bytes().size()) !=
      0) {
    return Internal("block %s: read OK, but the bytes are wrong", block.meta.key.Hex());
  }
  return absl::OkStatus();
}

TempFolder::TempFolder() {
  const char* root = std::getenv("TMPDIR");
  std::string name = std::string(root == nullptr ? "/tmp" : root) + "/kvtier-test-XXXXXX";
  KVT_CHECK(mkdtemp(name.data()) != nullptr);
  path_ = std::move(name);
}

TempFolder::~TempFolder() {
  std::error_code error;
  std::filesystem::remove_all(path_, error);
  if (error) std::fprintf(stderr, "%s: %s\n", path_.c_str(), error.message().c_str());
}

uint64_t TestSeed() {
  const char* given = std::getenv("KVTIER_TEST_SEED");
  const uint64_t seed =
      given == nullptr ? std::random_device()() : std::strtoull(given, nullptr, 10);
  std::printf("KVTIER_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  return seed;
}

}  // namespace kvtier
