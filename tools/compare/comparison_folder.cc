#include "tools/compare/comparison_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/cli/flags.h"
#include "tools/cli/run_files.h"
#include "tools/compare/request/training_process.h"
#include "tools/io/jsonl.h"
#include "tools/io/sha256.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using engine::IoError;
using engine::require;

constexpr std::int64_t kMaxTomlNbytes = 1 << 20;

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  require<IoError>(!error && fs::is_directory(path, error),
                   "[out] expected a folder that can be made, got {} ({})",
                   error ? error.message() : "something else", path);
}

std::string sha256_of(const std::string& path) {
  const engine::InputFile file(path);
  Sha256 sha;
  std::vector<std::byte> bytes(1 << 20);
  for (std::int64_t at = 0; at < file.nbytes();) {
    const auto n = std::min<std::int64_t>(std::ssize(bytes), file.nbytes() - at);
    const std::span part(bytes.data(), static_cast<std::size_t>(n));
    file.read(at, part);
    sha.update(part);
    at += n;
  }
  return sha.hex();
}

std::vector<std::string> folders_in(const std::string& folder) {
  std::vector<std::string> names = engine::names_in_folder(folder);
  std::erase_if(names, [](const std::string& name) { return name == "." || name == ".."; });
  std::ranges::sort(names);
  return names;
}

// Throws before anything is trained.
void check_can_write(const std::string& path) { const engine::AtomicFile never_committed(path); }

std::string done_path(const std::string& round) { return round + "/done.json"; }

// The first line of either text that the other has otherwise; "nothing" after its end.
std::pair<std::string, std::string> first_different_line(const std::string& a,
                                                         const std::string& b) {
  std::istringstream in_a(a), in_b(b);
  std::string line_a, line_b;
  do {
    line_a = std::getline(in_a, line_a) ? engine::excerpt(line_a) : "nothing";
    line_b = std::getline(in_b, line_b) ? engine::excerpt(line_b) : "nothing";
  } while (line_a == line_b && in_a && in_b);
  return {line_a, line_b};
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

}  // namespace

engine::FileDescriptor lock_folder(const std::string& folder) {
  const std::string path = folder + "/.lock";
  engine::FileDescriptor file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666));
  const int error = file.is_open() ? 0 : errno;
  require<IoError>(error == 0, "[out] expected a folder that can be written to, got {} ({})",
                   std::generic_category().message(error), folder);
  engine::lock_for_run(file, folder);
  return file;
}

void write_file(const std::string& path, const std::string& text) {
  engine::AtomicFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

ComparisonFolder::ComparisonFolder(const Request& request) {
  const CompareConfig& compare = request.compare;
  std::error_code error;
  trainer_ = program_path(compare.trainer);
  trainer_sha256_ = sha256_of(trainer_);
  path_ = fs::absolute(resolve_user_path(compare.out), error).string();
  report_path_ = compare.report.empty()
                     ? path_ + "/report.html"
                     : fs::absolute(resolve_user_path(compare.report), error).string();
  check_inputs(request);
  make_folder(path_);
  lock_ = lock_folder(path_);
  const bool is_new = folders_in(path_ + "/runs").empty();
  require(is_new || compare.resume,
          "[compare] expected a folder without a comparison, or --resume to go on with the one "
          "that is there, or another --out, got one ({})",
          path_);
  require(!is_new || !compare.resume,
          "[resume] expected a folder with a comparison to go on with, got none ({})", path_);
  require(!lies_in(report_path_, json_path()) && !lies_in(report_path_, path_ + "/runs"),
          "[report] expected a file apart from the comparison's others, got {}", report_path_);
  check_can_write(json_path());
  check_can_write(report_path_);
  if (!is_new) check_same(request);
  write_configurations(request);
  identify(request, is_new);
}

void ComparisonFolder::check_inputs(const Request& request) const {
  const RunFile page{request.compare.report.empty() ? "out" : "report", report_path_};
  const std::vector<RunFile> written = {
      page, {"out", json_path()}, {"out", gemm_algorithms_path()}};
  check_files_differ(written, request.inputs);
  check_files_outside(request.inputs, {"the trainings of out", path_ + "/runs"});
  std::vector<RunFile> others = {{"the lock of out", path_ + "/.lock"}};
  for (const Configuration& c : request.configurations) {
    const std::string& gemms = c.config.cuda.gemm_algorithms;
    if (!gemms.empty()) others.push_back({"cuda.gemm_algorithms", resolve_user_path(gemms)});
  }
  check_files_differ(std::span(&page, 1), others);
}

void ComparisonFolder::check_same(const Request& request) const {
  std::set<std::string> expected;
  for (const Configuration& c : request.configurations) {
    expected.insert(folder_name_of(c.name));
    const std::string path = configuration_path(c);
    if (!exists(path)) continue;
    const std::string there = engine::read_text_file(path, kMaxTomlNbytes);
    if (there != c.toml) {
      const auto [mine, theirs] = first_different_line(c.toml, there);
      engine::fail(
          "[resume] expected the options of the comparison that is there, got {} where it has {}; "
          "ask for the same, or choose another --out ({}, configuration {})",
          mine, theirs, path, engine::escaped(c.name));
    }
    for (std::int64_t round = 1; exists(round_path(c, round)); ++round) {
      const std::string done = done_path(round_path(c, round));
      if (!exists(done)) continue;
      const nlohmann::json record =
          engine::parse_json(engine::read_text_file(done, kMaxTomlNbytes), done);
      const bool is_same = record.is_object() && record.contains("trainer_sha256") &&
                           record["trainer_sha256"] == trainer_sha256_;
      require(is_same,
              "[resume] expected the program that trained what is there, got another build of it "
              "({}, {})",
              trainer_, done);
    }
  }
  std::vector<std::string> others = folders_in(path_ + "/runs");
  std::erase_if(others, [&](const std::string& name) { return expected.contains(name); });
  const std::size_t num_others = others.size();
  constexpr std::size_t kMost = 5;
  if (num_others > kMost) {
    others.resize(kMost);
    others.push_back(fmt::format("{} more", num_others - kMost));
  }
  require(num_others == 0,
          "[resume] expected a command that asks for all that the folder has of an earlier "
          "comparison, got one without {}: ask for {} too, or choose another --out ({})",
          engine::escaped(engine::join(others, "; ")), num_others == 1 ? "it" : "them", path_);
}

void ComparisonFolder::write_configurations(const Request& request) const {
  for (const Configuration& c : request.configurations) {
    const std::string path = configuration_path(c);
    make_folder(fs::path(path).parent_path().string());
    if (!exists(path)) write_file(path, c.toml);
  }
}

// A new comparison keeps nothing, and learns of its data from the logs of its trainings.
void ComparisonFolder::identify(const Request& request, bool is_new) {
  IdentityNow now(path_ + "/.arithmetic");
  for (const Configuration& c : request.configurations) {
    if (c.same_plan_as) continue;
    TrainingIdentity& identity = identities_[c.name];
    if (!is_new) identity.data_digest = now.data_digest(c);
    identity.arithmetic = now.arithmetic(c);
  }
}

std::string ComparisonFolder::configuration_path(const Configuration& c) const {
  return fmt::format("{}/runs/{}/configuration.toml", path_, folder_name_of(c.name));
}

std::string ComparisonFolder::round_path(const Configuration& c, std::int64_t round) const {
  return fmt::format("{}/runs/{}/round-{}", path_, folder_name_of(c.name), round);
}

std::string ComparisonFolder::outdated(const Configuration& c, std::int64_t round) const {
  const std::string path = done_path(round_path(c, round));
  if (!exists(path)) return "";
  const nlohmann::json done =
      engine::parse_json(engine::read_text_file(path, kMaxTomlNbytes), path);
  const auto text = [&](const char* name) {
    const auto field = done.find(name);
    return field != done.end() && field->is_string() ? field->get<std::string>() : "";
  };
  return why_again({text("data_digest"), text("arithmetic")}, identities_.at(c.name));
}

void ComparisonFolder::discard(const Configuration& c, std::int64_t round) const {
  std::error_code error;
  fs::remove(done_path(round_path(c, round)), error);
  require<IoError>(!error, "[out] expected a training that can be made again, got {} ({})",
                   error.message(), round_path(c, round));
}

std::optional<RunRecord> ComparisonFolder::finished(const Configuration& c,
                                                    std::int64_t round) const {
  const std::string folder = round_path(c, round);
  if (!exists(done_path(folder))) return std::nullopt;
  return read_run_record(folder + "/log.jsonl");
}

std::optional<RunRecord> ComparisonFolder::finish(const Configuration& c,
                                                  std::int64_t round) const {
  const std::string folder = round_path(c, round);
  RunRecord run = read_run_record(folder + "/log.jsonl");
  if (!run.stopped_by.empty() || std::ssize(run.loss) != c.config.train.steps) return std::nullopt;
  const auto text = [](const std::string& launch) {
    return launch.empty() ? "one process" : engine::escaped(launch);
  };
  require<IoError>(run.launch == c.launch_text,
                   "[compare] expected a training by {}, got one by {} ({})", text(c.launch_text),
                   text(run.launch), folder);
  write_file(done_path(folder), JsonRecord()
                                    .add("trainer", trainer_)
                                    .add("trainer_sha256", trainer_sha256_)
                                    .add("params_sha256", run.params_sha256)
                                    .add("data_digest", run.data_digest)
                                    .add("arithmetic", identities_.at(c.name).arithmetic)
                                    .line());
  return run;
}

}  // namespace tessera::tools
