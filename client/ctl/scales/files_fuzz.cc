// SPDX-License-Identifier: Apache-2.0
//
// Files of other programs that kvtierctl reads: .npy and .safetensors, scale sets, checkpoints and
// their configuration. The first byte picks the kind, the rest is the file. Every byte of a tensor
// that is accepted can be read; a scale set that is accepted is the same after it was written.
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>

#include "client/ctl/scales/checkpoint.h"
#include "client/ctl/scales/checkpoint_config.h"
#include "client/ctl/scales/scale_set_file.h"
#include "client/ctl/tensors/npy.h"
#include "client/ctl/tensors/safetensors.h"
#include "kernels/scale_set.h"
#include "proto/base/check.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/memory_file.h"

namespace kvtier::ctl {
namespace {

using fuzz::FuzzInput;

void CheckTensor(const Tensor& tensor) {
  const auto element_count = ElementCountOf(tensor.shape);
  KVT_CHECK(element_count.has_value());
  if (tensor.type != TensorType::kOther) {
    KVT_CHECK(tensor.bytes.size() == *element_count * TensorElementBytes(tensor.type));
  }
  unsigned sum = 0;
  for (const std::byte byte : tensor.bytes) sum += static_cast<unsigned>(byte);
  // Keeps the reads.
  KVT_CHECK(sum <= 255 * tensor.bytes.size());
  const auto floats = ToFloats(tensor);
  KVT_CHECK(!floats.ok() || floats->size() == *element_count);
}

void FuzzNpy(FuzzInput* input) {
  const uint8_t flags = input->Byte();
  const fuzz::MemoryFile file(input->Rest());
  const auto tensor = ReadNpy(
      file.path(), {.uint16_is_bf16 = (flags & 1) != 0, .uint8_is_fp8_e4m3 = (flags & 2) != 0});
  if (tensor.ok()) CheckTensor(*tensor);
}

// The header's length in front of it, or what the input says.
std::string SafetensorsOf(FuzzInput* input) {
  if (input->Byte() % 4 == 3) return fuzz::TextOf(input->Rest());
  const auto header = input->Piece();
  const uint64_t header_bytes = header.size();
  return std::string(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes)) +
         fuzz::TextOf(header) + fuzz::TextOf(input->Rest());
}

std::span<const uint8_t> BytesOf(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

void FuzzSafetensors(FuzzInput* input) {
  const fuzz::MemoryFile file(BytesOf(SafetensorsOf(input)));
  const auto opened = SafetensorsFile::Open(file.path());
  if (!opened.ok()) return;
  for (const auto& [name, tensor] : opened->tensors()) {
    CheckTensor(tensor);
    KVT_CHECK(opened->Find(name).ok());
  }
}

void FuzzScaleSet(FuzzInput* input) {
  const fuzz::MemoryFile file(input->Rest());
  const auto read = ReadScaleSet(file.path());
  if (!read.ok()) return;
  KVT_CHECK(kernels::Validate(read->scales.View()).ok());
  const fuzz::MemoryFile written(BytesOf(FormatScaleSet(*read)));
  const auto again = ReadScaleSet(written.path());
  KVT_CHECK(again.ok() && again->scales == read->scales && again->provenance == read->provenance);
}

void FuzzCheckpoint(FuzzInput* input) {
  const uint8_t flags = input->Byte();
  CheckpointOptions options{.layer_count = 1 + flags % 4U,
                            .kv_head_count = 1 + flags / 4U % 4U,
                            .head_dim = 16,
                            .force = flags >= 128};
  options.convention = static_cast<ScaleConvention>(flags / 16 % 4);
  const fuzz::MemoryFile file(BytesOf(SafetensorsOf(input)));
  const auto imported = ImportCheckpoint(file.path(), options);
  if (imported.ok()) KVT_CHECK(kernels::Validate(imported->scales.View()).ok());
}

// Files in a folder, each run's own.
void FuzzFolder(FuzzInput* input) {
  namespace fs = std::filesystem;
  static const fs::path folder =
      fs::temp_directory_path() / ("kvtier-fuzz-" + std::to_string(getpid()));
  fs::create_directory(folder);
  for (const char* name : {"config.json", "hf_quant_config.json", "model.safetensors.index.json"}) {
    const auto text = input->Piece();
    if (!text.empty()) std::ofstream(folder / name, std::ios::binary) << fuzz::TextOf(text);
  }
  std::ofstream(folder / "model.safetensors", std::ios::binary) << SafetensorsOf(input);
  const auto config = ReadCheckpointConfig(folder);
  KVT_CHECK(!config.ok() || config->files.size() <= 2);
  const auto imported = ImportCheckpoint(folder, {});
  if (imported.ok()) KVT_CHECK(kernels::Validate(imported->scales.View()).ok());
  fs::remove_all(folder);
}

constexpr std::array kTargets = {FuzzNpy, FuzzSafetensors, FuzzScaleSet, FuzzCheckpoint,
                                 FuzzFolder};

}  // namespace
}  // namespace kvtier::ctl

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes) {
  kvtier::fuzz::FuzzInput input(data, size_bytes);
  kvtier::ctl::kTargets[input.Below(kvtier::ctl::kTargets.size())](&input);
  return 0;
}
