#include "tools/compare/request/request.h"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <set>
#include <span>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/text.h"
#include "tools/compare/request/arguments.h"
#include "tools/compare/request/named.h"
#include "tools/launch/cpu.h"
#include "tools/launch/ranks.h"
#include "tools/planning/strategy_list.h"
#include "tools/probe/divergence.h"
#include "tools/programs/attention_choice.h"
#include "tools/programs/run_checks.h"

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
  config.val_fraction = 0;
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

// The CPU is chosen once in a process, so another one tries. What it says when it cannot; empty if
// it can.
std::string cpu_error(const CpuConfig& cpu) {
  std::array<int, 2> ends{};
  require<engine::DeviceError>(::pipe(ends.data()) == 0, "[cpu] expected a pipe, got none");
  const pid_t child = ::fork();
  if (child == 0) {
    std::string message;
    try {
      choose_cpu(cpu);
    } catch (const std::exception& e) {
      message = e.what();
    }
    [[maybe_unused]] const auto written = ::write(ends[1], message.data(), message.size());
    std::_Exit(0);
  }
  engine::FileDescriptor in(ends[0]);
  engine::FileDescriptor(ends[1]).close();
  require<engine::DeviceError>(child > 0, "[cpu] expected a process to start, got none");
  std::string message;
  std::array<char, 512> part{};
  for (ssize_t n = 0; (n = ::read(in.get(), part.data(), part.size())) > 0;) {
    message.append(part.data(), static_cast<std::size_t>(n));
  }
  int status = 0;
  const bool has_ended = ::waitpid(child, &status, 0) == child;
  if (!has_ended || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
    return "[cpu] expected an answer, got none";
  return message;
}

// What the configurations share is looked at once.
class Checks {
 public:
  void cpu(const CpuConfig& cpu) {
    const std::string key = fmt::format("{} {} {}", cpu.isa, cpu.gemm, cpu.threads_per_rank);
    if (!cpus_.insert(key).second) return;
    const std::string message = cpu_error(cpu);
    require(message.empty(), "{}", message);
  }
  void data(const TransformerConfig& config, const ModelConfig& model) {
    const std::string key =
        fmt::format("{}\n{}\n{} {} {} {} {} {}", config.data_path, config.init_from,
                    config.model.seq, model.seq, model.vocab, config.val_fraction,
                    static_cast<int>(config.data_order), static_cast<int>(config.data_format));
    if (!data_.insert(key).second) return;
    for (const std::string& line : config.check_data(model)) {
      if (warnings_.insert(line).second) fmt::print(stderr, "warning: {}\n", line);
    }
  }
  /// For Request::inputs.
  void files(const std::vector<RunFile>& files) {
    for (const RunFile& file : files) {
      if (paths_.insert(file.path).second) inputs_.push_back(file);
    }
  }
  const std::vector<RunFile>& inputs() const { return inputs_; }

 private:
  std::set<std::string> cpus_, data_, warnings_, paths_;
  std::vector<RunFile> inputs_;
};

void check(Configuration& c, const std::string& probe, const FlagSet& flags, Checks& checks) {
  TransformerConfig& config = c.config;
  require(config.save_final.empty(),
          "[config] expected save.final to be empty, as nothing says whose model to keep, got {}",
          config.save_final);
  require(config.log.tensorboard.empty(),
          "[config] expected no log.tensorboard, as configurations would share it, got '{}'",
          config.log.tensorboard);
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
  const Ranks ranks = Ranks::choose(config);
  check_device(config, flags, ranks);
  if (!config.plan)
    check_pins(config.cpu, ranks.local.num_on_host);  // a plan may be of another machine
  c.num_ranks = ranks.size;
  c.shard_ranks = config.fsdp_options(ranks.size).placement.shard_ranks;
  c.on_gpu = ranks.num_gpus > 0;
  check_attention(config, c.on_gpu);
  c.sums_in_rank_order = !ranks.nccl || config.parallel.canonical;
  c.model = config.model_config();
  config.check_blocks(c.model.layers);
  checks.data(config, c.model);
  checks.files(config.files_read(flags, config.text_path()));
}

// What is in force, without where it goes: the folder may be moved, and goes on from there.
void record(Configuration& c) {
  c.config.out = "runs/train_transformer";
  c.config.data_path = resolve_user_path(c.config.data_path);
  c.config.init_from = resolve_user_path(c.config.init_from);
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
  copy.log.trace.clear();
  copy.log.trace_steps = TrainConfig().log.trace_steps;
  c.toml = remark + all.to_toml();
}

// `probe`: where the training is to leave a record; empty: nowhere.
Configuration make(const std::vector<std::string>& arguments, const Overrides& overrides,
                   const std::string& probe, Checks& checks, std::ostream& out) {
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
  check(c, probe, flags, checks);
  c.fitted = static_cast<const TrainConfig&>(c.config);
  record(c);
  return c;
}

Configuration make_named(const std::vector<std::string>& arguments, const Overrides& overrides,
                         const std::string& probe, Checks& checks, std::ostream& out) {
  return named(name_of(overrides), [&] { return make(arguments, overrides, probe, checks, out); });
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
  Checks checks;
  for (const std::string& side : sides) {
    if (num_records > 0) {
      request.records.push_back(record_path(side));
      checks.files({{"find_divergence", request.records.back()}});
      continue;
    }
    const Overrides overrides = parse_overrides(side);
    std::vector<std::string> base = arguments;
    for (const auto& [key, value] : overrides) base = without(base, key);
    request.configurations.push_back(make_named(base, overrides, "probe.jsonl", checks, out));
  }
  if (!flags.config_path().empty()) checks.files({{"config", flags.config_path()}});
  request.inputs = checks.inputs();
  if (num_records > 0) return;
  request.inputs.push_back({"trainer", request.compare.trainer});
  check_same_training(request.configurations[0].options, request.configurations[1].options);
}

}  // namespace

void CompareConfig::add_to(FlagSet& flags) {
  flags.add(
      "strategies", &strategies,
      {.help = "values of parallel.strategy to compare, with commas between, or all; the first is "
               "the baseline; hsdp:2 is hsdp with parallel.shard_ranks=2, and so for other "
               "hybrids; empty: parallel.strategy alone"});
  flags.add("sweep", &sweep,
            {.help = "key=value,value,...: every value of an option of the training with every "
                     "other; several, apart by spaces or as several flags"});
  flags.add("find_divergence", &find_divergence,
            {.help = "--find-divergence A B: instead of comparing losses, name the first tensor of "
                     "which A and B have different bits; each is a strategy, options as "
                     "'key=value key=value' over those of this command, or a file of --log.probe"});
  flags.add(
      "rounds", &rounds,
      {.help = "how often all are trained, in an order drawn for each round; one shows parity, "
               "while to tell which is faster two configurations need 6, four 8, eight 11",
       .min = 1,
       .max = 1000});
  flags.add("warmup_steps", &warmup_steps,
            {.help = "first steps of each training that medians leave out", .min = 0});
  flags.add(
      "tolerance", &tolerance,
      {.help = "largest difference of a step's loss between configurations of one training in "
               "another arithmetic; within an arithmetic bits must be equal",
       .min = 0});
  flags.add("resume", &resume,
            {.help = "keep what an interrupted comparison in the output folder has finished, and "
                     "train the rest"});
  flags.add("report", &report,
            {.help = "file of the page; empty: report.html in the output folder"});
  flags.add("trainer", &trainer,
            {.help = "program that trains, as train_transformer does; relative to where this one "
                     "starts, as `bazel run` lays it there"});
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
  std::vector<SweepAxis> axes = parse_sweep(request.compare.sweep);
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
  Checks checks;
  std::set<std::string> folders;
  for (const Overrides& overrides : combinations(axes)) {
    const std::string name = name_of(overrides);
    request.configurations.push_back(make_named(arguments, overrides, "", checks, out));
    require(folders.insert(folder_name_of(name)).second,
            "[sweep] expected names that differ in letters and digits, got {} again",
            engine::escaped(name));
    require(request.only_plans ||
                request.compare.warmup_steps < request.configurations.back().config.train.steps,
            "[compare] expected warmup_steps below train.steps={}, got {} (configuration {})",
            request.configurations.back().config.train.steps, request.compare.warmup_steps,
            engine::escaped(name));
  }
  request.inputs = checks.inputs();
  request.inputs.push_back({"trainer", request.compare.trainer});
  return request;
}

std::vector<std::string> trace_arguments(const Configuration& c, const std::string& path) {
  if (c.config.log.trace.empty()) return {};
  return {"--log.trace=" + path, "--log.trace_steps=" + c.config.log.trace_steps};
}

}  // namespace tessera::tools
