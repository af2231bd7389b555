#include "tools/compare/request/request.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <set>
#include <span>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/compare/request/arguments.h"
#include "tools/compare/request/named.h"
#include "tools/compare/request/shared_checks.h"
#include "tools/launch/cpu.h"
#include "tools/launch/launcher.h"
#include "tools/machine/environment.h"
#include "tools/planning/strategy_list.h"
#include "tools/probe/divergence.h"
#include "tools/programs/run/run_checks.h"
#include "tools/train/graph_choice.h"

namespace tessera::tools {
namespace {

using engine::require;

constexpr const char* kAbout =
    "Trains the bundled transformer once for each configuration, with the same seed and data, one "
    "after the other, and says whether they give the same numbers, and what each costs. All "
    "options of train_transformer are those of every training. --plan says in a table what each "
    "would do, and trains none.";

// Short, so that a comparison takes minutes: speed and bits show in a few steps.
TransformerConfig defaults() {
  TransformerConfig config;
  config.train.steps = 20;
  config.train.warmup = 5;
  config.train.lr = 1e-3;
  config.log.val_every = 0;
  config.data.val_fraction = 0;
  config.sample_tokens = 0;
  config.audit = true;                   // which leaves what was planned in the log
  config.checkpoint.is_offered = false;  // a training that is interrupted begins again
  config.out = CompareConfig().out;
  return config;
}

bool parse(FlagSet& flags, const std::vector<std::string>& arguments, std::ostream& out) {
  std::vector<const char*> pointers;
  for (const std::string& argument : arguments) pointers.push_back(argument.c_str());
  return flags.parse(pointers, out);
}

// Where the ranks of `c` will be.
Ranks place(Configuration& c, const TrainingLaunch& launch) {
  ParallelConfig& parallel = c.config.parallel;
  if (c.config.plan && launch.words.words.empty()) return c.ranks();
  if (launch.words.words.empty() || parallel.launcher == LauncherChoice::kThreads) {
    check_started_alone(parallel.launcher);
    c.launch = find_launch(environment(), parallel.launcher);
  } else {
    require(parallel.launcher == LauncherChoice::kAuto,
            "[launch] expected parallel.launcher=auto, or threads for trainings in one process, "
            "with launch, got {}",
            name_of(parallel.launcher));
    c.launch = launch.launch;
  }
  const Ranks ranks = c.ranks();
  c.launch_text = ranks.launch_str();
  ranks.place(parallel);
  return ranks;
}

void check(Configuration& c, const std::string& probe, const TrainingLaunch& launch,
           const FlagSet& flags, SharedChecks& checks) {
  TransformerConfig& config = c.config;
  require(!config.save.is_on(),
          "[config] expected save.final to be empty, as nothing says whose model to keep, got {}",
          config.save.final);
  require(!flags.is_given("save.shard_gib"),
          "[config] expected no save.shard_gib, as no model is kept");
  require(config.log.tensorboard.empty(),
          "[config] expected no log.tensorboard, as configurations would share it, got '{}'",
          config.log.tensorboard);
  require(config.val_prompts.empty(),
          "[config] expected no log.val_prompts, as a comparison says no texts, got '{}'",
          config.val_prompts);
  require(!config.plan || config.log.trace.empty(),
          "[config] expected log.trace with trainings, or with the program plan, got it with plan");
  require(config.log.jsonl.empty(),
          "[config] expected log.jsonl to be empty, as each training has a log of its own, got {}",
          config.log.jsonl);
  require(config.log.probe == probe && config.log.probe_values.empty(),
          "[config] expected neither log.probe nor log.probe_values, as --find-divergence names "
          "what it records, got '{}'",
          config.log.probe == probe ? config.log.probe_values : config.log.probe);
  require(config.train.steps >= 1, "[config] expected at least 1 step to compare, got {}",
          config.train.steps);
  config.validate(flags);
  checks.cpu(config.cpu);
  const Ranks ranks = place(c, launch);
  check_device(config, flags, ranks);
  if (!config.plan)
    check_pins(config.cpu, ranks.local.num_on_host);  // a plan may be of another machine
  c.num_ranks = ranks.size;
  c.shard_ranks = config.fsdp_options(ranks.size).placement.shard_ranks;
  c.on_gpu = ranks.num_gpus > 0;
  config.check_attention(c.on_gpu);
  c.sums_in_rank_order = ranks.sums_in_rank_order(config.parallel);
  c.model = config.model_config();
  config.check_blocks(c.model.layers);
  checks.data(config, c.model);
  static_cast<void>(uses_graphs(config, ranks.size, c.on_gpu));  // data have a say in it
  checks.files(config.files_read(flags, config.data.run_files(config.data.sources())));
}

// What is in force, without where it goes: the folder may be moved, and goes on from there.
void record(Configuration& c, const std::string& launch) {
  c.config.out = "runs/train_transformer";
  TokenDataConfig& data = c.config.data;
  data.path = resolve_user_path(data.path);
  data.tokenizer = resolve_user_path(data.tokenizer);
  if (!data.mix.empty()) data.mix = mix_option(parse_mix(data.mix));
  c.config.init_from = resolve_user_path(c.config.init_from);
  c.config.lora.from = resolve_user_path(c.config.lora.from);
  FlagSet all("train_transformer", "");
  TransformerConfig copy = c.config;
  copy.add_to(all);
  const nlohmann::json options = nlohmann::json::parse(all.to_json());
  for (const auto& [key, value] : options.items()) c.options[key] = value.dump();
  // A trace costs time, so a comparison with traces must not go on without them: the file says so.
  std::string remark;
  if (!copy.log.trace.empty()) {
    remark = fmt::format("# Traced: --log.trace=FILE --log.trace_steps={} does so again.\n",
                         copy.log.trace_steps);
  }
  // Nor must one go on with another launcher.
  if (!launch.empty() && !c.launch_text.empty()) {
    remark += fmt::format("# Launched: {} PROGRAM --config=FILE does so again.\n",
                          engine::escaped(launch));
  }
  copy.log.trace.clear();
  copy.log.trace_steps = TrainConfig().log.trace_steps;
  c.toml = remark + all.to_toml();
}

// `probe`: where the training is to leave a record; empty: nowhere.
Configuration make(const std::vector<std::string>& arguments, const Overrides& overrides,
                   const std::string& probe, const TrainingLaunch& launch, SharedChecks& checks,
                   std::ostream& out) {
  Configuration c{
      .name = name_of(overrides), .overrides = options_of(overrides), .config = defaults()};
  c.config.log.probe = probe;
  std::vector<std::string> of_training;
  for (const auto& [key, value] : c.overrides) {
    of_training.push_back(fmt::format("--{}={}", key, value));
  }
  {
    // Only the trainer's options can be swept.
    TransformerConfig ignored = defaults();
    FlagSet flags("compare", kAbout);
    ignored.add_to(flags);
    parse(flags, of_training, out);
  }
  CompareConfig compare;
  FlagSet flags("compare", kAbout);
  compare.add_to(flags);
  c.config.add_to(flags);
  std::vector<std::string> all = arguments;
  all.insert(all.end(), of_training.begin(), of_training.end());
  parse(flags, all, out);
  check(c, probe, launch, flags, checks);
  c.fitted = static_cast<const TrainConfig&>(c.config);
  record(c, compare.launch);
  return c;
}

Configuration make_named(const std::vector<std::string>& arguments, const Overrides& overrides,
                         const std::string& probe, const TrainingLaunch& launch,
                         SharedChecks& checks, std::ostream& out) {
  return named(name_of(overrides),
               [&] { return make(arguments, overrides, probe, launch, checks, out); });
}

void check_launch_is_used(const Request& request) {
  const bool is_used = std::ranges::any_of(request.configurations, [](const Configuration& c) {
    return c.config.parallel.launcher != LauncherChoice::kThreads;
  });
  require(request.compare.launch.empty() || is_used,
          "[launch] expected a training that is several processes, got parallel.launcher=threads "
          "in all");
}

// What plans have no use for.
void check_needs_trainings(const Request& request, const FlagSet& flags) {
  for (const char* key :
       {"find_divergence", "rounds", "warmup_steps", "tolerance", "resume", "report", "trainer"}) {
    require(!request.only_plans || !flags.is_given(key),
            "[compare] expected {} without plan only, got it with: nothing is trained", key);
  }
}

void read_divergence(Request& request, const std::vector<std::string>& arguments,
                     const FlagSet& flags, std::ostream& out) {
  for (const char* key : {"strategies", "sweep", "rounds", "resume", "report", "tolerance"}) {
    require(!flags.is_given(key),
            "[find-divergence] expected two configurations alone, got {} as well", key);
  }
  const std::string& pair = request.compare.find_divergence;
  const std::size_t middle = pair.find(kPairSeparator);
  require(middle != std::string::npos,
          "[find-divergence] expected two configurations, as --find-divergence A B, got {}",
          engine::excerpt(pair));
  const std::array sides = {pair.substr(0, middle), pair.substr(middle + 1)};
  const auto num_records = std::ranges::count_if(sides, is_record_path);
  require(num_records != 1,
          "[find-divergence] expected two configurations or two records, got one of each ({}, {})",
          engine::excerpt(sides[0]), engine::excerpt(sides[1]));
  for (const std::string& argument : arguments) {
    const std::string key = argument.substr(0, argument.find('='));
    const bool is_unused = key.starts_with("--") && key != "--find_divergence" && key != "--out";
    require(num_records == 0 || !is_unused,
            "[find-divergence] expected two records alone, got {} as well: nothing is trained",
            key);
  }
  if (num_records == 0) request.launch = ask_launcher(request.compare.launch);
  SharedChecks checks;
  for (const std::string& side : sides) {
    if (num_records > 0) {
      request.records.push_back(record_path(side));
      checks.files({{"find_divergence", request.records.back()}});
      continue;
    }
    const Overrides overrides = parse_overrides(side);
    std::vector<std::string> base = arguments;
    for (const auto& [key, value] : overrides) base = without(base, key);
    request.configurations.push_back(
        make_named(base, overrides, "probe.jsonl", request.launch, checks, out));
  }
  if (!flags.config_path().empty()) checks.files({{"config", flags.config_path()}});
  request.inputs = checks.inputs();
  if (num_records > 0) return;
  check_launch_is_used(request);
  request.inputs.push_back({"trainer", request.compare.trainer});
  check_same_training(request.configurations[0].options, request.configurations[1].options);
}

}  // namespace

Ranks Configuration::ranks() const {
  const bool is_planned = config.plan && launch.by == LauncherChoice::kThreads;
  return is_planned ? Ranks::planned(config) : Ranks::choose(config, launch);
}

Request read_request(int argc, const char* const* argv, std::ostream& out) {
  const std::span<const char* const> given(argv, static_cast<std::size_t>(argc));
  const std::vector<std::string> arguments = joined_arguments(given.subspan(given.empty() ? 0 : 1));
  Request request;
  TransformerConfig config = defaults();
  FlagSet flags("compare", kAbout);
  request.compare.add_to(flags);
  config.add_to(flags);
  if (!parse(flags, arguments, out)) return {};
  request.compare.out = config.out;
  request.only_plans = config.plan;
  check_needs_trainings(request, flags);
  if (request.finds_divergence()) {
    read_divergence(request, arguments, flags, out);
    return request;
  }
  std::vector<SweepAxis> axes = parse_sweep(request.compare.sweep, request.only_plans);
  const bool sweeps_strategy =
      std::ranges::any_of(axes, [](const SweepAxis& a) { return a.key == "parallel.strategy"; });
  const bool asks = flags.is_given("strategies");
  require(!asks || request.compare.strategies.empty() ||
              !(sweeps_strategy || flags.is_given("parallel.strategy")),
          "[compare] expected strategies or parallel.strategy, got both");
  const bool is_one = sweeps_strategy || (!asks && flags.is_given("parallel.strategy"));
  if (!request.compare.strategies.empty() && !is_one) {
    axes.insert(axes.begin(),
                parse_axis("parallel.strategy", strategies_of(request.compare.strategies)));
  }
  request.launch = ask_launcher(request.compare.launch);
  SharedChecks checks;
  std::set<std::string> folders;
  for (const Overrides& overrides : combinations(axes)) {
    const std::string name = name_of(overrides);
    request.configurations.push_back(
        make_named(arguments, overrides, "", request.launch, checks, out));
    require(folders.insert(folder_name_of(name)).second,
            "[sweep] expected names that differ in letters and digits, got {} again",
            engine::escaped(name));
    require(request.only_plans ||
                request.compare.warmup_steps < request.configurations.back().config.train.steps,
            "[compare] expected warmup_steps below train.steps={}, got {} (configuration {})",
            request.configurations.back().config.train.steps, request.compare.warmup_steps,
            engine::escaped(name));
  }
  check_launch_is_used(request);
  request.inputs = checks.inputs();
  request.inputs.push_back({"trainer", request.compare.trainer});
  return request;
}

std::vector<std::string> trace_arguments(const Configuration& c, const std::string& path) {
  if (c.config.log.trace.empty()) return {};
  return {"--log.trace=" + path, "--log.trace_steps=" + c.config.log.trace_steps};
}

}  // namespace tessera::tools
