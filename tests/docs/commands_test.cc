// Every command of the docs runs, with fewer steps of a smaller model, or stands below with the
// reason why it does not; and what the docs print after a plan is what it says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "engine/io/text.h"
#include "engine/isa.h"
#include "tests/docs/pages.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

struct Command {
  std::string page;
  std::string line;                     // without its comment
  std::vector<std::string> shown = {};  // the lines of the next block, if it is no command
  std::string where() const { return page + ": " + line; }
};

/// Commands that no test runs as they stand here, by how they begin after variables, and why.
struct NotRun {
  const char* begin;
  const char* why;
};
constexpr NotRun kNotRun[] = {
    {"./bazelw test", "these are the parts of .ci/run"},
    {"./bazelw build //tools/programs:train_transformer", "tests of these programs build them"},
    {"./bazelw build", "it compiles everything with clang, which takes as long as with gcc"},
    {"bazel run //tools:bench", "it measures for minutes"},
    {"./bazelw run //tools:gpu_bundle", "//tests/tools:gpu_bundle_test does"},
    {"./bazelw run //tools:kernel_report",
     "it compiles every kernel: //tests/tools/kernel_report:kernel_table_test takes a few"},
    {"./bazelw run //tools:install", "//tests/tools/install:install_test and .ci/run install do"},
    {"bazel run //tools:convert", "it needs a checkpoint: //tests/tools/convert:convert_test does"},
    {"bazel run //tools:generate",
     "it needs a model and its tokenizer: //tests/tools/generate:generate_test has both"},
    {"bazel run //tools:tokenize",
     "it needs a model's tokenizer: //tests/tools/tokenize:tokenize_test has one"},
    {"bazel run //tools:plan -- --init.from=/data/model",
     "it needs a model: //tests/docs:finetune_test has one"},
    {"bazel run //tools:train_transformer -- --init.from=/data/model",
     "it needs a model: //tests/docs:finetune_test has one"},
    {"bazel run //tools:compare -- --launch",
     "it needs a launcher: //tests/tools/compare:compare_mpi_test has one"},
    {"bazel run //tools:doctor -- --flight",
     "it needs a run that failed: //tests/tools/programs:train_faults_test does"},
    {"cmake ", ".ci/run install does"},
    {"python3 -m venv", ".ci/run install makes one"},
    {"apt-get ", "it changes the system, as root: .ci/run install names what is missing"},
    {"env/bin/pip install torch", "PyTorch is no part of the build: it is tried by hand"},
    {"env/bin/python3 examples/python/torch_blocks.py", "it needs PyTorch: it is run by hand"},
    {"env/bin/python tests/golden/check_",
     "it needs PyTorch, transformers and PEFT, or a model of 540 MB: it is run by hand"},
    {"env/bin/torchrun ", "it needs PyTorch: it is run by hand"},
    {"python3 tests/golden/make_tokenizer_golden.py",
     "it needs the package tokenizers: it is run by hand"},
    {"mpirun -n 4 bazel-bin/tools/programs/train_transformer",
     "it needs an MPI: //tests/tools/programs:mpi_processes_test has one"},
    {"mpirun -n 2 bazel-bin/tools/doctor/doctor",
     "it needs an MPI: //tests/tools/doctor:peers_test meets over Gloo"},
    {"model = transformers.",
     "it needs transformers: tests/golden/check_hf_roundtrip.py loads such a folder, by hand"},
    {"tokenizer = transformers.", "it needs transformers: it is run by hand"},
    {"transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(",
     "it needs transformers: it is run by hand"},
    {"torchrun ", "it needs PyTorch: //tests/tools/programs:processes_test sets its variables"},
    {"srun ", "it needs Slurm: examples/clusters/slurm_here.sh has one, by hand"},
    {"sbatch ", "it needs Slurm: it is run by hand"},
    {"cd examples",
     "its programs are tests of //examples, and .ci/run install analyses its workspace"},
    {"bazel run //tools:train_transformer -- --device=cuda", "it needs a GPU: gpu_check.sh does"},
    {"./bazelw run //tools:train_transformer -- --device=cuda", "the same"},
    {"examples/clusters/", "they need launchers and root: they are run by hand"},
    {".ci/fuzz", "it fuzzes for minutes: //tests/fuzz runs each target on what is kept"},
    {"gpu_bundle/gpu_check.sh", "it needs a GPU: //tests/tools:gpu_bundle_test runs it without"},
    {"tensorboard ",
     "it is no part of the build: tests/golden/check_event_file.py reads the files"},
};

std::string without_comment(const std::string& line) {
  const std::size_t at = line.find("  #");
  std::string text = at == std::string::npos ? line : line.substr(0, at);
  while (text.ends_with(' ')) text.pop_back();
  return text;
}

/// Blocks of commands are indented by four spaces, those between ``` have none; a line that ends
/// with \ goes on. Variables may stand before a command.
std::vector<Command> commands_of(const std::string& page) {
  const std::regex begin(
      "([A-Z_]+=\\S+ )*(\\S*/bazelw|bazel|cmake|cd|tensorboard|\\.ci/\\w+|\\S*\\.sh|python3|pip|"
      "env/bin/\\S+|apt-get|mpirun|torchrun|srun|sbatch)( .*)?|(\\w+ = )?transformers\\..*");
  std::vector<Command> all;
  bool in_block = false, is_shown = false, is_fenced = false;
  std::istringstream lines(engine::read_text_file(page, 1 << 20));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("```")) is_fenced = !is_fenced;
    if (is_fenced || !line.starts_with("    ")) {
      if (!line.empty()) in_block = false;
      continue;
    }
    std::string text = line.substr(4);
    while (text.ends_with('\\')) {
      text.pop_back();
      EXPECT_TRUE(std::getline(lines, line)) << page;
      text += line.substr(std::min(line.find_first_not_of(' '), line.size()));
    }
    EXPECT_FALSE(text.find_first_not_of(' ') != std::string::npos &&
                 text.substr(text.find_first_not_of(' ')).starts_with("--"))
        << page << ": expected a \\ before what goes on, got " << text;
    if (std::regex_match(text, begin)) {
      all.push_back({page, without_comment(text)});
      is_shown = false;
    } else {
      if (!in_block) is_shown = !all.empty() && all.back().shown.empty();
      if (is_shown) all.back().shown.push_back(text);
    }
    in_block = true;
  }
  return all;
}

std::vector<Command> all_commands() {
  std::vector<Command> all;
  for (const std::string& page : pages()) {
    for (Command& command : commands_of(page)) all.push_back(std::move(command));
  }
  return all;
}

const NotRun* reason(const Command& command) {
  const std::regex variables("^([A-Z_]+=\\S+ )+");
  const std::string line = std::regex_replace(command.line, variables, "");
  for (const NotRun& r : kNotRun) {
    if (line.starts_with(r.begin)) return &r;
  }
  return nullptr;
}

// As a shell splits it, with single quotes.
std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words(1);
  bool quoted = false;
  for (const char c : line) {
    if (c == '\'') {
      quoted = !quoted;
    } else if (c == ' ' && !quoted) {
      if (!words.back().empty()) words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  return words;
}

class Docs : public ::testing::Test {
 protected:
  Docs() {
    std::string text;
    while (text.size() < 20000) text += "In the beginning God created the heaven and the earth.\n";
    for (const char* name : {"text.txt", "web.txt", "code.txt", "chats.txt"})
      folder_.write(name, text);
  }

  /// What the program of `command` prints, made small.
  Outcome run(const Command& command) const {
    std::vector<std::string> words = words_of(command.line);
    const std::string target = words.at(2);
    EXPECT_TRUE(target.starts_with("//tools:")) << command.where();
    const std::string name = target.substr(8);
    std::vector<std::string> arguments;
    for (std::size_t i = 4; i < words.size(); ++i) {
      // What it writes stays below the folder of this test.
      arguments.push_back(
          std::regex_replace(words[i], std::regex("=/(tmp|data)/"), "=" + folder_.path() + "/"));
    }
    const auto add = [&](const std::string& flag, const std::string& value) {
      const auto given = std::ranges::find_if(
          arguments, [&](const std::string& a) { return a.starts_with("--" + flag + "="); });
      if (given == arguments.end()) {
        arguments.push_back("--" + flag + "=" + value);
      } else if (flag == "train.steps") {
        *given = "--" + flag + "=" + value;
      }
    };
    const bool trains = name.starts_with("train_") || name == "compare";
    if (trains) {
      add("train.steps", "5");
      add("device", "cpu");
      add("log.peak_ms", "0");
      add("out", folder_ / "run");
    }
    if (trains && name != "train_mlp") {
      for (const char* size : {"layers", "heads"}) add(std::string("model.") + size, "2");
      for (const char* size : {"dim", "seq"}) add(std::string("model.") + size, "8");
      add("train.batch", "1");
      if (command.line.find("--data.mix=") == std::string::npos)
        add("data.path", folder_ / "text.txt");
      add("sample.tokens", "0");
    }
    if (name == "compare") {
      std::erase_if(arguments, [](const std::string& a) { return a.starts_with("--sample."); });
      std::erase_if(arguments,
                    [](const std::string& a) { return a.starts_with("--train.steps="); });
      arguments.emplace_back("--train.steps=5");
    }
    if (name == "doctor") add("self_test", "false");
    const std::string room = (trains && name != "compare") || name == "plan" ? "programs"
                             : name == "data"                                ? "samples"
                                                                             : name;
    const std::string program = "tools/" + room + "/" + name;
    fs::remove_all(folder_ / "run");
    return run_program(program, arguments, {{"BUILD_WORKING_DIRECTORY", folder_.path()}});
  }

  const TempFolder folder_;
};

TEST_F(Docs, EveryCommandRunsOrIsListed) {
  std::set<const NotRun*> used;
  int num_run = 0;
  for (const Command& command : all_commands()) {
    if (const NotRun* r = reason(command)) {
      used.insert(r);
      continue;
    }
    ++num_run;
    const Outcome outcome = run(command);
    EXPECT_EQ(outcome.exit_code, 0) << command.where() << "\n" << outcome.err;
  }
  EXPECT_GE(num_run, 20);
  for (const NotRun& r : kNotRun) EXPECT_TRUE(used.contains(&r)) << r.begin << ": in no page";
}

// Whether two lines are equal but for the scratch of matrix products in a sum of all memory, to
// which `more` is added: a CPU's library takes what that CPU's kernels need, at most some MiB.
bool is_shown(const std::string& got, const std::string& want, double more) {
  static const std::regex kMemory("(memory of a step, per rank: )([0-9.]+)( [MG]iB.*)");
  std::smatch of_got, of_want;
  if (!std::regex_match(got, of_got, kMemory) || !std::regex_match(want, of_want, kMemory))
    return got == want;
  const double expected = std::stod(of_want[2]) + more;
  return of_got[1] == of_want[1] && of_got[3] == of_want[3] &&
         std::abs(std::stod(of_got[2]) - expected) <= 0.001 * expected;
}

// "..." stands for lines that are left out.
TEST_F(Docs, ShowWhatPlansSay) {
  int num_shown = 0;
  for (const Command& command : all_commands()) {
    if (!command.line.starts_with("bazel run //tools:plan ") || command.shown.empty()) continue;
    ++num_shown;
    const Outcome outcome = run(command);
    ASSERT_EQ(outcome.exit_code, 0) << command.where() << "\n" << outcome.err;
    std::istringstream lines(outcome.out);
    // The GiB that docs/plan.md says of CPUs without products of bf16.
    const bool widens =
        command.line.find("=bf16") != std::string::npos && engine::isa() < engine::Isa::kV4Bf16;
    const double more = widens ? 0.3 : 0;
    bool may_skip = false;
    for (const std::string& want : command.shown) {
      if (want.find_first_not_of(' ') != std::string::npos && want.ends_with("...")) {
        may_skip = true;
        continue;
      }
      std::string got;
      while (std::getline(lines, got) && may_skip && !is_shown(got, want, more)) {
      }
      EXPECT_TRUE(is_shown(got, want, more)) << command.where() << "\n" << got << "\n" << want;
      may_skip = false;
    }
  }
  EXPECT_GE(num_shown, 9) << "eight strategies, and one in plan.md";
}

}  // namespace
}  // namespace tessera::testing
