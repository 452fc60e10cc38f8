// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/scales/scale_set_file.h"

#include <openssl/evp.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "absl/strings/escaping.h"
#include "client/ctl/scales/strict_json.h"
#include "client/ctl/tensors/mapped_file.h"
#include "client/ctl/tensors/tensor.h"
#include "client/ctl/tensors/write_file.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using Json = nlohmann::json;
using kernels::SideFormat;

constexpr std::string_view kFormat = "kvtier.scale_set";
constexpr uint64_t kVersion = 1;
// A set of 128 layers, 16 kv heads and 256 dims with both vectors has 25 MB.
constexpr uint64_t kFileBytesMax = uint64_t{64} << 20;

static_assert(std::endian::native == std::endian::little);

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    KVT_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }
  void Add(std::span<const std::byte> bytes) {
    KVT_CHECK(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1);
  }
  void Add(std::string_view text) { Add(std::as_bytes(std::span(text))); }
  void AddNumber(uint32_t number) { Add(std::as_bytes(std::span(&number, 1))); }
  void AddFloats(const std::vector<float>& floats) { Add(std::as_bytes(std::span(floats))); }
  std::string Hex() {
    unsigned char digest[32];
    KVT_CHECK(EVP_DigestFinal_ex(context_.get(), digest, nullptr) == 1);
    return absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(digest), sizeof(digest)));
  }

 private:
  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

// Shortest decimal text that reads back as the same double, and so as the same float.
void AppendNumber(float value, std::string* out) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), static_cast<double>(value)).ptr;
  out->append(text, end);
}

std::string Quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', true, Json::error_handler_t::replace);
}

void AppendVector(const char* name, std::span<const float> values, std::string* out) {
  *out += absl::StrFormat(", \"%s\": [", name);
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) *out += ", ";
    AppendNumber(values[i], out);
  }
  *out += ']';
}

std::string ProvenanceText(const Provenance& provenance) {
  std::string out = absl::StrFormat(
      "  \"provenance\": {\n    \"kind\": %s,\n    \"tool\": %s,\n    \"created\": %s,\n"
      "    \"model\": %s,\n    \"convention\": %s,\n    \"token_count\": %d,\n"
      "    \"nonfinite_count\": %d,\n    \"smooth_alpha\": %s,\n    \"files\": [",
      Quoted(provenance.kind), Quoted(provenance.tool), Quoted(provenance.created),
      Quoted(provenance.model), Quoted(provenance.convention), provenance.token_count,
      provenance.nonfinite_count, Json(provenance.smooth_alpha).dump());
  for (size_t i = 0; i < provenance.files.size(); ++i) {
    const Provenance::File& file = provenance.files[i];
    out += absl::StrFormat("%s\n      {\"name\": %s, \"bytes\": %d, \"sha256\": %s}",
                           i == 0 ? "" : ",", Quoted(file.name), file.bytes, Quoted(file.sha256));
  }
  return out + (provenance.files.empty() ? "]\n  }\n" : "\n    ]\n  }\n");
}

// Takes the members of one JSON object by name and type, and remembers the first problem. Names
// that nobody took are a problem too, so that a misspelt or newer field is not ignored.
class ObjectReader {
 public:
  ObjectReader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) Fail("is not an object");
  }

  const absl::Status& status() const { return status_; }

  const Json& Member(const char* name) {
    static const Json kNull;
    if (!status_.ok() || !object_.contains(name)) {
      Fail(absl::StrFormat("has no %s", name));
      return kNull;
    }
    ++taken_;
    return object_.at(name);
  }
  bool Has(const char* name) const { return status_.ok() && object_.contains(name); }

  std::string String(const char* name) {
    const Json& member = Member(name);
    if (member.is_string()) return member.get<std::string>();
    Fail(absl::StrFormat("%s is not a string", name));
    return "";
  }
  uint64_t Number(const char* name, uint64_t max = std::numeric_limits<uint64_t>::max()) {
    const Json& member = Member(name);
    if (member.is_number_unsigned() && member.get<uint64_t>() <= max) return member.get<uint64_t>();
    Fail(absl::StrFormat("%s is not a whole number up to %d", name, max));
    return 0;
  }
  float Float(const char* name) { return ToFloat(Member(name), name); }
  // Appends `count` floats.
  void Floats(const char* name, size_t count, std::vector<float>* out) {
    const Json& member = Member(name);
    if (!member.is_array() || member.size() != count) {
      Fail(absl::StrFormat("%s is not an array of %d numbers", name, count));
      return;
    }
    for (const Json& value : member) out->push_back(ToFloat(value, name));
  }
  const Json& Array(const char* name, size_t count) {
    const Json& member = Member(name);
    if (!member.is_array() || member.size() != count) {
      Fail(absl::StrFormat("%s is not an array of %d", name, count));
    }
    return member;
  }
  // DATA_LOSS if a member was left.
  absl::Status Finish() {
    if (status_.ok() && taken_ != object_.size())
      Fail("has a field that this version does not know");
    return status_;
  }
  void Fail(std::string_view problem) {
    if (status_.ok()) status_ = DataLoss("%s %s", where_, problem);
  }

 private:
  float ToFloat(const Json& value, const char* name) {
    if (value.is_number()) {
      const auto number = value.get<double>();
      const auto rounded = static_cast<float>(number);
      // Anything else was not written by FormatScaleSet, and its identity would be in doubt.
      if (static_cast<double>(rounded) == number) return rounded;
    }
    Fail(absl::StrFormat("%s has a value that is not an FP32 number", name));
    return 0.0F;
  }

  const Json& object_;
  const std::string where_;
  size_t taken_ = 0;
  absl::Status status_;
};

template <typename Enum>
Enum Choose(ObjectReader* reader, const char* name,
            std::initializer_list<std::pair<std::string_view, Enum>> choices) {
  const std::string text = reader->String(name);
  for (const auto& [choice, value] : choices) {
    if (choice == text) return value;
  }
  reader->Fail(absl::StrFormat("has an unknown %s", name));
  return choices.begin()->second;
}

SideFormat ReadSideFormat(ObjectReader* reader, const char* name) {
  return Choose<SideFormat>(
      reader, name,
      {{"nvfp4", SideFormat::kNvfp4}, {"fp8", SideFormat::kFp8}, {"bf16", SideFormat::kBf16}});
}

absl::Status ReadHead(const Json& json, const std::string& where, ScaleSetData* scales) {
  ObjectReader reader(json, where);
  scales->g_k.push_back(reader.Float("g_k"));
  scales->g_v.push_back(reader.Float("g_v"));
  if (reader.Has("k_mean")) reader.Floats("k_mean", scales->head_dim, &scales->k_mean);
  if (reader.Has("k_smooth")) reader.Floats("k_smooth", scales->head_dim, &scales->k_smooth);
  return reader.Finish();
}

absl::Status ReadLayer(const Json& json, const std::string& where, ScaleSetData* scales) {
  ObjectReader reader(json, where);
  const kernels::LayerFormat format{.k = ReadSideFormat(&reader, "k"),
                                    .v = ReadSideFormat(&reader, "v")};
  scales->layer_formats.push_back(format);
  const Json& heads = reader.Array("heads", scales->kv_head_count);
  KVT_RETURN_IF_ERROR(reader.Finish());
  for (size_t h = 0; h < heads.size(); ++h) {
    KVT_RETURN_IF_ERROR(ReadHead(heads[h], absl::StrFormat("%s kv head %d", where, h), scales));
  }
  return absl::OkStatus();
}

absl::Status ReadProvenance(const Json& json, const std::string& where, Provenance* out) {
  ObjectReader reader(json, where);
  out->kind = reader.String("kind");
  out->tool = reader.String("tool");
  out->created = reader.String("created");
  out->model = reader.String("model");
  out->convention = reader.String("convention");
  out->token_count = reader.Number("token_count");
  out->nonfinite_count = reader.Number("nonfinite_count");
  const Json& alpha = reader.Member("smooth_alpha");
  if (alpha.is_number()) out->smooth_alpha = alpha.get<double>();
  if (!alpha.is_number()) reader.Fail("smooth_alpha is not a number");
  const Json& files = reader.Member("files");
  if (!files.is_array()) reader.Fail("files is not an array");
  KVT_RETURN_IF_ERROR(reader.Finish());
  for (const Json& file : files) {
    ObjectReader file_reader(file, where + " files");
    out->files.push_back({.name = file_reader.String("name"),
                          .bytes = file_reader.Number("bytes"),
                          .sha256 = file_reader.String("sha256")});
    KVT_RETURN_IF_ERROR(file_reader.Finish());
  }
  return absl::OkStatus();
}

}  // namespace

kernels::ScaleSet ScaleSetData::View() const {
  return {.layer_count = layer_count,
          .kv_head_count = kv_head_count,
          .head_dim = head_dim,
          .search = search,
          .g_k = g_k,
          .g_v = g_v,
          .k_mean = k_mean,
          .k_smooth = k_smooth,
          .layer_formats = layer_formats};
}

absl::Status CheckChannelCount(uint64_t layer_count, uint64_t kv_head_count, uint64_t head_dim) {
  const uint64_t counts[] = {layer_count, kv_head_count,
                             std::max<uint64_t>(head_dim, kernels::kHeadDimMin)};
  if (ElementCountOf(counts).value_or(kChannelCountMax + 1) <= kChannelCountMax) {
    return absl::OkStatus();
  }
  return Invalid("%d layers of %d kv heads of head dim %d: more than %d channels", layer_count,
                 kv_head_count, head_dim, kChannelCountMax);
}

absl::StatusOr<Provenance::File> DescribeFile(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(path));
  Provenance::File description{.name = std::filesystem::path(path).filename().string(),
                               .bytes = file->bytes().size()};
  if (description.bytes <= kHashedBytesMax) {
    Sha256 hash;
    hash.Add(file->bytes());
    description.sha256 = hash.Hex();
  }
  return description;
}

std::string ScaleSetId(const ScaleSetData& scales) {
  const kernels::ScaleSet set = scales.View();
  Sha256 hash;
  hash.Add("kvtier.scale_set 1\n");
  hash.AddNumber(scales.layer_count);
  hash.AddNumber(scales.kv_head_count);
  hash.AddNumber(scales.head_dim);
  hash.AddNumber(static_cast<uint32_t>(scales.search));
  for (uint32_t layer = 0; layer < scales.layer_count; ++layer) {
    const auto format = kernels::LayerFormatOf(set, layer);
    hash.AddNumber(static_cast<uint32_t>(format.k) << 8 | static_cast<uint32_t>(format.v));
  }
  hash.AddNumber((scales.k_mean.empty() ? 0U : 1U) | (scales.k_smooth.empty() ? 0U : 2U));
  hash.AddFloats(scales.g_k);
  hash.AddFloats(scales.g_v);
  hash.AddFloats(scales.k_mean);
  hash.AddFloats(scales.k_smooth);
  return "ss1-" + hash.Hex();
}

std::string_view SearchName(kernels::ScaleSearch search) {
  return search == kernels::ScaleSearch::kAmax6 ? "amax6" : "4over6";
}

std::string_view SideFormatName(SideFormat format) {
  switch (format) {
    case SideFormat::kNvfp4:
      return "nvfp4";
    case SideFormat::kFp8:
      return "fp8";
    case SideFormat::kBf16:
      return "bf16";
  }
  return "";
}

std::string FormatScaleSet(const ScaleSetFile& file) {
  const ScaleSetData& scales = file.scales;
  const kernels::ScaleSet set = scales.View();
  std::string out = absl::StrFormat(
      "{\n  \"format\": \"%s\",\n  \"version\": %d,\n  \"id\": \"%s\",\n  \"layer_count\": %d,\n"
      "  \"kv_head_count\": %d,\n  \"head_dim\": %d,\n  \"search\": \"%s\",\n  \"layers\": [",
      kFormat, kVersion, ScaleSetId(scales), scales.layer_count, scales.kv_head_count,
      scales.head_dim, SearchName(scales.search));
  const size_t dim = scales.head_dim;
  for (uint32_t layer = 0; layer < scales.layer_count; ++layer) {
    const auto format = kernels::LayerFormatOf(set, layer);
    out +=
        absl::StrFormat("%s\n    {\"k\": \"%s\", \"v\": \"%s\", \"heads\": [",
                        layer == 0 ? "" : ",", SideFormatName(format.k), SideFormatName(format.v));
    for (size_t h = 0; h < scales.kv_head_count; ++h) {
      const size_t head = size_t{layer} * scales.kv_head_count + h;
      out += h == 0 ? "\n      {\"g_k\": " : ",\n      {\"g_k\": ";
      AppendNumber(scales.g_k[head], &out);
      out += ", \"g_v\": ";
      AppendNumber(scales.g_v[head], &out);
      const auto channels = [&](const std::vector<float>& vector) {
        return std::span(vector).subspan(head * dim, dim);
      };
      if (!scales.k_mean.empty()) AppendVector("k_mean", channels(scales.k_mean), &out);
      if (!scales.k_smooth.empty()) AppendVector("k_smooth", channels(scales.k_smooth), &out);
      out += '}';
    }
    out += "\n    ]}";
  }
  return out + "\n  ],\n" + ProvenanceText(file.provenance) + "}\n";
}

absl::StatusOr<ScaleSetFile> ReadScaleSet(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(const Json json, ReadStrictJson(path, kFileBytesMax));
  ScaleSetFile file;
  ObjectReader reader(json, path + ":");
  if (reader.String("format") != kFormat) reader.Fail("is not a scale set (format)");
  const uint64_t version = reader.Number("version");
  KVT_RETURN_IF_ERROR(reader.status());
  if (version != kVersion) {
    return Unimplemented("%s: scale set of version %d, this program reads version %d", path,
                         version, kVersion);
  }
  const std::string id = reader.String("id");
  ScaleSetData* scales = &file.scales;
  scales->layer_count = static_cast<uint32_t>(reader.Number("layer_count", 65'536));
  scales->kv_head_count = static_cast<uint32_t>(reader.Number("kv_head_count", 65'536));
  scales->head_dim = static_cast<uint32_t>(reader.Number("head_dim", kernels::kHeadDimMax));
  scales->search = Choose<kernels::ScaleSearch>(
      &reader, "search",
      {{"amax6", kernels::ScaleSearch::kAmax6}, {"4over6", kernels::ScaleSearch::kFourOverSix}});
  const Json& layers = reader.Array("layers", scales->layer_count);
  const Json& provenance = reader.Member("provenance");
  KVT_RETURN_IF_ERROR(reader.Finish());
  for (size_t i = 0; i < layers.size(); ++i) {
    KVT_RETURN_IF_ERROR(ReadLayer(layers[i], absl::StrFormat("%s: layer %d", path, i), scales));
  }
  const auto is_nvfp4 = [](const auto& format) { return format == kernels::LayerFormat{}; };
  if (std::all_of(scales->layer_formats.begin(), scales->layer_formats.end(), is_nvfp4)) {
    scales->layer_formats.clear();
  }
  KVT_RETURN_IF_ERROR(ReadProvenance(provenance, path + ": provenance", &file.provenance));
  if (const kernels::Status valid = kernels::Validate(scales->View()); !valid.ok()) {
    return DataLoss("%s: %s", path, valid.message());
  }
  if (ScaleSetId(*scales) != id) {
    return DataLoss("%s: the id is not that of its content, %s: was it edited?", path,
                    ScaleSetId(*scales));
  }
  return file;
}

absl::Status WriteScaleSet(const std::string& path, const ScaleSetFile& file) {
  if (const kernels::Status valid = kernels::Validate(file.scales.View()); !valid.ok()) {
    return Invalid("%s: %s", path, valid.message());
  }
  const std::string text = FormatScaleSet(file);
  const std::span<const std::byte> parts[] = {std::as_bytes(std::span(text))};
  return WriteFile(path, parts);
}

}  // namespace kvtier::ctl
