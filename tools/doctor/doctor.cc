// Looks at this machine as a training would find it: each line says ok, warn or FAIL, and what to
// do, and under a launcher at the connections between its processes. Exit code 1 if something
// fails. With --flight FILE... it looks at a run that failed instead.
#include <fmt/format.h>
#include <sys/resource.h>

#include <cstdint>
#include <iostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/parameter.h"
#include "tools/cli/flags.h"
#include "tools/cli/main.h"
#include "tools/config/model_flags.h"
#include "tools/config/train_config.h"
#include "tools/doctor/check.h"
#include "tools/doctor/file_checks.h"
#include "tools/doctor/flight_report.h"
#include "tools/doctor/gpu_checks.h"
#include "tools/doctor/launcher_checks.h"
#include "tools/doctor/machine_checks.h"
#include "tools/doctor/peer_checks.h"
#include "tools/doctor/self_test.h"
#include "tools/launch/launcher.h"
#include "tools/machine/environment.h"
#include "tools/machine/limits.h"
#include "tools/models/family.h"
#include "tools/models/mlp.h"

namespace tessera::tools {
namespace {

enum class Purpose { kTransformer, kMlp };

// What the lines are about: what a trainer asks of a machine unless it is told otherwise.
struct Needs {
  std::string model;
  std::int64_t num_parameters = 0;
  int num_ranks = 1;  // on the CPU
};

struct Config {
  Purpose purpose = Purpose::kTransformer;
  bool json = false;
  bool self_test = true;
  std::string out = "runs";
  std::string data_path;
  std::string preset = measured_presets().front();
  std::string init_from;
  std::string flight;
  TrainConfig launch;  // whose options of launches alone are looked at

  void add_to(FlagSet& flags) {
    launch.parallel.deadline_s = 30;
    flags.add(
        "for", &purpose,
        EnumOption<Purpose>{"what is to be run: train_transformer, or train_mlp",
                            {{"transformer", Purpose::kTransformer}, {"mlp", Purpose::kMlp}}});
    flags.add("json", &json, {.help = "one JSON object instead of lines"});
    flags.add(
        "self_test", &self_test,
        {.help = "three seconds of products, copies and collectives, and a few on each GPU: their "
                 "values, their rates, and the --rates.* of plan"});
    flags.add("out", &out, {.help = "folder that trainings are to write to"});
    flags.add("data.path", &data_path,
              {.help = "text or tokens to train a transformer on, or the folder of images of "
                       "train_mlp; empty: those that bazel run supplies"});
    flags.add("model.preset", &preset,
              {.help = "model of train_transformer whose needs limits are compared with",
               .choices = preset_names()});
    flags.add("init.from", &init_from,
              {.help = "folder of a Hugging Face " + titles() +
                       " model whose needs limits are compared with instead"});
    flags.add("flight", &flight,
              {.help = "--flight FILE...: instead of the machine, look at what a run that failed "
                       "left, and name the rank that was late, or the call at which ranks differ"});
    launch.parallel.add_launch_to(flags);
  }
  Needs needs() const {
    if (purpose == Purpose::kTransformer) {
      ModelFlags model;
      if (init_from.empty()) model.preset = preset;
      return {init_from.empty() ? preset : init_from,
              model.config(init_from, families()).num_parameters(),
              static_cast<int>(TrainConfig().parallel.cpu_ranks)};
    }
    Needs needs{.model = "the MLP", .num_ranks = 2};
    Mlp mlp{MlpConfig{}};
    for (const engine::Parameter* p : parameters_of(mlp)) needs.num_parameters += p->shape.numel();
    return needs;
  }
};

// Says each line once it is known: what is looked at later may end the process.
Checks examine(const Config& config, const Launch& launch) {
  Checks checks;
  const auto add = [&](Checks more) {
    for (Check& check : more) {
      if (!config.json) std::cout << text_of(check) << std::flush;
      checks.push_back(std::move(check));
    }
  };
  const MachineLimits limits = read_limits();
  const Needs needs = config.needs();
  add({check_cpu(environment()), check_libraries(environment())});
  const Devices devices = check_devices();
  add({check_cores(limits, devices.num_gpus > 0 ? 1 : needs.num_ranks), check_memory(limits),
       check_huge_pages()});
  add(devices.checks);
  add({check_locked_memory(soft_limit(RLIMIT_MEMLOCK), needs.model, needs.num_parameters,
                           devices.num_gpus > 0),
       check_open_files(soft_limit(RLIMIT_NOFILE))});
  add(check_launcher(environment(), config.launch.parallel.launcher));
  if (launch.num_processes > 1) {
    add(check_peers(config.launch, launch));
  } else {
    add({check_gloo(config.launch.parallel)});
  }
  add({config.purpose == Purpose::kTransformer ? check_text(config.data_path)
                                               : check_images(config.data_path),
       check_out(resolve_user_path(config.out), 4 * needs.num_parameters)});
  // What cannot be chosen is told already.
  const bool can_compute =
      checks[0].verdict != Verdict::kFail && checks[1].verdict != Verdict::kFail;
  if (config.self_test && can_compute) {
    add(self_test(limits.usable_cores(), limits.usable_nbytes()));
    add(gpu_self_test(static_cast<int>(devices.num_gpus), devices.has_nccl));
  }
  return checks;
}

// Which of several this process is. What contradicts itself is a line of check_launcher().
Launch launch_of(const Config& config) {
  try {
    return find_launch(environment(), config.launch.parallel.launcher);
  } catch (const engine::InvalidArgument&) {
    if (config.launch.parallel.launcher != LauncherChoice::kAuto) throw;
    return {};
  }
}

// A process but the first speaks of its connections alone, and only if they fail.
Verdict answer_first(const Config& config, const Launch& launch) {
  const Checks checks = check_peers(config.launch, launch);
  for (const Check& check : checks) {
    std::cerr << fmt::format("process {}: {}", launch.process, text_of(check));
  }
  return verdict_of(checks);
}

int run(int argc, char** argv) {
  FlagSet flags("doctor",
                "Looks at this machine as a training would find it, and says what to do.");
  Config config;
  config.add_to(flags);
  const std::vector<std::string> joined =
      join_flight_files(std::span(argv, static_cast<std::size_t>(argc)).subspan(1));
  std::vector<const char*> arguments;
  for (const std::string& argument : joined) arguments.push_back(argument.c_str());
  if (!flags.parse(arguments, std::cout)) return 0;
  if (!config.flight.empty()) {
    for (const char* name : {"for", "self_test", "out", "data.path", "model.preset", "init.from",
                             "parallel.launcher", "parallel.transport", "parallel.address",
                             "parallel.interface", "parallel.insecure", "parallel.deadline_s"}) {
      engine::require(!flags.is_given(name),
                      "[config] expected {} without flight only, got it with: the machine is not "
                      "looked at",
                      name);
    }
    const FlightReport report = report_flight(config.flight, config.json);
    std::cout << report.text << std::flush;
    return report.finding == FlightFinding::kFinished ? 0 : 1;
  }
  engine::require(config.purpose == Purpose::kTransformer || !flags.is_given("model.preset"),
                  "[config] expected model.preset with for=transformer only, got {} with for=mlp",
                  config.preset);
  engine::require(config.purpose == Purpose::kTransformer || config.init_from.empty(),
                  "[config] expected init.from with for=transformer only, got {} with for=mlp",
                  config.init_from);
  engine::require(config.init_from.empty() || !flags.is_given("model.preset"),
                  "[config] expected model.preset or init.from, got both: {} and {}", config.preset,
                  config.init_from);
  const Launch launch = launch_of(config);
  for (const char* name :
       {"parallel.transport", "parallel.address", "parallel.insecure", "parallel.deadline_s"}) {
    engine::require(launch.num_processes > 1 || !flags.is_given(name),
                    "[config] expected {} where a launcher has started this process, got it "
                    "without one",
                    name);
  }
  if (launch.process > 0) return answer_first(config, launch) == Verdict::kFail ? 1 : 0;
  const Checks checks = examine(config, launch);
  std::cout << (config.json ? json_of(checks) : summary_of(checks)) << std::flush;
  return verdict_of(checks) == Verdict::kFail ? 1 : 0;
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  int verdict = 0;
  const int error = tessera::tools::run_main([&] { verdict = tessera::tools::run(argc, argv); });
  return error != 0 ? error : verdict;
}
