# SPDX-License-Identifier: Apache-2.0
# The functions folders use to declare what they build:
#   kvtier_add_library        kvtier_<name>, alias kvtier::<name>
#   kvtier_add_executable     a program
#   kvtier_add_test           a GoogleTest program and its one ctest entry
#   kvtier_add_script_test    a ctest entry for a script or a program that is not a GoogleTest
#   kvtier_add_proto_library  protobuf messages and gRPC stubs
# Sources are named relative to the calling folder and include each other from the repository
# root: #include "tiers/tier.h".
include_guard(GLOBAL)
include(KvtierLayers)

set(KVTIER_PROTO_ROOT "${PROJECT_SOURCE_DIR}/proto")

function(_kvtier_reject_unparsed function)
  if(arg_UNPARSED_ARGUMENTS OR arg_KEYWORDS_MISSING_VALUES)
    message(FATAL_ERROR "${function}(${name}): unknown or empty arguments: "
                        "${arg_UNPARSED_ARGUMENTS} ${arg_KEYWORDS_MISSING_VALUES}")
  endif()
endfunction()

# kvtier_add_library(name SOURCES ... [PUBLIC libs...] [PRIVATE libs...] [LAYER layer])
# Headers may stand among SOURCES; a library of headers only becomes INTERFACE.
function(kvtier_add_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LAYER" "SOURCES;PUBLIC;PRIVATE")
  _kvtier_reject_unparsed(kvtier_add_library)
  set(compiled ${arg_SOURCES})
  list(FILTER compiled INCLUDE REGEX "\\.(cc|c|cu)$")
  if(compiled)
    add_library(kvtier_${name} STATIC ${arg_SOURCES})
    target_link_libraries(kvtier_${name}
      PUBLIC kvtier_options ${arg_PUBLIC}
      PRIVATE kvtier_warnings kvtier_sanitizers ${arg_PRIVATE})
  else()
    add_library(kvtier_${name} INTERFACE)
    target_link_libraries(kvtier_${name} INTERFACE kvtier_options ${arg_PUBLIC} ${arg_PRIVATE})
  endif()
  if(NOT KVTIER_SANITIZE STREQUAL "")
    # Only what a program links: with tests left out, some libraries are for nothing.
    set_target_properties(kvtier_${name} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
  add_library(kvtier::${name} ALIAS kvtier_${name})
  kvtier_set_layer(kvtier_${name} "${arg_LAYER}")
endfunction()

# Links what every program of ours needs: warnings, sanitizers and, for ThreadSanitizer, the
# annotations of Debian's uninstrumented Abseil and gRPC.
function(_kvtier_link_program target)
  target_link_libraries(${target} PRIVATE kvtier_options kvtier_warnings kvtier_sanitizers ${ARGN})
  if(TARGET kvtier_tsan)
    target_link_libraries(${target} PRIVATE kvtier_tsan)
    set_target_properties(${target} PROPERTIES ENABLE_EXPORTS ON DEFINE_SYMBOL "")
  endif()
endfunction()

# kvtier_add_executable(name SOURCES ... [LIBS libs...] [LAYER layer])
function(kvtier_add_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LAYER" "SOURCES;LIBS")
  _kvtier_reject_unparsed(kvtier_add_executable)
  add_executable(${name} ${arg_SOURCES})
  _kvtier_link_program(${name} ${arg_LIBS})
  kvtier_set_layer(${name} "${arg_LAYER}")
endfunction()

# Sets `left_out` in the caller, and has kvtier_report_left_out name the test, where the sanitizers
# of this build have nothing to find in it.
function(_kvtier_leave_out name)
  set(left_out OFF PARENT_SCOPE)
  if((arg_UNSANITIZED AND NOT KVTIER_SANITIZE STREQUAL "") OR
     (arg_SINGLE_THREADED AND KVTIER_SANITIZE STREQUAL "thread"))
    set_property(GLOBAL APPEND PROPERTY KVTIER_LEFT_OUT ${name})
    set(left_out ON PARENT_SCOPE)
  endif()
endfunction()

# kvtier_add_script_test(name COMMAND command... [LABELS labels...] [TIMEOUT seconds]
#                        [SINGLE_THREADED] [UNSANITIZED])
# Defaults as for kvtier_add_test. Exit status 77 means skipped; the script prints a line
# "SKIPPED: reason". Programs it needs are built by the default target; name them with
# $<TARGET_FILE:kvtierd>.
function(kvtier_add_script_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SINGLE_THREADED;UNSANITIZED" "TIMEOUT" "COMMAND;LABELS")
  _kvtier_reject_unparsed(kvtier_add_script_test)
  if(NOT KVTIER_TESTS)
    return()
  endif()
  _kvtier_leave_out(${name})
  if(left_out)
    return()
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  # ctest -j starts what costs most first: a long test that started last would run alone.
  set(cost ${arg_TIMEOUT})
  set(launcher "")
  if(NOT KVTIER_SANITIZE STREQUAL "")
    math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * 5")
  endif()
  if(KVTIER_SANITIZE STREQUAL "thread")
    # GCC 12's runtime does not know the address layout of kernels with 32 bits of randomness.
    set(launcher setarch --addr-no-randomize)
  endif()
  set(supp "${PROJECT_SOURCE_DIR}/deploy/sanitizers/tsan.supp")
  add_test(NAME ${name} COMMAND ${launcher} ${arg_COMMAND})
  set_tests_properties(${name} PROPERTIES
    LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} COST ${cost} SKIP_RETURN_CODE 77)
  set_property(TEST ${name} PROPERTY ENVIRONMENT
    # Debian's libraries are not instrumented: a container filled there and read here would be
    # reported as an overflow.
    "ASAN_OPTIONS=detect_container_overflow=0:detect_stack_use_after_return=1"
    "UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1"
    "TSAN_OPTIONS=suppressions=${supp}:halt_on_error=1:second_deadlock_stack=1:history_size=4")
endfunction()

# kvtier_add_test(name SOURCES ... [LIBS libs...] [LABELS labels...] [TIMEOUT seconds]
#                 [ARGS args...] [DEPENDS targets...] [OPTIMIZED] [SINGLE_THREADED]
#                 [UNSANITIZED])
# Default label: unit; default timeout: 60 s (sanitizer builds get five times as long). Tests with
# long timeouts start first. ARGS may hold generator expressions such as $<TARGET_FILE:kvtierd>;
# name that target in DEPENDS. OPTIMIZED: what the test itself computes takes long, so that it is
# not compiled with KVTIER_TEST_FLAGS. SINGLE_THREADED: nothing in the test has a second thread; it
# is neither built nor run for ThreadSanitizer. UNSANITIZED: for no sanitizer. Then there is no such
# target: ask if(TARGET name). A test may link any layer. Without KVTIER_TESTS this does nothing.
function(kvtier_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "OPTIMIZED;SINGLE_THREADED;UNSANITIZED" "TIMEOUT"
                        "SOURCES;LIBS;LABELS;ARGS;DEPENDS")
  _kvtier_reject_unparsed(kvtier_add_test)
  if(NOT KVTIER_TESTS)
    return()
  endif()
  _kvtier_leave_out(${name})
  if(left_out)
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  _kvtier_link_program(${name} ${arg_LIBS} GTest::gtest_main GTest::gmock)
  kvtier_set_layer(${name} tests)
  if(NOT arg_OPTIMIZED)
    target_compile_options(${name} PRIVATE ${KVTIER_TEST_FLAGS})
    # The headers are C++: CMake 3.25 cannot pass over a source in C.
    if(TARGET kvtier_test_headers AND NOT "${arg_SOURCES}" MATCHES "\\.c(;|$)")
      target_precompile_headers(${name} REUSE_FROM kvtier_test_headers)
      # For ccache.
      target_compile_options(${name} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
    endif()
  endif()
  if(arg_DEPENDS)
    add_dependencies(${name} ${arg_DEPENDS})
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  kvtier_add_script_test(${name} COMMAND $<TARGET_FILE:${name}> ${arg_ARGS}
                         LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT})
endfunction()

# With CMAKE_UNITY_BUILD: the headers of GoogleTest and of nearly every test, compiled once. A test
# of one source gains nothing from a unity build.
if(KVTIER_TESTS AND CMAKE_UNITY_BUILD)
  set(main "${PROJECT_BINARY_DIR}/test_headers.cc")
  file(GENERATE OUTPUT "${main}" CONTENT "int main() {}\n")
  # An executable like the tests: a library would have other flags.
  add_executable(kvtier_test_headers EXCLUDE_FROM_ALL "${main}")
  _kvtier_link_program(kvtier_test_headers GTest::gtest)
  target_compile_options(kvtier_test_headers PRIVATE ${KVTIER_TEST_FLAGS})
  target_precompile_headers(kvtier_test_headers PRIVATE
    <algorithm> <array> <atomic> <chrono> <cstdint> <cstring> <filesystem> <functional> <map>
    <memory> <mutex> <optional> <random> <set> <span> <string> <string_view> <thread>
    <unordered_map> <vector> <gtest/gtest.h> <absl/container/flat_hash_map.h>
    <absl/status/status.h> <absl/status/statusor.h> <absl/strings/str_cat.h>
    <absl/strings/str_format.h> <absl/synchronization/mutex.h> <absl/time/time.h>)
endif()

# Prints the tests that this build leaves out; call after the last add_subdirectory.
function(kvtier_report_left_out)
  get_property(tests GLOBAL PROPERTY KVTIER_LEFT_OUT)
  if(tests)
    list(SORT tests)
    list(LENGTH tests count)
    list(JOIN tests " " tests)
    message(STATUS "Left out of KVTIER_SANITIZE=${KVTIER_SANITIZE}, ${count} tests: ${tests}")
  endif()
endfunction()

# kvtier_add_proto_library(name PROTOS files... [PUBLIC libs...] [LAYER layer])
# PROTOS are relative to the calling folder, which lies under proto/; imports are relative to
# proto/ ("kvtier/v1/types.proto"). Generated headers are included as
# "kvtier/v1/types.pb.h" or "proto/kvtier/v1/types.pb.h", both as system headers.
function(kvtier_add_proto_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LAYER" "PROTOS;PUBLIC")
  _kvtier_reject_unparsed(kvtier_add_proto_library)
  set(out_root "${PROJECT_BINARY_DIR}/proto")
  list(TRANSFORM arg_PROTOS PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/" OUTPUT_VARIABLE protos)
  set(generated "")
  foreach(proto IN LISTS protos)
    file(RELATIVE_PATH stem "${KVTIER_PROTO_ROOT}" "${proto}")
    string(REGEX REPLACE "\\.proto$" "" stem "${out_root}/${stem}")
    set(outputs "${stem}.pb.cc" "${stem}.pb.h" "${stem}.grpc.pb.cc" "${stem}.grpc.pb.h")
    add_custom_command(
      OUTPUT ${outputs}
      COMMAND "${CMAKE_COMMAND}" -E make_directory "${out_root}"
      COMMAND protobuf::protoc "--proto_path=${KVTIER_PROTO_ROOT}" "--cpp_out=${out_root}"
              "--grpc_out=${out_root}"
              "--plugin=protoc-gen-grpc=$<TARGET_FILE:gRPC::grpc_cpp_plugin>" "${proto}"
      # Any file of the library may import any other.
      DEPENDS ${protos} protobuf::protoc gRPC::grpc_cpp_plugin
      COMMENT "Generating C++ from ${proto}"
      VERBATIM)
    # Messages of two files have the same static names.
    set_source_files_properties("${stem}.pb.cc" PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    list(APPEND generated ${outputs})
  endforeach()
  add_library(kvtier_${name} STATIC ${generated})
  add_library(kvtier::${name} ALIAS kvtier_${name})
  target_include_directories(kvtier_${name} SYSTEM PUBLIC "${out_root}" "${PROJECT_BINARY_DIR}")
  target_link_libraries(kvtier_${name}
    PUBLIC kvtier_options protobuf::libprotobuf gRPC::grpc++ ${arg_PUBLIC}
    PRIVATE kvtier_sanitizers)
  set_target_properties(kvtier_${name} PROPERTIES CXX_CLANG_TIDY "")
  kvtier_set_layer(kvtier_${name} "${arg_LAYER}")
endfunction()

if(KVTIER_SANITIZE STREQUAL "thread")
  add_subdirectory("${PROJECT_SOURCE_DIR}/deploy/sanitizers" deploy/sanitizers)
endif()
