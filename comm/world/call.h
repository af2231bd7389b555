// A call of a rank, as the ranks of its group compare it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "comm/flight_recorder.h"

namespace tessera::comm {

/// What a rank calls. Equal on all ranks, or the world fails.
struct Call {
  std::int64_t sequence = 0;
  std::string_view op;  ///< static storage
  std::string text;     ///< everything that must agree: op, reduction, dtypes, count, root, label
  FlightTicket flight = {};
  int round = 0;  ///< ranks may meet more than once in a call
};

}  // namespace tessera::comm
