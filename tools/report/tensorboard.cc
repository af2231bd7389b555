#include "tools/report/tensorboard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/host.h"
#include "tools/io/event_file.h"

namespace tessera::tools {
namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string file_name() {
  return fmt::format("events.out.tfevents.{:.0f}.{}.{}", now_s(), engine::host_name(), ::getpid());
}

// A second run of this process within a second has a number after its name.
std::pair<std::string, engine::FileDescriptor> create_file(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  engine::require<engine::IoError>(
      !error && std::filesystem::is_directory(folder),
      "[tensorboard] expected a folder that can be made, got {} ({}, log.tensorboard)",
      error ? error.message() : "something else", folder);
  const std::string name = folder + "/" + file_name();
  std::string path = name;
  for (int i = 1;; ++i) {
    engine::FileDescriptor file(
        ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (file.is_open()) return {path, std::move(file)};
    engine::require<engine::IoError>(
        errno == EEXIST,
        "[tensorboard] expected a folder that can be written to, got {} ({}, log.tensorboard)",
        std::generic_category().message(errno), path);
    path = fmt::format("{}.{}", name, i);
  }
}

}  // namespace

TensorBoardLog::TensorBoardLog(const std::string& folder, std::string items)
    : TensorBoardLog(create_file(folder), std::move(items)) {}

TensorBoardLog::TensorBoardLog(std::pair<std::string, engine::FileDescriptor> file,
                               std::string items)
    : items_(std::move(items)),
      path_(std::move(file.first)),
      file_(std::move(file.second)),
      writer_(file_.get(), path_) {}

TensorBoardLog::~TensorBoardLog() {
  if (!has_begun_) ::unlink(path_.c_str());
}

void TensorBoardLog::begin(std::int64_t first_step) {
  has_begun_ = true;
  writer_.write(event_header(now_s(), first_step));
}

void TensorBoardLog::step(const StepRecord& r, std::optional<double> peak_percent) {
  const std::string rate = "speed/" + items_ + "_per_s";
  std::vector<Scalar> scalars = {
      {"train/loss", r.loss},      {"train/lr", r.lr},
      {"time/step_ms", r.step_ms}, {"time/exposed_comm_ms", r.exposed_comm_ms},
      {"time/data_ms", r.data_ms}, {rate, r.items_per_s}};
  if (r.skipped.empty()) scalars.push_back({"train/grad_norm", r.grad_norm});
  if (r.compute_ms) scalars.push_back({"time/compute_ms", *r.compute_ms});
  if (r.optimizer_ms) scalars.push_back({"time/optimizer_ms", *r.optimizer_ms});
  if (peak_percent) scalars.push_back({"speed/peak_percent", *peak_percent});
  std::array<std::string, engine::kNumCategories> tags;
  for (int c = 0; c < engine::kNumCategories; ++c) {
    const auto i = static_cast<std::size_t>(c);
    tags[i] = fmt::format("peak_bytes/{}", name_of(static_cast<engine::Category>(c)));
    scalars.push_back({tags[i], static_cast<double>(r.memory.peak_nbytes[i])});
  }
  scalars.push_back({"peak_bytes/total", static_cast<double>(r.memory.peak_total_nbytes)});
  writer_.write(scalar_event(now_s(), r.step, scalars));
}

void TensorBoardLog::validation(std::int64_t step, double val_loss) {
  const Scalar scalar{"validation/val_loss", val_loss};
  writer_.write(scalar_event(now_s(), step, {&scalar, 1}));
}

}  // namespace tessera::tools
