// SPDX-License-Identifier: Apache-2.0
//
// LoadConfig, from a file, the environment and flags. The input: a piece for the file, then pieces
// that are flags ("section.key=value") or, with a first byte of '$', variables. What is accepted
// must be the same after it was printed and read again.
#include "daemon/config.h"
#include "proto/base/check.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/memory_file.h"

namespace kvtier {
namespace {

// A piece into one of the sources.
void AddSetting(std::string piece, ConfigSources* sources) {
  if (piece.starts_with('$')) {
    sources->environment.push_back(piece.substr(1));
    return;
  }
  const size_t equals = std::min(piece.find('='), piece.size());
  sources->flags.emplace_back(piece.substr(0, equals),
                              piece.substr(std::min(equals + 1, piece.size())));
}

void CheckPrintsAsItself(const Config& config) {
  const std::string printed = PrintConfig(config);
  const fuzz::MemoryFile file({reinterpret_cast<const uint8_t*>(printed.data()), printed.size()});
  const auto again = LoadConfig({.file = file.path(), .environment = {}, .flags = {}});
  KVT_CHECK(again.ok());
  KVT_CHECK(PrintConfig(*again) == printed);
}

void Run(fuzz::FuzzInput input) {
  const fuzz::MemoryFile file(input.Piece());
  ConfigSources sources{.file = file.path(), .environment = {}, .flags = {}};
  while (!input.empty()) AddSetting(fuzz::TextOf(input.Piece()), &sources);
  const auto config = LoadConfig(sources);
  if (config.ok()) CheckPrintsAsItself(*config);
}

}  // namespace
}  // namespace kvtier

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes) {
  kvtier::Run({data, size_bytes});
  return 0;
}
