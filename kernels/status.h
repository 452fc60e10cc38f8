// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_STATUS_H_
#define KVTIER_KERNELS_STATUS_H_

#include <cstdint>

namespace kvtier::kernels {

enum class StatusCode : uint8_t {
  kOk = 0,
  kInvalidArgument = 1,  // The caller broke a documented requirement.
  kDataLoss = 2,         // The bytes of a tile are not a tile (a scale byte that is never written).
  kUnavailable = 3,      // The GPU refused a launch; kernels for CPUs never return it.
};

// The outcome of a kernel call. Engines vendor this folder, so it depends on nothing, allocates
// nothing and never throws. Immutable. The message is a string literal: it lives forever.
class [[nodiscard]] Status {
 public:
  constexpr Status() = default;  // Ok.

  static constexpr Status InvalidArgument(const char* message) {
    return Status(StatusCode::kInvalidArgument, message);
  }
  static constexpr Status DataLoss(const char* message) {
    return Status(StatusCode::kDataLoss, message);
  }

  static constexpr Status Unavailable(const char* message) {
    return Status(StatusCode::kUnavailable, message);
  }

  constexpr bool ok() const { return code_ == StatusCode::kOk; }
  constexpr StatusCode code() const { return code_; }
  // Empty when ok. `message` passed to a factory must be a string literal.
  constexpr const char* message() const { return message_; }

 private:
  constexpr Status(StatusCode code, const char* message) : code_(code), message_(message) {}

  StatusCode code_ = StatusCode::kOk;
  const char* message_ = "";
};

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_STATUS_H_
