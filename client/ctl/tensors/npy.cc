// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/tensors/npy.h"

#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/tensors/write_file.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kVersionOffset = 6;
constexpr size_t kLengthOffset = 8;
// NumPy itself refuses to read more than 10,000.
constexpr size_t kNpyHeaderBytesMax = 65'536;

struct Descr {
  std::string_view text;
  TensorType type;
};
constexpr Descr kDescrs[] = {
    {"<f2", TensorType::kFp16},   {"<f4", TensorType::kFp32},   {"<f8", TensorType::kFp64},
    {"<V2", TensorType::kBf16},   {"|V2", TensorType::kBf16},   {"|i1", TensorType::kInt8},
    {"<i2", TensorType::kInt16},  {"<i4", TensorType::kInt32},  {"<i8", TensorType::kInt64},
    {"|u1", TensorType::kUint8},  {"<u2", TensorType::kUint16}, {"<u4", TensorType::kUint32},
    {"<u8", TensorType::kUint64}, {"|b1", TensorType::kBool},
};

struct Header {
  std::string descr;
  bool fortran_order = false;
  std::vector<uint64_t> shape;
};

// Reads the one Python literal that NumPy writes: a dictionary of a string, a bool and a tuple of
// integers, in any order, each once. Every Take skips blanks first.
class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : text_(text) {}

  bool Parse(Header* header) {
    unsigned seen = 0;
    if (!Take('{')) return false;
    while (!Take('}')) {
      std::string key;
      if (!TakeString(&key) || !Take(':')) return false;
      const unsigned field = key == "descr"           ? 1U
                             : key == "fortran_order" ? 2U
                             : key == "shape"         ? 4U
                                                      : 0U;
      if (field == 0 || (seen & field) != 0) return false;
      seen |= field;
      const bool ok = field == 1   ? TakeString(&header->descr)
                      : field == 2 ? TakeBool(&header->fortran_order)
                                   : TakeTuple(&header->shape);
      if (!ok) return false;
      if (!Take(',')) {
        if (!Take('}')) return false;
        break;
      }
    }
    SkipBlanks();
    return seen == 7U && text_.empty();
  }

 private:
  void SkipBlanks() {
    const size_t start = text_.find_first_not_of(" \t\r\n");
    text_.remove_prefix(start == std::string_view::npos ? text_.size() : start);
  }
  bool Take(char c) {
    SkipBlanks();
    if (text_.empty() || text_.front() != c) return false;
    text_.remove_prefix(1);
    return true;
  }
  bool TakeWord(std::string_view word) {
    SkipBlanks();
    if (!text_.starts_with(word)) return false;
    text_.remove_prefix(word.size());
    return true;
  }
  bool TakeString(std::string* out) {
    const char quote = Take('\'') ? '\'' : Take('"') ? '"' : '\0';
    if (quote == '\0') return false;
    const size_t end = text_.find(quote);
    if (end == std::string_view::npos) return false;
    *out = text_.substr(0, end);
    text_.remove_prefix(end + 1);
    return out->find('\\') == std::string::npos;
  }
  bool TakeBool(bool* out) {
    *out = TakeWord("True");
    return *out || TakeWord("False");
  }
  bool TakeTuple(std::vector<uint64_t>* out) {
    if (!Take('(')) return false;
    while (!Take(')')) {
      SkipBlanks();
      uint64_t dim = 0;
      const char* end = text_.data() + text_.size();
      const auto [next, error] = std::from_chars(text_.data(), end, dim);
      if (error != std::errc() || out->size() == kTensorRankMax) return false;
      text_.remove_prefix(static_cast<size_t>(next - text_.data()));
      out->push_back(dim);
      if (!Take(',')) {
        // (3) is a number in parentheses, not a tuple.
        return Take(')') && out->size() > 1;
      }
    }
    return true;
  }

  std::string_view text_;
};

absl::StatusOr<TensorType> TypeOf(const std::string& descr, const NpyOptions& options,
                                  const std::string& path) {
  if (descr == "<u2" && options.uint16_is_bf16) return TensorType::kBf16;
  if ((descr == "|u1" || descr == "<V1" || descr == "|V1") && options.uint8_is_fp8_e4m3) {
    return TensorType::kFp8E4m3;
  }
  for (const Descr& known : kDescrs) {
    if (known.text == descr) return known.type;
  }
  return Unimplemented("%s: unsupported NumPy type '%s'%s", path, absl::CHexEscape(descr),
                       descr.ends_with("V1") ? "; if it is FP8, its scale must be given" : "");
}

// Splits the file into the text of its header and the bytes of its array.
absl::Status Split(const MappedFile& file, std::string_view* header,
                   std::span<const std::byte>* data) {
  const std::span<const std::byte> bytes = file.bytes();
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with(kMagic) || text.size() < kLengthOffset) {
    return DataLoss("%s: not a .npy file", file.path());
  }
  const auto major = static_cast<unsigned>(bytes[kVersionOffset]);
  const auto minor = static_cast<unsigned>(bytes[kVersionOffset + 1]);
  if (major < 1 || major > 3 || minor != 0) {
    return Unimplemented("%s: .npy version %d.%d", file.path(), major, minor);
  }
  const size_t length_bytes = major == 1 ? 2 : 4;
  const size_t start = kLengthOffset + length_bytes;
  if (text.size() < start) return DataLoss("%s: the .npy header is cut short", file.path());
  uint32_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data() + kLengthOffset, length_bytes);
  if (header_bytes > kNpyHeaderBytesMax) {
    return DataLoss("%s: a .npy header of %d bytes", file.path(), header_bytes);
  }
  if (text.size() - start < header_bytes) {
    return DataLoss("%s: the .npy header is cut short", file.path());
  }
  *header = text.substr(start, header_bytes);
  *data = bytes.subspan(start + header_bytes);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Tensor> ReadNpy(const std::string& path, const NpyOptions& options) {
  Tensor tensor;
  KVT_ASSIGN_OR_RETURN(tensor.file, MappedFile::Open(path));
  std::string_view text;
  KVT_RETURN_IF_ERROR(Split(*tensor.file, &text, &tensor.bytes));
  Header header;
  if (!HeaderParser(text).Parse(&header)) {
    return DataLoss("%s: a .npy header that is not descr, fortran_order and shape", path);
  }
  KVT_ASSIGN_OR_RETURN(tensor.type, TypeOf(header.descr, options, path));
  if (header.fortran_order && header.shape.size() > 1) {
    return Unimplemented("%s: in Fortran order; save numpy.ascontiguousarray(array)", path);
  }
  tensor.shape = std::move(header.shape);
  const auto count = ElementCountOf(tensor.shape);
  const uint64_t element_bytes = TensorElementBytes(tensor.type);
  // Divided, because the product may overflow.
  if (!count.has_value() || tensor.bytes.size() % element_bytes != 0 ||
      tensor.bytes.size() / element_bytes != *count) {
    return DataLoss("%s: shape (%s) of %d-byte elements, but %d bytes of data", path,
                    absl::StrJoin(tensor.shape, ", "), element_bytes, tensor.bytes.size());
  }
  return tensor;
}

absl::Status WriteNpy(const std::string& path, TensorType type, std::span<const uint64_t> shape,
                      std::span<const std::byte> bytes) {
  std::string descr = type == TensorType::kFp8E4m3 ? "<V1" : "";
  for (const Descr& known : kDescrs) {
    if (known.type == type && descr.empty()) descr = known.text;
  }
  const auto count = ElementCountOf(shape);
  const uint64_t element_bytes = TensorElementBytes(type);
  if (descr.empty() || !count.has_value() || bytes.size() / element_bytes != *count ||
      bytes.size() % element_bytes != 0) {
    return Invalid("%s: %d bytes are not the array to write", path, bytes.size());
  }
  std::string header =
      absl::StrCat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (",
                   absl::StrJoin(shape, ", "), shape.size() == 1 ? "," : "", "), }");
  // Data begins at a multiple of 64, after a line break.
  constexpr size_t kPreamble = kLengthOffset + 2;
  header.append(63 - (kPreamble + header.size()) % 64, ' ');
  header += '\n';
  std::string preamble(kMagic);
  preamble +=
      {'\1', '\0', static_cast<char>(header.size() & 0xFF), static_cast<char>(header.size() >> 8)};
  preamble += header;
  const std::span<const std::byte> parts[] = {std::as_bytes(std::span(preamble)), bytes};
  return WriteFile(path, parts);
}

}  // namespace kvtier::ctl
