#include "tools/bench/training/peer.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "shard/placement.h"
#include "tools/models/family.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

std::string run_program(const std::vector<std::string>& arguments) {
  const std::string& program = arguments.at(0);
  const auto check = [&](int error, const char* what) {
    require<IoError>(error == 0, "[program] expected to {} {}, got {}", what, program,
                     std::strerror(error));
  };
  int ends[2];
  check(pipe2(ends, O_CLOEXEC) == 0 ? 0 : errno, "make a pipe for");
  const engine::FileDescriptor read_end(ends[0]);
  engine::FileDescriptor write_end(ends[1]);

  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  check(posix_spawn_file_actions_init(&actions), "start");
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDOUT_FILENO);
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  check(error, "start");
  write_end.close();  // the child has the last one: its end is the end of the pipe

  std::string output;
  std::array<char, 4096> buffer;
  for (;;) {
    const ssize_t n = read(read_end.get(), buffer.data(), buffer.size());
    if (n > 0) output.append(buffer.data(), static_cast<std::size_t>(n));
    if (n == 0 || (n < 0 && errno != EINTR)) break;
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) check(errno == EINTR ? 0 : errno, "wait for");
  require<IoError>(WIFEXITED(status) && WEXITSTATUS(status) == 0,
                   "[program] expected {} to succeed, got {} {}", program,
                   WIFEXITED(status) ? "exit status" : "signal",
                   WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  return output;
}

PeerRun run_peer(const Peer& peer, const TrainingRow& row, std::int64_t num_steps) {
  const std::string& script = peer.script;
  std::vector<std::string> arguments = {peer.python, script};
  if (peer.limit_s > 0) {
    arguments.insert(arguments.begin(), {"timeout", "-k", "5", std::to_string(peer.limit_s)});
  }
  const auto add = [&](const char* name, std::int64_t value) {
    arguments.insert(arguments.end(), {name, std::to_string(value)});
  };
  const bool is_whole = shard::Placement::preset(row.strategy).is_whole();
  arguments.insert(arguments.end(),
                   {"--dp", row.ranks == 1 ? "none" : (is_whole ? "ddp" : "fsdp2")});
  if (row.param == engine::DType::kBF16) arguments.emplace_back("--bf16");
  if (row.on_gpu) arguments.insert(arguments.end(), {"--device", "cuda"});
  if (peer.compile) arguments.emplace_back("--compile");
  if (row.model.family != families().front()) {
    arguments.insert(arguments.end(), {"--llama", nlohmann::json(row.model.numbers).dump()});
  }
  add("--ranks", row.ranks);
  add("--layers", row.model.layers);
  add("--heads", row.model.heads);
  add("--dim", row.model.dim);
  add("--seq", row.model.seq);
  add("--vocab", row.model.vocab);
  add("--batch", row.batch);
  add("--warmup", kWarmupSteps);
  add("--steps", num_steps);
  add("--port", 20000 + getpid() % 10000);  // two benchmarks at once do not meet

  const std::string output = run_program(arguments);
  const std::size_t brace = output.rfind("\n{") == std::string::npos ? 0 : output.rfind("\n{") + 1;
  const nlohmann::json record = engine::parse_json(std::string_view(output).substr(brace), script);
  const auto number = [&](const char* name) {
    require<IoError>(record.is_object() && record.contains(name) && record[name].is_number(),
                     "[peer] expected a number '{}', got {} ({})", name, output, script);
    return record[name].get<double>();
  };
  require<IoError>(number("params") == static_cast<double>(row.model.num_parameters()),
                   "[peer] expected {} parameters, got {} ({})", row.model.num_parameters(),
                   number("params"), script);
  const bool has_peak = record.contains("peak_mib") && record["peak_mib"].is_number();
  return {.step_ms = {number("step_ms"), number("min_ms"), number("max_ms")},
          .peak_mib = has_peak ? number("peak_mib") : std::numeric_limits<double>::quiet_NaN()};
}

}  // namespace tessera::tools
