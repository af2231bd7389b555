// What the host calls for a step that is a CUDA graph, and what becomes of its handles.
#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "tests/emulator/control.h"
#include "tests/shard/toy_training.h"

namespace tessera::shard {
namespace {

using cuda_emulation::Calls;

// One rank's zero3 training of a toy model of `num_blocks`.
class GraphSteps {
 public:
  GraphSteps(comm::ProcessGroup& world, int num_blocks)
      : model_(num_blocks, 300),
        fsdp_(world, memory_, compute_, model_.blocks(), &model_.root, {}),
        adamw_(fsdp_, {}) {
    step();
    step();
  }

  GradNorm step() {
    fsdp_.begin_step();
    tape_.backward(model_.loss(tape_, x_, false));
    GradNorm norm = fsdp_.finish_step();
    adamw_.step(1e-3, norm, 1);
    return norm;
  }
  void capture() {
    launch_ = fsdp_.capture_step([this] { captured_ = step(); });
  }
  void launch() {
    adamw_.repeat_step(1e-3);
    launch_();
    norm_ = fsdp_.read_norm(*captured_);
  }
  void read() const { EXPECT_GT(norm_->value(), 0); }
  static Calls calls_of(const std::function<void()>& fn) {
    cuda_emulation::start_counting();
    fn();
    return cuda_emulation::calls();
  }

 private:
  engine::Stream compute_ = engine::Stream::cuda("compute", 0);
  engine::Memory memory_{compute_};
  engine::Tape tape_{memory_, compute_};
  testing::ToyModel model_;
  Fsdp fsdp_;
  AdamW adamw_;
  const engine::Tensor x_ = engine::Tensor::zeros(memory_, {300}, engine::DType::kF32);
  std::optional<GradNorm> captured_, norm_;
  std::function<void()> launch_;
};

TEST(GraphSteps, OneLaunchWhateverTheModelsSize) {
  comm::run_ranks(1, {}, [](comm::ProcessGroup& world) {
    std::optional<Calls> small;
    for (const int num_blocks : {2, 6}) {
      GraphSteps steps(world, num_blocks);
      const Calls plain = GraphSteps::calls_of([&] { steps.step(); });
      const Calls capture = GraphSteps::calls_of([&] { steps.capture(); });
      EXPECT_EQ(capture.launches, plain.launches);
      for (int i = 0; i < 3; ++i) {
        steps.launch();
        steps.read();  // so that what it lies in is free for the next but one
      }
      const Calls launch = GraphSteps::calls_of([&] { steps.launch(); });
      EXPECT_EQ(launch.graph_launches, 1);
      EXPECT_EQ(launch.launches, 1);  // that of the rates
      EXPECT_EQ(launch.copies, 2);    // of the norm
      EXPECT_EQ(launch.mallocs, 0);
      EXPECT_EQ(launch.blocking, 0);
      EXPECT_GT(plain.launches + plain.copies, 8 * num_blocks);
      if (!small) small = launch;
      EXPECT_EQ(launch.copies + launch.launches, small->copies + small->launches);
    }
  });
}

TEST(GraphSteps, NothingIsLeft) {
  const cuda_emulation::Live before = cuda_emulation::live();
  comm::run_ranks(1, {}, [](comm::ProcessGroup& world) {
    GraphSteps steps(world, 2);
    steps.capture();
    for (int i = 0; i < 3; ++i) steps.launch();
    EXPECT_EQ(cuda_emulation::live().graphs, 1);
  });
  EXPECT_EQ(cuda_emulation::live(), before);
}

// CUDA fails in the midst of a capture, and later in a launch.
TEST(GraphSteps, AFailureIsTold) {
  comm::run_ranks(1, {}, [](comm::ProcessGroup& world) {
    GraphSteps steps(world, 2);
    steps.capture();
    steps.launch();
    cuda_emulation::fail_launch(0, 1);
    EXPECT_THROW(
        {
          steps.launch();
          for (int i = 0; i < 1000; ++i) steps.launch();
        },
        engine::DeviceError);
  });
  cuda_emulation::reset();
}

}  // namespace
}  // namespace tessera::shard
