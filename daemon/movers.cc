// SPDX-License-Identifier: Apache-2.0
#include "daemon/movers.h"

#include <cstdlib>
#include <memory>
#include <span>
#include <utility>

#include "absl/time/time.h"
#include "proto/base/check.h"

namespace kvtier {
namespace {

// How often a worker whose copies wait for the bucket looks again.
constexpr absl::Duration kBucketInterval = absl::Milliseconds(1);

// Page-aligned and whole pages, as nvme likes it.
class BlockBuffer {
 public:
  explicit BlockBuffer(uint32_t payload_bytes)
      : page_bytes_((payload_bytes + kPageBytes - 1) / kPageBytes * kPageBytes),
        data_(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, page_bytes_))) {
    KVT_CHECK(data_ != nullptr);
  }
  std::span<std::byte> bytes() { return {data_.get(), page_bytes_}; }

 private:
  static constexpr size_t kPageBytes = 4096;
  struct Freer {
    void operator()(std::byte* data) const { std::free(data); }
  };
  const size_t page_bytes_;
  const std::unique_ptr<std::byte, Freer> data_;
};

}  // namespace

Tier* TierSet::At(TierId tier) const {
  switch (tier) {
    case TierId::kHbm:
      return hbm;
    case TierId::kHost:
      return host;
    case TierId::kNvme:
      return nvme;
  }
  return nullptr;
}

MappedTier* TierSet::Memory(TierId tier) const {
  KVT_CHECK(tier != TierId::kNvme);
  return tier == TierId::kHbm ? hbm : host;
}

Movers::Movers(TierSet tiers, const Options& options, Completion on_done)
    : tiers_(tiers),
      options_(options),
      on_done_(std::move(on_done)),
      demote_bucket_(options.demote_bytes_per_second) {
  KVT_CHECK(options.worker_count > 0);
  for (uint32_t i = 0; i < options.worker_count; ++i) workers_.emplace_back([this] { Work(); });
}

Movers::~Movers() {
  {
    absl::MutexLock lock(&mutex_);
    draining_ = true;
    urgent_.NotifyAll();
    mutex_.Await(absl::Condition(
        +[](uint64_t* inflight_count) { return *inflight_count == 0; }, &inflight_count_));
    stopping_ = true;
  }
  workers_.clear();
}

void Movers::Start(const core::Transfer& transfer) {
  {
    absl::MutexLock lock(&mutex_);
    ++inflight_count_;
  }
  if (transfer.source_tier == TierId::kNvme) {
    StartNvmeRead(transfer);
  } else if (transfer.target_tier == TierId::kNvme) {
    StartNvmeWrite(transfer);
  } else {
    StartCopy(transfer);
  }
}

Tier::Done Movers::FinishOf(core::JobId job) {
  return [this, job](absl::Status status) { Finish(job, std::move(status)); };
}

void Movers::StartCopy(const core::Transfer& transfer) {
  MappedTier* const source = tiers_.Memory(transfer.source_tier);
  MappedTier* const target = tiers_.Memory(transfer.target_tier);
  const std::span<std::byte> source_bytes = source->Mapped(transfer.source);
  const std::span<std::byte> target_bytes = target->Mapped(transfer.target);
  if (source_bytes.empty()) {
    source->Read(transfer.source, transfer.meta, target_bytes, FinishOf(transfer.job));
  } else if (target_bytes.empty()) {
    target->Write(transfer.target, transfer.meta, source_bytes, FinishOf(transfer.job));
  } else {
    absl::MutexLock lock(&mutex_);
    (transfer.target_tier == TierId::kHbm ? promotes_ : demotes_).push_back(transfer);
    urgent_.NotifyAll();
  }
}

void Movers::StartNvmeRead(const core::Transfer& transfer) {
  MappedTier* const target = tiers_.Memory(transfer.target_tier);
  const std::span<std::byte> target_bytes = target->Mapped(transfer.target);
  if (!target_bytes.empty()) {
    ReadNvme(transfer, target_bytes, FinishOf(transfer.job));
    return;
  }
  const auto buffer = std::make_shared<BlockBuffer>(transfer.meta.payload_bytes);
  ReadNvme(transfer, buffer->bytes(), [this, transfer, target, buffer](absl::Status status) {
    if (!status.ok()) return Finish(transfer.job, std::move(status));
    target->Write(transfer.target, transfer.meta, buffer->bytes(),
                  [this, job = transfer.job, buffer](absl::Status written) {
                    Finish(job, std::move(written));
                  });
  });
}

void Movers::ReadNvme(const core::Transfer& transfer, std::span<std::byte> target,
                      Tier::Done done) {
  if (transfer.is_ahead) {
    tiers_.nvme->ReadAhead(transfer.source, transfer.meta, target, std::move(done));
  } else {
    tiers_.nvme->Read(transfer.source, transfer.meta, target, std::move(done));
  }
}

void Movers::StartNvmeWrite(const core::Transfer& transfer) {
  MappedTier* const source = tiers_.Memory(transfer.source_tier);
  const std::span<std::byte> source_bytes = source->Mapped(transfer.source);
  if (!source_bytes.empty()) {
    tiers_.nvme->Write(transfer.target, transfer.meta, source_bytes, FinishOf(transfer.job));
    return;
  }
  const auto buffer = std::make_shared<BlockBuffer>(transfer.meta.payload_bytes);
  source->Read(transfer.source, transfer.meta, buffer->bytes(),
               [this, transfer, buffer](absl::Status status) {
                 if (!status.ok()) return Finish(transfer.job, std::move(status));
                 tiers_.nvme->Write(transfer.target, transfer.meta, buffer->bytes(),
                                    [this, job = transfer.job, buffer](absl::Status written) {
                                      Finish(job, std::move(written));
                                    });
               });
}

void Movers::Work() {
  while (true) {
    std::optional<core::Transfer> transfer;
    {
      absl::MutexLock lock(&mutex_);
      const auto any = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !promotes_.empty() || !demotes_.empty();
      };
      mutex_.Await(absl::Condition(&any));
      if (stopping_) return;
      transfer = TakeCopy();
      if (!transfer.has_value()) {
        // Until the bucket has filled a little, or something may start that needs none of it.
        const auto urgent = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
          return draining_ || !promotes_.empty();
        };
        urgent_.WaitFor(mutex_, kBucketInterval, urgent);
        continue;
      }
    }
    Copy(*transfer);
  }
}

std::optional<core::Transfer> Movers::TakeCopy() {
  core::Transfer transfer;
  if (!promotes_.empty()) {
    transfer = promotes_.front();
    promotes_.pop_front();
  } else if (draining_ || demote_bucket_.MayGo(options_.now_ms())) {
    transfer = demotes_.front();
    demotes_.pop_front();
    demote_bucket_.Take(transfer.meta.payload_bytes);
  } else {
    return std::nullopt;
  }
  return transfer;
}

void Movers::Copy(const core::Transfer& transfer) {
  MappedTier* const source = tiers_.Memory(transfer.source_tier);
  tiers_.Memory(transfer.target_tier)
      ->Write(transfer.target, transfer.meta, source->Mapped(transfer.source),
              FinishOf(transfer.job));
}

void Movers::Finish(core::JobId job, absl::Status status) {
  on_done_(job, std::move(status));
  absl::MutexLock lock(&mutex_);
  --inflight_count_;
}

}  // namespace kvtier
