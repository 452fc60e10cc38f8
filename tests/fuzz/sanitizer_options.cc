// SPDX-License-Identifier: Apache-2.0
//
// What the sanitizers of a program with libFuzzer are told, however it is started; ctest tells
// those of the tests the same.

// Debian's libraries are not instrumented: a container filled there and read here would be reported
// as an overflow.
extern "C" const char* __asan_default_options() { return "detect_container_overflow=0"; }
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1:halt_on_error=1"; }
