// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/scales/strict_json.h"

#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "client/ctl/tensors/mapped_file.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using Json = nlohmann::json;

constexpr int kDepthMax = 32;

// The parser's callback: what it returns false for is dropped, which keeps memory small until the
// end of the text; then the problem decides.
class Watcher {
 public:
  bool operator()(int depth, Json::parse_event_t event, const Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
      case Json::parse_event_t::array_start:
        if (depth >= kDepthMax) return Fail("too many levels");
        names_.emplace_back();
        break;
      case Json::parse_event_t::object_end:
      case Json::parse_event_t::array_end:
        if (!names_.empty()) names_.pop_back();
        break;
      case Json::parse_event_t::key:
        if (!names_.empty() && !names_.back().insert(parsed.get<std::string>()).second) {
          return Fail("a name is there twice in one object");
        }
        break;
      case Json::parse_event_t::value:
        break;
    }
    return problem_.empty();
  }
  const std::string& problem() const { return problem_; }

 private:
  bool Fail(const char* problem) {
    if (problem_.empty()) problem_ = problem;
    return false;
  }

  std::vector<std::set<std::string>> names_;  // Of the objects around, the innermost last.
  std::string problem_;
};

}  // namespace

absl::StatusOr<Json> ReadStrictJson(const std::string& path, uint64_t bytes_max) {
  KVT_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(path));
  const auto bytes = file->bytes();
  if (bytes.size() > bytes_max) {
    return DataLoss("%s: %d bytes, more than %d", path, bytes.size(), bytes_max);
  }
  const char* begin = reinterpret_cast<const char*>(bytes.data());
  Watcher watcher;
  Json json = Json::parse(begin, begin + bytes.size(), std::ref(watcher), false);
  if (!watcher.problem().empty()) return DataLoss("%s: %s", path, watcher.problem());
  if (json.is_discarded()) return DataLoss("%s: not JSON", path);
  return json;
}

}  // namespace kvtier::ctl
