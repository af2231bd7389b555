// A communication hook with a memory: of each parameter a rank sends the elements that are at least
// the k-th largest, and adds what it does not send to its next gradient (error feedback). That
// threshold is looked for every `select_every` reductions. What is sent lies among zeros, and the
// strategy's own reducer sums it. For ranks on the CPU.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/error.h"
#include "shard/hooks/cut_error.h"

class TopK : public tessera::shard::HookReducer {
 public:
  using Info = tessera::shard::HookTensorInfo;
  using Tensor = tessera::engine::Tensor;
  TopK(const tessera::shard::ReducerContext& context, std::size_t k, int select_every)
      : HookReducer(context), c_(context), k_(k), select_every_(select_every) {
    tessera::engine::require(!c_.may_skip, "[topk] expected NonFinite::kThrow, got kSkip");
    sum_ = inner_->sum();
  }
  void begin_step() override { inner_->begin_step(); }
  void reduce(const Tensor& in, const tessera::engine::Event& ready, bool is_last) override {
    c_.stream.wait(ready);
    c_.stream.launch({"topk"}, [this, in] {
      for (std::size_t i = 0; i < choices_.size(); ++i) choose(i, in.data<float>());
    });
    inner_->reduce(sent_, c_.stream.record("chosen"), is_last);
  }
  void finish() override { inner_->finish(); }
  bool remembers() const override { return true; }
  std::vector<tessera::shard::HookTraffic> traffic() const override { return {}; }
  bool has_state() const override { return true; }
  std::vector<tessera::shard::HookTensor> state() const override {
    std::vector<tessera::shard::HookTensor> all;
    for (std::size_t i = 0; i < choices_.size(); ++i) {
      const auto error = of(error_, i);
      all.push_back({info("topk.error", i, std::ssize(error)), {error.begin(), error.end()}});
      if (select_every_ > 1) all.push_back({info("topk.threshold", i, 2), choices_[i]});
    }
    return all;
  }
  std::optional<bool> takes(const Info& saved) const override {
    const auto of_it = [&](const auto* p) { return p->name == saved.parameter; };
    if (std::ranges::none_of(c_.parameters, of_it)) return std::nullopt;
    return saved.name == "topk.error" || (saved.name == "topk.threshold" && select_every_ > 1);
  }
  void load(const tessera::shard::HookState& saved) override {
    std::vector<tessera::shard::CutError> errors;
    auto choices = choices_;
    for (std::size_t i = 0; i < choices.size(); ++i) {
      // Ranks owe errors together, so any number of ranks takes them over.
      const Info own = info("topk.error", i, c_.layout.numel(i));
      errors.emplace_back(saved, own.name, own.parameter, own.part, own.num_parts);
      errors.back().check(0, own.numel);
      if (select_every_ == 1) continue;  // a threshold is of one rank's gradients alone
      saved.read(find_own_part(saved, info("topk.threshold", i, 2)), 0, choices[i]);
    }
    choices_ = choices;
    for (std::size_t i = 0; i < errors.size(); ++i) errors[i].read(0, of(error_, i));
  }

 private:
  Info info(const char* name, std::size_t i, std::int64_t n) const {
    return {name, c_.parameters[i]->name, c_.mesh.world().rank(), c_.mesh.world().size(), 0, n};
  }
  std::span<float> of(const Tensor& flat, std::size_t i) const {
    return flat.slice(c_.layout.offset(i), {c_.layout.numel(i)}).span<float>();
  }
  void choose(std::size_t i, const float* in) {
    const std::span<float> error = of(error_, i), sent = of(sent_, i);
    std::vector<float>&choice = choices_[i], sizes;
    for (std::size_t j = 0; j < error.size(); ++j) {
      error[j] += in[c_.layout.offset(i) + static_cast<std::int64_t>(j)];
      sizes.push_back(std::abs(error[j]));
    }
    if (choice[1] == 0) {
      std::ranges::sort(sizes, std::greater<>());
      choice = {sizes[std::min(k_, sizes.size()) - 1], static_cast<float>(select_every_)};
    }
    choice[1] -= 1;
    for (std::size_t j = 0; j < error.size(); ++j) {
      sent[j] = std::abs(error[j]) >= choice[0] ? error[j] : 0;
      error[j] -= sent[j];
    }
  }

  const tessera::shard::ReducerContext c_;
  std::size_t k_;
  int select_every_;
  std::unique_ptr<Reducer> inner_ = make_reducer(c_);
  Tensor error_ = Tensor::zeros(c_.memory, {c_.layout.flat_numel()}, tessera::engine::DType::kF32);
  Tensor sent_ = Tensor::zeros(c_.memory, {c_.layout.flat_numel()}, tessera::engine::DType::kF32);
  // Of each parameter the threshold, and for how many reductions more.
  std::vector<std::vector<float>> choices_{c_.parameters.size(), {0, 0}};
};
