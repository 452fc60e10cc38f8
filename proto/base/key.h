// SPDX-License-Identifier: Apache-2.0
//
// Identity of blocks. One builder for every process and language; proto/golden/keys.json holds
// vectors that other implementations must reproduce.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvtier {

// 32 bytes of SHA-256. Compared and hashed as bytes; printed as lower-case hexadecimal.
struct Digest {
  static constexpr size_t kBytes = 32;
  std::array<uint8_t, kBytes> bytes{};

  friend auto operator<=>(const Digest&, const Digest&) = default;

  // SHA-256 output is uniform: eight of its bytes are a hash.
  template <typename H>
  friend H AbslHashValue(H state, const Digest& digest) {
    uint64_t word;
    std::memcpy(&word, digest.bytes.data(), sizeof(word));
    return H::combine(std::move(state), word);
  }

  std::string Hex() const;
  static absl::StatusOr<Digest> FromHex(std::string_view hex);
  // INVALID_ARGUMENT unless `raw` has exactly 32 bytes.
  static absl::StatusOr<Digest> FromBytes(std::string_view raw);
  std::string_view AsBytes() const {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
};
static_assert(sizeof(Digest) == 32);

using Key = Digest;
using NamespaceHash = Digest;
using LayoutFingerprint = Digest;

// SHA-256 over fields, each prefixed with its length as 8 little-endian bytes, so that no two
// different field lists have the same input.
class FieldHasher {
 public:
  FieldHasher();
  ~FieldHasher();
  FieldHasher(const FieldHasher&) = delete;
  FieldHasher& operator=(const FieldHasher&) = delete;

  FieldHasher& Add(std::string_view field);
  // As 4 or 8 little-endian bytes.
  FieldHasher& AddU32(uint32_t value);
  FieldHasher& AddU64(uint64_t value);
  // Ends the hash; the object is not used afterwards.
  Digest Finish();

 private:
  void* context_;  // EVP_MD_CTX, owned
};

// How an engine that brings its own block hashes makes them. Two engines whose hashes differ for
// the same tokens (another algorithm, another seed) share no namespace, so that neither finds, or
// takes for its own, what the other stored.
struct HashDomain {
  // "vllm/sha256_cbor", say; at most 64 bytes. Empty: keys are made by HashBlock.
  std::string name = {};
  // What the engine's own function makes of a first block with the token ids 1, 2, 3 and so on, one
  // block full, without adapter or salt: as bytes, at most 64. Not empty unless `name` is.
  std::string probe = {};

  friend bool operator==(const HashDomain&, const HashDomain&) = default;
};
inline constexpr size_t kHashDomainFieldBytesMax = 64;
// INVALID_ARGUMENT.
absl::Status ValidateHashDomain(const HashDomain& domain);

// Hash of ("kvtier-namespace-1", tenant, layout fingerprint, adapter, salt), or with a domain of
// ("kvtier-namespace-2", tenant, layout fingerprint, adapter, salt, domain's name, probe).
NamespaceHash HashNamespace(std::string_view tenant, const LayoutFingerprint& layout,
                            std::string_view adapter, std::string_view salt,
                            const HashDomain& domain = {});

// Hash of ("kvtier-block-1", namespace, parent key or empty, token ids as u32 little-endian,
// extra). `extra` carries what else fixes the block's content, e.g. multimodal item hashes.
Key HashBlock(const NamespaceHash& ns, const std::optional<Key>& parent,
              std::span<const uint32_t> token_ids, std::string_view extra = {});

// The key of a block that the engine has hashed itself, in a namespace with a HashDomain. Hash of
// ("kvtier-engine-block-1", namespace, the engine's hash, extra). The engine's hash stands for the
// whole chain up to this block, as those of engines do; 16 bytes or more, for two chains with equal
// hashes would share their bytes.
Key HashEngineBlock(const NamespaceHash& ns, std::string_view engine_hash,
                    std::string_view extra = {});

}  // namespace kvtier
