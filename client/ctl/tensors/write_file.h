// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/status.h"

namespace kvtier::ctl {

// Writes the parts, one after the other, as the file `path`: under another name beside it first, so
// that nobody sees half a file. An old file of that name, or the one that a link of that name leads
// to, is replaced when the new one is on the disk. What is no file, such as /dev/stdout or a pipe,
// is written to as it is. Errors: those of the file system; a file `path` is as before then.
absl::Status WriteFile(const std::string& path, std::span<const std::span<const std::byte>> parts);

}  // namespace kvtier::ctl
