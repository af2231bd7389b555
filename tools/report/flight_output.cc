#include "tools/report/flight_output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstddef>
#include <exception>
#include <set>
#include <span>

#include "engine/io/file.h"
#include "tools/flight/flight_file.h"

namespace tessera::tools {

FlightOutput::FlightOutput(const std::string& folder, const LocalRanks& ranks)
    : folder_(folder),
      ranks_(ranks),
      path_(ranks.file_of(fmt::format("{}/{}", folder, kName))),
      all_paths_(ranks.are_all() ? path_ : fmt::format("{}/{}", folder, kNames)),
      recorder_(std::make_shared<comm::FlightRecorder>()) {}

void FlightOutput::remove_earlier() const {
  ::unlink(path_.c_str());
  if (ranks_.first != 0) return;
  std::set<std::string> of_run;
  for (int rank = 0; rank < ranks_.world_size; rank += ranks_.count) {
    of_run.insert(LocalRanks{.first = rank}.file_of(kName));
  }
  for (const std::string& name : engine::names_in_folder(folder_)) {
    const bool is_flight = name.starts_with("flight.rank") && name.ends_with(".json");
    if (is_flight && !of_run.contains(name)) ::unlink(fmt::format("{}/{}", folder_, name).c_str());
  }
}

std::string FlightOutput::write(std::string_view error) noexcept {
  try {
    try {
      const std::lock_guard lock(mutex_);
      const std::string text = flight_json(recorder_->read(), error);
      engine::AtomicFile file(path_);
      file.write(std::as_bytes(std::span(text)));
      file.commit();
      return fmt::format(
          "what each rank called last: {} (//tools:doctor --flight {} says who was late)", path_,
          all_paths_);
    } catch (const std::exception& e) {
      return fmt::format("what each rank called last could not be written: {}", e.what());
    }
  } catch (const std::exception&) {
    return "no memory";  // short enough to need none
  }
}

}  // namespace tessera::tools
