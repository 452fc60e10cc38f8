# SPDX-License-Identifier: Apache-2.0
# What CMakeLists.txt needs when this folder is not built as part of kvtier: alone
# (cmake -S kernels), or copied into an engine's tree (add_subdirectory(third_party/kernels), then
# link kvtier::kernels). The same functions as deploy/cmake/Kvtier.cmake, as far as they are used.
#
#   KVTIER_TESTS         build the tests: ON when built alone, OFF inside another project
#   KVTIER_WERROR        warnings are errors: OFF
include_guard(GLOBAL)
set(KVTIER_KERNELS_ALONE ON)
include(CTest)

option(KVTIER_TESTS "Build the tests of kvtier's kernels" ${PROJECT_IS_TOP_LEVEL})
option(KVTIER_WERROR "Treat warnings in kvtier's kernels as errors" OFF)
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()

if(KVTIER_TESTS)
  find_package(GTest CONFIG QUIET)
  if(NOT TARGET GTest::gtest_main)
    # Debian's package googletest; what a cross build takes, which has no built GoogleTest.
    set(googletest_dir /usr/src/googletest)
    if(NOT EXISTS "${googletest_dir}/CMakeLists.txt")
      message(FATAL_ERROR "No GoogleTest: install it, or its sources in ${googletest_dir}, or set "
                          "KVTIER_TESTS=OFF")
    endif()
    set(BUILD_GMOCK OFF)
    set(INSTALL_GTEST OFF)
    add_subdirectory("${googletest_dir}" googletest EXCLUDE_FROM_ALL)
  endif()
endif()

function(_kvtier_standalone_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  # Headers are included as "kernels/...": the folder must keep its name.
  target_include_directories(${target} PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}/..")
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion
    $<$<CXX_COMPILER_ID:Clang,AppleClang>:-Wno-sign-conversion>
    $<$<BOOL:${KVTIER_WERROR}>:-Werror>)
endfunction()

# kvtier_add_library(name SOURCES ...)
function(kvtier_add_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  add_library(kvtier_${name} STATIC ${arg_SOURCES})
  _kvtier_standalone_options(kvtier_${name})
  set_target_properties(kvtier_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  add_library(kvtier::${name} ALIAS kvtier_${name})
endfunction()

# kvtier_add_executable(name SOURCES ... LIBS ...)
function(kvtier_add_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBS")
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LIBS})
  _kvtier_standalone_options(${name})
endfunction()

# kvtier_add_test(name SOURCES ... LIBS ... [SINGLE_THREADED])
function(kvtier_add_test name)
  if(NOT KVTIER_TESTS)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 arg "SINGLE_THREADED" "" "SOURCES;LIBS")
  kvtier_add_executable(${name} SOURCES ${arg_SOURCES} LIBS ${arg_LIBS} GTest::gtest_main)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
    # GCC 12 fails with an internal error on a reduction by std::fmax.
    target_compile_options(${name} PRIVATE -fno-tree-vectorize)
  endif()
  add_test(NAME ${name} COMMAND ${name})
endfunction()
