// SPDX-License-Identifier: Apache-2.0
//
// Runs one fuzz target without libFuzzer: every file of its corpus, then mutations of them. So
// every preset and every compiler runs the targets as an ordinary test.
//
//   NAME_fuzz CORPUS_FOLDER   KVTIER_FUZZ_ROUNDS mutations (500), from KVTIER_FUZZ_SEED (random)
//   NAME_fuzz FILE...         these inputs only
//
// The input that is running lies in $TMPDIR/NAME_fuzz.input, and stays there if it ends the
// process.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "proto/base/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes);

namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<uint8_t>;

constexpr size_t kInputBytesMax = 64 << 10;

uint64_t NumberFrom(const char* variable, uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

Bytes ReadWhole(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// In order of their names, so that a seed says the same on every machine.
std::vector<Bytes> ReadCorpus(const fs::path& folder) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> corpus;
  for (const fs::path& path : paths) corpus.push_back(ReadWhole(path));
  return corpus;
}

// The running input as a file: in shared memory, so it is there however the process ends.
class InputFile {
 public:
  explicit InputFile(const char* program)
      : path_(fs::temp_directory_path() / (fs::path(program).filename().string() + ".input")),
        fd_(open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)) {
    KVT_CHECK(fd_ >= 0 && ftruncate(fd_, kInputBytesMax) == 0);
    void* const base = mmap(nullptr, kInputBytesMax, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    KVT_CHECK(base != MAP_FAILED);
    bytes_ = static_cast<uint8_t*>(base);
  }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  ~InputFile() {
    munmap(bytes_, kInputBytesMax);
    close(fd_);
    unlink(path_.c_str());
  }

  void Run(const Bytes& input) {
    const size_t size_bytes = std::min(input.size(), kInputBytesMax);
    KVT_CHECK(ftruncate(fd_, static_cast<off_t>(size_bytes)) == 0);
    if (size_bytes > 0) std::memcpy(bytes_, input.data(), size_bytes);
    // From the heap, whose end a sanitizer watches.
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }

 private:
  const fs::path path_;
  const int fd_;
  uint8_t* bytes_ = nullptr;
};

class Mutator {
 public:
  Mutator(const std::vector<Bytes>& corpus, uint64_t seed) : corpus_(corpus), random_(seed) {}

  Bytes Next() {
    Bytes bytes = Any();
    for (uint64_t i = 0; i <= Below(6); ++i) Change(&bytes);
    if (bytes.size() > kInputBytesMax) bytes.resize(kInputBytesMax);
    return bytes;
  }

 private:
  uint64_t Below(uint64_t bound) { return random_() % bound; }
  const Bytes& Any() { return corpus_[Below(corpus_.size())]; }

  void Change(Bytes* bytes) {
    const size_t at = Below(bytes->size() + 1);
    const auto place = bytes->begin() + static_cast<std::ptrdiff_t>(at);
    const size_t left = bytes->size() - at;
    switch (Below(6)) {
      case 0:
        if (left > 0) (*bytes)[at] ^= static_cast<uint8_t>(1U << Below(8));
        break;
      case 1:
        if (left > 0) (*bytes)[at] = Interesting();
        break;
      case 2:
        bytes->insert(place, 1 + Below(8), Interesting());
        break;
      case 3:
        bytes->erase(place,
                     place + static_cast<std::ptrdiff_t>(Below(std::min<size_t>(left, 64) + 1)));
        break;
      case 4: {
        const Bytes& other = Any();
        const size_t from = Below(other.size() + 1);
        const size_t count = Below(std::min<size_t>(other.size() - from, 256) + 1);
        const Bytes part(other.begin() + static_cast<std::ptrdiff_t>(from),
                         other.begin() + static_cast<std::ptrdiff_t>(from + count));
        bytes->insert(place, part.begin(), part.end());
        break;
      }
      default:
        bytes->resize(at);
        break;
    }
  }

  uint8_t Interesting() {
    constexpr uint8_t kBytes[] = {0, 1, 4, 0x10, 0x20, 0x7F, 0x80, 0xFE, 0xFF};
    const uint64_t pick = Below(2 * std::size(kBytes));
    return pick < std::size(kBytes) ? kBytes[pick] : static_cast<uint8_t>(random_());
  }

  const std::vector<Bytes>& corpus_;
  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  InputFile running(argv[0]);
  if (argc == 2 && fs::is_directory(argv[1])) {
    const std::vector<Bytes> corpus = ReadCorpus(argv[1]);
    KVT_CHECK(!corpus.empty());
    const uint64_t seed = NumberFrom("KVTIER_FUZZ_SEED", std::random_device()());
    const uint64_t rounds = NumberFrom("KVTIER_FUZZ_ROUNDS", 500);
    std::printf("%zu inputs, then %llu mutations, KVTIER_FUZZ_SEED=%llu\n", corpus.size(),
                static_cast<unsigned long long>(rounds), static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    for (const Bytes& input : corpus) running.Run(input);
    Mutator mutator(corpus, seed);
    for (uint64_t round = 0; round < rounds; ++round) running.Run(mutator.Next());
    return 0;
  }
  for (int i = 1; i < argc; ++i) running.Run(ReadWhole(argv[i]));
  return 0;
}
