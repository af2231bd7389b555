// Looks at this machine as a training would find it: each line says ok, warn or FAIL, and what to
// do. Exit code 1 if something fails. With --flight FILE... it looks at a run that failed instead.
#include <sys/resource.h>

#include <cstdint>
#include <iostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tools/doctor/check.h"
#include "tools/doctor/file_checks.h"
#include "tools/doctor/flight_report.h"
#include "tools/doctor/gpu_checks.h"
#include "tools/doctor/launcher_checks.h"
#include "tools/doctor/machine_checks.h"
#include "tools/doctor/self_test.h"
#include "tools/machine/limits.h"
#include "tools/models/gpt.h"
#include "tools/train/flags.h"
#include "tools/train/main.h"

namespace tessera::tools {
namespace {

struct Config {
  bool json = false;
  bool self_test = true;
  std::string out = "runs";
  std::string data_path;
  std::string preset = "gpt2";
  std::string flight;

  void add_to(FlagSet& flags) {
    flags.add("json", &json, {.help = "one JSON object instead of lines"});
    flags.add(
        "self_test", &self_test,
        {.help = "two seconds of products and collectives, and a few on each GPU: their values "
                 "and their rates"});
    flags.add("out", &out, {.help = "folder that trainings are to write to"});
    flags.add("data.path", &data_path,
              {.help = "text or tokens to train a transformer on; empty: the bundled text"});
    flags.add(
        "model.preset", &preset,
        {.help = "model whose needs limits are compared with", .choices = gpt_preset_names()});
    flags.add("flight", &flight,
              {.help = "--flight FILE...: instead of the machine, look at what a run that failed "
                       "left, and name the rank that was late, or the call at which ranks differ"});
  }
};

// Says each line once it is known: what is looked at later may end the process.
Checks examine(const Config& config) {
  Checks checks;
  const auto add = [&](Checks more) {
    for (Check& check : more) {
      if (!config.json) std::cout << text_of(check) << std::flush;
      checks.push_back(std::move(check));
    }
  };
  const MachineLimits limits = read_limits();
  const std::int64_t num_parameters = gpt_preset(config.preset).num_parameters();
  add({check_cpu(), check_libraries(), check_cores(limits), check_memory(limits),
       check_huge_pages()});
  const Devices devices = check_devices();
  add(devices.checks);
  add({check_locked_memory(soft_limit(RLIMIT_MEMLOCK), config.preset, num_parameters,
                           devices.num_gpus > 0),
       check_open_files(soft_limit(RLIMIT_NOFILE))});
  add(check_launcher(environment()));
  add({check_text(config.data_path), check_images(),
       check_out(resolve_user_path(config.out), 4 * num_parameters)});
  // What cannot be chosen is told already.
  const bool can_compute =
      checks[0].verdict != Verdict::kFail && checks[1].verdict != Verdict::kFail;
  if (config.self_test && can_compute) {
    add(self_test(limits.usable_cores(), limits.usable_nbytes()));
    add(gpu_self_test(static_cast<int>(devices.num_gpus), devices.has_nccl));
  }
  return checks;
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
    for (const char* name : {"self_test", "out", "data.path", "model.preset"}) {
      engine::require(!flags.is_given(name),
                      "[config] expected {} without flight only, got it with: the machine is not "
                      "looked at",
                      name);
    }
    const FlightReport report = report_flight(config.flight, config.json);
    std::cout << report.text << std::flush;
    return report.finding == FlightFinding::kFinished ? 0 : 1;
  }
  const Checks checks = examine(config);
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
