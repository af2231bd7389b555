// A communication hook without a memory: a rank sends its gradients in bf16, half the bytes, and
// rounds each up or down by chance, the likelier the nearer, so that it is right on average. What
// is drawn depends on the program's step, the rank, the parameter and the element alone: bits are
// equal under every strategy, and those of a run that goes on are those of one that was not
// interrupted. The strategy's own reducer sums. For ranks on the CPU.
#pragma once
#include <bit>
#include <cmath>
#include <memory>
#include <string>

#include "engine/dtype.h"
#include "engine/philox.h"
#include "shard/reducer.h"

class RoundByChance : public tessera::shard::Reducer {
 public:
  using Tensor = tessera::engine::Tensor;
  /// `step`: where the program counts its steps, read in each; outlives this.
  RoundByChance(const tessera::shard::ReducerContext& context, const std::uint64_t& step)
      : Reducer(context), c_(context), step_(step) {}
  void begin_step() override {
    inner_->begin_step();
    num_reductions_ = 0;
  }
  void reduce(const Tensor& in, const tessera::engine::Event& ready, bool is_last) override {
    const std::uint64_t seed = step_ << 16 | num_reductions_++;
    c_.stream.wait(ready);
    c_.stream.launch({"round by chance"}, [this, in, seed] {
      for (std::size_t i = 0; i < c_.parameters.size(); ++i) round(i, in.data<float>(), seed);
    });
    inner_->reduce(sent_, c_.stream.record("rounded"), is_last);
  }
  bool has_more() const override { return inner_->has_more(); }
  void finish() override { inner_->finish(); }

 private:
  void round(std::size_t i, const float* in, std::uint64_t seed) {
    const std::string rank = std::to_string(c_.mesh.world().rank());
    const std::uint64_t name = tessera::engine::fnv1a(c_.parameters[i]->name);
    const tessera::engine::RandomStream random{seed, tessera::engine::fnv1a(rank, name)};
    const std::int64_t begin = c_.layout.offset(i);
    for (std::int64_t j = 0; j < c_.layout.numel(i); ++j) {
      // bf16 is the upper half of an f32: the lower half says how likely the next number is.
      auto bits = std::bit_cast<std::uint32_t>(in[begin + j]);
      if (std::isfinite(in[begin + j])) bits += random.bits(std::uint64_t(j)) & 0xFFFFu;
      sent_.data<tessera::engine::BFloat16>()[begin + j].bits = std::uint16_t(bits >> 16);
    }
  }

  const tessera::shard::ReducerContext c_;
  const std::uint64_t& step_;
  std::uint64_t num_reductions_ = 0;  // of this step
  std::unique_ptr<Reducer> inner_ = make_reducer(c_);
  Tensor sent_ = Tensor::zeros(c_.memory, {c_.layout.flat_numel()}, tessera::engine::DType::kBF16);
};
