// SPDX-License-Identifier: Apache-2.0
//
// What the tests of the readers share: a folder of files, and files damaged in every way.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <string_view>

namespace kvtier::ctl {

// A folder of the test's own that ends with it.
class TestFolder {
 public:
  TestFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "kvtier-ctl-XXXXXX").string();
    path_ = mkdtemp(name.data()) == nullptr ? "" : name;
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  ~TestFolder() { std::filesystem::remove_all(path_); }

  std::string File(std::string_view name) const { return path_ + "/" + std::string(name); }
  // Writes a file and returns its path.
  std::string Write(std::string_view name, std::string_view bytes) const {
    std::ofstream(File(name), std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return File(name);
  }
  std::string Read(std::string_view name) const {
    std::ostringstream text;
    text << std::ifstream(File(name), std::ios::binary).rdbuf();
    return text.str();
  }

 private:
  std::string path_;
};

// Calls `read` with the path of every shorter beginning of `bytes`; none may be accepted.
inline void ExpectEveryTruncationRefused(const TestFolder& folder, std::string_view bytes,
                                         const std::function<bool(const std::string&)>& read) {
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(read(folder.Write("truncated", bytes.substr(0, size)))) << size << " bytes";
  }
}

// Calls `read` with `count` copies of `bytes` of which one to four bytes are others; whatever it
// answers, it must come back, and sanitizers must have nothing to say.
inline void ReadDamaged(const TestFolder& folder, std::string_view bytes, uint32_t seed, int count,
                        const std::function<void(const std::string&)>& read) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int i = 0; i < count; ++i) {
    std::string damaged(bytes);
    for (uint32_t flips = 1 + random() % 4; flips > 0; --flips) {
      // Half of them among the first bytes, where lengths are.
      const size_t range = random() % 2 == 0 ? std::min<size_t>(16, bytes.size()) : bytes.size();
      damaged[random() % range] = static_cast<char>(random());
    }
    read(folder.Write("damaged", damaged));
  }
}

}  // namespace kvtier::ctl
