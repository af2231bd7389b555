// The file that a run leaves when it fails: what its ranks called last. One JSON object, an entry a
// line. Files are untrusted.
#pragma once

#include <string>
#include <string_view>

#include "comm/flight_recording.h"

namespace tessera::tools {

struct FlightFile {
  std::string path;
  std::string error;  ///< that the run ended with
  comm::FlightRecording recording;
};

/// The text of a file.
std::string flight_json(const comm::FlightRecording& recording, std::string_view error);
/// Throws IoError naming the file and what is wrong: not JSON, not of this format or of a newer
/// version of it, a number out of range, a rank twice or of no group of its entry, sequence numbers
/// that do not grow.
FlightFile read_flight(const std::string& path);

/// "all_gather f32 x 1024 'h.3'"; `group` is the entry's.
std::string text_of(const comm::FlightEntry& entry, const comm::FlightGroup& group);

}  // namespace tessera::tools
