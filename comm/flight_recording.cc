#include "comm/flight_recording.h"

namespace tessera::comm {

std::string_view name_of(FlightState state) {
  switch (state) {
    case FlightState::kCalled:
      return "called";
    case FlightState::kStarted:
      return "started";
    case FlightState::kFinished:
      return "finished";
    case FlightState::kFailed:
      return "failed";
  }
  return "";
}

}  // namespace tessera::comm
