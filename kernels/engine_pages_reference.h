// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_ENGINE_PAGES_REFERENCE_H_
#define KVTIER_KERNELS_ENGINE_PAGES_REFERENCE_H_

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/engine_pages.h"
#include "kernels/engine_pages_layouts.h"
#include "kernels/tile_layout.h"

// For tests: the memory of each known engine, addressed element by element with the formulas its
// own sources state, without EnginePageLayout.

namespace kvtier::kernels::engine_pages_reference {

inline constexpr uint32_t kSeed = 20261129;
inline constexpr GlobalScales kScales{.k = 0x1p-6F, .v = 0x1p-9F};

// Uniform enough for tests, in [0, bound).
inline uint32_t Below(uint32_t bound, std::mt19937* random) {
  return static_cast<uint32_t>((*random)() % bound);
}

inline void Fill(std::span<std::byte> bytes, std::mt19937* random) {
  for (size_t i = 0; i < bytes.size(); i += 4) {
    const auto word = static_cast<uint32_t>((*random)());
    std::memcpy(&bytes[i], &word, std::min<size_t>(4, bytes.size() - i));
  }
}

enum Side : uint32_t { kK, kV };
enum Part : uint32_t { kCodes, kScaleBytes };
inline constexpr Side kSides[] = {kK, kV};

// A byte of the engine: which of its four buffers (2 * side + part; all the same for one buffer)
// and where in it. For codes, the first of the 8 bytes of vector s.
struct Address {
  uint32_t buffer;
  uint64_t byte;
};

// Where an element is.
using AddressOf = std::function<Address(const EnginePageShape&, Side, Part, uint64_t page,
                                        uint64_t head, uint64_t token, uint64_t s)>;

struct Engine {
  std::string name;
  EnginePageLayout (*layout)(const EnginePageShape&);
  AddressOf address;
  bool interleaved = false;
  bool one_buffer = false;
  bool own_v_pages = false;
};

// Bytes of a row and of one vector in it.
inline uint64_t RowBytes(const EnginePageShape& shape, Part part) {
  return part == kCodes ? shape.head_dim / 2 : shape.head_dim / 16;
}
inline uint64_t VectorBytes(Part part) { return part == kCodes ? 8 : 1; }

// Element (page, token, head, s) of a contiguous [page][P][H][S] tensor.
inline uint64_t Nhd(const EnginePageShape& shape, Part part, uint64_t page, uint64_t head,
                    uint64_t token, uint64_t s) {
  return ((page * shape.page_tokens + token) * shape.kv_head_count + head) * RowBytes(shape, part) +
         s * VectorBytes(part);
}

inline uint64_t Hnd(const EnginePageShape& shape, Part part, uint64_t page, uint64_t head,
                    uint64_t token, uint64_t s) {
  return ((page * shape.kv_head_count + head) * shape.page_tokens + token) * RowBytes(shape, part) +
         s * VectorBytes(part);
}

// FlashInfer and vLLM state the swizzle as a move of (t, s) within a [P][S] table.
inline uint64_t SwizzledToken(const EnginePageShape& shape, uint64_t t, uint64_t s) {
  const uint64_t s_group = shape.head_dim / 16 / 4;
  return t / 4 * 4 + s / s_group;
}
inline uint64_t SwizzledScale(const EnginePageShape& shape, uint64_t t, uint64_t s) {
  const uint64_t s_group = shape.head_dim / 16 / 4;
  return s % s_group * 4 + t % 4;
}

// TRT-LLM states it as an address in the [P][S] bytes of a head: (t/4)*4*S + s*4 + t%4.
inline uint64_t HndInterleaved(const EnginePageShape& shape, uint64_t page, uint64_t head,
                               uint64_t t, uint64_t s) {
  const uint64_t row = shape.head_dim / 16;
  return (page * shape.kv_head_count + head) * shape.page_tokens * row + t / 4 * 4 * row + s * 4 +
         t % 4;
}

inline Address FourBufferNhd(const EnginePageShape& shape, Side side, Part part, uint64_t page,
                             uint64_t head, uint64_t t, uint64_t s) {
  return {2 * side + part, Nhd(shape, part, page, head, t, s)};
}

inline Address FourBufferNhdSwizzled(const EnginePageShape& shape, Side side, Part part,
                                     uint64_t page, uint64_t head, uint64_t t, uint64_t s) {
  if (side == kK || part == kCodes) return FourBufferNhd(shape, side, part, page, head, t, s);
  return FourBufferNhd(shape, side, part, page, head, SwizzledToken(shape, t, s),
                       SwizzledScale(shape, t, s));
}

inline Address FourBufferHnd(const EnginePageShape& shape, Side side, Part part, uint64_t page,
                             uint64_t head, uint64_t t, uint64_t s) {
  return {2 * side + part, Hnd(shape, part, page, head, t, s)};
}

inline Address FourBufferHndInterleaved(const EnginePageShape& shape, Side side, Part part,
                                        uint64_t page, uint64_t head, uint64_t t, uint64_t s) {
  if (side == kK || part == kCodes) return FourBufferHnd(shape, side, part, page, head, t, s);
  return {2 * side + part, HndInterleaved(shape, page, head, t, s)};
}

inline Address StackedHnd(const EnginePageShape& shape, Side side, Part part, uint64_t page,
                          uint64_t head, uint64_t t, uint64_t s) {
  // [page][2][H][P][S] is [2 * page + side] of [H][P][S]. Codes and scales are one tensor each.
  return {part, Hnd(shape, part, 2 * page + side, head, t, s)};
}

inline Address Sglang(const EnginePageShape& shape, Side side, Part part, uint64_t page,
                      uint64_t head, uint64_t t, uint64_t s) {
  if (part == kCodes) {
    const uint64_t slot = page * shape.page_tokens + t;
    return {2 * side + part, (slot * shape.kv_head_count + head) * (shape.head_dim / 2) + s * 8};
  }
  return FourBufferHndInterleaved(shape, side, part, page, head, t, s);
}

// vLLM: [K data | K scale | V data | V scale] a page.
inline uint64_t VllmSection(const EnginePageShape& shape, Side side, Part part, uint64_t page) {
  const uint64_t rows = uint64_t{shape.kv_head_count} * shape.page_tokens;
  const uint64_t side_bytes = rows * (shape.head_dim / 2 + shape.head_dim / 16);
  return page * 2 * side_bytes + side * side_bytes +
         (part == kCodes ? 0 : rows * shape.head_dim / 2);
}

inline Address VllmHndSwizzled(const EnginePageShape& shape, Side side, Part part, uint64_t page,
                               uint64_t head, uint64_t t, uint64_t s) {
  const bool move = side == kV && part == kScaleBytes;
  return {0, VllmSection(shape, side, part, page) + Hnd(shape, part, 0, head,
                                                        move ? SwizzledToken(shape, t, s) : t,
                                                        move ? SwizzledScale(shape, t, s) : s)};
}

inline Address VllmHndLinear(const EnginePageShape& shape, Side side, Part part, uint64_t page,
                             uint64_t head, uint64_t t, uint64_t s) {
  return {0, VllmSection(shape, side, part, page) + Hnd(shape, part, 0, head, t, s)};
}

inline Address VllmNhdSwizzled(const EnginePageShape& shape, Side side, Part part, uint64_t page,
                               uint64_t head, uint64_t t, uint64_t s) {
  const bool move = side == kV && part == kScaleBytes;
  return {0, VllmSection(shape, side, part, page) + Nhd(shape, part, 0, head,
                                                        move ? SwizzledToken(shape, t, s) : t,
                                                        move ? SwizzledScale(shape, t, s) : s)};
}

inline constexpr ScaleOrder kLinear = ScaleOrder::kLinear;
inline constexpr ScaleOrder kInterleaved = ScaleOrder::kInterleaved4;

inline std::vector<Engine> AllEngines() {
  using Shape = EnginePageShape;
  return {
      {"FlashInfer NHD", [](const Shape& s) { return FlashInferNhd(s, kLinear); }, FourBufferNhd},
      {"FlashInfer HND", [](const Shape& s) { return FlashInferHnd(s, kLinear); }, FourBufferHnd},
      {"FlashInfer NHD trtllm-gen", [](const Shape& s) { return FlashInferNhd(s, kInterleaved); },
       FourBufferNhdSwizzled, true},
      {"FlashInfer HND trtllm-gen", [](const Shape& s) { return FlashInferHnd(s, kInterleaved); },
       FourBufferHndInterleaved, true},
      {"FlashInfer stacked HND", [](const Shape& s) { return Stacked(FlashInferHnd(s, kLinear)); },
       StackedHnd},
      {"TRT-LLM", [](const Shape& s) { return TrtLlm(s); }, FourBufferHndInterleaved, true, false,
       true},
      {"SGLang GenMHA", [](const Shape& s) { return SglangGenMha(s); }, Sglang, true},
      {"vLLM HND", [](const Shape& s) { return VllmHnd(s, kInterleaved); }, VllmHndSwizzled, true,
       true},
      {"vLLM HND SM12x", [](const Shape& s) { return VllmHnd(s, kLinear); }, VllmHndLinear, false,
       true},
      {"vLLM NHD", [](const Shape& s) { return VllmNhd(s, kInterleaved); }, VllmNhdSwizzled, true,
       true},
  };
}

// An engine's memory full of random bytes, and where the tokens of one tile are in it.
class Memory {
 public:
  Memory(const Engine& engine, const EnginePageShape& shape, const TileShape& tile,
         uint64_t first_slot, std::mt19937* random)
      : engine_(engine),
        shape_(shape),
        tile_(tile),
        first_slot_(first_slot),
        head_(Below(shape.kv_head_count, random)) {
    const auto page_count = static_cast<uint32_t>(
        (first_slot + tile.block_tokens + shape.page_tokens - 1) / shape.page_tokens + 2);
    for (std::vector<uint32_t>* table : {&table_, &v_table_}) {
      table->resize(page_count);
      std::iota(table->begin(), table->end(), 0U);
      std::shuffle(table->begin(), table->end(), *random);
    }
    // K and V of all pages, twice as much as a buffer of one side needs: a wrong stride should meet
    // wrong bytes, not the end. What is not the tile's must stay as it is.
    const uint64_t rows = uint64_t{2} * page_count * shape.kv_head_count * shape.page_tokens;
    for (uint32_t buffer = 0; buffer < (engine.one_buffer ? 1U : 4U); ++buffer) {
      const uint64_t row_bytes = RowBytes(shape, buffer % 2 == 0 ? kCodes : kScaleBytes) +
                                 (engine.one_buffer ? RowBytes(shape, kScaleBytes) : 0);
      buffers_[buffer].resize(rows * row_bytes);
      Fill(buffers_[buffer], random);
    }
    ForEach([&](Side side, uint32_t token, uint32_t s) {
      *At(side, kScaleBytes, token, s) = static_cast<std::byte>(Below(0x7F, random));
    });
  }

  template <typename F>
  void ForEach(const F& visit) const {
    for (const Side side : kSides) {
      for (uint32_t token = 0; token < tile_.block_tokens; ++token) {
        for (uint32_t s = 0; s < VectorsPerToken(tile_); ++s) visit(side, token, s);
      }
    }
  }

  std::byte* At(Side side, Part part, uint32_t token, uint32_t s) {
    const uint64_t slot = first_slot_ + token;
    const std::vector<uint32_t>& table = side == kV && engine_.own_v_pages ? v_table_ : table_;
    const Address address = engine_.address(shape_, side, part, table[slot / shape_.page_tokens],
                                            head_, slot % shape_.page_tokens, s);
    return &buffers_[address.buffer].at(address.byte);
  }

  // The tile that holds this memory's tokens, by the addresses of tile_layout.h.
  std::vector<std::byte> Tile() {
    std::vector<std::byte> tile(TileBytes(tile_));
    ForEach([&](Side side, uint32_t token, uint32_t s) {
      const bool k = side == kK;
      std::memcpy(&tile[k ? KCodeOffset(tile_, token, s) : VCodeOffset(tile_, token, s)],
                  At(side, kCodes, token, s), 8);
      tile[k ? KScaleByteOffset(tile_, token, s) : VScaleByteOffset(tile_, token, s)] =
          *At(side, kScaleBytes, token, s);
    });
    return tile;
  }

  MutableEnginePages Pages() {
    MutableEnginePages pages;
    if (engine_.one_buffer) {
      pages = OneBuffer(std::span(buffers_[0]));
    } else if (engine_.name == "FlashInfer stacked HND") {
      pages = {.k_codes = buffers_[0],
               .k_scales = buffers_[1],
               .v_codes = buffers_[0],
               .v_scales = buffers_[1]};
    } else {
      pages = {.k_codes = buffers_[0],
               .k_scales = buffers_[1],
               .v_codes = buffers_[2],
               .v_scales = buffers_[3]};
    }
    pages.page_table = table_;
    if (engine_.own_v_pages) pages.v_page_table = v_table_;
    pages.first_slot = first_slot_;
    pages.kv_head_idx = head_;
    return pages;
  }

  EnginePageLayout layout() const { return engine_.layout(shape_); }
  std::array<std::vector<std::byte>, 4>& buffers() { return buffers_; }

 private:
  Engine engine_;
  EnginePageShape shape_;
  TileShape tile_;
  uint64_t first_slot_;
  uint32_t head_;
  std::vector<uint32_t> table_;
  std::vector<uint32_t> v_table_;
  std::array<std::vector<std::byte>, 4> buffers_;
};

}  // namespace kvtier::kernels::engine_pages_reference

#endif  // KVTIER_KERNELS_ENGINE_PAGES_REFERENCE_H_
