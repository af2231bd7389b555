// A model of the ops that no other test shards, most of all those with parameters. In each dtype
// every strategy and number of ranks has equal bits, with and without recomputation.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/philox.h"
#include "ops/add.h"
#include "ops/cross_entropy.h"
#include "ops/dims/broadcast.h"
#include "ops/dims/permute.h"
#include "ops/dims/reduce.h"
#include "ops/dims/slice.h"
#include "ops/dot_product_attention.h"
#include "ops/elementwise/cast.h"
#include "ops/elementwise/div.h"
#include "ops/elementwise/sub.h"
#include "ops/elementwise/unary.h"
#include "ops/elementwise/where.h"
#include "ops/embedding.h"
#include "ops/group_norm.h"
#include "ops/index/gather.h"
#include "ops/layernorm.h"
#include "ops/linear.h"
#include "ops/losses/losses.h"
#include "ops/losses/weighted_cross_entropy.h"
#include "ops/mul.h"
#include "ops/parameter.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/softmax/softmax.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::Init;
using engine::Parameter;
using engine::Shape;
using engine::Tape;
using engine::Tensor;

constexpr std::int64_t B = 2, T = 5, H = 2, D = 4, C = H * D, V = 11;
// Where tokens stand in the two documents of each row.
constexpr std::int32_t kPlaces[T] = {0, 1, 2, 0, 1};

Parameter make(std::string name, Shape shape, Init init = Init::normal(0.4f)) {
  return {.name = std::move(name), .shape = shape, .init = init};
}

struct Layer {
  Layer(const std::string& name, std::int64_t num_keys)
      : norm_w(make(name + ".norm_w", {C}, Init::ones())),
        norm_b(make(name + ".norm_b", {C})),
        q(make(name + ".q", {C, C})),
        kv(make(name + ".kv", {C, C})),
        out(make(name + ".out", {C, C})),
        scale(make(name + ".scale", {C}, Init::ones())),
        S(num_keys),
        block{name, {&norm_w, &norm_b, &q, &kv, &out, &scale}} {}

  Tensor operator()(Tape& tape, const Tensor& x) {
    const Tensor channels = ops::transpose(tape, x, 1, 2);
    const Tensor normed =
        ops::permute(tape, ops::group_norm(tape, channels, 2, norm_w, &norm_b), {0, 2, 1});
    // Keys of the first S tokens, and one head of them for both of queries.
    const Tensor seen = S == T ? normed : ops::slice(tape, normed, 1, 0, S);
    const auto turned = [&](const Tensor& h) {
      const std::vector<std::int32_t> places(kPlaces, kPlaces + h.dim(1));
      const Tensor at = Tensor::from<std::int32_t>(tape.memory(), {h.dim(1)}, places);
      return ops::rope(tape, ops::rmsnorm(tape, h), {.positions = at});
    };
    const Tensor queries = ops::linear(tape, normed, q, nullptr).reshape({B, T, H, D});
    const std::vector<Tensor> both =
        ops::split(tape, ops::linear(tape, seen, kv, nullptr).reshape({B, S, H, D}), 2, {1, 1});
    const Tensor heads = ops::dot_product_attention(tape, turned(queries), turned(both[0]), both[1],
                                                    {.mask = mask(tape, x.dtype())});
    const Tensor y = ops::linear(tape, heads.reshape({B, T, C}), out, nullptr);
    const Tensor scales = ops::broadcast(tape, ops::parameter(tape, scale), x.shape());
    return ops::add(tape, x, ops::mul(tape, activated(tape, y), scales));
  }

  // The last key of the second sequence is padding. Where each token has a key, a query sees that
  // of its own and that of the one before, if it is of the same document.
  Tensor mask(Tape& tape, DType dtype) const {
    const std::int64_t rows = S == T ? T : 1;
    std::vector<float> values;
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t t = 0; t < rows; ++t)
        for (std::int64_t s = 0; s < S; ++s) {
          const bool is_near = s <= t && s >= t - 1 && s >= t - kPlaces[t];
          const bool is_padding = b == 1 && s == S - 1;
          values.push_back(
              (S < T || is_near) && !is_padding ? 0 : -std::numeric_limits<float>::infinity());
        }
    return ops::cast(tape, Tensor::from<float>(tape.memory(), {B, 1, 1, rows, S}, values), dtype);
  }

  // By several functions, each of a part of the channels.
  static Tensor activated(Tape& tape, const Tensor& y) {
    const std::vector<Tensor> parts = ops::split(tape, y, -1, {2, 3, 3});
    const Tensor a = ops::div(tape, ops::tanh(tape, parts[0]), ops::exp(tape, parts[0]));
    const Tensor b =
        ops::sub(tape, ops::add(tape, ops::silu(tape, parts[1]), ops::clamp(tape, parts[1], -1, 1)),
                 ops::log(tape, ops::softplus(tape, parts[2])));
    const Tensor c =
        ops::where(tape, ops::clamp(tape, parts[2], 0, 1), ops::sigmoid(tape, parts[1]), b);
    return ops::concat(tape, {c, a, b}, -1);
  }

  Parameter norm_w, norm_b, q, kv, out, scale;
  std::int64_t S;  // how many keys there are
  engine::Block block;
};

struct Model {
  Model()
      : table(make("table", {V, C})),
        positions(make("positions", {T, C})),
        head(make("head", {C, V})),
        root{"root", {&table, &positions, &head}} {
    layers.push_back(std::make_unique<Layer>("h.0", T));
    layers.push_back(std::make_unique<Layer>("h.1", 3));
  }
  std::vector<engine::Block*> blocks() {
    std::vector<engine::Block*> all;
    for (const auto& layer : layers) all.push_back(&layer->block);
    return all;
  }

  // Of tokens and targets that follow from `number`.
  Tensor loss(Tape& tape, std::uint64_t number, bool recompute) {
    const auto integers = [&](std::uint64_t stream, Shape shape, std::int64_t below = V) {
      std::vector<std::int32_t> values(static_cast<std::size_t>(shape.numel()));
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<std::int32_t>(engine::philox(stream, i, number)[0] % below);
      return Tensor::from<std::int32_t>(tape.memory(), shape, values);
    };
    return tape.region(root, [&] {
      Tensor x = ops::embedding(tape, integers(1, {B, T}), table);
      x = ops::add(tape, x, ops::broadcast(tape, ops::parameter(tape, positions), x.shape()));
      for (const auto& layer : layers) {
        x = tape.region(layer->block, [x, &tape, &l = *layer] { return l(tape, x); },
                        {.recompute = recompute});
      }
      const Tensor logits = ops::linear(tape, ops::layernorm(tape, x), head, nullptr);
      // The mean over sequences of means that are weighted.
      std::vector<float> of_classes(V);
      for (std::size_t v = 0; v < of_classes.size(); ++v)
        of_classes[v] = 1 + static_cast<float>(v) / 4;
      const Tensor class_weights = Tensor::from<float>(tape.memory(), {V}, of_classes);
      const Tensor targets = integers(2, {B, T});
      const Tensor weights = ops::target_weights(tape, class_weights, targets);
      const Tensor rows = ops::mul(tape, ops::cross_entropy_rows(tape, logits, targets), weights);
      const Tensor means = ops::div(tape, ops::sum(tape, rows, 1), ops::sum(tape, weights, 1));
      Tensor sum = ops::mean(tape, means, 0);
      // Other losses of the logits, each a part of the whole.
      const Tensor log_p = ops::log_softmax(tape, logits).reshape({B * T, V});
      const Tensor others = ops::rows(tape, log_p, integers(3, {B * T}, B * T));
      const Tensor p = ops::stop_gradient(tape, ops::softmax(tape, logits));
      const Tensor largest = ops::max(tape, logits, -1).y;
      const Tensor chosen = ops::gather(tape, logits, integers(4, {B, T}));
      const DType dtype = logits.dtype(), other = dtype == DType::kF32 ? DType::kBF16 : DType::kF32;
      const Tensor rounded = ops::cast(tape, ops::cast(tape, chosen, other), dtype);
      for (const Tensor& more :
           {ops::kl_divergence(tape, others, p.reshape({B * T, V})),
            ops::mse(tape, rounded, largest), ops::bce_with_logits(tape, logits, p),
            ops::weighted_cross_entropy(tape, logits, integers(5, {B, T}), class_weights)}) {
        sum = ops::add(tape, sum, more);
      }
      return sum;
    });
  }

  Parameter table, positions, head;
  engine::Block root;
  std::vector<std::unique_ptr<Layer>> layers;
};

struct Case {
  std::string strategy = "ddp";
  int ranks = 1;
  bool recompute = false;
  DType param = DType::kF32;
};

// Losses of rank 0's first micro-batches, and all parameters, after three steps of 12
// micro-batches.
std::vector<float> train(const Case& c) {
  std::vector<float> result;
  comm::run_ranks(c.ranks, {}, [&](ProcessGroup& world) {
    const engine::Stream compute = engine::Stream::inline_cpu("compute");
    const engine::Memory memory(compute, {.poison = true});
    Tape tape(memory, compute);
    Model model;
    Fsdp fsdp(world, memory, compute, model.blocks(), &model.root,
              {.placement = Placement::preset(c.strategy), .precision = {.param = c.param}});
    Sgd sgd(fsdp, {.momentum = 0.9});
    std::vector<float> mine;
    for (int step = 0; step < 3; ++step) {
      const int accum = 12 / c.ranks;
      fsdp.begin_step(accum);
      for (int micro = 0; micro < accum; ++micro) {
        if (micro > 0) fsdp.next_micro_step();
        const int number = step * 12 + micro * c.ranks + world.rank();
        const Tensor loss = model.loss(tape, static_cast<std::uint64_t>(number), c.recompute);
        tape.backward(loss);
        if (micro == 0) mine.push_back(loss.item());
      }
      mine.push_back(fsdp.finish_step().value());
      sgd.step(0.1);
    }
    for (const Parameter* p : fsdp.parameters())
      for (const float v : fsdp.full_parameter(*p)) mine.push_back(v);
    if (world.rank() == 0) result = mine;
  });
  return result;
}

class OpsOf : public ::testing::TestWithParam<DType> {};

TEST_P(OpsOf, AnyStrategyHasTheBitsOfOneProcess) {
  const std::vector<float> one = train({.param = GetParam()});
  // It learns: the loss of the last step is less than that of the first.
  EXPECT_LT(one[4], one[0]);
  bool recompute = false;
  for (const std::string& strategy : Placement::preset_names()) {
    for (const int ranks : {1, 2, 3, 4}) {
      const Case c{strategy, ranks, recompute = !recompute, GetParam()};
      EXPECT_EQ(train(c), one) << strategy << " on " << ranks << " ranks, recompute " << recompute;
    }
    recompute = !recompute;
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, OpsOf, ::testing::Values(DType::kF32, DType::kBF16));

}  // namespace
}  // namespace tessera::shard
