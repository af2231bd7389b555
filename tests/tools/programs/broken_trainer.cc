// train_transformer with a fault that a test asks for: what is planned, and what other strategies
// compute, is then not what is done.
#include <signal.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/forwarding_group.h"
#include "engine/error.h"
#include "engine/memory.h"
#include "engine/tape.h"
#include "tools/cli/main.h"
#include "tools/models/model.h"
#include "tools/programs/run/run_task.h"
#include "tools/programs/transformer_task.h"

namespace tessera::tools {
namespace {

using engine::DType;
using engine::Tensor;

enum class Fault {
  kSend,      // 4 bytes more, in step 2
  kAllocate,  // 4 bytes more, in step 2 of rank 1
  kRead,      // of a value, which a plan has not
  kError,     // of rank 1, in step 2, where rank 0 waits to be told
  kBit,       // in what rank 1 sends of the gradient of h.1, in every step of zero3
  kKill,      // of the last rank's process, in the third forward of zero3
  kExit,      // of the last rank's process there, with 0
};

// Flips a bit of the gradient of h.1 before it is reduced.
class BrokenGroup : public comm::ForwardingGroup {
 public:
  explicit BrokenGroup(comm::ProcessGroup& inner) : ForwardingGroup(inner) {}
  explicit BrokenGroup(std::unique_ptr<comm::ProcessGroup> inner)
      : ForwardingGroup(std::move(inner)) {}

  std::unique_ptr<comm::ProcessGroup> make_part(int color, int key) override {
    return std::make_unique<BrokenGroup>(inner().split(color, key));
  }

 private:
  void before(const comm::Collective& c, const engine::Stream& stream) override {
    if (c.op != comm::Collective::Op::kReduceScatter || c.work.detail != "h.1 gradient") return;
    stream.launch({.name = "broken"}, [in = c.in] {
      constexpr std::uint32_t kTopOfMantissa = 1u << 22;
      float& first = *in.data<float>();
      first = std::bit_cast<float>(std::bit_cast<std::uint32_t>(first) ^ kTopOfMantissa);
    });
  }
};

// Ends its process when h.1 is gathered for the third forward.
class DyingGroup : public comm::ForwardingGroup {
 public:
  DyingGroup(comm::ProcessGroup& inner, Fault fault) : ForwardingGroup(inner), fault_(fault) {}
  DyingGroup(std::unique_ptr<comm::ProcessGroup> inner, Fault fault)
      : ForwardingGroup(std::move(inner)), fault_(fault) {}

  std::unique_ptr<comm::ProcessGroup> make_part(int color, int key) override {
    return std::make_unique<DyingGroup>(inner().split(color, key), fault_);
  }

 private:
  void before(const comm::Collective& c, const engine::Stream&) override {
    if (c.work.detail != "h.1 forward" || ++num_gathers_ < 3) return;
    if (fault_ == Fault::kExit) ::_exit(0);
    ::kill(::getpid(), SIGKILL);
  }

  const Fault fault_;
  int num_gathers_ = 0;
};

class BrokenRank final : public TaskRank, public Model {
 public:
  BrokenRank(std::unique_ptr<TaskRank> inner, const TrainConfig& config, Fault fault)
      : inner_(std::move(inner)), config_(config), fault_(fault) {}

  // As TaskRank.
  Model& model() override { return *this; }
  comm::ProcessGroup& group(comm::ProcessGroup& world) override {
    if (config_.parallel.strategy != "zero3") return world;
    const bool dies = fault_ == Fault::kKill || fault_ == Fault::kExit;
    if (dies && world.rank() == world.size() - 1) return dying_.emplace(world, fault_);
    if (fault_ == Fault::kBit && world.rank() == 1) return broken_.emplace(world);
    return world;
  }
  void load(Trainer& trainer, RunLog* log) override {
    trainer_ = &trainer;
    inner_->load(trainer, log);
  }
  Trainer::Data data() override { return inner_->data(); }
  Trainer::Validate validation(Trainer& trainer) override { return inner_->validation(trainer); }
  std::vector<UnrecordedPass> unrecorded_passes() override { return inner_->unrecorded_passes(); }
  std::string finish(Trainer& trainer, RunLog* log) override {
    return inner_->finish(trainer, log);
  }

  // As Model.
  std::vector<engine::Block*> blocks() override { return inner_->model().blocks(); }
  engine::Block* root() override { return inner_->model().root(); }
  Tensor loss(engine::Tape& tape, const std::vector<Tensor>& batch, const Pass& pass) override {
    stray_ = {};
    if (trainer_ != nullptr && pass.training && ++num_losses_ == 2) do_more(tape);
    const Tensor loss = inner_->model().loss(tape, batch, pass);
    if (fault_ == Fault::kRead) static_cast<void>(loss.item());
    return loss;
  }

 private:
  void do_more(engine::Tape& tape) {
    comm::ProcessGroup& world = trainer_->world();
    if (fault_ == Fault::kAllocate && world.rank() == 1) {
      stray_ =
          Tensor::empty(tape.memory(), {1}, DType::kF32, "stray", engine::Category::kActivation);
    }
    if (fault_ == Fault::kError) fail_on_rank_1(world);
    if (fault_ != Fault::kSend) return;
    engine::Memory unseen(tape.stream());
    const Tensor x = Tensor::from<float>(unseen, {1}, std::vector<float>{1}, "stray");
    world.all_reduce(x, x, comm::Accumulate::kNo, tape.stream(), "stray");
    tape.stream().synchronize();
  }

  static void fail_on_rank_1(comm::ProcessGroup& world) {
    world.barrier("both are here");
    engine::require(world.rank() != 1, "[broken] expected no fault, got one");
    try {
      for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) world.check();
    } catch (const engine::CommError& error) {
      std::fprintf(stderr, "told: %s\n", error.what());
      throw;
    }
  }

  const std::unique_ptr<TaskRank> inner_;
  const TrainConfig& config_;
  const Fault fault_;
  Trainer* trainer_ = nullptr;  // null while it is planned
  std::optional<BrokenGroup> broken_;
  std::optional<DyingGroup> dying_;
  Tensor stray_;
  int num_losses_ = 0;
};

class BrokenTask : public TransformerTask {
 public:
  void add_to(FlagSet& flags) override {
    TransformerTask::add_to(flags);
    flags.add("fault", &fault_,
              EnumOption<Fault>{"what is done wrong",
                                {{"send", Fault::kSend},
                                 {"allocate", Fault::kAllocate},
                                 {"read", Fault::kRead},
                                 {"error", Fault::kError},
                                 {"bit", Fault::kBit},
                                 {"kill", Fault::kKill},
                                 {"exit", Fault::kExit}}});
  }
  std::unique_ptr<TaskRank> rank() const override {
    return std::make_unique<BrokenRank>(TransformerTask::rank(), config(), fault_);
  }

 private:
  Fault fault_ = Fault::kBit;
};

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  namespace tools = tessera::tools;
  return tools::run_main([&] {
    tools::BrokenTask task;
    tools::run_task(argc, argv, {"broken_trainer", "Trains with a fault."}, task);
  });
}
