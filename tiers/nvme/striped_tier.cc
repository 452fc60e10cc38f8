// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/striped_tier.h"

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

ReplicaId IdOf(ReplicaId in_member, size_t drive_idx) { return in_member * kStride + drive_idx; }
ReplicaId InMember(ReplicaId replica) { return replica / kStride; }

// No other drive makes these good: the configuration or the owner has to change.
bool IsFatal(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status);
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
  std::vector<Drive> drives;
  size_t used_count = 0;
  for (const std::string& dir : dirs) {
    NvmeOptions member = options;
    member.dir = dir;
    member.capacity_bytes = options.capacity_bytes / dirs.size();
    member.write_bytes_per_day_max = options.write_bytes_per_day_max / dirs.size();
    member.scrub_bytes_per_second = options.scrub_bytes_per_second / dirs.size();
    auto tier = NvmeTier::Create(member);
    if (IsFatal(tier.status())) return Annotate(tier.status(), dir);
    drives.push_back({.dir = dir, .tier = nullptr, .failure = tier.status()});
    if (tier.ok()) {
      drives.back().tier = std::move(tier).value();
      ++used_count;
    } else {
      spdlog::error("nvme: {} is left out: {}", dir, tier.status().ToString());
    }
  }
  if (used_count == 0) return Annotate(drives.front().failure, drives.front().dir);
  return std::unique_ptr<StripedTier>(new StripedTier(std::move(drives)));
}

void StripedTier::OnMapped(std::span<std::byte> segment) {
  for (Drive& drive : drives_) {
    if (drive.tier != nullptr) drive.tier->memory_observer().OnMapped(segment);
  }
}

void StripedTier::OnUnmapping(std::span<std::byte> segment) {
  for (Drive& drive : drives_) {
    if (drive.tier != nullptr) drive.tier->memory_observer().OnUnmapping(segment);
  }
}

NvmeTier& StripedTier::TierOf(ReplicaId replica) const {
  const size_t drive_idx = replica % kStride;
  KVT_CHECK(drive_idx < drives_.size() && drives_[drive_idx].failure.ok());
  return *drives_[drive_idx].tier;
}

// Drives that take blocks: the first one drawn by free room, then the others, most room first.
std::vector<StripedTier::Choice> StripedTier::DrawOrder() {
  std::vector<Choice> choices;
  uint64_t total_bytes = 0;
  for (size_t i = 0; i < drives_.size(); ++i) {
    if (!drives_[i].failure.ok() || drives_[i].tier->Health().degraded) continue;
    const TierUsage usage = drives_[i].tier->Usage();
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
    const auto replica = drives_[choice.drive_idx].tier->Reserve(payload_bytes, owner);
    if (replica.ok()) return IdOf(*replica, choice.drive_idx);
    // No room on one of them says more to the caller than a failure of the other.
    if (!absl::IsResourceExhausted(refusal)) refusal = replica.status();
  }
  return refusal;
}

void StripedTier::Free(ReplicaId replica) { TierOf(replica).Free(InMember(replica)); }

uint64_t StripedTier::FootprintBytes(uint32_t payload_bytes) const {
  uint64_t most_bytes = 0;
  for (const Drive& drive : drives_) {
    if (!drive.failure.ok()) continue;
    most_bytes = std::max(most_bytes, drive.tier->FootprintBytes(payload_bytes));
  }
  return most_bytes;
}

TierUsage StripedTier::Usage() const {
  TierUsage total;
  for (const Drive& drive : drives_) {
    if (!drive.failure.ok()) continue;
    const TierUsage usage = drive.tier->Usage();
    total.capacity_bytes += usage.capacity_bytes;
    total.used_bytes += usage.used_bytes;
    total.physical_bytes += usage.physical_bytes;
  }
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

absl::Status StripedTier::Recover(const std::function<void(const BlockMeta&, ReplicaId)>& found) {
  absl::flat_hash_set<std::pair<Digest, Digest>> seen;
  absl::Status failure;
  size_t used_count = 0;
  for (size_t i = 0; i < drives_.size(); ++i) {
    Drive& drive = drives_[i];
    if (!drive.failure.ok()) continue;
    // Told only once the whole member is recovered: one that fails half-way leaves nothing.
    std::vector<std::pair<BlockMeta, ReplicaId>> blocks;
    const absl::Status recovered = drive.tier->Recover(
        [&](const BlockMeta& meta, ReplicaId replica) { blocks.emplace_back(meta, replica); });
    if (!recovered.ok()) {
      spdlog::error("nvme: {} is left out: {}", drive.dir, recovered.ToString());
      drive.failure = failure = Annotate(recovered, drive.dir);
      drive.tier->Close();
      continue;
    }
    ++used_count;
    for (const auto& [meta, replica] : blocks) {
      if (seen.insert({meta.namespace_hash, meta.key}).second) {
        found(meta, IdOf(replica, i));
      } else {
        drive.tier->Free(replica);
      }
    }
  }
  return used_count > 0 ? absl::OkStatus() : failure;
}

TierHealth StripedTier::Health() const {
  TierHealth health{.degraded = true, .reason = ""};
  for (const Drive& drive : drives_) {
    const TierHealth member =
        drive.failure.ok() ? drive.tier->Health()
                           : TierHealth{.degraded = true, .reason = drive.failure.ToString()};
    if (!member.degraded) {
      health.degraded = false;
      continue;
    }
    if (!health.reason.empty()) health.reason += "; ";
    health.reason += drives_.size() == 1 ? member.reason : drive.dir + ": " + member.reason;
  }
  return health;
}

NvmeStats StripedTier::Stats() const {
  NvmeStats total;
  total.is_direct = true;
  for (const Drive& drive : drives_) {
    if (!drive.failure.ok()) continue;
    const NvmeStats stats = drive.tier->Stats();
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
  }
  return total;
}

std::vector<StripedTier::Member> StripedTier::Members() const {
  std::vector<Member> members;
  for (const Drive& drive : drives_) {
    Member& member = members.emplace_back(Member{.dir = drive.dir, .failure = "", .usage = {}});
    if (!drive.failure.ok()) {
      member.failure = drive.failure.ToString();
      continue;
    }
    member.failure = drive.tier->Health().reason;
    member.usage = drive.tier->Usage();
  }
  return members;
}

void StripedTier::Close() {
  for (Drive& drive : drives_) {
    if (drive.tier != nullptr) drive.tier->Close();
  }
}

}  // namespace kvtier
