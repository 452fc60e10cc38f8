# SPDX-License-Identifier: Apache-2.0
# Third-party packages, all from Debian 12 (deploy/deps.apt). Targets to link:
#   absl::*  protobuf::libprotobuf  gRPC::grpc++  gRPC::grpc++_reflection
#   gRPC::grpc++_error_details  RocksDB::rocksdb-shared  spdlog::spdlog  CLI11::CLI11
#   tomlplusplus::tomlplusplus  nlohmann_json::nlohmann_json  OpenSSL::Crypto  LibLZMA::LibLZMA
#   PkgConfig::liburing  PkgConfig::libisal  PkgConfig::libxxhash
#   kvtier::malloc  jemalloc for executables; empty under sanitizers, which bring their own malloc
include_guard(GLOBAL)

find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(Protobuf MODULE REQUIRED)  # Debian ships no protobuf-config.cmake
find_package(gRPC CONFIG REQUIRED)
find_package(RocksDB CONFIG REQUIRED)
find_package(spdlog CONFIG REQUIRED)
find_package(CLI11 CONFIG REQUIRED)
find_package(tomlplusplus CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(LibLZMA REQUIRED)
find_package(civetweb CONFIG REQUIRED)
pkg_check_modules(prometheus-cpp-core REQUIRED IMPORTED_TARGET prometheus-cpp-core)
pkg_check_modules(liburing REQUIRED IMPORTED_TARGET liburing)
pkg_check_modules(libisal REQUIRED IMPORTED_TARGET libisal)
pkg_check_modules(libxxhash REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(jemalloc REQUIRED IMPORTED_TARGET jemalloc)
if(KVTIER_TESTS)
  find_package(GTest CONFIG REQUIRED)
endif()
if(KVTIER_BENCH)
  find_package(benchmark CONFIG REQUIRED)
endif()

add_library(kvtier_malloc INTERFACE)
add_library(kvtier::malloc ALIAS kvtier_malloc)
if(KVTIER_SANITIZE STREQUAL "")
  # Nothing names a jemalloc symbol, so an as-needed link could drop it.
  target_link_options(kvtier_malloc INTERFACE
    "LINKER:--push-state,--no-as-needed" "${jemalloc_LINK_LIBRARIES}" "LINKER:--pop-state")
endif()
