// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emu/access_log.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <string>

namespace kvtier::kernels::cuda::emu {
namespace {

constexpr uint32_t kBankBytes = 4;
constexpr uint32_t kBankCount = 32;
constexpr uint32_t kSectorBytes = 32;
// A lane can run this far ahead of the others at one place before its requests are counted alone.
constexpr size_t kPendingMax = 4096;

}  // namespace

Wavefronts CountWavefronts(const std::array<uint64_t, kWarpLanes>& addresses, uint32_t mask,
                           uint32_t access_bytes) {
  const uint32_t phase_lanes = access_bytes == 16 ? 8 : access_bytes == 8 ? 16 : 32;
  const uint32_t words_per_lane = std::max(access_bytes / kBankBytes, 1U);
  Wavefronts result;
  for (uint32_t first = 0; first < kWarpLanes; first += phase_lanes) {
    std::array<std::array<uint64_t, kWarpLanes * 4>, kBankCount> bank_words;
    std::array<uint32_t, kBankCount> word_counts = {};
    uint32_t most = 0;
    for (uint32_t lane = first; lane < first + phase_lanes; ++lane) {
      if ((mask >> lane & 1U) == 0) continue;
      for (uint32_t i = 0; i < words_per_lane; ++i) {
        const uint64_t word = addresses[lane] / kBankBytes + i;
        auto& words = bank_words[word % kBankCount];
        uint32_t& count = word_counts[word % kBankCount];
        if (std::find(words.begin(), words.begin() + count, word) == words.begin() + count) {
          words[count++] = word;
        }
        most = std::max(most, count);
      }
    }
    result.count += most;
    result.ideal_count += most > 0 ? 1 : 0;
  }
  return result;
}

Sectors CountSectors(const std::array<uint64_t, kWarpLanes>& addresses, uint32_t mask,
                     uint32_t access_bytes) {
  // Accesses are aligned and not wider than a sector, so each lies in one.
  std::array<uint64_t, kWarpLanes> accesses;
  uint32_t count = 0;
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    if ((mask >> lane & 1U) != 0) accesses[count++] = addresses[lane] / access_bytes;
  }
  std::sort(accesses.begin(), accesses.begin() + count);
  Sectors result;
  uint32_t distinct_count = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (i > 0 && accesses[i] == accesses[i - 1]) continue;
    ++distinct_count;
    const uint64_t per_sector = kSectorBytes / access_bytes;
    if (i == 0 || accesses[i] / per_sector != accesses[i - 1] / per_sector) ++result.count;
  }
  result.ideal_count = (distinct_count * access_bytes + kSectorBytes - 1) / kSectorBytes;
  return result;
}

size_t AccessLog::KeyHash::operator()(const Key& key) const {
  const size_t place = (size_t{key.line} << 20) ^ (size_t{key.column} << 8) ^ key.kind_and_bytes;
  return std::hash<size_t>()(place) ^ std::hash<const void*>()(key.file);
}

AccessLog::Place* AccessLog::FindPlace(AccessKind kind, const Site& site, uint32_t access_bytes) {
  const Key key{site.file_name(), site.line(), site.column(),
                static_cast<uint32_t>(kind) << 8 | access_bytes};
  Recent& recent = recent_[KeyHash()(key) % recent_.size()];
  if (recent.place != nullptr && recent.key == key) return recent.place;
  std::unique_ptr<Place>& place = places_[key];
  if (place == nullptr) {
    place = std::make_unique<Place>();
    place->site = site;
    place->counters.kind = kind;
    place->counters.access_bytes = access_bytes;
  }
  recent = {key, place.get()};
  return place.get();
}

void AccessLog::Record(AccessKind kind, const Site& site, uint32_t warp_idx, uint32_t lane_idx,
                       uint32_t lanes, uint64_t address, uint32_t access_bytes) {
  Place* place = FindPlace(kind, site, access_bytes);
  if (place->warps.size() <= warp_idx) place->warps.resize(warp_idx + 1);
  Pending& pending = place->warps[warp_idx];
  const uint64_t request_idx = std::max(pending.lane_requests[lane_idx], pending.first_request);
  pending.lane_requests[lane_idx] = request_idx + 1;
  while (pending.first_request + pending.requests.size() <= request_idx) {
    pending.requests.emplace_back();
  }
  Request& request = pending.requests[request_idx - pending.first_request];
  request.mask |= 1U << lane_idx;
  request.addresses[lane_idx] = address;
  while (!pending.requests.empty() &&
         (pending.requests.front().mask == lanes || pending.requests.size() > kPendingMax)) {
    Count(place, pending.requests.front());
    pending.requests.pop_front();
    ++pending.first_request;
  }
}

void AccessLog::Count(Place* place, const Request& request) {
  SiteCounters& counters = place->counters;
  ++counters.request_count;
  if (IsShared(counters.kind)) {
    const Wavefronts wavefronts =
        CountWavefronts(request.addresses, request.mask, counters.access_bytes);
    counters.unit_count += wavefronts.count;
    counters.ideal_unit_count += wavefronts.ideal_count;
  } else {
    const Sectors sectors = CountSectors(request.addresses, request.mask, counters.access_bytes);
    counters.unit_count += sectors.count;
    counters.ideal_unit_count += sectors.ideal_count;
  }
}

void AccessLog::Flush() {
  for (auto& [key, place] : places_) {
    for (const Pending& pending : place->warps) {
      for (const Request& request : pending.requests) Count(place.get(), request);
    }
    place->warps.clear();
  }
}

std::vector<SiteCounters> AccessLog::Counters() const {
  std::vector<SiteCounters> result;
  for (const auto& [key, place] : places_) {
    result.push_back(place->counters);
    result.back().place = std::string(place->site.file_name()) + ":" +
                          std::to_string(place->site.line()) + ":" +
                          std::to_string(place->site.column());
  }
  std::sort(result.begin(), result.end(), [](const SiteCounters& a, const SiteCounters& b) {
    return std::tie(a.place, a.kind, a.access_bytes) < std::tie(b.place, b.kind, b.access_bytes);
  });
  return result;
}

}  // namespace kvtier::kernels::cuda::emu
