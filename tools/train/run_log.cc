#include "tools/train/run_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "tools/io/text.h"
#include "tools/train/stop.h"

namespace tessera::tools {
namespace {

std::string make_folder(const std::string& path) {
  const std::string folder = resolve_user_path(path);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  engine::require<engine::IoError>(!error && std::filesystem::is_directory(folder),
                                   "[out] expected a folder that can be made, got {} ({})",
                                   error ? error.message() : "something else", folder);
  return folder;
}

FileDescriptor locked(const std::string& folder) {
  FileDescriptor file(::open((folder + "/.lock").c_str(),
                             O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666));
  const int error = file.is_open() ? 0 : errno;
  engine::require<engine::IoError>(error == 0,
                                   "[out] expected a folder that can be written to, got {} ({})",
                                   std::generic_category().message(error), folder);
  lock_for_run(file, folder);
  return file;
}

std::string log_path(const TrainConfig& config) {
  return resolve_user_path(config.log.jsonl.empty() ? config.out + "/log.jsonl" : config.log.jsonl);
}

std::string peak_bytes(const engine::MemoryStats& memory) {
  JsonRecord record;
  for (int c = 0; c < engine::kNumCategories; ++c) {
    record.add(name_of(static_cast<engine::Category>(c)),
               memory.peak_nbytes[static_cast<std::size_t>(c)]);
  }
  return record.add("total", memory.peak_total_nbytes).text();
}

}  // namespace

RunLog::RunLog(const TrainConfig& config, std::string items, std::string config_toml)
    : num_steps_(config.train.steps),
      every_(config.log.every),
      items_(std::move(items)),
      config_toml_(std::move(config_toml)),
      folder_(make_folder(config.out)),
      folder_lock_(locked(folder_)),
      jsonl_path_(log_path(config)),
      jsonl_file_(jsonl_path_, JsonlWriter::Mode::kReplaceLater),
      jsonl_(jsonl_file_.fd(), jsonl_path_),
      terminal_(STDOUT_FILENO, "stdout"),
      start_(std::chrono::steady_clock::now()) {}

std::vector<RunFile> RunLog::outputs(const TrainConfig& config) {
  const std::string folder = resolve_user_path(config.out);
  return {{config.log.jsonl.empty() ? "out" : "log.jsonl", log_path(config)},
          {"out", folder + "/sample.txt"},
          {"out", folder + "/config.toml"}};
}

void RunLog::check_outputs(const TrainConfig& config, const FlagSet& flags,
                           std::span<const RunFile> read) {
  const std::vector<RunFile> written = outputs(config);
  const std::span<const RunFile> all = written;
  check_files_differ(all.first(1), all.subspan(1));
  check_files_differ(all, read);
  if (flags.config_path().empty()) return;
  const RunFile given{"config", flags.config_path()};
  const std::string text = flags.to_toml();
  // What is written over it is then what it holds.
  const bool stays = holds_text(given.path, text);
  check_files_differ(stays ? all.first(2) : all, std::span(&given, 1));
}

void RunLog::begin() {
  ::unlink(path("sample.txt").c_str());  // of an earlier run
  write_file("config.toml", config_toml_);
  jsonl_file_.clear();
}

void RunLog::write_file(const std::string& name, const std::string& text) const {
  AtomicFile file(path(name));
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

void RunLog::say(const std::string& line) { terminal_.write(line + "\n"); }

// Tells once of each output that is lost.
void RunLog::check_output() {
  const auto check = [](const BackgroundWriter& output, const std::string& name, bool& told) {
    const auto error = output.error();
    if (!error || std::exchange(told, true)) return;
    const bool reader_has_gone = error->value() == EPIPE;
    std::fprintf(stderr, "warning: [log] %s: %s; the training %s\n", escaped(name).c_str(),
                 error->message().c_str(),
                 reader_has_gone ? "ends after this step" : "goes on without");
    if (reader_has_gone) request_stop(SIGPIPE);
  };
  check(jsonl_, jsonl_path_, told_jsonl_);
  check(terminal_, "stdout", told_terminal_);
}

void RunLog::step(const StepRecord& r) {
  jsonl_.write(
      JsonRecord()
          .add("step", r.step)
          .add("loss", r.loss)  // null if it is not finite
          .add_literal("grad_norm", r.skipped.empty() ? json_literal(r.grad_norm) : "null")
          .add("lr", r.lr)
          .add("step_ms", r.step_ms)
          .add(items_ + "_per_s", r.items_per_s)
          .add("exposed_comm_ms", r.exposed_comm_ms)
          .add_literal("peak_bytes", peak_bytes(r.memory))
          .add_all(r.skipped.empty() ? JsonRecord() : JsonRecord().add("skipped", r.skipped))
          .line());
  check_output();
  if (!r.skipped.empty()) {
    return say(fmt::format("step {:>5}/{} | update skipped: the gradient is not finite ({})",
                           r.step, num_steps_, r.skipped));
  }
  const bool is_last = r.step == num_steps_;
  if (every_ == 0 || (r.step % every_ != 0 && !is_last && r.step != 1)) return;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  const double left =
      elapsed.count() / static_cast<double>(r.step) * static_cast<double>(num_steps_ - r.step);
  say(fmt::format(
      "step {:>5}/{} | loss {:.4f} | norm {:.3f} | lr {:.2e} | {:.0f} ms | {:.0f} {}/s | exposed "
      "comm {:.1f} ms | ETA {}",
      r.step, num_steps_, r.loss, r.grad_norm, r.lr, r.step_ms, r.items_per_s, items_,
      r.exposed_comm_ms, duration_text(left)));
}

void RunLog::validation(std::int64_t step, double val_loss, const std::string& extra) {
  say(fmt::format("step {:>5}/{} | val loss {:.4f}{}", step, num_steps_, val_loss, extra));
}

void RunLog::finish(const std::string& params_sha256, std::optional<double> val_loss,
                    const JsonRecord& extra) {
  JsonRecord record;
  record.add("params_sha256", params_sha256);
  record.add_literal("val_loss", val_loss ? json_literal(*val_loss) : "null");
  jsonl_.write(JsonRecord().add_literal("final", record.add_all(extra).text()).line());
  flush();
}

void RunLog::flush() {
  using Patience = BackgroundWriter::Patience;
  const Patience patience = stop_requested() != 0 ? Patience::kShort : Patience::kLong;
  jsonl_.flush(patience);
  terminal_.flush(patience);
}

}  // namespace tessera::tools
