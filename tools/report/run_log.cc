#include "tools/report/run_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/cli/error_output.h"
#include "tools/cli/stop.h"
#include "tools/report/flight_output.h"
#include "tools/report/run_folder.h"
#include "tools/report/step_text.h"

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

std::string lock_path(const std::string& folder) { return folder + "/.lock"; }

engine::FileDescriptor locked(const std::string& folder) {
  engine::FileDescriptor file(::open(
      lock_path(folder).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666));
  const int error = file.is_open() ? 0 : errno;
  engine::require<engine::IoError>(error == 0,
                                   "[out] expected a folder that can be written to, got {} ({})",
                                   std::generic_category().message(error), folder);
  engine::lock_for_run(file, folder);
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

JsonRecord known(std::string_view name, const std::optional<double>& value) {
  return value ? JsonRecord().add(name, *value) : JsonRecord();
}

}  // namespace

RunLog::RunLog(const TrainConfig& config, std::string items, std::string config_toml,
               RunClock clock)
    : num_steps_(config.train.steps),
      every_(config.log.every),
      items_(std::move(items)),
      config_toml_(std::move(config_toml)),
      folder_(make_folder(config.out)),
      folder_lock_(locked(folder_)),
      jsonl_path_(log_path(config)),
      jsonl_file_(jsonl_path_, JsonlWriter::Mode::kReplaceLater),
      jsonl_(jsonl_file_.fd(), jsonl_path_),
      console_(STDOUT_FILENO),
      tensorboard_(config.log.tensorboard.empty()
                       ? nullptr
                       : std::make_unique<TensorBoardLog>(resolve_user_path(config.log.tensorboard),
                                                          items_)),
      clock_(std::move(clock)),
      start_time_(clock_()) {}

std::vector<RunFile> RunLog::outputs(const TrainConfig& config) {
  const std::string folder = resolve_user_path(config.out);
  std::vector<RunFile> files = {{config.log.jsonl.empty() ? "out" : "log.jsonl", log_path(config)}};
  for (const char* name : kRunTexts) files.push_back({"out", fmt::format("{}/{}", folder, name)});
  files.push_back({"out", fmt::format("{}/{}", folder, FlightOutput::kName)});
  if (!config.log.trace.empty()) {
    files.insert(files.begin(), {"log.trace", resolve_user_path(config.log.trace)});
  }
  if (!config.log.probe.empty()) {
    files.insert(files.begin(), {"log.probe", resolve_user_path(config.log.probe)});
  }
  const std::string& gemms = config.cuda.gemm_algorithms;
  files.push_back(gemms.empty() ? RunFile{"out", folder + "/gemm_algorithms.txt"}
                                : RunFile{"cuda.gemm_algorithms", resolve_user_path(gemms)});
  files.push_back({"out", folder + "/config.toml"});
  return files;
}

RunFile RunLog::lock_of(const TrainConfig& config) {
  return {"the lock of out", lock_path(resolve_user_path(config.out))};
}

void RunLog::check_outputs(const TrainConfig& config, const FlagSet& flags,
                           std::span<const RunFile> read) {
  const std::vector<RunFile> written = outputs(config);
  const std::span<const RunFile> all = written;
  for (std::size_t i = 0; i + 1 < all.size(); ++i) {
    check_files_differ(all.subspan(i, 1), all.subspan(i + 1));
  }
  check_files_differ(all, read);
  // Which would be replaced, and then holds off nobody.
  const RunFile lock = lock_of(config);
  check_files_differ(all, std::span(&lock, 1));
  config.checkpoint.check_apart(config.out, all);
  if (config.checkpoint.saves()) config.checkpoint.check_apart(config.out, read);
  if (!config.log.tensorboard.empty()) {
    const RunFile folder{"log.tensorboard", resolve_user_path(config.log.tensorboard)};
    config.checkpoint.check_apart(config.out, std::span(&folder, 1));
  }
  check_run_folder(resolve_user_path(config.out), config.log.jsonl.empty());
  if (flags.config_path().empty()) return;
  const RunFile given{"config", flags.config_path()};
  const std::string text = flags.to_toml();
  // What is written over it is then what it holds.
  const bool stays = engine::holds_text(given.path, text);
  check_files_differ(stays ? all.first(all.size() - 1) : all, std::span(&given, 1));
}

void RunLog::begin(std::int64_t start) {
  start_ = start;
  for (const char* name : kRunTexts) ::unlink(path(name).c_str());  // of an earlier run
  write_file("config.toml", config_toml_);
  jsonl_file_.keep_while([this](const nlohmann::json& record) {
    const auto step = record.find("step");
    const bool keeps =
        step != record.end() && step->is_number_integer() && step->get<std::int64_t>() <= start_;
    if (keeps && record.contains("val_loss")) last_validation_ = step->get<std::int64_t>();
    return keeps;
  });
  if (tensorboard_) tensorboard_->begin(start + 1);
  start_time_ = clock_();
  has_begun_ = true;
}

void RunLog::set_rates(double flops_per_item, double peak_flop_per_s) {
  peak_items_per_s_ = flops_per_item > 0 ? peak_flop_per_s / flops_per_item : 0;
}

std::optional<double> RunLog::peak_percent(const StepRecord& r) const {
  if (peak_items_per_s_ == 0) return std::nullopt;
  return 100 * r.items_per_s / peak_items_per_s_;
}

void RunLog::write_file(const std::string& name, const std::string& text) const {
  engine::AtomicFile file(path(name));
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

void RunLog::say(const std::string& line, Console::Style style) {
  if (stop_requested() != 0) console_.status("");  // whose place the signal's message has taken
  console_.say(line, style);
}

// Tells once of each output that is lost.
void RunLog::check_output() {
  const auto check = [this](const auto& output, const std::string& name, bool& told) {
    const auto error = output.error();
    if (!error || std::exchange(told, true)) return;
    const bool reader_has_gone = error->value() == EPIPE;
    console_.status("");
    write_to_stderr(
        {"warning: [log] ", engine::escaped(name), ": ", error->message(), "; the training ",
         reader_has_gone ? "ends after this step" : "goes on without", "\n"},
        kWarningPatience);
    if (reader_has_gone) request_stop(SIGPIPE);
  };
  check(jsonl_, jsonl_path_, told_jsonl_);
  check(console_, "stdout", told_console_);
  if (tensorboard_) check(tensorboard_->writer(), tensorboard_->path(), told_tensorboard_);
}

std::string RunLog::time_left(std::int64_t step) const {
  const std::chrono::duration<double> elapsed = clock_() - start_time_;
  const double left =
      elapsed.count() / static_cast<double>(step - start_) * static_cast<double>(num_steps_ - step);
  return engine::duration_text(left);
}

void RunLog::step(const StepRecord& r) {
  const std::optional<double> percent = peak_percent(r);
  summary_.add(r, percent);
  if (tensorboard_) tensorboard_->step(r, percent);
  jsonl_.write(
      JsonRecord()
          .add("step", r.step)
          .add("loss", r.loss)  // null if it is not finite
          .add_literal("grad_norm", r.skipped.empty() ? engine::json_literal(r.grad_norm) : "null")
          .add("lr", r.lr)
          .add("step_ms", r.step_ms)
          .add(items_ + "_per_s", r.items_per_s)
          .add("exposed_comm_ms", r.exposed_comm_ms)
          .add("num_collectives", r.traffic.num_collectives)
          .add("sent_bytes", r.traffic.bytes_sent)
          .add("data_ms", r.data_ms)
          .add_all(known("compute_ms", r.compute_ms))
          .add_all(known("optimizer_ms", r.optimizer_ms))
          .add_all(known("peak_percent", percent))
          .add_literal("peak_bytes", peak_bytes(r.memory))
          .add_all(r.host_memory
                       ? JsonRecord().add_literal("host_peak_bytes", peak_bytes(*r.host_memory))
                       : JsonRecord())
          .add_all(r.replayed.empty() ? JsonRecord() : JsonRecord().add("replayed", r.replayed))
          .add_all(r.skipped.empty() ? JsonRecord() : JsonRecord().add("skipped", r.skipped))
          .add_all(more_ ? more_() : JsonRecord())
          .line());
  check_output();
  const StepTextOptions options{.num_steps = num_steps_,
                                .items = items_,
                                .peak_percent = percent,
                                .eta = time_left(r.step),
                                .columns = console_.columns()};
  const bool is_last = r.step == num_steps_;
  if (every_ > 0) console_.status(is_last || stop_requested() != 0 ? "" : status_text(r, options));
  if (!r.skipped.empty()) {
    return say(fmt::format("step {:>5}/{} | update skipped: the gradient is not finite ({})",
                           r.step, num_steps_, r.skipped),
               Console::Style::kWarning);
  }
  if (every_ == 0 || (r.step % every_ != 0 && !is_last && r.step != start_ + 1)) return;
  say(step_text(r, options), Console::Style::kStrong);
}

void RunLog::validation(std::int64_t step, double val_loss, const std::string& remark,
                        const JsonRecord& extra) {
  say(fmt::format("step {:>5}/{} | val loss {:.4f}{}", step, num_steps_, val_loss, remark),
      Console::Style::kStrong);
  if (step < num_steps_) {
    jsonl_.write(JsonRecord().add("step", step).add("val_loss", val_loss).add_all(extra).line());
  }
  if (tensorboard_) tensorboard_->validation(step, val_loss);
}

void RunLog::summary(const std::string& late, const std::vector<std::string>& advice) {
  const auto figures = summary_.figures();
  if (!figures) return;
  console_.status("");
  say("summary", Console::Style::kStrong);
  for (const auto& [label, text] : RunSummary::rows(*figures, items_)) {
    say(fmt::format("  {:<8}{}", label, text));
  }
  if (!late.empty()) say("  late    " + late);
  for (const std::string& line : advice) say("  next    " + line);
}

void RunLog::finish(const std::string& params_sha256, std::optional<double> val_loss,
                    const JsonRecord& extra) {
  JsonRecord record;
  record.add("params_sha256", params_sha256);
  record.add_literal("val_loss", val_loss ? engine::json_literal(*val_loss) : "null");
  if (const auto figures = summary_.figures()) {
    record.add_literal("summary", RunSummary::record(*figures, items_).text());
  }
  jsonl_.write(JsonRecord().add_literal("final", record.add_all(extra).text()).line());
  flush();
}

void RunLog::flush() {
  const auto hurries = [] { return stop_requested() != 0; };  // which may come while this waits
  jsonl_.flush(hurries);
  if (tensorboard_) tensorboard_->flush(hurries);
  console_.flush(hurries);
}

}  // namespace tessera::tools
