#include "tools/bench/training/training.h"

#include <fmt/format.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/meta.h"
#include "comm/threads.h"
#include "engine/cuda.h"
#include "engine/gemm/gemm_algorithms.h"
#include "engine/meta.h"
#include "engine/philox.h"
#include "engine/tape.h"
#include "ops/attention.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "tools/rates/timing.h"

namespace tessera::tools {

using engine::DType;
using engine::Tensor;

std::string TrainingRow::name() const {
  return fmt::format("{}x{} batch {} {}, {}{}{}", model.layers, model.dim, batch, name_of(param),
                     on_gpu       ? "GPU"
                     : ranks == 1 ? "1 rank"
                                  : fmt::format("{} ranks {}", ranks, strategy),
                     model.cuda_attention == ops::CudaAttention::kMma     ? ", mma"
                     : model.cuda_attention == ops::CudaAttention::kWgmma ? ", wgmma"
                                                                          : "",
                     is_graph ? ", graph" : "");
}

ModelConfig bench_model(std::int64_t layers, std::int64_t heads, std::int64_t dim, std::int64_t seq,
                        std::int64_t vocab) {
  ModelConfig config = preset_config("small");
  config.layers = layers;
  config.heads = heads;
  config.dim = dim;
  config.seq = seq;
  config.vocab = vocab;
  return config;
}

const std::vector<TrainingRow>& training_rows() {
  static const ModelConfig kMedium = bench_model(6, 6, 384, 256);
  static const ModelConfig kSmall = bench_model(4, 4, 128, 256);
  static const std::vector<TrainingRow> kRows = {
      {.model = kMedium},
      {.model = kMedium, .ranks = 2},
      {.model = kMedium, .ranks = 2, .strategy = "ddp"},
      {.model = kMedium, .batch = 1},
      {.model = kMedium, .batch = 1, .ranks = 2},
      {.model = kMedium, .batch = 1, .ranks = 2, .strategy = "ddp"},
      {.model = kMedium, .param = DType::kBF16},
      {.model = kMedium, .batch = 1, .ranks = 2, .param = DType::kBF16},
      {.model = kSmall},
      {.model = kSmall, .ranks = 4},
  };
  return kRows;
}

const std::vector<TrainingRow>& preset_rows() {
  static const ModelConfig kModel = preset_config(measured_presets().front());
  static const std::vector<TrainingRow> kRows = {
      {.model = kModel, .batch = 1},
      {.model = kModel, .batch = 1, .ranks = 2},
      {.model = kModel, .batch = 1, .param = DType::kBF16},
      {.model = kModel, .batch = 1, .ranks = 2, .param = DType::kBF16},
  };
  return kRows;
}

const std::vector<TrainingRow>& smollm2_rows() {
  static const std::vector<TrainingRow> kRows = [] {
    ModelConfig model = preset_config("smollm2-135m");
    model.seq = 512;
    return std::vector<TrainingRow>{
        {.model = model, .batch = 1, .ranks = 2},
        {.model = model, .batch = 1, .ranks = 2, .param = DType::kBF16},
    };
  }();
  return kRows;
}

TrainingRow prefetch_row() {
  return {.model = bench_model(16, 4, 256, 256), .batch = 1, .ranks = 2};
}

TrainingRow offload_row() { return {.model = bench_model(6, 6, 384, 256), .batch = 1, .ranks = 2}; }

TrainingRow hooks_row() {
  return {.model = bench_model(3, 4, 128, 64), .ranks = 4, .strategy = "ddp"};
}

const std::vector<TrainingRow>& process_rows() {
  static const std::vector<TrainingRow> kRows = {
      {.model = bench_model(3, 4, 128, 64), .batch = 6, .ranks = 2},
      {.model = bench_model(6, 6, 384, 256), .batch = 1, .ranks = 2},
      {.model = bench_model(6, 6, 384, 256), .batch = 4, .ranks = 2},
      {.model = bench_model(6, 6, 384, 256), .batch = 4, .ranks = 2, .strategy = "ddp"},
  };
  return kRows;
}

namespace {

// A model in training, and what its steps read.
class Training {
 public:
  Training(comm::ProcessGroup& world, const TrainingRow& row, engine::Stream compute,
           LaunchLog* log)
      : row_(row),
        compute_(std::move(compute)),
        memory_(compute_),
        tape_(memory_, compute_),
        model_(row.model.make()),
        fsdp_(world, memory_, compute_, model_->blocks(), model_->root(),
              {.placement = shard::Placement::preset(row.strategy),
               .prefetch = row.prefetch,
               .backward_prefetch = row.backward_prefetch,
               .precision = {.param = row.param},
               .offload = row.offload,
               .listener = log}),
        adamw_(fsdp_, {}),
        random_{1, static_cast<std::uint64_t>(world.rank())} {}

  const engine::Stream& compute() const { return compute_; }
  engine::MemoryStats memory() const { return memory_.stats(); }
  engine::MemoryStats host_memory() const { return fsdp_.host_memory().stats(); }

  // From now on a step is one launch of what is captured here.
  void capture() {
    launch_ = fsdp_.capture_step([this] {
      TrainingTimes unused;
      step(unused);
    });
  }
  void launch() {
    adamw_.repeat_step(kLearningRate);
    launch_();
  }

  void draw_batch() {
    tokens_ = draw("tokens");
    targets_ = draw("targets");
  }

  // Appends the times of its parts, as the host sees them. Returns the time of all.
  double step(TrainingTimes& times) {
    const std::int64_t blocked_ns = compute_.blocked_ns();
    const Timer timer;
    if (row_.updates_in_backward) adamw_.step_in_backward(kLearningRate);
    fsdp_.begin_step();
    const Tensor loss = model_->loss(tape_, {tokens_, targets_}, {});
    const double forward_end = timer.ms();
    tape_.backward(loss);
    const double backward_end = timer.ms();
    fsdp_.finish_step();
    const double finish_end = timer.ms();
    if (!row_.updates_in_backward) adamw_.step(kLearningRate);
    const double step_end = timer.ms();
    times.forward_ms.push_back(forward_end);
    times.backward_ms.push_back(backward_end - forward_end);
    times.finish_ms.push_back(finish_end - backward_end);
    times.optimizer_ms.push_back(step_end - finish_end);
    times.exposed_comm_ms.push_back(static_cast<double>(compute_.blocked_ns() - blocked_ns) * 1e-6);
    return step_end;
  }

 private:
  Tensor draw(const char* name) {
    const engine::Shape shape{row_.batch, row_.model.seq};
    std::vector<std::int32_t> values(static_cast<std::size_t>(shape.numel()));
    const auto vocab = static_cast<std::uint32_t>(row_.model.vocab);
    for (std::int32_t& token : values) {
      token = static_cast<std::int32_t>(random_.bits(index_++) % vocab);
    }
    return Tensor::from<std::int32_t>(memory_, shape, values, name);
  }

  static constexpr double kLearningRate = 3e-4;

  const TrainingRow& row_;
  engine::Stream compute_;
  engine::Memory memory_;
  engine::Tape tape_;
  std::unique_ptr<LanguageModel> model_;
  shard::Fsdp fsdp_;
  shard::AdamW adamw_;
  engine::RandomStream random_;
  std::uint64_t index_ = 0;
  Tensor tokens_, targets_;
  std::function<void()> launch_;
};

// `at_ends`: null but on rank 0.
TrainingTimes run_on_cpu(Training& training, std::int64_t num_steps, LaunchLog* log,
                         const std::function<void()>& at_ends) {
  TrainingTimes times, warmup;
  for (std::int64_t step = -kWarmupSteps; step < num_steps; ++step) {
    training.draw_batch();
    if (step == 0 && log != nullptr) log->clear();
    if (step == 0 && at_ends) at_ends();
    const double step_ms = training.step(step < 0 ? warmup : times);
    if (step >= 0) times.step_ms.push_back(step_ms);
  }
  if (at_ends) at_ends();
  return times;
}

// Matrix products by the algorithms that are fastest in this process, as in training.
void tune(Training& training, TrainingTimes& unused) {
  if constexpr (engine::kCudaBuilt) {
    static const auto algorithms = std::make_shared<engine::GemmAlgorithms>();
    const auto gemms = std::make_shared<std::vector<engine::DeviceProduct>>();
    engine::record_gemms(training.compute(), gemms);
    training.step(unused);
    engine::record_gemms(training.compute(), nullptr);
    training.compute().synchronize();
    engine::tune_gemms(training.compute(), *gemms, *algorithms);
    engine::set_gemm_algorithms(training.compute(), algorithms);
  }
}

// One batch for all steps, and the host one step ahead, as in training.
TrainingTimes run_on_gpu(Training& training, bool is_graph, std::int64_t num_steps, LaunchLog* log,
                         const std::function<void()>& at_ends) {
  TrainingTimes times, host;
  training.draw_batch();
  tune(training, host);
  for (std::int64_t step = 0; step < kWarmupSteps; ++step) training.step(host);
  if (is_graph) training.capture();
  training.compute().synchronize();
  if (log != nullptr) log->clear();
  if (at_ends) at_ends();
  Timer timer;
  engine::Event previous;
  for (std::int64_t step = 0; step <= num_steps; ++step) {
    engine::Event done;
    if (step < num_steps) {
      is_graph ? training.launch() : static_cast<void>(training.step(host));
      done = training.compute().record("step");
    }
    previous.wait();
    if (step > 0) times.step_ms.push_back(timer.restart());
    previous = done;
  }
  training.compute().synchronize();
  if (at_ends) at_ends();
  return times;
}

}  // namespace

TrainingTimes train_rank(comm::ProcessGroup& world, const TrainingRow& row, std::int64_t num_steps,
                         LaunchLog* log, const std::function<void()>& at_ends) {
  const engine::StreamOptions options{.listener = log};
  Training training(world, row,
                    row.on_gpu ? engine::Stream::cuda("compute", world.rank(), options)
                               : engine::Stream::inline_cpu("compute", options),
                    log);
  TrainingTimes times = row.on_gpu ? run_on_gpu(training, row.is_graph, num_steps, log, at_ends)
                                   : run_on_cpu(training, num_steps, log, at_ends);
  times.memory = training.memory();
  times.host_memory = training.host_memory();
  return times;
}

TrainingTimes run_training(const TrainingRow& row, std::int64_t num_steps, LaunchLog* log,
                           const WrapGroup& wrap, const std::function<void()>& at_ends) {
  TrainingTimes first;
  comm::run_ranks(row.ranks, {}, [&](comm::ProcessGroup& world) {
    const bool is_first = world.rank() == 0;
    const auto wrapped = wrap ? wrap(world) : nullptr;
    TrainingTimes mine = train_rank(wrapped ? *wrapped : world, row, num_steps,
                                    is_first ? log : nullptr, is_first ? at_ends : nullptr);
    if (is_first) first = std::move(mine);
  });
  return first;
}

std::vector<engine::DeviceProduct> gemms_of(const TrainingRow& row) {
  const auto gemms = std::make_shared<std::vector<engine::DeviceProduct>>();
  if constexpr (engine::kCudaBuilt) {
    const auto world = comm::make_meta_rank(0, row.ranks);
    Training training(*world, row, engine::Stream::meta("compute", engine::DeviceKind::kCuda, {}),
                      /*log=*/nullptr);
    engine::record_gemms(training.compute(), gemms);
    TrainingTimes unused;
    training.draw_batch();
    training.step(unused);
  }
  return *gemms;
}

}  // namespace tessera::tools
