// Graphs, which captures make, and their launches.
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/emulator/capture.h"
#include "tests/emulator/edges.h"
#include "tests/emulator/internal.h"

namespace tessera::cuda_emulation {

/// See [Note: captures]. The streams are made with it.
struct GraphExec {
  std::shared_ptr<const GraphContent> content;
  std::vector<std::shared_ptr<Stream>> streams;
  std::mutex mutex;
  std::shared_ptr<Record> ended;  ///< of the last launch
};

cudaGraph_t add_graph(std::shared_ptr<const GraphContent> content) {
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  const auto handle = reinterpret_cast<cudaGraph_t>(new_handle(machine, 0x64));
  machine.graphs.emplace(handle, std::move(content));
  machine.counters.graphs.fetch_add(1, std::memory_order_relaxed);
  return handle;
}

namespace {

template <class T>
T find(const auto& handles, auto handle) {
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  const auto found = handles.find(handle);
  if (found != handles.end()) return found->second;
  failed(cudaErrorInvalidResourceHandle);
  return nullptr;
}

/// Launches of one graph run one after the other.
void launch(GraphExec& exec, Stream& stream) {
  const std::lock_guard lock(exec.mutex);
  if (exec.ended) stream.push_wait(exec.ended);
  stream.push_work("graph launch", [] {});  // what the account knows of it
  const std::shared_ptr<Record> begun = stream.push_record();
  for (const std::shared_ptr<Stream>& branch : exec.streams) branch->push_wait(begun);
  std::vector<std::shared_ptr<Record>> records(exec.content->num_records);
  for (const GraphOperation& operation : exec.content->operations) {
    Stream& branch = *exec.streams[operation.stream];
    switch (operation.kind) {
      case Task::Kind::kWork: {
        const Seen seen;  // the copy is the launching thread's
        branch.push_work(operation.name, operation.run);
        break;
      }
      case Task::Kind::kRecord:
        records[operation.record] = branch.push_record();
        break;
      case Task::Kind::kWait:
        branch.push_wait(records[operation.record]);
        break;
      case Task::Kind::kQuit:
        break;
    }
  }
  for (const std::shared_ptr<Stream>& branch : exec.streams) {
    stream.push_wait(branch->push_record());
  }
  exec.ended = stream.push_record();
}

}  // namespace
}  // namespace tessera::cuda_emulation

using namespace tessera::cuda_emulation;  // NOLINT: the definitions below are CUDA's own names

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* handle, cudaGraph_t graph,
                                          unsigned long long flags) {
  const Unseen unseen;
  if (const cudaError_t error = entry_error()) return error;
  if (handle == nullptr || flags != 0) return failed(cudaErrorInvalidValue);
  Runtime& machine = runtime();
  auto exec = std::make_shared<GraphExec>();
  exec->content = find<std::shared_ptr<const GraphContent>>(machine.graphs, graph);
  if (exec->content == nullptr) return cudaErrorInvalidResourceHandle;
  for (const std::shared_ptr<Stream>& stream : exec->content->streams) {
    exec->streams.push_back(
        Stream::start(stream->device, "graph of " + stream->label, stream->priority, false));
  }
  const std::lock_guard lock(machine.mutex);
  *handle = reinterpret_cast<cudaGraphExec_t>(new_handle(machine, 0x65));
  machine.graph_execs.emplace(*handle, std::move(exec));
  machine.counters.graphs.fetch_add(1, std::memory_order_relaxed);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* handle, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(handle, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  const Unseen unseen;
  const std::shared_ptr<Stream> stream = find_stream(stream_handle);
  const auto exec = find<std::shared_ptr<GraphExec>>(runtime().graph_execs, handle);
  if (!stream || !exec) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = work_error(*stream)) return error;
  if (const cudaError_t error = uncapturable_error(*stream)) return error;
  if (exec->streams.front()->device != stream->device) return failed(cudaErrorInvalidValue);
  runtime().counters.graph_launches.fetch_add(1, std::memory_order_relaxed);
  launch(*exec, *stream);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  const Unseen unseen;
  Runtime& machine = runtime();
  const auto exec = find<std::shared_ptr<GraphExec>>(machine.graph_execs, handle);
  if (!exec) return cudaErrorInvalidResourceHandle;
  {
    const std::lock_guard lock(machine.mutex);
    machine.graph_execs.erase(handle);
    machine.counters.graphs.fetch_sub(1, std::memory_order_relaxed);
  }
  for (const std::shared_ptr<Stream>& stream : exec->streams) stream->quit();
  return entry_error(exec->streams.front()->device);
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  const Unseen unseen;
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  if (machine.graphs.erase(handle) == 0) return failed(cudaErrorInvalidResourceHandle);
  machine.counters.graphs.fetch_sub(1, std::memory_order_relaxed);
  return cudaSuccess;
}
