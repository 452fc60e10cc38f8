// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/tensors/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/str_join.h"
#include "client/ctl/tensors/write_file.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kJsonBytesMax = 100'000'000;  // That of the reference implementation.

struct Entry {
  std::string type_name;
  std::vector<uint64_t> shape;
  std::vector<uint64_t> offsets;  // Begin and end in the data.
};
using Entries = std::map<std::string, Entry, std::less<>>;
using Metadata = std::map<std::string, std::string, std::less<>>;

// Takes the header event by event: nothing is built but what the format has, however large or deep
// the text. A handler that returns false ends the parse.
class HeaderHandler final : public nlohmann::json_sax<Json> {
 public:
  HeaderHandler(Entries* entries, Metadata* metadata) : entries_(entries), metadata_(metadata) {}

  // Why the parse ended.
  const std::string& problem() const { return problem_; }

  bool start_object(std::size_t) override {
    if (state_ == State::kStart) return Go(State::kRoot);
    if (state_ == State::kRoot && key_ == kMetadataKey) return Go(State::kMetadata);
    if (state_ == State::kRoot) return Go(State::kTensor);
    return Unexpected("object");
  }
  bool key(string_t& text) override {
    key_ = text;
    if (state_ == State::kRoot) return StartMember();
    if (state_ == State::kTensor && !fields_.insert(text).second) return Fail("a field twice");
    return true;
  }
  bool end_object() override {
    if (state_ == State::kMetadata) return Go(State::kRoot);
    if (state_ == State::kRoot) return Go(State::kEnd);
    if (fields_.size() != 3) return Fail("not dtype, shape and data_offsets");
    return Go(State::kRoot);
  }
  bool start_array(std::size_t) override {
    if (state_ == State::kTensor && key_ == "shape") return Go(State::kShape);
    if (state_ == State::kTensor && key_ == "data_offsets") return Go(State::kOffsets);
    return Unexpected("array");
  }
  bool end_array() override { return Go(State::kTensor); }
  bool number_unsigned(number_unsigned_t value) override {
    if (state_ != State::kShape && state_ != State::kOffsets) return Unexpected("number");
    std::vector<uint64_t>* list = state_ == State::kShape ? &entry_->shape : &entry_->offsets;
    if (list->size() == kTensorRankMax) return Fail("too many dimensions");
    list->push_back(value);
    return true;
  }
  bool string(string_t& text) override {
    if (state_ == State::kMetadata) {
      return metadata_->emplace(key_, text).second || Fail("a name twice");
    }
    if (state_ != State::kTensor || key_ != "dtype") return Unexpected("string");
    entry_->type_name = text;
    return true;
  }
  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("boolean"); }
  bool number_integer(number_integer_t) override { return Unexpected("negative number"); }
  bool number_float(number_float_t, const string_t&) override { return Unexpected("fraction"); }
  bool binary(binary_t&) override { return Unexpected("binary"); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    problem_ = absl::StrFormat("no JSON at byte %d of the header", position);
    return false;
  }

 private:
  enum class State : uint8_t { kStart, kRoot, kMetadata, kTensor, kShape, kOffsets, kEnd };
  static constexpr std::string_view kMetadataKey = "__metadata__";

  bool Go(State state) {
    state_ = state;
    return true;
  }
  bool Fail(std::string_view what) {
    problem_ = tensor_.empty() ? std::string(what) : "tensor " + tensor_ + ": " + std::string(what);
    return false;
  }
  bool Unexpected(std::string_view what) {
    return Fail(absl::StrFormat("an unexpected %s in the header", what));
  }
  bool StartMember() {
    fields_.clear();
    tensor_ = ShownName(key_);
    if (key_ == kMetadataKey) return !std::exchange(has_metadata_, true) || Fail("twice");
    const auto [position, is_new] = entries_->try_emplace(key_);
    entry_ = &position->second;
    return is_new || Fail("its name is there twice");
  }

  Entries* const entries_;
  Metadata* const metadata_;
  State state_ = State::kStart;
  std::string key_;
  std::string tensor_;            // The member of the root that is being read, for messages.
  Entry* entry_ = nullptr;        // Of that member.
  std::set<std::string> fields_;  // Seen of that member.
  bool has_metadata_ = false;
  std::string problem_;
};

TensorType TypeOfName(std::string_view name) {
  for (size_t i = 0; i < static_cast<size_t>(TensorType::kOther); ++i) {
    if (TensorTypeName(static_cast<TensorType>(i)) == name) return static_cast<TensorType>(i);
  }
  return TensorType::kOther;
}

// The tensor of one entry, or DATA_LOSS.
absl::StatusOr<Tensor> TensorOf(const std::string& name, Entry entry,
                                std::span<const std::byte> data,
                                const std::shared_ptr<const MappedFile>& file) {
  Tensor tensor{.name = name, .type = TypeOfName(entry.type_name), .file = file};
  tensor.shape = std::move(entry.shape);
  if (entry.offsets.size() != 2 || entry.offsets[0] > entry.offsets[1] ||
      entry.offsets[1] > data.size()) {
    return DataLoss("%s: its data_offsets are not a range of the %d bytes of data", tensor.Where(),
                    data.size());
  }
  const uint64_t size = entry.offsets[1] - entry.offsets[0];
  tensor.bytes = data.subspan(entry.offsets[0], size);
  const auto count = ElementCountOf(tensor.shape);
  const uint32_t element_bytes = TensorElementBytes(tensor.type);
  if (!count.has_value() ||
      (element_bytes != 0 && (size % element_bytes != 0 || size / element_bytes != *count))) {
    return DataLoss("%s: shape [%s] of type %s, but %d bytes", tensor.Where(),
                    absl::StrJoin(tensor.shape, ", "), ShownName(entry.type_name), size);
  }
  return tensor;
}

// DATA_LOSS unless the tensors cover `data` in some order, each byte once.
absl::Status CheckCover(const std::map<std::string, Tensor, std::less<>>& tensors,
                        std::span<const std::byte> data, const std::string& path) {
  std::vector<const Tensor*> sorted;
  sorted.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) sorted.push_back(&tensor);
  std::sort(sorted.begin(), sorted.end(), [](const Tensor* a, const Tensor* b) {
    return std::pair(a->bytes.data(), a->bytes.size()) <
           std::pair(b->bytes.data(), b->bytes.size());
  });
  const std::byte* next = data.data();
  for (const Tensor* tensor : sorted) {
    if (tensor->bytes.data() != next) {
      return DataLoss("%s: %s before it", tensor->Where(),
                      tensor->bytes.data() > next ? "a gap" : "it overlaps the one");
    }
    next += tensor->bytes.size();
  }
  const auto* end = data.data() + data.size();
  if (next != end) return DataLoss("%s: %d bytes after the last tensor", path, end - next);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  SafetensorsFile result;
  KVT_ASSIGN_OR_RETURN(result.file_, MappedFile::Open(path));
  const std::span<const std::byte> bytes = result.file_->bytes();
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) return DataLoss("%s: not a safetensors file", path);
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  if (header_bytes > kJsonBytesMax || header_bytes > bytes.size() - sizeof(header_bytes)) {
    return DataLoss("%s: not a safetensors file, or cut short: a header of %d bytes in %d", path,
                    header_bytes, bytes.size());
  }
  const char* header = reinterpret_cast<const char*>(bytes.data()) + sizeof(header_bytes);
  Entries entries;
  HeaderHandler handler(&entries, &result.metadata_);
  if (!Json::sax_parse(header, header + header_bytes, &handler)) {
    return DataLoss("%s: %s", path, handler.problem());
  }
  const std::span<const std::byte> data = bytes.subspan(sizeof(header_bytes) + header_bytes);
  for (auto& [name, entry] : entries) {
    KVT_ASSIGN_OR_RETURN(Tensor tensor, TensorOf(name, std::move(entry), data, result.file_));
    result.tensors_.emplace(name, std::move(tensor));
  }
  KVT_RETURN_IF_ERROR(CheckCover(result.tensors_, data, path));
  return result;
}

absl::StatusOr<Tensor> SafetensorsFile::Find(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    return NotFound("%s: no tensor %s", path(), ShownName(name));
  }
  return found->second;
}

absl::Status WriteSafetensors(const std::string& path, std::span<const Tensor> tensors) {
  Json header = Json::object();
  uint64_t offset = 0;
  for (const Tensor& tensor : tensors) {
    const auto count = ElementCountOf(tensor.shape);
    const uint64_t element_bytes = TensorElementBytes(tensor.type);
    if (element_bytes == 0 || !count.has_value() || tensor.bytes.size() % element_bytes != 0 ||
        tensor.bytes.size() / element_bytes != *count || header.contains(tensor.name)) {
      return Invalid("%s: tensor %s cannot be written", path, ShownName(tensor.name));
    }
    header[tensor.name] = {{"dtype", std::string(TensorTypeName(tensor.type))},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t header_bytes = text.size();
  std::vector<std::span<const std::byte>> parts = {std::as_bytes(std::span(&header_bytes, 1)),
                                                   std::as_bytes(std::span(text))};
  for (const Tensor& tensor : tensors) parts.push_back(tensor.bytes);
  return WriteFile(path, parts);
}

}  // namespace kvtier::ctl
