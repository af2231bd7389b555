#include <fmt/format.h>

#include <functional>
#include <memory>
#include <vector>

#include "comm/threads.h"
#include "engine/elementwise.h"
#include "engine/gemm/gemm.h"
#include "engine/isa.h"
#include "engine/tape.h"
#include "ops/attention.h"
#include "ops/cross_entropy.h"
#include "ops/gelu.h"
#include "ops/layernorm.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "tools/bench/parts.h"
#include "tools/bench/training/launches.h"
#include "tools/rates/peak.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using engine::DType;
using engine::Memory;
using engine::Parameter;
using engine::Shape;
using engine::Stream;
using engine::Tape;
using engine::Tensor;

// One block of the 10.8M model at batch 4.
constexpr std::int64_t kBatch = 4, kTokens = 256, kWidth = 384, kHeads = 6, kVocab = 256;
constexpr std::int64_t kModelNumel = 10'844'160;

void fill_normal(const Tensor& t, const char* name) {
  std::vector<float> values(static_cast<std::size_t>(t.numel()));
  engine::Init::normal(1).write(values.data(), 0, t.numel(), name, 1);
  engine::dispatch_float(t.dtype(), "bench", [&](auto type) {
    engine::cast(t.data<decltype(type)>(), values.data(), t.numel());
  });
}

Tensor normal(const Memory& memory, const Shape& shape, DType dtype, const char* name) {
  const Tensor t = Tensor::empty(memory, shape, dtype, name);
  fill_normal(t, name);
  return t;
}

// A scalar whose gradient gives y the gradient dy, so that one op can run backward alone.
Tensor scalar_of(Tape& tape, const Tensor& y, const Tensor& dy) {
  const Tensor scalar = tape.empty({}, DType::kF32, "scalar");
  *scalar.data<float>() = 0;
  tape.record("scalar", scalar, [&tape, y, dy](const Tensor&) { tape.pass_grad(y, dy); });
  return scalar;
}

struct Bench {
  const BenchConfig& config;
  BenchReport& report;
  LaunchLog log = {};

  // Runs `fn` and reports what it launches; `suffix` follows the kernels' names.
  void run(const std::string& suffix, const std::function<void()>& fn) {
    for (int i = 0; i < 2; ++i) fn();  // do not count
    log.clear();
    for (std::int64_t s = 0; s < config.samples; ++s) fn();
    for (const KernelTimes& k : log.kernels()) {
      if (k.flops == 0 || !config.wants(k.name + suffix)) continue;
      const Measurement t = Measurement::of(k.ms);
      const double per_ms = 1e-6 / t.median_ms / static_cast<double>(k.ms.size());
      report.row({k.name + suffix, Cell(t.median_ms, 3), Cell(t.min_ms, 3), Cell(t.max_ms, 3),
                  k.flops * per_ms, k.nbytes * per_ms});
    }
  }
};

void bench_kernels(Bench& bench, DType dtype) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute", {.listener = &bench.log}));
  const std::string suffix = fmt::format(" {}", name_of(dtype));
  const Shape shape{kBatch, kTokens, kWidth};
  const Tensor x = normal(memory, shape, dtype, "x");
  const Tensor dy = normal(memory, shape, dtype, "dy");
  const Tensor qkv = normal(memory, shape.with_last(3 * kWidth), dtype, "qkv");
  const Tensor wide = normal(memory, shape.with_last(4 * kWidth), dtype, "wide");
  const Tensor dwide = normal(memory, wide.shape(), dtype, "dwide");
  Parameter w{.name = "w", .shape = {kWidth}, .init = engine::Init::ones()};
  Parameter b{.name = "b", .shape = {kWidth}};
  Parameter table{.name = "table", .shape = {kVocab, kWidth}, .init = engine::Init::normal(0.02f)};
  const std::vector<Parameter*> parameters = {&w, &b, &table};
  engine::materialize(parameters, memory, 1, dtype);
  const Tensor targets = Tensor::zeros(memory, shape.drop_last(), DType::kI32, "targets");

  const auto run = [&](const Tensor& input, const std::function<Tensor()>& loss) {
    bench.run(suffix, [&] {
      for (Parameter* p : parameters) p->grad_written = false;
      tape.watch(input);
      tape.backward(loss());
      tape.clear();
    });
  };
  run(qkv, [&] { return scalar_of(tape, ops::attention(tape, qkv, {.num_heads = kHeads}), dy); });
  run(x, [&] { return scalar_of(tape, ops::layernorm(tape, x, w, &b), dy); });
  run(wide, [&] { return scalar_of(tape, ops::gelu(tape, wide), dwide); });
  run(x, [&] { return ops::linear_cross_entropy(tape, x, table, targets); });
}

// Attention alone, of as many tokens in shorter and longer rows and in narrower and wider heads.
void bench_attention(Bench& bench, DType dtype, std::int64_t tokens, std::int64_t head_size) {
  const std::string suffix = fmt::format(" {} T {} D {}", name_of(dtype), tokens, head_size);
  if (!bench.config.wants("attention.forward" + suffix) &&
      !bench.config.wants("attention.backward" + suffix)) {
    return;
  }
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute", {.listener = &bench.log}));
  const Shape shape{kBatch * kTokens / tokens, tokens, kWidth};
  const Tensor dy = normal(memory, shape, dtype, "dy");
  const Tensor qkv = normal(memory, shape.with_last(3 * kWidth), dtype, "qkv");
  bench.run(suffix, [&] {
    tape.watch(qkv);
    const Tensor y = ops::attention(tape, qkv, {.num_heads = kWidth / head_size});
    tape.backward(scalar_of(tape, y, dy));
    tape.clear();
  });
}

void bench_adamw(Bench& bench) {
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    const Memory memory;
    const Stream compute = Stream::inline_cpu("compute", {.listener = &bench.log});
    Parameter w{.name = "w", .shape = {kModelNumel}, .init = engine::Init::normal(0.02f)};
    engine::Block block{"block", {&w}};
    shard::Fsdp fsdp(world, memory, compute, {&block}, nullptr,
                     {.placement = shard::Placement::preset("zero3")});
    shard::AdamW adamw(fsdp, {});
    bench.run(": adamw", [&] {
      fsdp.begin_step();
      fsdp.finish_step();
      adamw.step(3e-4);
    });
  });
}

}  // namespace

void bench_ops(const BenchConfig& config, BenchReport& report) {
  report.note(fmt::format(
      "{}, {}; at most {:.1f} GFLOP/s of f32 in registers; matrix products {:.1f} f32, {:.1f} "
      "bf16; "
      "{:.1f} GB/s by memcpy",
      name_of(engine::isa()), engine::gemm_library(), peak_gflop_per_s(),
      product_gflop_per_s(DType::kF32), product_gflop_per_s(DType::kBF16), copy_gb_per_s()));
  report.begin_table("ops",
                     fmt::format("Kernels, one thread: B {}, T {}, C {}, H {}, V {}; adamw of "
                                 "{:.1f}M parameters. Work as the kernels state it",
                                 kBatch, kTokens, kWidth, kHeads, kVocab, kModelNumel * 1e-6),
                     {"kernel", "ms", "min_ms", "max_ms", "gflop_per_s", "gb_per_s"});
  Bench bench{config, report};
  for (const DType dtype : {DType::kF32, DType::kBF16}) bench_kernels(bench, dtype);
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const std::int64_t tokens : {256, 512, 1024})
      for (const std::int64_t head_size : {32, 64, 128})
        bench_attention(bench, dtype, tokens, head_size);
  bench_adamw(bench);
}

}  // namespace tessera::tools
