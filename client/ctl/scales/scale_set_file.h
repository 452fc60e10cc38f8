// SPDX-License-Identifier: Apache-2.0
//
// Scale sets as files. The format is specified in docs/scale-sets.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/scale_set.h"

namespace kvtier::ctl {

// The owner of a kernels::ScaleSet. A plain value.
struct ScaleSetData {
  uint32_t layer_count = 0;
  uint32_t kv_head_count = 0;
  uint32_t head_dim = 0;
  kernels::ScaleSearch search = kernels::ScaleSearch::kAmax6;
  std::vector<float> g_k = {};                           // [layer][kv head]
  std::vector<float> g_v = {};                           // [layer][kv head]
  std::vector<float> k_mean = {};                        // [layer][kv head][dim] or empty
  std::vector<float> k_smooth = {};                      // [layer][kv head][dim] or empty
  std::vector<kernels::LayerFormat> layer_formats = {};  // [layer] or empty: NVFP4 everywhere

  // Views into this object.
  kernels::ScaleSet View() const;

  friend bool operator==(const ScaleSetData&, const ScaleSetData&) = default;
};

// Where a set came from. Tells people; nothing depends on it, and it is not part of the identity.
struct Provenance {
  struct File {
    std::string name = {};  // Without its folder.
    uint64_t bytes = 0;
    std::string sha256 = {};  // Hexadecimal; empty for files above kHashedBytesMax.

    friend bool operator==(const File&, const File&) = default;
  };

  std::string kind = {};         // "calibration" or "checkpoint"
  std::string tool = {};         // "kvtierctl 0.1.0"
  std::string created = {};      // RFC 3339, UTC
  std::string model = {};        // As the user named it, or empty.
  std::string convention = {};   // Of a checkpoint's scales, or empty.
  uint64_t token_count = 0;      // Calibration: tokens per layer, the fewest.
  uint64_t nonfinite_count = 0;  // Calibration: values left out.
  double smooth_alpha = 0.0;     // Calibration; 0 without smoothing.
  std::vector<File> files = {};

  friend bool operator==(const Provenance&, const Provenance&) = default;
};

// Most channels, that is layers * kv heads * head dim, of a set that kvtierctl makes: 128 layers of
// 128 heads of 256 dims. The counts come from files that need not be honest.
inline constexpr uint64_t kChannelCountMax = uint64_t{1} << 22;

// Errors: INVALID_ARGUMENT above kChannelCountMax. Other limits are those of kernels::Validate.
absl::Status CheckChannelCount(uint64_t layer_count, uint64_t kv_head_count, uint64_t head_dim);

// Larger files are named with their size only: hashing a checkpoint takes longer than reading its
// scales.
inline constexpr uint64_t kHashedBytesMax = uint64_t{256} << 20;

// Name, size and SHA-256 of a file, which is read. Errors: those of MappedFile::Open.
absl::StatusOr<Provenance::File> DescribeFile(const std::string& path);

// A scale set with its origin: the content of one file.
struct ScaleSetFile {
  ScaleSetData scales = {};
  Provenance provenance = {};
};

// The identity of a set: "ss1-" and the SHA-256 of its content in hexadecimal, 68 characters. Equal
// for equal scales wherever they came from, different whenever a bit of a sealed block could
// differ: what to put into Layout::scale_set. Requires: kernels::Validate(scales.View()).ok().
std::string ScaleSetId(const ScaleSetData& scales);

// "amax6" or "4over6".
std::string_view SearchName(kernels::ScaleSearch search);
// "nvfp4", "fp8" or "bf16".
std::string_view SideFormatName(kernels::SideFormat format);

// The text of a file; the same for equal contents. Requires: kernels::Validate(scales.View()).ok().
std::string FormatScaleSet(const ScaleSetFile& file);

// Reads one file, which must be exactly what docs/scale-sets.md says. Floats come back to the bit.
// Errors: those of ReadStrictJson; UNIMPLEMENTED for another version; DATA_LOSS naming file and
// field for anything else, including an id that is not that of the content.
absl::StatusOr<ScaleSetFile> ReadScaleSet(const std::string& path);

// Writes a file that ReadScaleSet accepts. Errors: INVALID_ARGUMENT if kernels::Validate refuses
// the set; those of the file system.
absl::Status WriteScaleSet(const std::string& path, const ScaleSetFile& file);

}  // namespace kvtier::ctl
