#include "tools/weights/adapter_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "engine/error.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::Parameter;
using engine::TensorSpec;

TensorSpec spec_of(const Parameter& p) {
  const auto dims = p.shape.dims();
  return {p.name, {dims.begin(), dims.end()}};
}

// In name order.
std::vector<Parameter*> adapters_among(std::vector<Parameter*> parameters) {
  std::erase_if(parameters, [](const Parameter* p) { return !is_adapter(*p); });
  std::ranges::sort(parameters, {}, [](const Parameter* p) { return p->name; });
  return parameters;
}

std::vector<TensorSpec> specs_of(std::span<Parameter* const> parameters) {
  std::vector<TensorSpec> specs;
  for (const Parameter* p : parameters) specs.push_back(spec_of(*p));
  return specs;
}

AdapterConfig file_config(const LanguageModel& model, const LoraOptions& options,
                          const std::string& base) {
  return {.r = options.rank,
          .lora_alpha = options.alpha,
          .lora_dropout = options.dropout,
          .use_rslora = options.use_rslora,
          .fan_in_fan_out = model.layout().is_in_out,
          .target_modules = options.targets,
          .base = base};
}

ModelWeights complete_weights(const LanguageModel& model, std::span<Parameter* const> adapters,
                              const std::string& folder) {
  ModelWeights weights = adapter_weights(folder, model.layout());
  weights.check_complete(specs_of(adapters));
  return weights;
}

std::vector<float> values_of(const Parameter& p, const ReadParameter& read) {
  std::vector<float> values(static_cast<std::size_t>(p.shape.numel()));
  read(p, values);
  return values;
}

// A module of one layer, "model.layers.0.self_attn.q_proj", which PEFT names all of instead of
// all-linear: that of every layer. Where some layers have none, tensors will be missing.
std::string in_every_layer(std::string name, std::span<const LinearModule> modules) {
  for (const LinearModule& module : modules) {
    if (name.ends_with("." + module.name)) return module.name;
  }
  return name;
}

// (rows, columns) -> (columns, rows)
std::vector<float> transposed(std::span<const float> values, std::int64_t rows,
                              std::int64_t columns) {
  std::vector<float> result(values.size());
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      result[static_cast<std::size_t>(j * rows + i)] =
          values[static_cast<std::size_t>(i * columns + j)];
    }
  }
  return result;
}

}  // namespace

LoraOptions read_lora(const std::string& folder, const ModelConfig& base) {
  const AdapterConfig file = read_adapter_config(folder);
  LoraOptions options{.rank = file.r, .alpha = file.lora_alpha, .use_rslora = file.use_rslora};
  const std::vector<LinearModule> modules = base.make()->linear_modules();
  std::vector<std::string> targets = file.target_modules;
  for (std::string& name : targets) name = in_every_layer(std::move(name), modules);
  try {
    options.targets = lora_targets(modules, targets);
  } catch (const engine::InvalidArgument& e) {
    engine::fail<IoError>("{} ({}/{}: target_modules)", e.what(), folder, kAdapterConfig);
  }
  return options;
}

void load_adapters(shard::Fsdp& fsdp, const LanguageModel& model, const std::string& folder) {
  const std::vector<Parameter*> adapters = adapters_among(fsdp.parameters());
  const ModelWeights weights = complete_weights(model, adapters, folder);
  for (const Parameter* p : adapters) {
    fsdp.load_owned(*p, [&](shard::Range elements, std::span<float> out) {
      weights.read(spec_of(*p), elements.begin, out);
    });
  }
}

void check_can_save_adapters(const ModelConfig& config, const std::string& folder,
                             const std::string& base) {
  const auto model = config.make();
  const std::vector<TensorSpec> specs = specs_of(adapters_among(parameters_of(*model)));
  // Under temporary names, which are removed again.
  const AdapterWriter files(folder, model->layout(), file_config(*model, config.lora, base), specs);
}

void save_adapters(shard::Fsdp& fsdp, const LanguageModel& model, const LoraOptions& options,
                   const std::string& folder, const std::string& base, comm::ProcessGroup& world) {
  const std::vector<Parameter*> adapters = adapters_among(fsdp.parameters());
  std::unique_ptr<AdapterWriter> writer;
  if (world.rank() == 0) {
    const auto pause = world.pause_deadline();
    writer = std::make_unique<AdapterWriter>(folder, model.layout(),
                                             file_config(model, options, base), specs_of(adapters));
  }
  for (const Parameter* p : adapters) {
    const std::vector<float> values = fsdp.full_parameter(*p);
    if (writer) writer->write(p->name, values);
  }
  if (!writer) return;
  const auto pause = world.pause_deadline();
  writer->finish();
}

void write_adapters(LanguageModel& model, const LoraOptions& options, const std::string& folder,
                    const std::string& base, const ReadParameter& read) {
  const std::vector<Parameter*> adapters = adapters_among(parameters_of(model));
  AdapterWriter writer(folder, model.layout(), file_config(model, options, base),
                       specs_of(adapters));
  for (const Parameter* p : adapters) writer.write(p->name, values_of(*p, read));
  writer.finish();
}

LoraDelta::LoraDelta(LanguageModel& model, const LoraOptions& options, const ReadParameter& read) {
  add(model, options, read);
}

LoraDelta::LoraDelta(const std::string& folder, const ModelConfig& base) {
  ModelConfig config = base;
  config.lora = read_lora(folder, base);
  const auto model = config.make();
  const ModelWeights weights =
      complete_weights(*model, adapters_among(parameters_of(*model)), folder);
  add(*model, config.lora,
      [&](const Parameter& p, std::span<float> values) { weights.read(spec_of(p), 0, values); });
}

void LoraDelta::add(LanguageModel& model, const LoraOptions& options, const ReadParameter& read) {
  rank_ = options.rank;
  const auto scale = static_cast<float>(options.scale());
  const bool is_in_out = model.layout().is_in_out;
  std::map<std::string, const Parameter*, std::less<>> by_name;
  const std::vector<Parameter*> adapters = adapters_among(parameters_of(model));
  for (const Parameter* p : adapters) by_name[p->name] = p;
  for (const Parameter* a : adapters) {
    if (!a->name.ends_with(kLoraA)) continue;
    const std::string module = a->name.substr(0, a->name.size() - kLoraA.size());
    const Parameter& b = *by_name.at(fmt::format("{}{}", module, kLoraB));
    const std::int64_t in = a->shape.dims()[1], out = b.shape.dims()[0];
    std::vector<float> of_a = values_of(*a, read);                         // (r, in)
    std::vector<float> of_b = transposed(values_of(b, read), out, rank_);  // (r, out)
    for (float& value : of_b) value *= scale;
    Product& product = products_[module + ".weight"];
    product = {out, in, std::move(of_b), std::move(of_a)};
    if (!is_in_out) continue;
    std::swap(product.rows, product.columns);
    std::swap(product.left, product.right);
  }
}

void LoraDelta::add_to(const TensorSpec& tensor, std::int64_t first,
                       std::span<float> values) const {
  const auto found = products_.find(tensor.name);
  if (found == products_.end()) return;
  const Product& p = found->second;
  const std::int64_t end = first + std::ssize(values);
  std::int64_t at = first;
  while (at < end) {  // row by row
    const std::int64_t row = at / p.columns, column = at % p.columns;
    const std::int64_t count = std::min(p.columns - column, end - at);
    float* const out = values.data() + (at - first);
    std::vector<float> sum(static_cast<std::size_t>(count));
    for (std::int64_t r = 0; r < rank_; ++r) {
      const float left = p.left[static_cast<std::size_t>(r * p.rows + row)];
      const float* const right = p.right.data() + r * p.columns + column;
      for (std::int64_t j = 0; j < count; ++j) sum[static_cast<std::size_t>(j)] += left * right[j];
    }
    for (std::int64_t j = 0; j < count; ++j) out[j] += sum[static_cast<std::size_t>(j)];
    at += count;
  }
}

}  // namespace tessera::tools
