# SPDX-License-Identifier: Apache-2.0
# Compiler cache, linker, and the three INTERFACE targets every target of ours links:
#   kvtier_options     language level, include root; links through (PUBLIC)
#   kvtier_warnings    warnings, as errors with KVTIER_WERROR; our code only, never generated code
#   kvtier_sanitizers  flags of KVTIER_SANITIZE; our code and generated code
include_guard(GLOBAL)
include(CheckCXXSourceCompiles)

find_program(KVTIER_CCACHE ccache)
mark_as_advanced(KVTIER_CCACHE)
foreach(lang IN ITEMS C CXX CUDA)
  if(KVTIER_CCACHE AND NOT CMAKE_${lang}_COMPILER_LAUNCHER)
    # Without this sloppiness ccache passes over every source with a precompiled header.
    set(CMAKE_${lang}_COMPILER_LAUNCHER
        "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros "${KVTIER_CCACHE}")
  endif()
endforeach()

# With CMAKE_UNITY_BUILD, which most presets set, this many sources of a target are compiled as one:
# most of a source's time goes into headers that its neighbours include, too. Each source must still
# compile alone: the debug and tidy presets compile them so.
set(CMAKE_UNITY_BUILD_BATCH_SIZE 12)

# The first linker that links a program with threads wins; a broken one is passed over.
foreach(linker IN ITEMS mold lld)
  set(CMAKE_REQUIRED_LINK_OPTIONS "-fuse-ld=${linker}")
  check_cxx_source_compiles("#include <thread>
int main() { std::jthread t([] {}); }" KVTIER_LINKS_WITH_${linker})
  unset(CMAKE_REQUIRED_LINK_OPTIONS)
  if(KVTIER_LINKS_WITH_${linker})
    add_link_options("-fuse-ld=${linker}")
    break()
  endif()
endforeach()

add_library(kvtier_options INTERFACE)
target_compile_features(kvtier_options INTERFACE cxx_std_20)
target_compile_options(kvtier_options INTERFACE -fno-omit-frame-pointer -pthread)
target_include_directories(kvtier_options INTERFACE "${PROJECT_SOURCE_DIR}")
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

add_library(kvtier_warnings INTERFACE)
target_compile_options(kvtier_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion>
  # Clang's -Wconversion has -Wsign-conversion in it, GCC's for C++ has not.
  $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wthread-safety -Wno-sign-conversion
    # Of std::stable_sort in the headers of GCC 12.
    -Wno-deprecated-declarations>
  $<$<AND:$<BOOL:${KVTIER_WERROR}>,$<COMPILE_LANGUAGE:C,CXX>>:-Werror>)

add_library(kvtier_sanitizers INTERFACE)
if(KVTIER_SANITIZE STREQUAL "address,undefined")
  set(sanitize_flags -fsanitize=address,undefined -fno-sanitize-recover=undefined)
elseif(KVTIER_SANITIZE STREQUAL "thread")
  set(sanitize_flags -fsanitize=thread)
elseif(NOT KVTIER_SANITIZE STREQUAL "")
  message(FATAL_ERROR "KVTIER_SANITIZE=\"${KVTIER_SANITIZE}\": use \"\", \"address,undefined\" "
                      "or \"thread\"")
endif()
if(KVTIER_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "KVTIER_FUZZ=ON needs clang (the preset asan), not "
                        "${CMAKE_CXX_COMPILER_ID}")
  endif()
  # Counts edges; main is another's (kvtier_add_fuzzer).
  list(APPEND sanitize_flags -fsanitize=fuzzer-no-link)
endif()
if(sanitize_flags)
  target_compile_options(kvtier_sanitizers INTERFACE ${sanitize_flags})
  target_link_options(kvtier_sanitizers INTERFACE ${sanitize_flags})
endif()
