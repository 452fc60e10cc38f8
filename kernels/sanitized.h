// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvtier::kernels {

// Whether a sanitizer makes every step of a test take ten times as long. It sees the same code run
// in a short sequence as in a long one; that results are right is for the other builds to say.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kIsSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kIsSanitized = true;
#else
inline constexpr bool kIsSanitized = false;
#endif
#else
inline constexpr bool kIsSanitized = false;
#endif

}  // namespace kvtier::kernels
