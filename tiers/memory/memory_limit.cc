// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/memory_limit.h"

#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

#include "proto/base/status_util.h"

namespace kvtier {
namespace {

// The number a limit file holds; nothing when it is absent or says "max".
std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  if (!(file >> text)) return std::nullopt;
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Lowers `limit` to the least `file_name` on the way from `path` up to `root`. A container often
// sees its own group as the root, while /proc/self/cgroup names the host's path: then only the
// root has the file.
void ApplyGroup(const std::string& root, std::string path, const std::string& file_name,
                MemoryLimit& limit) {
  while (true) {
    const std::string file = root + (path == "/" ? "" : path) + "/" + file_name;
    if (const auto bytes = ReadNumber(file); bytes && *bytes < limit.bytes) {
      limit = {.bytes = *bytes, .source = file};
    }
    if (path.empty() || path == "/") return;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

}  // namespace

absl::StatusOr<MemoryLimit> ReadMemoryLimit(const std::string& proc_root,
                                            const std::string& cgroup_root) {
  const std::string meminfo_path = proc_root + "/meminfo";
  std::ifstream meminfo(meminfo_path);
  std::string word;
  uint64_t total_kib = 0;
  if (!(meminfo >> word >> total_kib) || word != "MemTotal:" || total_kib == 0) {
    return Unavailable("%s: no MemTotal", meminfo_path);
  }
  MemoryLimit limit{.bytes = total_kib * 1024, .source = "memory of the machine"};
  // Lines "hierarchy:controllers:path"; v2 has no controllers.
  std::ifstream groups(proc_root + "/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      ApplyGroup(cgroup_root, path, "memory.max", limit);
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      ApplyGroup(cgroup_root + "/memory", path, "memory.limit_in_bytes", limit);
    }
  }
  return limit;
}

}  // namespace kvtier
