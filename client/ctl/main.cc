// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "client/ctl/commands.h"
#include "client/ctl/doctor_command.h"
#include "client/ctl/eval_command.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/plan_command.h"
#include "client/ctl/scales_command.h"
#include "client/ctl/simulate_command.h"
#include "client/ctl/watch_command.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/base/version.h"

namespace kvtier::ctl {
namespace {

constexpr const char* kFooter = R"(
Examples:
  kvtierctl status
  kvtierctl tiers --json --run-dir /tmp/kvtier/run
  kvtierctl where --context agent-00017
  kvtierctl watch --json
  kvtierctl replay agents.jsonl.xz --progress --simulate
  kvtierctl eval-kv --quick
  kvtierctl plan --layers 80 --kv-heads 8 --head-dim 128 --card "96 GiB" --card-share 0.9
  kvtierctl doctor --config /etc/kvtier/kvtierd.toml
  kvtierctl --address node7:7443 --tls-cert me.crt --tls-key me.key --tls-ca ca.crt status
  kvtierctl scales import Qwen3-8B-NVFP4 --out scales.json
  kvtierctl demo --daemon build/release/daemon/kvtierd --dir /tmp/kvtier-demo

Exit status: 0 ok, 1 failed (wrong bytes too), 2 usage, 3 daemon unreachable, 4 not found,
124 timeout.)";

constexpr const char* kReplayFooter = R"(
Examples:
  kvtierctl replay agents.jsonl.xz --progress            as fast as possible, every byte checked
  kvtierctl replay agents.jsonl.xz --requests 500 --simulate
  kvtierctl replay --generate --speed 10 --layout medium

The daemon's tiers should be smaller than what the trace holds, or nothing moves.)";

constexpr const char* kEvalFooter = R"(
Examples:
  kvtierctl eval-kv                                      all families, all methods
  kvtierctl eval-kv --synthetic out_bias --methods nvfp4,nvfp4_mean_smooth_4over6
  kvtierctl eval-kv --k k.npy --v v.npy --q q.npy --plot errors.svg
  kvtierctl eval-kv --safetensors dump.safetensors --names layers.3.k,layers.3.v

Needs no daemon. K and V are [tokens, kv heads, head_dim], Q is [queries, query heads, head_dim].)";

// CLI::Range lets NaN pass.
std::string CheckIsNumber(const std::string& text) {
  return text.find_first_of("nN") == std::string::npos ? "" : "not a number";
}

constexpr const char* kSimulateFooter = R"(
Examples:
  kvtierctl simulate agents.jsonl.xz
  kvtierctl simulate agents.jsonl.xz --hints --what-if curve.svg
  kvtierctl simulate agents.jsonl.xz --sizes 512GiB --codec bf16,fp8,nvfp4 --concurrency 8,16,32

A line of TRACE is a request, {"timestamp": 1500, "hash_ids": [0, 1, 2]}: ms from the start, and the
prompt's blocks in order. Optional: "input_length" (tokens), "session", "api" (ms of work).)";

// What the command line says.
struct CommandLine {
  GlobalOptions global;
  uint32_t contexts_limit = 0;
  std::string where_context;
  std::string where_key;
  std::string why_miss_key;
  WatchCommand watch;
  ReplayCommand replay;
  bool replay_generate = false;
  bool replay_no_pauses = false;
  DemoCommand demo;
  ScalesCommand scales;
  EvalCommand eval;
  SimulateCommand simulate;
  PlanCommand plan;
  DoctorCommand doctor;
};

void AddGlobalOptions(CLI::App* app, GlobalOptions* global) {
  app->add_option("--run-dir", global->run_dir, "Directory of the daemon's sockets")
      ->envname("KVTIER_RUN_DIR")
      ->capture_default_str();
  app->add_option("--address", global->tcp.address,
                  "HOST:PORT of a daemon on TCP, instead of its sockets")
      ->envname("KVTIER_ADDRESS");
  app->add_option("--tls-cert", global->tcp.cert_path, "With --address: your certificate, PEM")
      ->envname("KVTIER_TLS_CERT");
  app->add_option("--tls-key", global->tcp.key_path, "Its key, PEM")->envname("KVTIER_TLS_KEY");
  app->add_option("--tls-ca", global->tcp.ca_path, "Authority of the daemon's certificate, PEM")
      ->envname("KVTIER_TLS_CA");
  app->add_option("--tls-server-name", global->tcp.server_name,
                  "Name in the daemon's certificate, if it is not HOST")
      ->envname("KVTIER_TLS_SERVER_NAME");
  app->add_flag("--json", global->json, "Print JSON, with a stable schema");
  app->add_option("--timeout", global->timeout_seconds, "Seconds that one call may take")
      ->check(CLI::Range(0.01, 86'400.0))
      ->check(CheckIsNumber)
      ->capture_default_str();
}

void AddLooking(CLI::App* app, CommandLine* line) {
  app->add_subcommand("status", "The daemon as a whole: version, uptime, health");
  app->add_subcommand("tiers", "Occupancy, hits and traffic of every tier and link");
  app->add_subcommand("tenants",
                      "What each tenant has of every tier, may have, and lost to others");
  app->add_subcommand("contexts", "Contexts, most recently used first")
      ->add_option("--limit", line->contexts_limit, "At most so many, up to 10000")
      ->check(CLI::Range(1U, 10'000U));
  CLI::App* where =
      app->add_subcommand("where", "Every replica of a context's blocks, or of a key");
  CLI::Option_group* which = where->add_option_group("Which");
  which->add_option("--context", line->where_context, "Name of a context");
  which->add_option("--key", line->where_key, "Key of a block, 64 hexadecimal digits");
  which->require_option(1);
  app->add_subcommand("why-miss", "Why a block is not found")
      ->add_option("key", line->why_miss_key, "Key of the block, 64 hexadecimal digits")
      ->required();
  CLI::App* watch = app->add_subcommand(
      "watch", "Blocks of this user's tenant as they are stored and removed, tier by tier");
  watch->add_option("--seconds", line->watch.seconds, "End after so many; 0: do not")
      ->check(CLI::Range(0.0, 86'400.0))
      ->check(CheckIsNumber)
      ->capture_default_str();
  watch->add_flag("--snapshot", line->watch.snapshot_only, "Only what is stored now");
  app->add_subcommand("version", "The version of kvtierctl");
}

void AddReplay(CLI::App* app, CommandLine* line) {
  ReplayCommand* replay = &line->replay;
  CLI::App* command =
      app->add_subcommand("replay", "Drive the daemon with a workload and check every byte");
  command->footer(kReplayFooter);
  CLI::Option_group* what = command->add_option_group("Workload");
  what->add_option("TRACE", replay->trace_path, "Recorded workload: JSON lines, plain or .xz");
  what->add_flag("--generate", line->replay_generate, "The built-in workload of agents");
  what->require_option(1);
  command->add_option("--sessions", replay->generated_session_count, "Agents of --generate")
      ->check(CLI::Range(1U, 10'000U))
      ->capture_default_str();
  command->add_option("--requests", replay->request_count_max, "Only the first so many; 0: all")
      ->capture_default_str();
  command->add_option("--layout", replay->layout, "Shape of a block: small, medium or large")
      ->check(CLI::IsMember({"small", "medium", "large"}))
      ->capture_default_str();
  command
      ->add_option("--speed", replay->speed,
                   "Virtual seconds in one second; 0: as fast as possible, in order")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--seed", replay->seed, "Of queries and keys (and --generate)")
      ->capture_default_str();
  command
      ->add_option("--decode-every", replay->decode_every,
                   "Check one decode step in so many requests; 0: none")
      ->capture_default_str();
  command
      ->add_option("--resume-ahead-ms", replay->resume_ahead_ms,
                   "Virtual time from a resume to the request")
      ->capture_default_str();
  command->add_flag("--no-pauses", line->replay_no_pauses, "Do not pause and resume contexts");
  command
      ->add_option("--restart-timeout-ms", replay->restart_timeout_ms,
                   "How long to wait for a daemon that went away")
      ->capture_default_str();
  command->add_option("--cache-mib", replay->oracle_cache_mib, "Memory for recomputed blocks")
      ->check(CLI::Range(1U, 1U << 20))
      ->capture_default_str();
  command->add_flag("--progress", replay->progress, "Report progress on standard error");

  CLI::Option_group* simulation = command->add_option_group("Simulation");
  simulation->add_flag("--simulate", replay->simulate,
                       "Compare with an exact simulation; needs a daemon without blocks");
  simulation
      ->add_option("--simulate-tolerance", replay->simulate_tolerance,
                   "Allowed difference of the token hit rate of each tier and of all")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  simulation->add_option("--high-watermark", replay->high_watermark, "Of the daemon's tiers")
      ->check(CLI::Range(0.01, 1.0))
      ->capture_default_str();
  simulation->add_option("--low-watermark", replay->low_watermark, "Of the daemon's tiers")
      ->check(CLI::Range(0.01, 1.0))
      ->capture_default_str();
  simulation->add_option("--admission", replay->admission, "The daemon's nvme.admission")
      ->check(CLI::IsMember({"all", "seen_again"}))
      ->capture_default_str();
  simulation->add_option("--eviction", replay->eviction, "The daemon's policy.eviction")
      ->check(CLI::IsMember({"lru", "hazard"}))
      ->capture_default_str();
}

void AddDemo(CLI::App* app, DemoCommand* demo) {
  CLI::App* command = app->add_subcommand(
      "demo", "Start a daemon, pause and resume agents, kill -9 it, and check what comes back");
  command->add_option("--daemon", demo->daemon_path, "The kvtierd to run")
      ->required()
      ->check(CLI::ExistingFile);
  command->add_option("--dir", demo->dir, "For its sockets, data and log; created if missing")
      ->required();
  command->add_option("--seed", demo->seed, "Of the workload")->capture_default_str();
  command->add_flag("!--no-hints", demo->hints, "Do not end with what to try next");
}

void AddEval(CLI::App* app, EvalCommand* eval) {
  CLI::App* command = app->add_subcommand(
      "eval-kv", "What storing K and V in fewer bits does to attention, method by method");
  command->footer(kEvalFooter);
  CLI::Option* k = command->add_option("--k", eval->k_path, "Keys, .npy");
  CLI::Option* v = command->add_option("--v", eval->v_path, "Values, .npy");
  CLI::Option* q = command->add_option("--q", eval->q_path, "Queries, .npy; else synthetic ones");
  k->needs(v);
  v->needs(k);
  q->needs(k);
  command->add_flag("--uint16-is-bf16", eval->uint16_is_bf16, "Read .npy files of uint16 as BF16")
      ->needs(k);
  CLI::Option* safetensors =
      command->add_option("--safetensors", eval->safetensors_path, "Keys, values (and queries)");
  command->add_option("--names", eval->tensor_names, "Tensors K,V or K,V,Q; default k,v and q")
      ->needs(safetensors);
  CLI::Option* synthetic = command->add_option(
      "--synthetic", eval->families, "gauss, out_zm, out_bias, t4, t3_out, with commas, or all");
  CLI::Option* example =
      command->add_flag("--example", eval->example, "A worked example: keys per channel or token");
  safetensors->excludes(k, synthetic, example);
  k->excludes(synthetic, example);
  synthetic->capture_default_str()->excludes(example);
  command->add_option("--methods", eval->methods, "Only these, with commas between")
      ->excludes(example);
  command
      ->add_option("--queries", eval->query_count,
                   "Synthetic queries of a kv head, or last ones of each query head of a dump")
      ->check(CLI::Range(1U, 1024U))
      ->capture_default_str();
  CLI::Option* tokens =
      command->add_option("--tokens", eval->token_count, "Of synthetic data (default 4096)")
          ->check(CLI::Range(2U, 1U << 17));
  CLI::Option* head_dim = command->add_option("--head-dim", eval->head_dim, "Of synthetic data")
                              ->check(CLI::Range(4U, 1024U))
                              ->capture_default_str();
  CLI::Option* seeds =
      command->add_option("--seeds", eval->seed_count, "Draws of synthetic data (default 6)")
          ->check(CLI::Range(1U, 10'000U));
  CLI::Option* sigma =
      command->add_option("--sigma", eval->sigma, "Multiplies synthetic K and V; scores stay")
          ->check(CLI::Range(1e-9, 1e9))
          ->check(CheckIsNumber)
          ->capture_default_str();
  CLI::Option* quick = command->add_flag("--quick", eval->quick, "1024 tokens and 2 seeds");
  for (CLI::Option* option : {tokens, head_dim, seeds, sigma, quick}) {
    option->excludes(k, safetensors, example);
  }
  command->add_option("--plot", eval->plot_path, "Also draw the errors into this .svg")
      ->excludes(example);
}

void AddSimulate(CLI::App* app, SimulateCommand* simulate) {
  CLI::App* command = app->add_subcommand(
      "simulate", "What a cache would hit on a recorded workload, policy by policy; no daemon");
  command->footer(kSimulateFooter);
  command->add_option("TRACE", simulate->trace_path, "Recorded workload: JSON lines, plain or .xz")
      ->required();
  command->add_option("--requests", simulate->request_count_max, "Only the first so many; 0: all")
      ->capture_default_str();
  command->add_option("--sizes", simulate->sizes, "Shares of all blocks, or bytes, with commas")
      ->capture_default_str();
  command->add_option("--codec", simulate->codecs, "bf16, fp8, nvfp4, with commas; for bytes")
      ->capture_default_str();
  command->add_option("--token-bytes", simulate->token_bytes, "K and V of one token in BF16")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 30))
      ->capture_default_str();
  command
      ->add_option("--concurrency", simulate->concurrency,
                   "Contexts at once instead of as recorded, with commas")
      ->delimiter(',')
      ->check(CLI::Range(1U, 1'000'000U));
  command->add_flag("--hints", simulate->hints,
                    "Clients say that they finished, and within 25 % when they come back");
  command->add_flag("--room-first", simulate->make_room_first,
                    "Evict before the blocks of a request come, not after it");
  command->add_option("--what-if", simulate->what_if_path,
                      "Sweep sizes (or --concurrency) and draw the curves into this .svg");
}

absl::Status RunCommand(const CLI::App& app, const CommandLine& line) {
  const GlobalOptions& global = line.global;
  if (app.got_subcommand("status")) return ShowStatus(global);
  if (app.got_subcommand("tiers")) return ShowTiers(global);
  if (app.got_subcommand("tenants")) return ShowTenants(global);
  if (app.got_subcommand("contexts")) return ShowContexts(global, line.contexts_limit);
  if (app.got_subcommand("where")) return ShowWhere(global, line.where_context, line.where_key);
  if (app.got_subcommand("why-miss")) return ShowWhyMiss(global, line.why_miss_key);
  if (app.got_subcommand("watch")) return RunWatch(global, line.watch);
  if (app.got_subcommand("replay")) {
    ReplayCommand replay = line.replay;
    replay.pauses = !line.replay_no_pauses;
    return RunReplay(global, replay);
  }
  if (app.got_subcommand("eval-kv")) return RunEval(global, line.eval);
  if (app.got_subcommand("demo")) return RunDemo(global, line.demo);
  if (app.got_subcommand("simulate")) return RunSimulate(global, line.simulate);
  if (app.got_subcommand("plan")) return RunPlan(line.plan, global.json);
  if (app.got_subcommand("doctor")) return RunDoctor(line.doctor, global.json);
  if (app.got_subcommand("scales")) return RunScales(app, line.scales, global.json);
  return ShowVersion(global);
}

int Main(int argc, char** argv) {
  CLI::App app("Looks into a kvtierd, and drives it with recorded workloads.", "kvtierctl");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("kvtierctl ") + kVersion);
  // Global options may stand before or after the command.
  app.fallthrough();
  CommandLine line;
  AddGlobalOptions(&app, &line.global);
  AddLooking(&app, &line);
  AddReplay(&app, &line);
  AddDemo(&app, &line.demo);
  AddScales(&app, &line.scales);
  AddEval(&app, &line.eval);
  AddSimulate(&app, &line.simulate);
  AddPlan(&app, &line.plan);
  AddDoctor(&app, &line.doctor);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 would say that a command is missing, and not which word is none.
    const std::vector<std::string> rest = app.remaining();
    if (error.get_name() == "RequiredError" && app.get_subcommands().empty() && !rest.empty()) {
      std::fprintf(stderr, "kvtierctl: no command \"%s\"; --help lists them\n",
                   rest.front().c_str());
      return static_cast<int>(ExitCode::kUsage);
    }
    return app.exit(error) == 0 ? 0 : static_cast<int>(ExitCode::kUsage);
  }
  const absl::Status status = RunCommand(app, line);
  if (!status.ok()) {
    const std::string reason = ReasonOf(status);
    std::fprintf(stderr, "kvtierctl: %s%s%s%s\n", std::string(FromAbsl(status.message())).c_str(),
                 reason.empty() ? "" : " (", reason.c_str(), reason.empty() ? "" : ")");
  }
  return static_cast<int>(ExitCodeOf(status));
}

}  // namespace
}  // namespace kvtier::ctl

int main(int argc, char** argv) { return kvtier::ctl::Main(argc, argv); }
