// SPDX-License-Identifier: Apache-2.0
#include "daemon/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"

namespace kvtier {
namespace {

// Set before other threads exist, read by all.
std::atomic<bool> json_lines{false};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

std::string_view LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "error";
}

spdlog::logger& Logger() {
  static const auto logger = [] {
    auto created = std::make_shared<spdlog::logger>(
        "kvtierd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    created->set_pattern("%v");
    return created;
  }();
  return *logger;
}

std::string TimeText(std::chrono::system_clock::time_point now) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                      now - std::chrono::system_clock::from_time_t(seconds))
                      .count();
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  return absl::StrFormat("%04d-%02d-%02dT%02d:%02d:%02d.%03dZ", utc.tm_year + 1900, utc.tm_mon + 1,
                         utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, ms);
}

// Quoted where a reader could take it for more than one word; control characters escaped, since
// values may come from clients.
std::string TextValue(std::string_view value) {
  const auto plain = [](char c) { return c > ' ' && c < 0x7f && c != '"' && c != '='; };
  if (!value.empty() && std::all_of(value.begin(), value.end(), plain)) return std::string(value);
  return nlohmann::json(value).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

std::string JsonLine(LogLevel level, std::string_view time, std::string_view message,
                     std::initializer_list<LogField> fields) {
  nlohmann::ordered_json line = {{"time", time}, {"level", LevelName(level)}, {"message", message}};
  for (const LogField& field : fields) {
    line[std::string(field.key)] = field.value.is_number
                                       ? nlohmann::ordered_json::parse(field.value.text)
                                       : nlohmann::ordered_json(field.value.text);
  }
  return line.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

std::string FormatLogLine(bool json, LogLevel level, std::string_view time,
                          std::string_view message, std::initializer_list<LogField> fields) {
  if (json) return JsonLine(level, time, message, fields);
  std::string line = absl::StrFormat("%s %s %s", LevelName(level), time, message);
  for (const LogField& field : fields) {
    line += absl::StrFormat(" %s=%s", field.key, TextValue(field.value.text));
  }
  return line;
}

namespace {

LogLevel FromSpdlog(spdlog::level::level_enum level) {
  if (level >= spdlog::level::err) return LogLevel::kError;
  if (level == spdlog::level::warn) return LogLevel::kWarning;
  return level == spdlog::level::info ? LogLevel::kInfo : LogLevel::kDebug;
}

// Gives the lines of the layers below, which use spdlog's default logger, the form of ours.
class LineFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& line) override {
    const std::string text =
        FormatLogLine(json_lines, FromSpdlog(message.level), TimeText(message.time),
                      {message.payload.data(), message.payload.size()}, {}) +
        "\n";
    line.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<LineFormatter>();
  }
};

}  // namespace

void SetUpLog(const LogConfig& config) {
  json_lines = config.format == "json";
  auto below =
      std::make_shared<spdlog::logger>("tiers", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  below->set_formatter(std::make_unique<LineFormatter>());
  for (const LogLevel level :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    if (LevelName(level) != config.level) continue;
    Logger().set_level(ToSpdlog(level));
    below->set_level(ToSpdlog(level));
  }
  spdlog::set_default_logger(std::move(below));
}

void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
  spdlog::logger& logger = Logger();
  if (!logger.should_log(ToSpdlog(level))) return;
  const std::string line =
      FormatLogLine(json_lines, level, TimeText(std::chrono::system_clock::now()), message, fields);
  // As one string: spdlog must not look for placeholders in it.
  logger.log(ToSpdlog(level), spdlog::string_view_t(line));
}

}  // namespace kvtier
