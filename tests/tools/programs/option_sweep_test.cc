// Every option of the trainers, one at a time: it changes what it is for, or is refused with a
// reason. It means the same to both trainers, plan and compare, and is explained in equal words by
// every program that has it.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/tiny_images.h"
#include "tests/tools/testing/tiny_training.h"
#include "tests/tools/tokenizer/small_tokenizer.h"

namespace tessera {
namespace {

using testing::Flags;
using testing::has;
using testing::kMlp;
using testing::kTransformer;
using testing::Outcome;
using testing::run_program;
using testing::TempFolder;

const std::string kPlanProgram = "tools/programs/plan", kCompare = "tools/compare/compare",
                  kDoctor = "tools/doctor/doctor", kBench = "tools/bench/bench";

enum class Effect {
  kBits,       // the trained parameters
  kPlan,       // the plan of a step
  kSays,       // words on the terminal, which the run with the option or the one without has
  kWrites,     // a file, by its path below the test's folder, which one of the two runs leaves
  kRefused,    // the option's value, with these words
  kElsewhere,  // seen by another test, which is named
};

struct Row {
  std::string value;
  Effect effect;
  std::string evidence = {};  // the words, the path or the test
  Flags context = {};         // without which the option means nothing
};

// What each option is for. `folder` is the test's.
std::map<std::string, Row> rows(const std::string& folder) {
  using enum Effect;
  const Flags hsdp = {{"parallel.strategy", "hsdp"}, {"parallel.ranks", "4"}};
  const Flags adam = {{"train.lr", "0.5"}};
  const Flags sgd = {{"train.optimizer", "sgd"}};
  const Flags saved = {{"checkpoint.every", "1"}};
  const Flags probed = {{"log.probe", folder + "/probe"}};
  const Flags powersgd = {{"comm.hook", "powersgd"}, {"powersgd.start_step", "0"}};
  const Flags llama = {{"model.preset", "smollm2-135m"},
                       {"model.dim", "24"},
                       {"model.heads", "6"},
                       {"model.vocab", "256"}};
  const Flags lora = {{"lora.rank", "2"}};
  Flags replicated = hsdp;
  replicated.insert(powersgd.begin(), powersgd.end());
  return {
      {"audit", {"true", kSays, "audit of a step, rank 0"}},
      {"checkpoint.async",
       {"false", kElsewhere, "//tests/shard/checkpoint:checkpoint_faults_test"}},
      {"checkpoint.dir", {folder + "/saved", kWrites, "saved/step_3", saved}},
      {"checkpoint.every", {"2", kWrites, "run/checkpoints/step_2"}},
      {"checkpoint.keep", {"1", kWrites, "run/checkpoints/step_2", saved}},
      {"checkpoint.strict", {"false", kRefused, "checkpoint.strict=false, got none"}},
      {"comm.hook", {"bf16", kBits}},
      {"cpu.gemm", {"eigen", kSays, ", Eigen "}},
      {"cpu.isa", {"v2", kSays, ", v2, "}},
      {"cpu.pin", {"true", kRefused, "(cpu.pin)", {{"parallel.ranks", "1024"}}}},
      {"cpu.threads_per_rank", {"2", kSays, "with 2 threads"}},
      {"cuda.attention", {"wgmma", kRefused, "cuda.attention=wgmma on GPUs only"}},
      {"cuda.gemm_algorithms", {"algorithms.txt", kRefused, "cuda.gemm_algorithms on GPUs only"}},
      {"cuda.graph", {"on", kRefused, "cuda.graph=on"}},
      {"cuda.tune_gemm", {"false", kRefused, "cuda.tune_gemm on GPUs only"}},
      {"data.end", {"none", kRefused, "expected a text and its tokenizer"}},
      {"data.field", {"words", kRefused, "expected a .jsonl in data.path"}},
      {"data.format", {"uint16", kRefused, "tokens of 2 bytes"}},
      {"data.loss", {"all", kRefused, "expected a .jsonl in data.path"}},
      {"data.mix", {folder + "/other.txt:1", kRefused, "expected data.path or data.mix, got both"}},
      {"data.order", {"sequential", kBits}},
      {"data.packing", {"true", kRefused, "expected documents to pack, got text"}},
      {"data.path", {folder + "/other.txt", kBits}},
      {"data.prompt", {"ask", kRefused, "expected a .jsonl in data.path"}},
      {"data.special", {"false", kRefused, "expected a text and its tokenizer"}},
      {"data.template", {"{content}", kRefused, "expected a .jsonl in data.path"}},
      {"data.tokenizer", {folder + "/tokenizer.txt", kBits}},
      {"data.val_fraction", {"0.5", kBits}},
      {"device", {"cuda", kElsewhere, "//tests/tools/train:cuda_train_test"}},
      {"init.from",
       {"tests/golden/gpt2_tiny",
        kBits,
        "",
        {{"model.dim", "52"}, {"model.heads", "4"}, {"model.vocab", "307"}}}},
      {"log.every", {"1", kSays, "step     1/3"}},
      {"log.jsonl", {folder + "/lines.jsonl", kWrites, "lines.jsonl"}},
      {"log.peak_ms", {"1", kSays, "of the peak measured"}},
      {"log.probe", {folder + "/probe", kWrites, "probe"}},
      {"log.probe_steps", {"1:1", kSays, "checksums of steps 1 to 1", probed}},
      {"log.probe_values", {"gathered_forward:1:1:wte.weight", kSays, ": 3 checksums", probed}},
      {"log.tensorboard", {folder + "/board", kWrites, "board"}},
      {"log.trace", {folder + "/trace.json", kWrites, "trace.json"}},
      {"log.trace_steps", {"1:2", kElsewhere, "//tests/tools/trace:trace_run_test"}},
      {"log.val_every", {"1", kSays, "1/3 | val loss", {{"log.every", "1"}}}},
      {"log.val_prompts",
       {folder + "/prompts.txt", kSays, "  the e => ", {{"sample.tokens", "2"}}}},
      {"lora.alpha", {"3", kBits, "", lora}},
      {"lora.dropout", {"0.5", kBits, "", lora}},
      {"lora.from", {"nowhere", kRefused, "(lora.from=nowhere)"}},
      {"lora.rank", {"2", kBits}},
      {"lora.targets", {"c_fc", kBits, "", lora}},
      {"memory_budget", {"1KiB", kRefused, "[memory_budget] expected"}},
      {"memory_check", {"false", kElsewhere, "//tests/tools/programs/run:memory_check_test"}},
      {"model.dim", {"16", kBits}},
      {"model.dropout", {"0.5", kBits}},
      {"model.heads", {"1", kBits}},
      {"model.hidden", {"8", kElsewhere, "//tests/tools/programs:train_cli_test"}},
      {"model.kv_heads", {"2", kBits, "", llama}},
      {"model.layers", {"1", kBits}},
      {"model.mlp_dim", {"10", kBits, "", llama}},
      {"model.preset", {"gpt2", kPlan}},
      {"model.seq", {"4", kBits}},
      {"model.vocab", {"300", kBits}},
      {"offload.gradients", {"1", kPlan}},
      {"offload.optimizer", {"1", kPlan}},
      {"offload.parameters", {"1", kPlan}},
      {"offload.threads", {"1000", kPlan, "", {{"offload.optimizer", "1"}}}},
      {"out", {folder + "/elsewhere", kWrites, "elsewhere/log.jsonl"}},
      {"parallel.address", {"tcp:h:1", kRefused, "expected parallel.address where"}},
      {"parallel.backend", {"nccl", kRefused, "parallel.backend=nccl"}},
      {"parallel.backward_prefetch", {"post", kPlan}},
      {"parallel.bucket_mb", {"1", kPlan, "", {{"parallel.strategy", "ddp"}}}},
      {"parallel.canonical", {"true", kRefused, "parallel.canonical=true"}},
      {"parallel.deadline_s", {"0.001", kElsewhere, "//tests/tools/launch:ranks_test"}},
      {"parallel.insecure", {"true", kRefused, "parallel.insecure"}},
      {"parallel.interface", {"lo", kRefused, "expected parallel.interface where"}},
      {"parallel.launcher", {"torchrun", kRefused, "expected torchrun to have started"}},
      {"parallel.prefetch", {"0", kPlan}},
      {"parallel.ranks", {"1", kBits}},
      {"parallel.reductions_in_flight", {"0", kPlan}},
      {"parallel.reshard_after_forward", {"false", kPlan}},
      {"parallel.shard_ranks", {"4", kPlan, "", hsdp}},
      {"parallel.strategy", {"ddp", kPlan}},
      {"parallel.threads", {"3", kRefused, "expected parallel.ranks=3 with parallel.threads=3"}},
      {"parallel.transport", {"gloo", kRefused, "parallel.transport"}},
      {"parallel.unit_min_numel", {"100000", kPlan}},
      {"plan", {"true", kSays, "memory of a step"}},
      {"powersgd.across_replicas", {"true", kBits, "", replicated}},
      {"powersgd.error_dtype", {"bf16", kBits, "", powersgd}},
      {"powersgd.error_feedback", {"false", kBits, "", powersgd}},
      {"powersgd.min_compression_rate", {"1e9", kBits, "", powersgd}},
      {"powersgd.offload_error", {"true", kPlan, "", powersgd}},
      {"powersgd.orthogonalize_eps", {"0.5", kBits, "", powersgd}},
      {"powersgd.rank", {"2", kBits, "", powersgd}},
      {"powersgd.seed", {"1", kBits, "", powersgd}},
      {"powersgd.start_step", {"2", kBits, "", powersgd}},
      {"powersgd.warm_start", {"false", kBits, "", powersgd}},
      {"precision.accumulate", {"bf16", kBits}},
      {"precision.param", {"bf16", kBits}},
      {"precision.reduce", {"bf16", kBits}},
      {"rates.gflops", {"5", kPlan}},
      {"rates.host_link_gbs", {"5", kPlan, "", {{"offload.optimizer", "1"}}}},
      {"rates.host_memory_gbs", {"5", kPlan, "", {{"offload.optimizer", "1"}}}},
      {"rates.link_gbs", {"5", kPlan}},
      {"rates.link_latency_us", {"5", kPlan}},
      {"rates.memory_gbs", {"5", kPlan}},
      {"resume", {"nowhere", kRefused, "(resume)"}},
      {"sample.tokens", {"8", kWrites, "run/sample.txt"}},
      {"save.final", {folder + "/final", kWrites, "final/model.safetensors"}},
      {"save.shard_gib",
       {"1e-6",
        kWrites,
        "final/model.safetensors.index.json",
        {{"save.final", folder + "/final"}}}},
      {"train.accum", {"2", kBits}},
      {"train.accum_comm", {"last", kPlan, "", {{"train.accum", "2"}}}},
      {"train.batch", {"2", kBits}},
      {"train.beta1", {"0", kBits, "", adam}},
      {"train.beta2", {"0", kBits, "", adam}},
      {"train.check_gradients", {"true", kPlan}},
      {"train.eps", {"1", kBits, "", adam}},
      {"train.grad_clip", {"0.01", kBits, "", sgd}},
      {"train.loss_mean", {"tokens", kPlan}},
      {"train.lr", {"1", kBits}},
      {"train.max_minutes", {"1e-9", kSays, "stopped by train.max_minutes after step 1"}},
      {"train.max_skips", {"1", kPlan}},
      {"train.momentum", {"0", kBits, "", sgd}},
      {"train.optimizer", {"sgd", kBits}},
      {"train.overlap_optimizer", {"backward", kPlan, "", {{"train.grad_clip", "0"}}}},
      {"train.recompute", {"true", kPlan}},
      {"train.schedule", {"constant", kBits, "", {{"train.warmup", "0"}}}},
      {"train.seed", {"1", kBits}},
      {"train.spike_factor", {"2", kPlan}},
      {"train.steps", {"2", kBits}},
      {"train.verify_every", {"1", kPlan}},
      {"train.warmup", {"0", kBits}},
      {"train.weight_decay", {"0", kBits, "", adam}},
  };
}

class OptionSweep : public testing::TinyTraining {
 protected:
  OptionSweep() {
    std::string text;
    while (text.size() < 4000) text += "Other words, of which this text has many, again.\n";
    folder_.write("other.txt", text);
    folder_.write("prompts.txt", "the e\n");
    folder_.write("tokenizer.txt", testing::small_tokenizer().dump());
  }
  /// What --help says of each option.
  static std::map<std::string, std::string> help_of(const std::string& program) {
    std::istringstream help(run_program(program, std::vector<std::string>{"--help"}).out);
    std::map<std::string, std::string> texts;
    std::string name;
    for (std::string line; std::getline(help, line);) {
      const auto equals = line.find('=');
      if (line.starts_with("  --") && equals != std::string::npos) {
        name = line.substr(4, equals - 4);
      } else if (line.starts_with("      ")) {
        texts[name] += line;
      }
    }
    return texts;
  }
  static std::set<std::string> names_of(const std::string& program) {
    std::set<std::string> names;
    for (const auto& [name, text] : help_of(program)) names.insert(name);
    return names;
  }
  /// A run in a folder of which nothing is left from the one before.
  Outcome fresh_run(const Flags& flags) const {
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      if (!entry.path().filename().string().ends_with(".txt")) {
        std::filesystem::remove_all(entry.path());
      }
    }
    return run_program(program_, with(flags));
  }
  static std::string digest(const Outcome& outcome) {
    const std::string before = "parameters sha256 ";
    const auto at = outcome.out.find(before);
    return at == std::string::npos ? "" : outcome.out.substr(at + before.size(), 64);
  }

  /// What a plan says, but how fast it was made.
  static std::string plan_of(const Outcome& outcome) {
    return outcome.out.substr(0, outcome.out.find(", which took this host"));
  }

  /// What `row` says of the option, seen in a run without it and in one with it.
  void check(const std::string& name, const Row& row) const {
    using enum Effect;
    if (row.effect == kElsewhere) return;
    Flags flags = row.context;
    if (row.effect == kPlan) flags["plan"] = "true";
    const Outcome without = row.effect == kRefused ? Outcome() : fresh_run(flags);
    const bool was_there = exists(row.evidence);
    EXPECT_EQ(without.exit_code, row.effect == kRefused ? -1 : 0) << without.err;
    flags[name] = row.value;
    const Outcome with = fresh_run(flags);
    EXPECT_EQ(with.exit_code, row.effect == kRefused ? 1 : 0) << with.err;
    switch (row.effect) {
      case kBits:
        EXPECT_EQ(digest(without).size(), 64U);
        EXPECT_NE(digest(with), digest(without));
        break;
      case kPlan:
        EXPECT_TRUE(has(without.out, {", which took this host"}));
        EXPECT_NE(plan_of(with), plan_of(without));
        break;
      case kSays:
        EXPECT_NE(bool(has(with.out, {row.evidence})), bool(has(without.out, {row.evidence})));
        break;
      case kWrites:
        EXPECT_NE(exists(row.evidence), was_there);
        break;
      case kRefused:
        EXPECT_TRUE(has(with.err, {row.evidence}));
        break;
      case kElsewhere:
        break;
    }
  }

  std::string program_ = kTransformer;
};

TEST_F(OptionSweep, KnowsEveryOption) {
  std::set<std::string> known, all = names_of(kTransformer);
  for (const auto& [name, row] : rows(folder_.path())) known.insert(name);
  all.merge(names_of(kMlp));
  EXPECT_GT(all.size(), 95U);
  EXPECT_EQ(known, all) << "a row for each option, in this file";
}

TEST_F(OptionSweep, EachChangesWhatItIsForOrIsRefused) {
  for (const auto& [name, row] : rows(folder_.path())) {
    SCOPED_TRACE(name);
    check(name, row);
  }
}

// train_mlp has another model, so what names its parts has other values.
TEST_F(OptionSweep, EachOfTheOtherTrainerChangesWhatItIsForOrIsRefused) {
  const TempFolder images;
  testing::Images tiny;
  for (int i = 0; i < 8; ++i) tiny.add(static_cast<std::uint8_t>(30 * i), i);
  for (const char* part : {"train", "t10k"}) tiny.write(images, part);
  program_ = kMlp;
  flags_["data.path"] = images.path();
  for (const char* other : {"model.heads", "model.dim", "model.seq", "sample.tokens"}) {
    flags_.erase(other);
  }
  flags_["model.hidden"] = "8";
  flags_["train.batch"] = "2";  // of one image a gradient has rank 1, which PowerSGD keeps whole
  auto all = rows(folder_.path());
  all.at("model.hidden") = {"16", Effect::kBits};
  all.at("model.layers").value = "3";  // one has nothing hidden
  all.at("train.batch").value = "1";
  all.at("log.probe_values").value = "gathered_forward:1:1:fc.0.weight";
  int num_checked = 0;
  for (const std::string& name : names_of(kMlp)) {
    if (name == "data.path") continue;
    SCOPED_TRACE(name);
    check(name, all.at(name));
    num_checked += all.at(name).effect == Effect::kElsewhere ? 0 : 1;
  }
  EXPECT_GT(num_checked, 80);
}

// What one refuses the other refuses, in the same words; what one takes has the same plan in both.
TEST_F(OptionSweep, EachMeansTheSameToPlan) {
  // What precedes depends on the machine's speed; the name is the program's own.
  const auto comparable = [](std::string text) {
    text = text.substr(0, text.find("a step has "));
    const auto replace = [&](std::string_view what, std::string_view with) {
      const auto at = text.find(what);
      if (at != std::string::npos) text.replace(at, what.size(), with);
    };
    replace("[train_transformer]", "[plan]");
    replace("1048576", "1024");  // ranks of a plan are no threads
    return text;
  };
  for (const auto& [name, row] : rows(folder_.path())) {
    if (name == "plan" || name == "model.hidden") continue;
    if (name == "data.path" || name == "device") continue;  // a plan needs neither data nor a GPU
    for (const std::string& value : {row.value, std::string("?")}) {
      SCOPED_TRACE(name + "=" + value);
      Flags flags = with(row.context);
      flags[name] = value;
      flags["plan"] = "true";
      const Outcome trainer = fresh_run(flags);
      if (row.effect == Effect::kWrites && name != "log.trace") {
        EXPECT_FALSE(exists(row.evidence)) << "a plan makes nothing";
      }
      if (name != "model.preset") flags.insert({"model.vocab", "256"});  // which the text has
      const Outcome plan = run_program(kPlanProgram, flags);
      EXPECT_EQ(plan.exit_code, trainer.exit_code);
      EXPECT_EQ(comparable(plan.err), comparable(trainer.err));
      EXPECT_EQ(comparable(plan.out), comparable(trainer.out));
    }
  }
}

// What compare takes for its trainings has the plan that it has in `plan`, with its warnings, and
// what it refuses it refuses in the same words. What says where output goes is compare's own; of
// ranks over NCCL without GPUs each says what it looks for first.
TEST_F(OptionSweep, EachMeansTheSameToCompare) {
  const auto of_compare = help_of(kCompare);
  int num_equal = 0;
  for (const auto& [name, row] : rows(folder_.path())) {
    const bool is_output =
        name.starts_with("save.") || name == "resume" || name.starts_with("log.");
    if (!of_compare.contains(name) || name == "plan" || is_output) continue;
    SCOPED_TRACE(name);
    Flags flags = with(row.context);
    flags[name] = name == "memory_budget" ? "1GiB" : row.value;
    if (name != "model.preset") flags.insert({"model.vocab", "256"});  // which the text has
    flags.insert({"parallel.strategy", "zero3"});
    const std::string strategy = flags.extract("parallel.strategy").mapped();
    flags["strategies"] = strategy;
    const Outcome plan = run_program(kPlanProgram, flags);
    flags["plan"] = "true";
    const Outcome compare = run_program(kCompare, flags);
    EXPECT_EQ(compare.exit_code, plan.exit_code) << compare.err;
    std::string said = compare.err + compare.out;
    const std::string where = " (configuration " + strategy + ")";
    const auto at = said.find(where);
    if (at != std::string::npos) said.erase(at, where.size());
    if (name != "parallel.backend") {
      EXPECT_EQ(said, plan.err + plan.out);
    }
    num_equal += compare.exit_code == 0 ? 1 : 0;
  }
  EXPECT_GT(num_equal, 70);
}

// An option that several programs have is explained in equal words; defaults and bounds may differ.
// Options in `own` mean something else in each program, those in `own_of_doctor` in that one.
TEST_F(OptionSweep, OptionsOfOneNameHaveOneText) {
  const std::set<std::string> own = {"data.order",   "data.path",    "json",
                                     "model.layers", "model.preset", "parallel.ranks",
                                     "resume",       "strategies",   "out"};
  const std::set<std::string> own_of_doctor = {"init.from"};
  const auto without_bounds = [](const std::string& text) {
    return text.substr(0, text.rfind(" ("));
  };
  std::map<std::string, std::string> texts;
  int num_shared = 0;
  for (const std::string& program : {kTransformer, kMlp, kPlanProgram, kCompare, kDoctor}) {
    for (const auto& [name, text] : help_of(program)) {
      if (own.contains(name) || (program == kDoctor && own_of_doctor.contains(name))) continue;
      const auto [first, is_new] = texts.emplace(name, without_bounds(text));
      EXPECT_EQ(without_bounds(text), first->second) << program << " --" << name;
      num_shared += is_new ? 0 : 1;
    }
  }
  EXPECT_GT(num_shared, 250);
}

// A value of no sense is refused by every program that has the option, in the same words.
TEST_F(OptionSweep, EachIsCheckedByEveryProgram) {
  const auto words = [](const std::string& error) {
    const auto end = error.find("] ");
    return end == std::string::npos ? error : error.substr(end);
  };
  const std::set<std::string> of_mlp = names_of(kMlp), of_compare = names_of(kCompare);
  int num_checked = 0;
  for (const auto& [name, row] : rows(folder_.path())) {
    if (name == "model.hidden") continue;
    SCOPED_TRACE(name);
    const Outcome transformer = run_program(kTransformer, with({{name, "?"}, {"plan", "true"}}));
    const bool is_checked = has(transformer.err, {"got \"?\" (--" + name + ")"});
    if (!is_checked) continue;  // a text or a path, of which any may be right
    ++num_checked;
    const std::vector<std::string> flag = {"--" + name + "=?"};
    if (of_mlp.contains(name) && !name.starts_with("model.")) {
      EXPECT_EQ(words(run_program(kMlp, flag).err), words(transformer.err));
    }
    if (of_compare.contains(name)) {
      EXPECT_EQ(words(run_program(kCompare, flag).err), words(transformer.err));
    }
  }
  EXPECT_GT(num_checked, 75);
}

// So are all options of other programs; after a text or a path, of which any may be right, another
// option ends the program.
TEST_F(OptionSweep, EachOfAnotherProgramIsChecked) {
  const struct {
    std::string program, last;
    int least_checked;
  } programs[] = {
      {kCompare, "rounds", 80}, {kDoctor, "parallel.deadline_s", 6}, {kBench, "bench.steps", 3}};
  for (const auto& [program, last, least] : programs) {
    int num_checked = 0;
    for (const std::string& name : names_of(program)) {
      SCOPED_TRACE(program + " --" + name);
      std::vector<std::string> flags = {"--" + name + "=?"};
      if (name != last) flags.push_back("--" + last + "=?");
      const Outcome run = run_program(program, flags);
      EXPECT_NE(run.exit_code, 0);
      const bool is_checked = has(run.err, {"got \"?\" (--" + name + ")"}) ||
                              has(run.err, {"got ?"}) || has(run.err, {"got only ?"});
      EXPECT_TRUE(is_checked || has(run.err, {"got \"?\" (--" + last + ")"})) << run.err;
      num_checked += is_checked ? 1 : 0;
    }
    EXPECT_GE(num_checked, least) << program;
  }
}

}  // namespace
}  // namespace tessera
