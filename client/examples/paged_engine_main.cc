// SPDX-License-Identifier: Apache-2.0
//
// An engine in small that serves requests twice, without kvtier and with it, and compares the
// attention outputs. Run two: the second finds what the first has stored. docs/client.md tells
// more.
//   paged_engine RUN_DIR CODEC FIRST COUNT [--hold] [--flip-a-bit]
// CODEC: bf16 (outputs must be equal to the bit) or nvfp4 (within its error). Requests FIRST to
// FIRST + COUNT - 1. --hold: then waits for the end of its input, with its session open.
// --flip-a-bit: spoils one bit of what is loaded, which the comparison must see.
// Exit status: 0 as said, 1 not, 2 usage.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "client/examples/engine.h"
#include "client/examples/kv_store.h"

namespace {

using kvtier::example::Engine;
using kvtier::example::KvStore;
using kvtier::example::Request;
using Outputs = std::vector<std::vector<float>>;

// docs/accuracy.md: 0.095 of normal values in NVFP4. Attention that is not peaked averages more.
constexpr double kNvfp4ErrorMax = 0.1;
constexpr uint32_t kSystemPromptCount = 70;
constexpr uint32_t kGeneratedCount = 30;

// One system prompt for all; every second request waits for a tool.
Request MakeRequest(uint32_t number) {
  Request request;
  request.name = "request-" + std::to_string(number);
  std::mt19937 random(7);
  const auto token = [&random] { return static_cast<uint32_t>(random()); };
  while (request.tokens.size() < kSystemPromptCount) request.tokens.push_back(token());
  random.seed(1000 + number);
  request.prompt_count = kSystemPromptCount + 10 + token() % 40;
  while (request.tokens.size() < request.prompt_count + kGeneratedCount) {
    request.tokens.push_back(token());
  }
  if (number % 2 == 0) request.pause_at = request.prompt_count + kGeneratedCount / 2;
  return request;
}

struct Difference {
  bool is_equal = true;
  // Relative, in Frobenius norms.
  double error = 0;
};

Difference Compare(const Outputs& expected, const Outputs& actual) {
  Difference difference;
  double error_squares = 0;
  double squares = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].size() != actual[i].size()) return {.is_equal = false, .error = INFINITY};
    for (size_t k = 0; k < expected[i].size(); ++k) {
      // Bits: -0 is not 0 here, and NaN is NaN.
      if (std::memcmp(&expected[i][k], &actual[i][k], sizeof(float)) != 0) {
        difference.is_equal = false;
      }
      const double error = static_cast<double>(actual[i][k]) - static_cast<double>(expected[i][k]);
      error_squares += error * error;
      squares += static_cast<double>(expected[i][k]) * static_cast<double>(expected[i][k]);
    }
  }
  difference.error = std::sqrt(error_squares / squares);
  return difference;
}

int Fail(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "paged_engine: %s: %s\n", what, status.ToString().c_str());
  return 1;
}

struct Arguments {
  KvStore::Options store;
  uint32_t first = 0;
  uint32_t count = 0;
  bool holds = false;
};

bool Parse(int argc, char** argv, Arguments* arguments) {
  if (argc < 5) return false;
  const std::string_view codec = argv[2];
  if (codec != "bf16" && codec != "nvfp4") return false;
  arguments->store.run_dir = argv[1];
  arguments->store.engine_name = std::string("paged_engine ") + argv[3];
  arguments->store.codec = codec == "bf16" ? kvtier::Codec::kBf16 : kvtier::Codec::kNvfp4;
  arguments->first = static_cast<uint32_t>(std::strtoul(argv[3], nullptr, 10));
  arguments->count = static_cast<uint32_t>(std::strtoul(argv[4], nullptr, 10));
  for (int i = 5; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag != "--hold" && flag != "--flip-a-bit") return false;
    (flag == "--hold" ? arguments->holds : arguments->store.flips_a_bit) = true;
  }
  return arguments->count > 0;
}

int Run(const Arguments& arguments) {
  std::vector<Request> requests;
  for (uint32_t i = 0; i < arguments.count; ++i) {
    requests.push_back(MakeRequest(arguments.first + i));
  }
  Engine alone({}, nullptr);
  const auto expected = alone.Serve(requests);
  if (!expected.ok()) return Fail("without kvtier", expected.status());

  const auto store = KvStore::Open(arguments.store, {});
  if (!store.ok()) return Fail("open", store.status());
  Engine engine({}, store->get());
  const auto actual = engine.Serve(requests);
  if (!actual.ok()) return Fail("with kvtier", actual.status());

  const Difference difference = Compare(*expected, *actual);
  const bool is_right = arguments.store.codec == kvtier::Codec::kBf16
                            ? difference.is_equal
                            : difference.error <= kNvfp4ErrorMax;
  std::printf(
      "%zu requests in %llu steps, %llu pauses; blocks: %llu loaded, %llu stored; prefilled "
      "tokens: "
      "%llu, without kvtier %llu; outputs: %s, error %.4f\n",
      requests.size(), static_cast<unsigned long long>(engine.counts().step_count),
      static_cast<unsigned long long>(engine.counts().pause_count),
      static_cast<unsigned long long>((*store)->counts().loaded),
      static_cast<unsigned long long>((*store)->counts().stored),
      static_cast<unsigned long long>(engine.counts().prefilled_token_count),
      static_cast<unsigned long long>(alone.counts().prefilled_token_count),
      difference.is_equal ? "equal" : "different", difference.error);
  std::fflush(stdout);
  if (arguments.holds) {
    while (std::getchar() != EOF) {
    }
  }
  return is_right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!Parse(argc, argv, &arguments)) {
    std::fprintf(stderr,
                 "usage: paged_engine RUN_DIR bf16|nvfp4 FIRST COUNT [--hold] [--flip-a-bit]\n");
    return 2;
  }
  return Run(arguments);
}
