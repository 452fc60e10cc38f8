// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_EMU_ACCESS_LOG_H_
#define KVTIER_KERNELS_CUDA_EMU_ACCESS_LOG_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kernels/cuda/emu/hooks.h"

// Puts the accesses of a warp's lanes together into requests and counts sectors and wavefronts.

namespace kvtier::kernels::cuda::emu {

// Wavefronts that shared memory needs for one request, and the least for its width. `addresses`
// holds the lanes of `mask`.
struct Wavefronts {
  uint32_t count = 0;
  uint32_t ideal_count = 0;
};
Wavefronts CountWavefronts(const std::array<uint64_t, kWarpLanes>& addresses, uint32_t mask,
                           uint32_t access_bytes);

struct Sectors {
  uint32_t count = 0;
  uint32_t ideal_count = 0;
};
Sectors CountSectors(const std::array<uint64_t, kWarpLanes>& addresses, uint32_t mask,
                     uint32_t access_bytes);

// Single-thread: the launch's.
class AccessLog {
 public:
  // `lanes` is the mask of the lanes that the warp has.
  void Record(AccessKind kind, const Site& site, uint32_t warp_idx, uint32_t lane_idx,
              uint32_t lanes, uint64_t address, uint32_t access_bytes);
  // Counts what is still incomplete. Call at the end of a block.
  void Flush();

  std::vector<SiteCounters> Counters() const;

 private:
  struct Request {
    uint32_t mask = 0;
    std::array<uint64_t, kWarpLanes> addresses;
  };
  // Requests of one warp at one place that not all lanes have joined.
  struct Pending {
    uint64_t first_request = 0;
    std::array<uint64_t, kWarpLanes> lane_requests = {};
    std::deque<Request> requests;
  };
  struct Place {
    Site site;
    SiteCounters counters;
    std::vector<Pending> warps;
  };
  struct Key {
    const char* file;
    uint32_t line;
    uint32_t column;
    uint32_t kind_and_bytes;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };

  Place* FindPlace(AccessKind kind, const Site& site, uint32_t access_bytes);
  static void Count(Place* place, const Request& request);

  std::unordered_map<Key, std::unique_ptr<Place>, KeyHash> places_;
  // Places by their hash, the last one of each: most accesses find theirs here.
  struct Recent {
    Key key = {};
    Place* place = nullptr;
  };
  std::array<Recent, 64> recent_;
};

}  // namespace kvtier::kernels::cuda::emu

#endif  // KVTIER_KERNELS_CUDA_EMU_ACCESS_LOG_H_
