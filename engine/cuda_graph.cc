#include "engine/cuda_graph.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "engine/cuda_check.h"
#include "engine/error.h"
#include "engine/stream_impl.h"

namespace tessera::engine {

using internal::StreamCapture;

struct CudaGraph::State {
  Memory memory;
  Stream home;
  std::vector<Stream> beside;
  std::shared_ptr<StreamCapture> capture = std::make_shared<StreamCapture>();
  std::shared_ptr<Memory::Owned> owned = {};
  cudaGraphExec_t exec = nullptr;

  cudaStream_t native() const { return static_cast<cudaStream_t>(home.native()); }
  void set_capture(const std::shared_ptr<StreamCapture>& now) const {
    home.set_capture(now);
    for (const Stream& stream : beside) stream.set_capture(now);
  }
  // Ends the capture, whatever became of it.
  cudaError_t end(cudaGraph_t& graph) noexcept {
    cudaError_t status = cudaSuccess;
    on_gpu_quietly(home.device().index, [&] { status = cudaStreamEndCapture(native(), &graph); });
    set_capture(nullptr);
    capture->is_active = false;
    owned = memory.end_owning();
    return status;
  }
};

CudaGraph::CudaGraph(const Memory& memory, std::vector<Stream> beside,
                     const std::function<void()>& fn) {
  require(memory.home() && !memory.device().is_meta,
          "[graph] expected memory of a stream of a GPU, got that of {}",
          to_string(memory.device()));
  state_ = std::make_unique<State>(State{memory, *memory.home(), std::move(beside)});
  State& s = *state_;
  const int gpu = s.home.device().index;
  s.home.synchronize();
  for (const Stream& stream : s.beside) {
    require(stream.device() == s.home.device(), "[graph] expected streams of {}, got '{}' of {}",
            to_string(s.home.device()), stream.name(), to_string(stream.device()));
    stream.synchronize();
  }
  cudaGraph_t graph = nullptr;
  try {
    s.set_capture(s.capture);
    const CurrentGpu current(gpu);
    check_cuda(cudaStreamBeginCapture(s.native(), cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture");
  } catch (...) {
    s.set_capture(nullptr);
    throw;
  }
  s.memory.begin_owning();
  try {
    const Event begun = s.home.record("captured");
    for (const Stream& stream : s.beside) stream.wait(begun);
    fn();
    for (const Stream& stream : s.beside) s.home.wait(stream.record("joined"));
  } catch (...) {
    s.end(graph);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    throw;
  }
  check_cuda(s.end(graph), "cudaStreamEndCapture");
  const CurrentGpu current(gpu);
  const cudaError_t status = cudaGraphInstantiateWithFlags(&s.exec, graph, 0);
  (void)cudaGraphDestroy(graph);
  check_cuda(status, "cudaGraphInstantiateWithFlags");
}

CudaGraph::~CudaGraph() {
  if (!state_ || state_->exec == nullptr) return;
  state_->home.synchronize_quietly();
  on_gpu_quietly(state_->home.device().index, [this] { (void)cudaGraphExecDestroy(state_->exec); });
}

void CudaGraph::launch() {
  State& s = *state_;
  s.memory.count_again(*s.owned);
  for (const Event& event : std::exchange(s.capture->before, {})) s.home.wait(event);
  for (const Stream& stream : s.beside) s.home.wait(stream.record("before the graph"));
  s.home.launch({.name = "graph"},
                [&] { check_cuda(cudaGraphLaunch(s.exec, s.native()), "cudaGraphLaunch"); });
  s.capture->last_launch = s.home.record("graph done");
  for (const Stream& stream : s.beside) stream.wait(s.capture->last_launch);
}

}  // namespace tessera::engine
