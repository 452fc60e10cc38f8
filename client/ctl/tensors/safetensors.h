// SPDX-License-Identifier: Apache-2.0
//
// The safetensors format: u64 length of a JSON header, the header, the bytes of all tensors. Read
// as strictly as huggingface/safetensors does (safetensors/src/tensor.rs): the tensors cover the
// data without gap or overlap. Format: https://huggingface.co/docs/safetensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/ctl/tensors/tensor.h"

namespace kvtier::ctl {

// One open .safetensors file. Immutable after Open, thread-safe. Tensors outlive it.
class SafetensorsFile {
 public:
  // Reads and checks the whole header; blocks on the disk. Errors: those of MappedFile::Open;
  // DATA_LOSS naming file and tensor if the file is not well-formed: a header above 100 MB or
  // beyond the file, JSON other than the format's, a name twice, a size that is not that of shape
  // and type, offsets out of range, gaps, overlaps. Types it does not know are listed as kOther and
  // their sizes are not checked.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  const std::string& path() const { return file_->path(); }
  // By name, in order.
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  // The strings of "__metadata__".
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }
  // Errors: NOT_FOUND.
  absl::StatusOr<Tensor> Find(std::string_view name) const;

 private:
  SafetensorsFile() = default;

  std::shared_ptr<const MappedFile> file_;
  std::map<std::string, Tensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

// Writes the tensors' names, types, shapes and bytes. Errors: INVALID_ARGUMENT for kOther, a name
// twice or bytes that are not the size of the shape; those of the file system.
absl::Status WriteSafetensors(const std::string& path, std::span<const Tensor> tensors);

}  // namespace kvtier::ctl
