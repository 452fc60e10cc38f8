// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/striped_tier.h"

#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr ReplicaId kStride = StripedTier::kMemberCountMax;
// Between two tries to open a drive, in intervals of healing: opening costs more than probing.
constexpr int kRejoinIntervals = 5;

ReplicaId IdOf(ReplicaId in_member, size_t drive_idx) { return in_member * kStride + drive_idx; }
ReplicaId InMember(ReplicaId replica) { return replica / kStride; }

// No other drive makes these good: the configuration or the owner has to change.
bool IsFatal(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status);
}

// Of the drive, which may be replaced, emptied or mounted again while the daemon runs.
bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsResourceExhausted(status);
}

// Is `inner` the same directory as `outer`, or below it? By their names without links.
bool IsWithin(const std::filesystem::path& inner, const std::filesystem::path& outer) {
  return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

absl::Status CheckDirs(const std::vector<std::string>& dirs) {
  if (dirs.empty() || dirs.size() > StripedTier::kMemberCountMax) {
    return Invalid("nvme: %d directories: must be 1 to %d", dirs.size(),
                   StripedTier::kMemberCountMax);
  }
  std::vector<std::filesystem::path> paths;
  for (const std::string& dir : dirs) {
    std::error_code error;
    std::filesystem::path path = std::filesystem::weakly_canonical(dir, error);
    if (error) path = std::filesystem::path(dir).lexically_normal();
    // "/a/b/" ends in an empty name.
    if (!path.has_filename()) path = path.parent_path();
    for (size_t i = 0; i < paths.size(); ++i) {
      if (IsWithin(path, paths[i]) || IsWithin(paths[i], path)) {
        return Invalid("nvme: of %s and %s one is in the other, or they are one directory", dirs[i],
                       dir);
      }
    }
    paths.push_back(std::move(path));
  }
  return absl::OkStatus();
}

// Of the description of an engine.
int Slowness(const std::string& io_engine) {
  if (io_engine.empty()) return 0;
  if (io_engine.starts_with("pread")) return 3;
  return io_engine.find(", without") == std::string::npos ? 1 : 2;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StripedTier>> StripedTier::Create(
    const std::vector<std::string>& dirs, const NvmeOptions& options) {
  KVT_RETURN_IF_ERROR(CheckDirs(dirs));
  std::unique_ptr<StripedTier> striped(new StripedTier());
  absl::Status first_failure;
  bool has_hope = false;
  for (const std::string& dir : dirs) {
    Drive& drive = *striped->drives_.emplace_back(std::make_unique<Drive>());
    drive.options = options;
    drive.options.dir = dir;
    drive.options.capacity_bytes = options.capacity_bytes / dirs.size();
    drive.options.write_bytes_per_day_max = options.write_bytes_per_day_max / dirs.size();
    drive.options.scrub_bytes_per_second = options.scrub_bytes_per_second / dirs.size();
    auto tier = NvmeTier::Create(drive.options);
    if (IsFatal(tier.status())) return Annotate(tier.status(), dir);
    if (tier.ok()) {
      drive.tier = std::move(tier).value();
      drive.in_use = drive.tier.get();
    } else {
      striped->LeaveOut(drive, tier.status());
      first_failure.Update(Annotate(tier.status(), dir));
    }
    has_hope = has_hope || tier.ok() || MayPass(tier.status());
  }
  if (!has_hope) return first_failure;
  return striped;
}

void StripedTier::OnMapped(std::span<std::byte> segment) {
  absl::MutexLock lock(&memory_mutex_);
  memory_.push_back(segment);
  for (const auto& drive : drives_) {
    if (drive->tier != nullptr) drive->tier->memory_observer().OnMapped(segment);
  }
}

void StripedTier::OnUnmapping(std::span<std::byte> segment) {
  absl::MutexLock lock(&memory_mutex_);
  std::erase_if(memory_,
                [&](std::span<std::byte> known) { return known.data() == segment.data(); });
  for (const auto& drive : drives_) {
    if (drive->tier != nullptr) drive->tier->memory_observer().OnUnmapping(segment);
  }
}

absl::Status StripedTier::FailureOf(const Drive& drive) const {
  absl::MutexLock lock(&mutex_);
  return drive.failure;
}

void StripedTier::LeaveOut(Drive& drive, const absl::Status& failure) {
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(drive.failure, failure) == failure) return;
  }
  spdlog::error("nvme: {} is left out: {}", drive.options.dir, failure.ToString());
}

void StripedTier::StartRejoining(std::function<void(const Blocks&)> joined) {
  const absl::Duration interval =
      kRejoinIntervals * absl::Milliseconds(drives_.front()->options.heal_interval_ms);
  rejoining_ = std::jthread([this, interval, joined = std::move(joined)] {
    pthread_setname_np(pthread_self(), "kvt-nvme-join");
    while (!rejoining_ends_.WaitFor(interval)) TryAgain(joined);
  });
}

void StripedTier::EndRejoining() {
  rejoining_ends_.Notify();
  if (rejoining_.joinable()) rejoining_.join();
}

void StripedTier::TryAgain(const std::function<void(const Blocks&)>& joined) {
  for (size_t i = 0; i < drives_.size() && !rejoining_ends_.HasBeenNotified(); ++i) {
    Drive& drive = *drives_[i];
    if (drive.in_use != nullptr) continue;
    const absl::StatusOr<Blocks> blocks = Join(i);
    if (!blocks.ok()) {
      LeaveOut(drive, blocks.status());
      continue;
    }
    spdlog::info("nvme: {} is in use again, with {} blocks", drive.options.dir, blocks->size());
    joined(*blocks);
  }
}

absl::StatusOr<StripedTier::Blocks> StripedTier::Join(size_t drive_idx) {
  Drive& drive = *drives_[drive_idx];
  KVT_ASSIGN_OR_RETURN(std::unique_ptr<NvmeTier> tier, NvmeTier::Create(drive.options));
  Blocks blocks;
  KVT_RETURN_IF_ERROR(tier->Recover([&](const BlockMeta& meta, ReplicaId replica) {
    blocks.emplace_back(meta, IdOf(replica, drive_idx));
  }));
  absl::MutexLock lock(&memory_mutex_);
  for (const std::span<std::byte> segment : memory_) tier->memory_observer().OnMapped(segment);
  drive.tier = std::move(tier);
  drive.in_use = drive.tier.get();
  return blocks;
}

NvmeTier& StripedTier::TierOf(ReplicaId replica) const {
  const size_t drive_idx = replica % kStride;
  KVT_CHECK(drive_idx < drives_.size());
  NvmeTier* const tier = drives_[drive_idx]->in_use;
  KVT_CHECK(tier != nullptr);
  return *tier;
}

// Drives that take blocks: the first one drawn by free room, then the others, most room first.
std::vector<StripedTier::Choice> StripedTier::DrawOrder() {
  std::vector<Choice> choices;
  uint64_t total_bytes = 0;
  for (size_t i = 0; i < drives_.size(); ++i) {
    const NvmeTier* const tier = drives_[i]->in_use;
    if (tier == nullptr || tier->Health().degraded) continue;
    const TierUsage usage = tier->Usage();
    choices.push_back({.drive_idx = i, .free_bytes = usage.capacity_bytes - usage.used_bytes});
    total_bytes += choices.back().free_bytes;
  }
  std::sort(choices.begin(), choices.end(),
            [](const Choice& a, const Choice& b) { return a.free_bytes > b.free_bytes; });
  if (total_bytes == 0) return choices;
  absl::MutexLock lock(&mutex_);
  uint64_t drawn = std::uniform_int_distribution<uint64_t>(0, total_bytes - 1)(random_);
  auto first = choices.begin();
  while (drawn >= first->free_bytes) {
    drawn -= first->free_bytes;
    ++first;
  }
  std::rotate(choices.begin(), first, first + 1);
  return choices;
}

absl::StatusOr<ReplicaId> StripedTier::Reserve(uint32_t payload_bytes, OwnerIdx owner) {
  absl::Status refusal = Unavailable("nvme: degraded: %s", Health().reason);
  for (const Choice& choice : DrawOrder()) {
    NvmeTier* const tier = drives_[choice.drive_idx]->in_use;
    const auto replica = tier->Reserve(payload_bytes, owner);
    if (replica.ok()) return IdOf(*replica, choice.drive_idx);
    // No room on one of them says more to the caller than a failure of the other.
    if (!absl::IsResourceExhausted(refusal)) refusal = replica.status();
  }
  return refusal;
}

void StripedTier::Free(ReplicaId replica) { TierOf(replica).Free(InMember(replica)); }

uint64_t StripedTier::FootprintBytes(uint32_t payload_bytes) const {
  uint64_t most_bytes = payload_bytes;
  ForEachInUse([&](const NvmeTier& tier) {
    most_bytes = std::max(most_bytes, tier.FootprintBytes(payload_bytes));
  });
  return most_bytes;
}

TierUsage StripedTier::Usage() const {
  TierUsage total;
  ForEachInUse([&](const NvmeTier& tier) {
    const TierUsage usage = tier.Usage();
    total.capacity_bytes += usage.capacity_bytes;
    total.used_bytes += usage.used_bytes;
    total.physical_bytes += usage.physical_bytes;
  });
  return total;
}

void StripedTier::Write(ReplicaId replica, const BlockMeta& meta, std::span<const std::byte> source,
                        Done done) {
  TierOf(replica).Write(InMember(replica), meta, source, std::move(done));
}

void StripedTier::Read(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                       Done done) {
  TierOf(replica).Read(InMember(replica), meta, target, std::move(done));
}

void StripedTier::ReadAhead(ReplicaId replica, const BlockMeta& meta, std::span<std::byte> target,
                            Done done) {
  TierOf(replica).ReadAhead(InMember(replica), meta, target, std::move(done));
}

void StripedTier::Expedite(ReplicaId replica) { TierOf(replica).Expedite(InMember(replica)); }

absl::Status StripedTier::Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) {
  absl::flat_hash_set<std::pair<Digest, Digest>> seen;
  absl::Status failure;
  bool has_hope = false;
  for (size_t i = 0; i < drives_.size(); ++i) {
    Drive& drive = *drives_[i];
    NvmeTier* const tier = drive.in_use;
    if (tier == nullptr) {
      has_hope = has_hope || MayPass(FailureOf(drive));
      continue;
    }
    // Told only once the whole member is recovered: one that fails half-way leaves nothing.
    std::vector<std::pair<BlockMeta, ReplicaId>> blocks;
    const absl::Status recovered = tier->Recover(
        [&](const BlockMeta& meta, ReplicaId replica) { blocks.emplace_back(meta, replica); });
    if (!recovered.ok()) {
      LeaveOut(drive, recovered);
      failure.Update(Annotate(recovered, drive.options.dir));
      has_hope = has_hope || MayPass(recovered);
      drive.in_use = nullptr;
      tier->Close();
      continue;
    }
    has_hope = true;
    for (const auto& [meta, replica] : blocks) {
      if (seen.insert({meta.namespace_hash, meta.key}).second) {
        found(meta, IdOf(replica, i));
      } else {
        tier->Free(replica);
      }
    }
  }
  return has_hope ? absl::OkStatus() : failure;
}

TierHealth StripedTier::Health() const {
  TierHealth health{.degraded = true, .reason = ""};
  for (const auto& drive : drives_) {
    const NvmeTier* const tier = drive->in_use;
    const TierHealth member =
        tier != nullptr ? tier->Health()
                        : TierHealth{.degraded = true, .reason = FailureOf(*drive).ToString()};
    if (!member.degraded) {
      health.degraded = false;
      continue;
    }
    if (!health.reason.empty()) health.reason += "; ";
    health.reason +=
        drives_.size() == 1 ? member.reason : drive->options.dir + ": " + member.reason;
  }
  return health;
}

NvmeStats StripedTier::Stats() const {
  NvmeStats total;
  total.is_direct = true;
  ForEachInUse([&](const NvmeTier& tier) {
    const NvmeStats stats = tier.Stats();
    if (Slowness(stats.io_engine) > Slowness(total.io_engine)) total.io_engine = stats.io_engine;
    total.registered_bytes += stats.registered_bytes;
    total.is_direct = total.is_direct && stats.is_direct;
    total.segment_bytes = std::max(total.segment_bytes, stats.segment_bytes);
    total.segment_count += stats.segment_count;
    total.physical_bytes += stats.physical_bytes;
    total.live_bytes += stats.live_bytes;
    total.moved_bytes += stats.moved_bytes;
    total.recovered_count += stats.recovered_count;
    total.dropped_count += stats.dropped_count;
    total.is_rebuilt = total.is_rebuilt || stats.is_rebuilt;
    total.sync_count += stats.sync_count;
    total.written_bytes += stats.written_bytes;
    total.useful_read_bytes += stats.useful_read_bytes;
    total.written_today_bytes += stats.written_today_bytes;
    total.scrubbed_count += stats.scrubbed_count;
    total.scrub_lost_count += stats.scrub_lost_count;
    total.scrub_round_count += stats.scrub_round_count;
  });
  return total;
}

std::vector<StripedTier::Member> StripedTier::Members() const {
  std::vector<Member> members;
  for (const auto& drive : drives_) {
    Member& member =
        members.emplace_back(Member{.dir = drive->options.dir, .failure = "", .usage = {}});
    const NvmeTier* const tier = drive->in_use;
    if (tier == nullptr) {
      member.failure = FailureOf(*drive).ToString();
      continue;
    }
    member.failure = tier->Health().reason;
    member.usage = tier->Usage();
  }
  return members;
}

void StripedTier::Close() {
  EndRejoining();
  ForEachInUse([](NvmeTier& tier) { tier.Close(); });
}

}  // namespace kvtier
