#include "shard/hooks/hooks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "engine/elementwise.h"
#include "engine/error.h"

namespace tessera::shard {

using comm::Accumulate;
using engine::DType;
using engine::Event;
using engine::require;
using engine::Tensor;

namespace {

struct Named {
  std::string_view name;
  HookKind kind;
  Wire wire;
};

constexpr std::array kHooks = {
    Named{"none", HookKind::kNone, Wire::kF32},
    Named{"bf16", HookKind::kNone, Wire::kBF16},
    Named{"f16", HookKind::kNone, Wire::kF16},
    Named{"powersgd", HookKind::kPowerSgd, Wire::kF32},
    Named{"bf16+powersgd", HookKind::kPowerSgd, Wire::kBF16},
    Named{"f16+powersgd", HookKind::kPowerSgd, Wire::kF16},
    Named{"batched_powersgd", HookKind::kBatchedPowerSgd, Wire::kF32},
    Named{"bf16+batched_powersgd", HookKind::kBatchedPowerSgd, Wire::kBF16},
    Named{"f16+batched_powersgd", HookKind::kBatchedPowerSgd, Wire::kF16},
    Named{"noop", HookKind::kNoop, Wire::kF32},
};

std::string_view name_of(const HookOptions& options) {
  const auto* const found = std::ranges::find_if(kHooks, [&](const Named& hook) {
    return hook.kind == options.kind && hook.wire == options.wire;
  });
  require(found != kHooks.end(), "[hook] expected noop by itself, got it with a wire");
  return found->name;
}

// What all parameters of a flat send whose gradients travel in `nbytes` an element.
std::vector<HookTraffic> whole_traffic(const ReducerContext& context, double nbytes) {
  std::vector<HookTraffic> traffic;
  for (const engine::Parameter* p : context.parameters) {
    const auto numel = static_cast<double>(p->shape.numel());
    traffic.push_back({p, 0, 4 * numel, nbytes * numel});
  }
  return traffic;
}

// The gradient in 16 bits, otherwise as the strategy does it.
class CastReducer final : public HookReducer {
 public:
  CastReducer(const ReducerContext& context, Wire wire)
      : HookReducer(context),
        stream_(context.stream),
        label_(context.name + " gradient"),
        traffic_(whole_traffic(context, static_cast<double>(size_of(wire)))),
        scratch_(Scratch::of(context.stream, context.memory)) {
    const std::int64_t numel = context.layout.flat_numel();
    if (wire == Wire::kF16) {
      half_.emplace(context.mesh.reduce(), context.mesh.num_parts(context.place),
                    context.range.numel, *scratch_);
      return;
    }
    scratch_->reserve("wire", numel, DType::kBF16);
    context_.emplace(context);
    context_->sum = sum();
    context_->staging = {};
  }

  void begin_step() override {
    has_sum_ = false;
    if (half_) return;
    // Scratch is as large as it gets by now.
    if (inner_ == nullptr) {
      context_->staging = scratch_->get("wire", {context_->layout.flat_numel()});
      inner_ = make_reducer(*context_);
    }
    inner_->begin_step();
  }
  void reduce(const Tensor& in, const Event& ready, bool is_last) override {
    if (inner_ != nullptr) return inner_->reduce(in, ready, is_last);
    stream_.wait(ready);
    half_->add(in, sum_, has_sum_, stream_, label_);
    has_sum_ = true;
  }
  bool has_more() const override { return inner_ != nullptr && inner_->has_more(); }
  void finish() override {
    if (inner_ != nullptr) inner_->finish();
  }
  std::vector<HookTraffic> traffic() const override { return traffic_; }

 private:
  engine::Stream stream_;
  std::string label_;
  std::vector<HookTraffic> traffic_;
  std::shared_ptr<Scratch> scratch_;
  std::optional<HalfSum> half_;
  std::optional<ReducerContext> context_;
  std::unique_ptr<Reducer> inner_;
  bool has_sum_ = false;
};

// As if all other ranks' gradients were zero.
class NoReduction final : public HookReducer {
 public:
  explicit NoReduction(const ReducerContext& context)
      : HookReducer(context),
        stream_(context.stream),
        label_(context.name + " gradient"),
        range_(context.range),
        traffic_(whole_traffic(context, 0)) {}

  void begin_step() override { has_sum_ = false; }
  void reduce(const Tensor& in, const Event& ready, bool) override {
    stream_.wait(ready);
    engine::launch_assign_or_add(stream_, sum_, in.slice(range_.begin, {range_.numel}), has_sum_,
                                 "not_reduced", label_);
    has_sum_ = true;
  }
  bool has_more() const override { return false; }
  std::vector<HookTraffic> traffic() const override { return traffic_; }

 private:
  engine::Stream stream_;
  std::string label_;
  Range range_;
  std::vector<HookTraffic> traffic_;
  bool has_sum_ = false;
};

}  // namespace

std::vector<std::string> hook_names() {
  std::vector<std::string> names;
  for (const Named& hook : kHooks) names.emplace_back(hook.name);
  return names;
}

void set_hook(HookOptions& options, std::string_view name) {
  const auto* const found = std::ranges::find(kHooks, name, &Named::name);
  require(found != kHooks.end(), "[hook] expected one of {}, got '{}'",
          fmt::join(hook_names(), ", "), name);
  options.kind = found->kind;
  options.wire = found->wire;
}

std::string describe(const HookOptions& options) {
  const PowerSgdOptions& p = options.powersgd;
  std::string text(name_of(options));
  if (!options.compresses()) return text;
  return text + fmt::format(
                    ": rank {}, start_step {}, error_feedback {}{}{}, warm_start {}, "
                    "min_compression_rate {}, orthogonalize_eps {}, seed {}{}",
                    p.low_rank.rank, p.start_step, p.error_feedback,
                    p.error_feedback ? fmt::format(" in {}", engine::name_of(p.error_dtype)) : "",
                    p.offload_error ? " offloaded" : "", p.warm_start,
                    p.low_rank.min_compression_rate, p.orthogonalize_eps, p.seed,
                    p.across_replicas ? ", across replicas" : "");
}

ReducerFactory make_hook(const HookOptions& options) {
  static_cast<void>(name_of(options));
  if (options.kind == HookKind::kNone && options.wire == Wire::kF32) return {};
  const auto uncompressed =
      [wire = options.wire](const ReducerContext& context) -> std::unique_ptr<Reducer> {
    if (wire == Wire::kF32) return make_reducer(context);
    return std::make_unique<CastReducer>(context, wire);
  };
  return [options, uncompressed](const ReducerContext& context) -> std::unique_ptr<Reducer> {
    require(context.precision.reduce == DType::kF32,
            "[hook] expected a reduction dtype of f32, since the hook says what is sent, got {} "
            "with {}",
            engine::name_of(context.precision.reduce), name_of(options));
    if (options.kind == HookKind::kNoop) return std::make_unique<NoReduction>(context);
    if (options.kind == HookKind::kNone) return uncompressed(context);
    PowerSgdOptions powersgd = options.powersgd;
    powersgd.low_rank.batched = options.kind == HookKind::kBatchedPowerSgd;
    return make_powersgd(context, powersgd, options.wire, uncompressed);
  };
}

}  // namespace tessera::shard
