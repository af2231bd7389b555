// One of several processes: Gloo's own collectives over loopback, with its defaults.
// gloo_process NUM_SAMPLES FOLDER PROCESS NUM_PROCESSES, where FOLDER is one that all see.
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tools/bench/processes/calls.h"
#include "tools/cli/main.h"

namespace tessera::tools {
namespace {

using engine::Tensor;

class Gloo final : public Collectives {
 public:
  Gloo(const std::string& folder, int process, int num_processes)
      : context_(std::make_shared<gloo::rendezvous::Context>(process, num_processes)) {
    gloo::transport::tcp::attr attr;
    attr.hostname = "127.0.0.1";
    gloo::rendezvous::FileStore store(folder);
    auto device = gloo::transport::tcp::CreateDevice(attr);
    context_->connectFullMesh(store, device);
  }

  int process() const override { return context_->rank; }
  int num_processes() const override { return context_->size; }
  void all_gather(const Tensor& in, const Tensor& out) override {
    gloo::AllgatherOptions options(context_);
    options.setInput(in.data<float>(), count(in));
    options.setOutput(out.data<float>(), count(out));
    gloo::allgather(options);
  }
  // As PyTorch does: Gloo's own, of large tensors and called in a row, gave wrong sums.
  void reduce_scatter(const Tensor& in, const Tensor& out) override {
    sums_.resize(count(in));
    sum(in, sums_.data());
    std::copy_n(sums_.begin() + process() * out.numel(), count(out), out.data<float>());
  }
  void all_reduce(const Tensor& in, const Tensor& out) override { sum(in, out.data<float>()); }
  void broadcast(const Tensor& inout, int root) override {
    gloo::BroadcastOptions options(context_);
    options.setOutput(inout.data<float>(), count(inout));
    options.setRoot(root);
    gloo::broadcast(options);
  }

 private:
  static std::size_t count(const Tensor& tensor) {
    return static_cast<std::size_t>(tensor.numel());
  }
  void sum(const Tensor& in, float* out) {
    gloo::AllreduceOptions options(context_);
    options.setInput(in.data<float>(), count(in));
    options.setOutput(out, count(in));
    options.setReduceFunction([](void* sum, const void* a, const void* b, std::size_t n) {
      gloo::sum<float>(sum, a, b, n);
    });
    gloo::allreduce(options);
  }

  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::vector<float> sums_;
};

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] {
    tessera::engine::require(argc == 5,
                             "expected gloo_process NUM_SAMPLES FOLDER PROCESS NUM_PROCESSES");
    tessera::tools::Gloo gloo(argv[2], std::stoi(argv[3]), std::stoi(argv[4]));
    tessera::tools::time_calls(gloo, std::stoll(argv[1]));
  });
}
