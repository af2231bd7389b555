// A collective as the flight recorder keeps it.
#pragma once

#include "comm/flight_recorder.h"
#include "comm/process_group.h"

namespace tessera::comm {

/// Views of what `c` holds.
inline FlightCall flight_call(const Collective& c) {
  const bool scatters = c.op == Collective::Op::kReduceScatter;
  return {.op = c.work.name,
          .dtype = name_of(c.in.dtype()),
          .numel = scatters ? c.out.numel() : c.in.numel(),
          .onto_sum = c.accumulate == Accumulate::kYes,
          .root = c.op == Collective::Op::kBroadcast ? c.root : -1,
          .label = c.work.detail};
}

}  // namespace tessera::comm
