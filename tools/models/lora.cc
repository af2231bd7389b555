#include "tools/models/lora.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/error.h"
#include "ops/add.h"
#include "ops/dims/slice.h"
#include "ops/linear.h"
#include "ops/scale.h"
#include "tools/models/residual_dropout.h"

namespace tessera::tools {

using engine::require;
using engine::Tape;
using engine::Tensor;

namespace {

constexpr std::string_view kAll = "all-linear";

// What stands after the last dot: "q_proj".
std::string_view last_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }

bool means(std::string_view asked, const LinearModule& module) {
  return asked == kAll || asked == module.name || asked == last_of(module.name);
}

std::string known(std::span<const LinearModule> modules) {
  std::vector<std::string_view> names;
  for (const LinearModule& module : modules) {
    if (std::ranges::find(names, last_of(module.name)) == names.end())
      names.push_back(last_of(module.name));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

double LoraOptions::scale() const {
  const auto r = static_cast<double>(rank);
  return alpha / (use_rslora ? std::sqrt(r) : r);
}

std::vector<std::string> lora_targets(std::span<const LinearModule> modules,
                                      std::span<const std::string> asked) {
  require(!modules.empty(), "[lora] expected a model whose linear modules have names, got another");
  for (const std::string& name : asked) {
    require(std::ranges::any_of(modules, [&](const auto& module) { return means(name, module); }),
            "[lora] expected targets of {}, or {}, got '{}' (lora.targets)", known(modules), kAll,
            name);
  }
  const auto is_target = [&](const LinearModule& module) {
    if (asked.empty()) return module.is_usual;
    return std::ranges::any_of(asked, [&](const auto& name) { return means(name, module); });
  };
  std::vector<std::string> targets;
  for (const LinearModule& module : modules) {
    if (!is_target(module)) continue;
    // Short where that says it.
    const std::string_view last = last_of(module.name);
    const bool is_short = std::ranges::all_of(modules, [&](const LinearModule& other) {
      return last_of(other.name) != last || is_target(other);
    });
    std::string target(is_short ? last : module.name);
    if (std::ranges::find(targets, target) == targets.end()) targets.push_back(std::move(target));
  }
  return targets;
}

std::vector<std::string> parse_lora_targets(std::string_view text) {
  std::vector<std::string> targets;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(','), text.size());
    targets.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return targets;
}

bool is_adapter(const engine::Parameter& p) {
  return p.name.ends_with(kLoraA) || p.name.ends_with(kLoraB);
}

Lora::Lora(LoraOptions options, std::vector<LinearModule> modules,
           std::span<engine::Block* const> layers)
    : options_(std::move(options)), modules_(std::move(modules)), layers_(layers.size()) {
  require(options_.rank >= 1 && options_.rank <= 1 << 16,
          "[lora] expected lora.rank in [1, {}], got {}", 1 << 16, options_.rank);
  require(options_.alpha > 0 && std::isfinite(options_.alpha),
          "[lora] expected lora.alpha above 0, got {}", options_.alpha);
  require(options_.dropout >= 0 && options_.dropout < 1,
          "[lora] expected lora.dropout in [0, 1), got {}", options_.dropout);
  const std::vector<std::string> targets = lora_targets(modules_, options_.targets);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    for (const LinearModule& m : modules_) {
      if (std::ranges::none_of(targets, [&](const auto& target) { return means(target, m); }))
        continue;
      Adapter& adapter = layers_[i][m.name];
      adapter.name = fmt::format("{}.{}", layers[i]->name, m.name);
      adapter.a.name = fmt::format("{}{}", adapter.name, kLoraA);
      adapter.a.shape = {options_.rank, m.in};
      adapter.a.init = engine::Init::uniform(1.0f / std::sqrt(static_cast<float>(m.in)));
      adapter.b.name = fmt::format("{}{}", adapter.name, kLoraB);
      adapter.b.shape = {m.out, options_.rank};
      layers[i]->parameters.push_back(&adapter.a);
      layers[i]->parameters.push_back(&adapter.b);
    }
  }
}

bool Lora::has(std::initializer_list<std::string_view> modules) const {
  return std::ranges::any_of(modules,
                             [&](std::string_view m) { return layers_.front().contains(m); });
}

const LinearModule& Lora::module(std::string_view name) const {
  const auto found = std::ranges::find(modules_, name, &LinearModule::name);
  require(found != modules_.end(), "[lora] expected a module of the model, got {}", name);
  return *found;
}

Tensor Lora::delta(Tape& tape, Adapter& adapter, const Tensor& x, const Pass& pass) const {
  constexpr auto kOutIn = ops::WeightLayout::kOutIn;
  const Tensor kept = residual_dropout(tape, x, options_.dropout, adapter.name + ".lora", pass);
  const Tensor low = ops::linear(tape, kept, adapter.a, nullptr, kOutIn);  // (B, T, r)
  return ops::linear(tape, ops::scale(tape, low, static_cast<float>(options_.scale())), adapter.b,
                     nullptr, kOutIn);
}

Tensor Lora::add_to(Tape& tape, std::size_t layer, std::initializer_list<std::string_view> modules,
                    const Tensor& x, const Tensor& y, const Pass& pass) {
  if (!has(modules)) return y;
  auto& adapters = layers_[layer];
  std::vector<std::int64_t> outs;
  for (const std::string_view m : modules) outs.push_back(module(m).out);
  std::vector<Tensor> parts = {y};
  if (modules.size() > 1) parts = ops::split(tape, y, 2, outs);
  std::size_t i = 0;
  for (const std::string_view m : modules) {
    if (const auto found = adapters.find(m); found != adapters.end())
      parts[i] = ops::add(tape, parts[i], delta(tape, found->second, x, pass));
    ++i;
  }
  return modules.size() > 1 ? ops::concat(tape, parts, 2) : parts[0];
}

double Lora::train_flops(std::int64_t tokens) const {
  double numel = 0;
  for (const auto& adapters : layers_) {
    for (const auto& [name, adapter] : adapters)
      numel += static_cast<double>(adapter.a.shape.numel() + adapter.b.shape.numel());
  }
  return 6 * static_cast<double>(tokens) * numel;
}

}  // namespace tessera::tools
