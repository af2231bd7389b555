// Work of a GPU that is enqueued once and then run again and again by one call: a CUDA graph.
//
//   CudaGraph step(memory, {gather, reduce}, [&] { ... launches on all three streams ... });
//   step.launch();    // does it; as often as you like
//
// [Note: what a graph freezes]
// Kernels, their arguments and every address. So what changes from launch to launch - batches,
// rates, counts - is read from memory of the device, which is written before the launch; and the
// memory that is handed out during the capture belongs to the graph, which alone uses it until it
// dies. What the function does on the host is done once, by the capture, which itself computes
// nothing. Events: inside the capture one that was recorded before it counts as reached, since a
// launch begins after all that its streams hold; one that was recorded inside it stands, outside,
// for the end of the last launch.
//
// A function may not wait for the GPU, ask whether an event is reached, or use streams that are not
// the graph's. Memory that it needs is best asked of the system before: run it once without a
// graph.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/memory.h"
#include "engine/stream.h"

namespace tessera::engine {

class CudaGraph {
 public:
  /// Captures fn() on the home stream of `memory` and on `beside`, which nobody listens to, all of
  /// one GPU; blocks until they are idle first. What fn() throws goes through, and streams are as
  /// before then. Tensors that fn() uses and did not make itself outlive the graph. Throws
  /// InvalidArgument for a stream with a listener, one of a meta device or the CPU, and for work
  /// that a graph cannot hold; DeviceError naming the call that CUDA refused.
  CudaGraph(const Memory& memory, std::vector<Stream> beside, const std::function<void()>& fn);
  /// Blocks until the last launch has ended.
  ~CudaGraph();
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  /// Runs what was captured, after all that its streams hold and before all that comes. Counts in
  /// the peaks of `memory` as fn() did. Throws DeviceError, OutOfMemory beyond a memory's limit.
  void launch();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::engine
