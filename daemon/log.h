// SPDX-License-Identifier: Apache-2.0
//
// Structured log lines on standard error: `info 2026-01-31T12:00:00.000Z message key=value` or one
// JSON object a line. Thread-safe; a line is one write. Never called under a lock.
#pragma once

#include <concepts>
#include <initializer_list>
#include <string>
#include <string_view>

#include "daemon/config.h"

namespace kvtier {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };

// A value of a log line. Numbers stay numbers in JSON.
struct LogValue {
  LogValue(std::string_view value) : text(value) {}    // NOLINT(google-explicit-constructor)
  LogValue(const char* value) : text(value) {}         // NOLINT(google-explicit-constructor)
  LogValue(const std::string& value) : text(value) {}  // NOLINT(google-explicit-constructor)
  template <std::integral Number>
  LogValue(Number value)  // NOLINT(google-explicit-constructor)
      : text(std::to_string(value)), is_number(true) {}

  std::string text;
  bool is_number = false;
};

struct LogField {
  std::string_view key;
  LogValue value;
};

// Once, before other threads exist. Until then lines are text at level info.
void SetUpLog(const LogConfig& config);

void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields = {});

// One line without its line break. For Log and its test.
std::string FormatLogLine(bool json, LogLevel level, std::string_view time,
                          std::string_view message, std::initializer_list<LogField> fields);

}  // namespace kvtier
