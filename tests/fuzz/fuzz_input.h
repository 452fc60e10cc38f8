// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kvtier::fuzz {

// The bytes of one run, taken from the front as decisions and contents. What is beyond the end is
// zero, so every input is a whole one. A plain value; views are into the fuzzer's own bytes.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size_bytes) : rest_(data, size_bytes) {}

  bool empty() const { return rest_.empty(); }

  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const uint8_t byte = rest_.front();
    rest_ = rest_.subspan(1);
    return byte;
  }

  uint32_t Number() {
    uint32_t number = 0;
    for (int i = 0; i < 4; ++i) number = number << 8 | Byte();
    return number;
  }

  // Requires: bound > 0.
  size_t Below(size_t bound) { return (bound <= 256 ? Byte() : Number()) % bound; }

  // At most so many.
  std::span<const uint8_t> Take(size_t bytes_max) {
    const auto taken = rest_.first(std::min(bytes_max, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }
  std::span<const uint8_t> Rest() { return Take(rest_.size()); }

  // Two bytes of length, then that many, or what there is.
  std::span<const uint8_t> Piece() {
    const size_t high = Byte();
    return Take(high << 8 | Byte());
  }

 private:
  std::span<const uint8_t> rest_;
};

inline std::string TextOf(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace kvtier::fuzz
