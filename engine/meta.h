// A device that is not there: what a program would do, without doing it.
//
//   Stream compute = Stream::meta("compute", DeviceKind::kCpu, {});
//   Memory memory(compute);                 // counts bytes; its addresses must not be read
//
// It runs the code of the device that it stands for, with the shapes, allocations,
// waits and launches: so peaks of memory, launches and collectives are those of a real run. For a
// GPU that takes a build with CUDA, and no GPU: the functions that enqueue kernels are called, for
// their workspace, and what they enqueue is dropped. Workspace of products, which the library says
// on a GPU alone, is the most that they are allowed.
//
// [Note: simulated time]
// Each stream has a clock. A launch takes the longer of its FLOPs and its bytes at the rates below,
// a collective the time of the link to other ranks: the streams of one rank share it, and it
// carries one transfer at a time. An event is a time, and waiting moves the clock to it. Listeners
// are told these times; a launch that would end after 100,000 days throws InvalidArgument. What the
// host takes to launch is left out, and so is waiting for other ranks: they are taken to be where
// this one is. Copies between a device and its host share a link as well, one for each direction,
// and threads of the host share the rate of its memory. Nothing else is charged for their work, as
// all that they do is update, and that is as fast as memory.
#pragma once

#include <cstdint>

#include "engine/stream.h"

namespace tessera::engine {

/// Of one rank. The defaults are those of one core of a small server.
struct MetaRates {
  double flops_per_s = 100e9;
  double bytes_per_s = 10e9;            ///< of memory, read and written
  double link_bytes_per_s = 10e9;       ///< sent to other ranks
  double link_latency_s = 20e-6;        ///< of each collective
  double host_link_bytes_per_s = 10e9;  ///< copied between a device and its host, each way
  double host_bytes_per_s = 10e9;       ///< of the host's memory, by all its threads together
};

/// The simulated time that a meta stream has come to, in nanoseconds from 0.
std::int64_t meta_now_ns(const Stream& stream);

}  // namespace tessera::engine
