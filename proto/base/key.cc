// SPDX-License-Identifier: Apache-2.0
#include "proto/base/key.h"

#include <openssl/evp.h>

#include <bit>

#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

static_assert(std::endian::native == std::endian::little,
              "token ids and lengths are hashed in memory order, which must be little-endian");

EVP_MD_CTX* Context(void* context) { return static_cast<EVP_MD_CTX*>(context); }

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::string Digest::Hex() const {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * kBytes);
  for (uint8_t byte : bytes) {
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

absl::StatusOr<Digest> Digest::FromHex(std::string_view hex) {
  if (hex.size() != 2 * kBytes) {
    return Invalid("a key is %d hexadecimal digits, not %d", 2 * kBytes, hex.size());
  }
  Digest digest;
  for (size_t i = 0; i < kBytes; ++i) {
    const int high = HexValue(hex[2 * i]);
    const int low = HexValue(hex[2 * i + 1]);
    if (high < 0 || low < 0) return Invalid("a key is lower-case hexadecimal: %s", hex);
    digest.bytes[i] = static_cast<uint8_t>(high * 16 + low);
  }
  return digest;
}

absl::StatusOr<Digest> Digest::FromBytes(std::string_view raw) {
  if (raw.size() != kBytes) return Invalid("a key has %d bytes, not %d", kBytes, raw.size());
  Digest digest;
  std::memcpy(digest.bytes.data(), raw.data(), kBytes);
  return digest;
}

FieldHasher::FieldHasher() : context_(EVP_MD_CTX_new()) {
  KVT_CHECK(context_ != nullptr);
  KVT_CHECK(EVP_DigestInit_ex(Context(context_), EVP_sha256(), nullptr) == 1);
}

FieldHasher::~FieldHasher() { EVP_MD_CTX_free(Context(context_)); }

FieldHasher& FieldHasher::Add(std::string_view field) {
  const uint64_t length = field.size();
  KVT_CHECK(EVP_DigestUpdate(Context(context_), &length, sizeof(length)) == 1);
  KVT_CHECK(EVP_DigestUpdate(Context(context_), field.data(), field.size()) == 1);
  return *this;
}

FieldHasher& FieldHasher::AddU32(uint32_t value) {
  return Add({reinterpret_cast<const char*>(&value), sizeof(value)});
}

FieldHasher& FieldHasher::AddU64(uint64_t value) {
  return Add({reinterpret_cast<const char*>(&value), sizeof(value)});
}

Digest FieldHasher::Finish() {
  Digest digest;
  unsigned int length = 0;
  KVT_CHECK(EVP_DigestFinal_ex(Context(context_), digest.bytes.data(), &length) == 1);
  KVT_CHECK(length == Digest::kBytes);
  return digest;
}

NamespaceHash HashNamespace(std::string_view tenant, const LayoutFingerprint& layout,
                            std::string_view adapter, std::string_view salt,
                            const HashDomain& domain) {
  FieldHasher hasher;
  hasher.Add(domain.name.empty() ? "kvtier-namespace-1" : "kvtier-namespace-2");
  hasher.Add(tenant).Add(layout.AsBytes()).Add(adapter).Add(salt);
  if (!domain.name.empty()) hasher.Add(domain.name).Add(domain.probe);
  return hasher.Finish();
}

absl::Status ValidateHashDomain(const HashDomain& domain) {
  if (domain.name.size() > kHashDomainFieldBytesMax ||
      domain.probe.size() > kHashDomainFieldBytesMax) {
    return Invalid("hash_domain: a name of %d bytes and a probe of %d; at most %d each",
                   domain.name.size(), domain.probe.size(), kHashDomainFieldBytesMax);
  }
  if (domain.name.empty() != domain.probe.empty()) {
    return Invalid("hash_domain: a name without a probe, or a probe without a name");
  }
  return absl::OkStatus();
}

Key HashEngineBlock(const NamespaceHash& ns, std::string_view engine_hash, std::string_view extra) {
  return FieldHasher()
      .Add("kvtier-engine-block-1")
      .Add(ns.AsBytes())
      .Add(engine_hash)
      .Add(extra)
      .Finish();
}

Key HashBlock(const NamespaceHash& ns, const std::optional<Key>& parent,
              std::span<const uint32_t> token_ids, std::string_view extra) {
  return FieldHasher()
      .Add("kvtier-block-1")
      .Add(ns.AsBytes())
      .Add(parent.has_value() ? parent->AsBytes() : std::string_view())
      .Add({reinterpret_cast<const char*>(token_ids.data()), token_ids.size_bytes()})
      .Add(extra)
      .Finish();
}

}  // namespace kvtier
