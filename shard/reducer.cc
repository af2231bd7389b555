#include "shard/reducer.h"

#include "engine/copy.h"
#include "engine/elementwise.h"

namespace tessera::shard {

using comm::Accumulate;
using comm::ProcessGroup;
using engine::Event;
using engine::Tensor;

// [Note: one order of sums]
// One process that accumulates adds the gradients of the first micro-step rank by rank, then those
// of the second, and so on. Every reducer adds in that order, so every strategy has its bits:
// collectives add onto the running sum one rank after the other. Over two axes replicas take turns:
// each adds its own ranks' gradients to the running sum, cut over the shard axis, and hands it on
// down the columns of the mesh. Between replicas of K ranks a shard of 1/K then travels once per
// replica, and replicas wait for each other, though not for other units' reductions. Groups that do
// not sum in rank order anyway reduce inside each replica alone, and across once per step.

namespace {

// What all reducers of the strategies do besides the collective itself.
class StrategyReducer : public Reducer {
 public:
  explicit StrategyReducer(const ReducerContext& context)
      : Reducer(context),
        stream_(context.stream),
        label_(context.name + " gradient"),
        staging_(context.staging) {}

  void begin_step() override { has_sum_ = false; }
  bool has_more() const override { return false; }

  void reduce(const Tensor& in, const Event& ready, bool is_last) override {
    stream_.wait(ready);
    Tensor sent = in;
    if (staging_.defined()) {
      sent = staging_.slice(0, in.shape());
      engine::launch_assign_or_add(stream_, sent, in, false, "cast", label_);
    }
    add(sent, has_sum_ ? Accumulate::kYes : Accumulate::kNo, is_last);
    has_sum_ = true;
  }

 protected:
  // sum_ = or += `in` of every rank.
  virtual void add(const Tensor& in, Accumulate accumulate, bool is_last) = 0;

  const engine::Stream& stream() const { return stream_; }
  const std::string& label() const { return label_; }

 private:
  engine::Stream stream_;
  std::string label_;
  Tensor staging_;
  bool has_sum_ = false;
};

// Its first gradient is the sum, unless that is rounded on its way.
class Alone final : public StrategyReducer {
 public:
  using StrategyReducer::StrategyReducer;
  bool takes_sum() const override { return true; }

 private:
  void add(const Tensor& in, Accumulate accumulate, bool) override {
    if (in.key() == sum_.key()) return;
    engine::launch_assign_or_add(stream(), sum_, in, accumulate == Accumulate::kYes, "reduce",
                                 label());
  }
};

// One collective adds everything.
class OneCall final : public StrategyReducer {
 public:
  using Call = decltype(&ProcessGroup::all_reduce);
  OneCall(const ReducerContext& context, ProcessGroup& group, Call call)
      : StrategyReducer(context), group_(group), call_(call) {}

 private:
  void add(const Tensor& in, Accumulate accumulate, bool) override {
    (group_.*call_)(in, sum_, accumulate, stream(), label());
  }
  ProcessGroup& group_;
  Call call_;
};

// [Note: one order of sums]: replicas take turns.
class InTurns final : public StrategyReducer {
 public:
  explicit InTurns(const ReducerContext& context) : StrategyReducer(context), mesh_(context.mesh) {}

 private:
  void add(const Tensor& in, Accumulate accumulate, bool) override {
    for (int replica = 0; replica < mesh_.num_replicas(); ++replica) {
      if (replica == mesh_.replica()) {
        mesh_.reduce().shard->reduce_scatter(in, sum_, replica == 0 ? accumulate : Accumulate::kYes,
                                             stream(), label());
      }
      mesh_.reduce().replicate->broadcast(sum_, replica, stream(), label());
    }
  }
  const Mesh& mesh_;
};

// The sum of InTurns in another order: inside the replica each time, across replicas after the last
// micro-step. A unit that
// the last micro-step did not reach goes across at the end.
class InsideThenAcross final : public StrategyReducer {
 public:
  explicit InsideThenAcross(const ReducerContext& context)
      : StrategyReducer(context), mesh_(context.mesh) {}

  bool has_more() const override { return !is_across_; }
  void finish() override {
    if (has_more()) go_across();
  }

 private:
  void add(const Tensor& in, Accumulate accumulate, bool is_last) override {
    mesh_.reduce().shard->reduce_scatter(in, sum_, accumulate, stream(), label());
    is_across_ = false;
    if (is_last) go_across();
  }
  void go_across() {
    mesh_.reduce().replicate->all_reduce(sum_, sum_, Accumulate::kNo, stream(), label());
    is_across_ = true;
  }
  const Mesh& mesh_;
  bool is_across_ = false;
};

}  // namespace

std::unique_ptr<Reducer> make_reducer(const ReducerContext& context) {
  const Axes& axes = context.mesh.reduce();
  if (axes.world == nullptr) return std::make_unique<Alone>(context);
  if (context.place == Place::kWhole || axes.shard == nullptr) {
    return std::make_unique<OneCall>(context, *axes.world, &ProcessGroup::all_reduce);
  }
  if (axes.replicate == nullptr) {
    return std::make_unique<OneCall>(context, *axes.shard, &ProcessGroup::reduce_scatter);
  }
  if (axes.shard->sums_in_rank_order()) return std::make_unique<InTurns>(context);
  return std::make_unique<InsideThenAcross>(context);
}

}  // namespace tessera::shard
