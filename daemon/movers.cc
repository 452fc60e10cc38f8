// SPDX-License-Identifier: Apache-2.0
#include "daemon/movers.h"

#include <utility>

#include "proto/base/check.h"

namespace kvtier {

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

Movers::Movers(TierSet tiers, uint32_t worker_count, Completion on_done)
    : tiers_(tiers), on_done_(std::move(on_done)) {
  KVT_CHECK(worker_count > 0);
  for (uint32_t i = 0; i < worker_count; ++i) workers_.emplace_back([this] { Work(); });
}

Movers::~Movers() {
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](uint64_t* inflight_count) { return *inflight_count == 0; }, &inflight_count_));
    stopping_ = true;
  }
  workers_.clear();
}

void Movers::Start(const core::Transfer& transfer) {
  const bool copy = transfer.source_tier != TierId::kNvme && transfer.target_tier != TierId::kNvme;
  {
    absl::MutexLock lock(&mutex_);
    ++inflight_count_;
    if (copy) queue_.push_back(transfer);
  }
  if (copy) return;
  auto done = [this, job = transfer.job](absl::Status status) { Finish(job, std::move(status)); };
  if (transfer.source_tier == TierId::kNvme) {
    tiers_.nvme->Read(transfer.source, transfer.meta,
                      tiers_.Memory(transfer.target_tier)->Mapped(transfer.target),
                      std::move(done));
  } else {
    tiers_.nvme->Write(transfer.target, transfer.meta,
                       tiers_.Memory(transfer.source_tier)->Mapped(transfer.source),
                       std::move(done));
  }
}

void Movers::Work() {
  while (true) {
    core::Transfer transfer;
    {
      absl::MutexLock lock(&mutex_);
      const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !queue_.empty();
      };
      mutex_.Await(absl::Condition(&ready));
      if (queue_.empty()) return;
      transfer = queue_.front();
      queue_.pop_front();
    }
    Copy(transfer);
  }
}

void Movers::Copy(const core::Transfer& transfer) {
  MappedTier* const source = tiers_.Memory(transfer.source_tier);
  tiers_.Memory(transfer.target_tier)
      ->Write(transfer.target, transfer.meta, source->Mapped(transfer.source),
              [this, job = transfer.job](absl::Status status) { Finish(job, std::move(status)); });
}

void Movers::Finish(core::JobId job, absl::Status status) {
  on_done_(job, std::move(status));
  absl::MutexLock lock(&mutex_);
  --inflight_count_;
}

}  // namespace kvtier
