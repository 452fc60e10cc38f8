// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/tensors/write_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "absl/strings/str_format.h"
#include "client/ctl/tensors/tensor_cases.h"

namespace kvtier::ctl {
namespace {

namespace fs = std::filesystem;

absl::Status WriteText(const std::string& path, std::string_view text) {
  const std::span<const std::byte> parts[] = {std::as_bytes(std::span(text.substr(0, 1))),
                                              std::as_bytes(std::span(text.substr(1)))};
  return WriteFile(path, parts);
}

class WriteFileTest : public testing::Test {
 protected:
  // Nothing but the files that the test made.
  size_t FileCount() const {
    const fs::directory_iterator folder{fs::path(folder_.File(""))};
    return static_cast<size_t>(std::distance(begin(folder), end(folder)));
  }

  TestFolder folder_;
};

TEST_F(WriteFileTest, ReplacesAFileWithoutARest) {
  folder_.Write("a", "an old and longer text");
  ASSERT_TRUE(WriteText(folder_.File("a"), "new").ok());
  EXPECT_EQ(folder_.Read("a"), "new");
  EXPECT_EQ(FileCount(), 1U);
}

TEST_F(WriteFileTest, FollowsALinkToItsFile) {
  folder_.Write("target", "old");
  fs::create_symlink("target", folder_.File("link"));
  ASSERT_TRUE(WriteText(folder_.File("link"), "new").ok());
  EXPECT_TRUE(fs::is_symlink(folder_.File("link")));
  EXPECT_EQ(folder_.Read("target"), "new");
}

TEST_F(WriteFileTest, WritesIntoAPipeInsteadOfReplacingIt) {
  const std::string path = folder_.File("pipe");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const int reader = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  ASSERT_TRUE(WriteText(path, "new").ok());
  char text[8] = {};
  EXPECT_EQ(read(reader, text, sizeof(text)), 3);
  EXPECT_EQ(std::string_view(text), "new");
  close(reader);
  EXPECT_TRUE(fs::is_fifo(path));
}

TEST_F(WriteFileTest, LeavesWhatLiesUnderItsTemporaryName) {
  folder_.Write("victim", "theirs");
  const std::string staging = absl::StrFormat("%s.%d.0.tmp", folder_.File("a"), getpid());
  fs::create_symlink("victim", staging);
  ASSERT_TRUE(WriteText(folder_.File("a"), "new").ok());
  EXPECT_EQ(folder_.Read("victim"), "theirs");
  EXPECT_EQ(folder_.Read("a"), "new");
  EXPECT_EQ(FileCount(), 3U);
}

TEST_F(WriteFileTest, AnErrorLeavesTheFolderAsItWas) {
  EXPECT_FALSE(WriteText(folder_.File(""), "new").ok());
  EXPECT_FALSE(WriteText(folder_.File("none/a"), "new").ok());
  EXPECT_EQ(WriteText("/dev/full", "new").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  EXPECT_EQ(FileCount(), 0U);
}

}  // namespace
}  // namespace kvtier::ctl
