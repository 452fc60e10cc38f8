// SPDX-License-Identifier: Apache-2.0
#include "proto/base/tls_material.h"

#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <memory>
#include <vector>

#include "proto/base/status_util.h"

namespace kvtier {
namespace {

// Of one file: bundles of all public authorities have a quarter of it.
constexpr size_t kFileBytesMax = 1 << 20;

struct Freer {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using Certificates = std::vector<std::unique_ptr<X509, Freer>>;

absl::StatusOr<std::string> ReadAll(const std::string& path, struct stat* info) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ErrnoStatus(errno, path);
  std::string text;
  std::array<char, 16384> buffer;
  ssize_t got = fstat(fd, info) == 0 ? 1 : -1;
  while (got > 0 && text.size() <= kFileBytesMax) {
    got = read(fd, buffer.data(), buffer.size());
    if (got > 0) text.append(buffer.data(), static_cast<size_t>(got));
  }
  const int error_number = errno;
  close(fd);
  if (got < 0) return ErrnoStatus(error_number, path);
  if (text.size() > kFileBytesMax) return Invalid("%s: more than %d bytes", path, kFileBytesMax);
  return text;
}

std::unique_ptr<BIO, Freer> Reader(const std::string& text) {
  return std::unique_ptr<BIO, Freer>(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

absl::StatusOr<Certificates> ParseCertificates(const std::string& path, const std::string& text) {
  const auto reader = Reader(text);
  Certificates certificates;
  while (X509* const next = PEM_read_bio_X509(reader.get(), nullptr, nullptr, nullptr)) {
    certificates.emplace_back(next);
  }
  // The end is reported as an error like any other.
  const unsigned long last = ERR_peek_last_error();
  ERR_clear_error();
  if (certificates.empty()) return Invalid("%s: has no certificate in PEM", path);
  if (ERR_GET_REASON(last) != PEM_R_NO_START_LINE) {
    return Invalid("%s: certificate %d is damaged", path, certificates.size() + 1);
  }
  return certificates;
}

// Without it OpenSSL would ask at the terminal.
int NoPassphrase(char* /*buffer*/, int /*buffer_bytes*/, int /*is_writing*/, void* /*data*/) {
  return -1;
}

absl::Status CheckKey(const TlsPaths& paths, const std::string& text, X509* certificate) {
  const auto reader = Reader(text);
  const std::unique_ptr<EVP_PKEY, Freer> key(
      PEM_read_bio_PrivateKey(reader.get(), nullptr, NoPassphrase, nullptr));
  ERR_clear_error();
  if (key == nullptr)
    return Invalid("%s: is no private key in PEM, or an encrypted one", paths.key);
  const int matches = X509_check_private_key(certificate, key.get());
  ERR_clear_error();
  if (matches == 1) return absl::OkStatus();
  return Invalid("%s: is not the key of the certificate in %s", paths.key, paths.cert);
}

int64_t SecondsOf(const ASN1_TIME* time) {
  tm broken_down{};
  if (ASN1_TIME_to_tm(time, &broken_down) != 1) return 0;
  return timegm(&broken_down);
}

absl::Status CheckKeyMode(const std::string& path, mode_t mode) {
  if ((mode & (S_IROTH | S_IWOTH | S_IWGRP)) == 0) return absl::OkStatus();
  return PermissionDenied(
      "%s: mode %04o lets others than its owner read or change the key: chmod 0600", path,
      static_cast<unsigned>(mode & 07777));
}

}  // namespace

absl::StatusOr<TlsMaterial> ReadTlsMaterial(const TlsPaths& paths) {
  TlsMaterial material;
  struct stat info{};
  KVT_ASSIGN_OR_RETURN(material.certificate_chain, ReadAll(paths.cert, &info));
  KVT_ASSIGN_OR_RETURN(material.roots, ReadAll(paths.ca, &info));
  KVT_ASSIGN_OR_RETURN(material.private_key, ReadAll(paths.key, &info));
  KVT_RETURN_IF_ERROR(CheckKeyMode(paths.key, info.st_mode));
  material.key_is_group_readable = (info.st_mode & S_IRGRP) != 0;
  KVT_ASSIGN_OR_RETURN(const Certificates chain,
                       ParseCertificates(paths.cert, material.certificate_chain));
  KVT_ASSIGN_OR_RETURN(const Certificates roots, ParseCertificates(paths.ca, material.roots));
  KVT_RETURN_IF_ERROR(CheckKey(paths, material.private_key, chain.front().get()));
  material.not_before_seconds = SecondsOf(X509_get0_notBefore(chain.front().get()));
  material.first_expiry_seconds = SecondsOf(X509_get0_notAfter(chain.front().get()));
  for (const Certificates* certificates : {&chain, &roots}) {
    for (const auto& certificate : *certificates) {
      material.first_expiry_seconds =
          std::min(material.first_expiry_seconds, SecondsOf(X509_get0_notAfter(certificate.get())));
    }
  }
  return material;
}

}  // namespace kvtier
