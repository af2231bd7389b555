// One of several processes: Gloo's own collectives over loopback, with its defaults.
// gloo_process NUM_SAMPLES FOLDER PROCESS NUM_PROCESSES, where FOLDER is one that all see.
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

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
  // Works in place, so as PyTorch's it has to copy.
  void reduce_scatter(const Tensor& in, const Tensor& out) override {
    if (scatter_ == nullptr || work_.size() != count(in)) {
      work_.resize(count(in));
      scatter_ = std::make_unique<Scatter>(
          context_, std::vector<float*>{work_.data()}, static_cast<int>(count(in)),
          std::vector<int>(static_cast<std::size_t>(context_->size), static_cast<int>(count(out))));
    }
    std::copy_n(in.data<float>(), count(in), work_.begin());
    scatter_->run();
    std::copy_n(work_.begin(), count(out), out.data<float>());
  }
  void all_reduce(const Tensor& in, const Tensor& out) override {
    gloo::AllreduceOptions options(context_);
    options.setInput(in.data<float>(), count(in));
    options.setOutput(out.data<float>(), count(out));
    options.setReduceFunction([](void* sum, const void* a, const void* b, std::size_t n) {
      gloo::sum<float>(sum, a, b, n);
    });
    gloo::allreduce(options);
  }
  void broadcast(const Tensor& inout, int root) override {
    gloo::BroadcastOptions options(context_);
    options.setOutput(inout.data<float>(), count(inout));
    options.setRoot(root);
    gloo::broadcast(options);
  }

 private:
  using Scatter = gloo::ReduceScatterHalvingDoubling<float>;

  static std::size_t count(const Tensor& tensor) {
    return static_cast<std::size_t>(tensor.numel());
  }

  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::vector<float> work_;
  std::unique_ptr<Scatter> scatter_;
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
