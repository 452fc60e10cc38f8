# SPDX-License-Identifier: Apache-2.0
# Fuzz targets: sources with LLVMFuzzerTestOneInput, beside the code that they are for.
include_guard(GLOBAL)

if(KVTIER_FUZZ)
  # All targets of kvtier_add_fuzzer, in one folder.
  add_custom_target(fuzzers)
endif()

# kvtier_add_fuzzer(name SOURCES ... [LIBS libs...] [TIMEOUT seconds])
# With KVTIER_FUZZ a program with libFuzzer, fuzzers/<name> in the build folder, and a test that
# runs it for KVTIER_FUZZ_SECONDS of the environment (tests/fuzz/run). Without, a program and a test
# that run the inputs in tests/fuzz/corpus/<name> and mutations of them. For ThreadSanitizer there
# is neither: no byte of an input makes a race, the tests of threads do. A fuzz target may link any
# layer.
function(kvtier_add_fuzzer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "SOURCES;LIBS")
  _kvtier_reject_unparsed(kvtier_add_fuzzer)
  if(NOT KVTIER_TESTS)
    return()
  endif()
  if(NOT KVTIER_FUZZ)
    set(arg_SINGLE_THREADED ON)
    _kvtier_leave_out(${name})
    if(left_out)
      return()
    endif()
  endif()
  add_executable(${name} ${arg_SOURCES})
  kvtier_set_layer(${name} tests)
  if(KVTIER_FUZZ)
    target_sources(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests/fuzz/sanitizer_options.cc")
    _kvtier_link_program(${name} ${arg_LIBS})
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    set_target_properties(${name} PROPERTIES
      RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/fuzzers")
    add_dependencies(fuzzers ${name})
    kvtier_add_script_test(${name}
      COMMAND "${CMAKE_COMMAND}" -E env "KVTIER_FUZZ_BUILD=${PROJECT_BINARY_DIR}"
        "${PROJECT_SOURCE_DIR}/tests/fuzz/run" --for-test ${name}
      LABELS fuzz TIMEOUT 300)
    return()
  endif()
  _kvtier_link_program(${name} ${arg_LIBS} kvtier::fuzz_driver)
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  kvtier_add_script_test(${name}
    COMMAND $<TARGET_FILE:${name}> "${PROJECT_SOURCE_DIR}/tests/fuzz/corpus/${name}"
    LABELS fuzz TIMEOUT ${arg_TIMEOUT})
endfunction()
