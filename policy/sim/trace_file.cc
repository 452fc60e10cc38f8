// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/trace_file.h"

#include <lzma.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/base/status_util.h"

namespace kvtier::sim {
namespace {

using Json = nlohmann::json;

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  const std::unique_ptr<std::FILE, FileCloser> file(std::fopen(path.c_str(), "rb"));
  if (file == nullptr) return ErrnoStatus(errno, "open " + path);
  std::string data;
  std::vector<char> chunk(1 << 20);
  while (const size_t count = std::fread(chunk.data(), 1, chunk.size(), file.get())) {
    data.append(chunk.data(), count);
  }
  if (std::ferror(file.get()) != 0) return ErrnoStatus(errno, "read " + path);
  return data;
}

absl::StatusOr<std::string> Decompress(const std::string& packed, const std::string& path) {
  constexpr uint64_t kMemoryLimitBytes = 1ULL << 30;
  lzma_stream stream = LZMA_STREAM_INIT;
  if (lzma_stream_decoder(&stream, kMemoryLimitBytes, LZMA_CONCATENATED) != LZMA_OK) {
    return Exhausted("%s: no memory for the xz decoder", path);
  }
  const std::unique_ptr<lzma_stream, void (*)(lzma_stream*)> ender(&stream, lzma_end);
  stream.next_in = reinterpret_cast<const uint8_t*>(packed.data());
  stream.avail_in = packed.size();
  std::string text;
  std::vector<uint8_t> chunk(1 << 20);
  lzma_ret result = LZMA_OK;
  while (result == LZMA_OK) {
    stream.next_out = chunk.data();
    stream.avail_out = chunk.size();
    result = lzma_code(&stream, LZMA_FINISH);
    text.append(reinterpret_cast<const char*>(chunk.data()), chunk.size() - stream.avail_out);
  }
  if (result != LZMA_STREAM_END) {
    return DataLoss("%s: not a complete xz file (lzma error %d)", path, static_cast<int>(result));
  }
  return text;
}

// Milliseconds of 30,000 years: sums of numbers up to this do not overflow.
constexpr double kNumberMax = 1e15;

// A field that is a number in 0..kNumberMax; empty when it is missing or something else.
std::optional<uint64_t> NumberOf(const Json& line, const char* field) {
  const auto place = line.find(field);
  if (place == line.end() || !place->is_number()) return std::nullopt;
  const auto number = place->get<double>();
  if (!(number >= 0 && number <= kNumberMax)) return std::nullopt;
  return static_cast<uint64_t>(number);
}

policy::NextStep NextStepOf(const Json& line) {
  const auto place = line.find("stop");
  if (place == line.end()) return policy::NextStep::kUnknown;
  if (*place == "tool") return policy::NextStep::kTool;
  return *place == "user" ? policy::NextStep::kUser : policy::NextStep::kUnknown;
}

absl::Status AddLine(std::string_view text, std::string_view where,
                     absl::flat_hash_map<std::string, uint32_t>* sessions, TraceBuilder* builder) {
  const Json line = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!line.is_object()) return Invalid("%s: not a JSON object", where);
  const std::optional<uint64_t> timestamp = NumberOf(line, "timestamp");
  if (!timestamp) return Invalid("%s: timestamp is not a number in 0..1e15", where);
  const auto ids = line.find("hash_ids");
  if (ids == line.end() || !ids->is_array()) return Invalid("%s: hash_ids is no list", where);
  std::vector<uint64_t> hash_ids;
  hash_ids.reserve(ids->size());
  for (const Json& id : *ids) {
    if (!id.is_number_unsigned()) return Invalid("%s: hash_ids has no number >= 0", where);
    hash_ids.push_back(id.get<uint64_t>());
  }
  uint32_t context_idx = kNoContext;
  if (const auto session = line.find("session"); session != line.end() && !session->is_null()) {
    if (!session->is_number() && !session->is_string()) {
      return Invalid("%s: session is no number and no string", where);
    }
    const auto [place, inserted] = sessions->try_emplace(session->dump(), kNoContext);
    if (inserted) place->second = builder->AddContext();
    context_idx = place->second;
  } else {
    context_idx = builder->AddContext();
  }
  builder->AddRequest(context_idx, *timestamp, NumberOf(line, "api").value_or(0),
                      NumberOf(line, "input_length").value_or(0), hash_ids, NextStepOf(line));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Trace> ParseTrace(std::string_view text, std::string_view name,
                                 size_t request_count_max) {
  TraceBuilder builder;
  absl::flat_hash_map<std::string, uint32_t> sessions;
  size_t line_number = 0;
  size_t request_count = 0;
  while (!text.empty() && (request_count_max == 0 || request_count < request_count_max)) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = absl::StrFormat("%s:%d", ToAbsl(name), line_number);
    KVT_RETURN_IF_ERROR(AddLine(line, where, &sessions, &builder));
    ++request_count;
  }
  return std::move(builder).Build();
}

absl::StatusOr<Trace> ReadTraceFile(const std::string& path, size_t request_count_max) {
  KVT_ASSIGN_OR_RETURN(std::string data, ReadWhole(path));
  if (path.ends_with(".xz")) {
    KVT_ASSIGN_OR_RETURN(data, Decompress(data, path));
  }
  return ParseTrace(data, path, request_count_max);
}

}  // namespace kvtier::sim
