#include "tools/weights/model_files.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "tools/huggingface/config_file.h"

namespace tessera::tools {
namespace {

std::vector<engine::TensorSpec> tensors_of(const LanguageModel& model,
                                           std::span<engine::Parameter* const> parameters) {
  std::vector<engine::TensorSpec> all;
  for (const engine::Parameter* p : parameters) {
    const std::vector<engine::TensorSpec> tensors = model.file_tensors(*p);
    std::int64_t numel = 0;
    for (const engine::TensorSpec& tensor : tensors) numel += engine::numel(tensor.shape);
    engine::require(numel == p->shape.numel(),
                    "[model] expected tensors in files of {} elements, got {} ({})",
                    p->shape.numel(), numel, p->name);
    all.insert(all.end(), tensors.begin(), tensors.end());
  }
  return all;
}

// fn(tensor, its part of `values`), for each tensor that keeps `p`.
template <class T, class F>
void for_each_tensor(const LanguageModel& model, const engine::Parameter& p, std::span<T> values,
                     const F& fn) {
  for (const engine::TensorSpec& tensor : model.file_tensors(p)) {
    const auto numel = static_cast<std::size_t>(engine::numel(tensor.shape));
    fn(tensor, values.first(numel));
    values = values.subspan(numel);
  }
}

// Elements of a parameter, which `tensors` keep one after the other.
void read_elements(const ModelWeights& weights, std::span<const engine::TensorSpec> tensors,
                   const LoraDelta* delta, shard::Range elements, std::span<float> out) {
  std::int64_t begin = 0;  // of the tensor, in the parameter
  for (const engine::TensorSpec& tensor : tensors) {
    const std::int64_t end = begin + engine::numel(tensor.shape);
    const std::int64_t from = std::max(begin, elements.begin);
    const std::int64_t to = std::min(end, elements.begin + elements.numel);
    if (from < to) {
      const auto part = out.subspan(static_cast<std::size_t>(from - elements.begin),
                                    static_cast<std::size_t>(to - from));
      weights.read(tensor, from - begin, part);
      if (delta != nullptr) delta->add_to(tensor, from - begin, part);
    }
    begin = end;
  }
}

std::vector<engine::Parameter*> without_adapters(std::vector<engine::Parameter*> parameters) {
  std::erase_if(parameters, [](const engine::Parameter* p) { return is_adapter(*p); });
  return parameters;
}

}  // namespace

void load_model(shard::Fsdp& fsdp, const LanguageModel& model, const std::string& folder,
                const LoraDelta* delta) {
  const ModelWeights weights(folder, model.layout());
  const auto parameters = without_adapters(fsdp.parameters());
  weights.check_complete(tensors_of(model, parameters));
  for (const engine::Parameter* p : parameters) {
    fsdp.load_owned(*p, [&](shard::Range elements, std::span<float> out) {
      read_elements(weights, model.file_tensors(*p), delta, elements, out);
    });
  }
}

void check_can_save_model(LanguageModel& model, const std::string& folder,
                          const SaveOptions& options) {
  // The files are opened under temporary names, and removed again.
  const std::unique_ptr<ModelWriter> files =
      model_writer(model, folder, parameters_of(model), options);
  const engine::AtomicFile replaced(folder + "/" + kReplacedConfig);
  engine::flush_folder_of(folder + "/config.json");
}

void save_model(shard::Fsdp& fsdp, const LanguageModel& model, const std::string& folder,
                comm::ProcessGroup& world, const SaveOptions& options) {
  const auto parameters = fsdp.parameters();
  std::unique_ptr<ModelWriter> writer;
  if (world.rank() == 0) {
    const auto pause = world.pause_deadline();
    writer = model_writer(model, folder, parameters, options);
  }
  for (const engine::Parameter* p : parameters) {
    const std::vector<float> values = fsdp.full_parameter(*p);
    if (!writer) continue;
    const auto pause = world.pause_deadline();
    write_parameter(*writer, model, *p, values);
  }
  if (!writer) return;
  const auto pause = world.pause_deadline();
  writer->finish();
}

std::unique_ptr<ModelWriter> model_writer(const LanguageModel& model, const std::string& folder,
                                          std::span<engine::Parameter* const> parameters,
                                          const SaveOptions& options) {
  return std::make_unique<ModelWriter>(folder, model.layout(), model.config_text(),
                                       tensors_of(model, parameters), options);
}

void write_parameter(ModelWriter& writer, const LanguageModel& model, const engine::Parameter& p,
                     std::span<const float> values) {
  for_each_tensor(model, p, values,
                  [&](const engine::TensorSpec& tensor, std::span<const float> part) {
                    writer.write(tensor.name, part);
                  });
}

void add_delta(const LoraDelta& delta, const LanguageModel& model, const engine::Parameter& p,
               std::span<float> values) {
  for_each_tensor(model, p, values, [&](const engine::TensorSpec& tensor, std::span<float> part) {
    delta.add_to(tensor, 0, part);
  });
}

void merge_model(LanguageModel& model, const std::string& from, const LoraDelta& delta,
                 const std::string& to, const SaveOptions& options,
                 const std::function<void(std::int64_t numel)>& progress) {
  auto parameters = parameters_of(model);
  std::ranges::sort(parameters, {}, [](const engine::Parameter* p) { return p->name; });
  const ModelWeights weights(from, model.layout());
  weights.check_complete(tensors_of(model, parameters));
  const auto writer = model_writer(model, to, parameters, options);
  for (const engine::Parameter* p : parameters) {
    std::vector<float> values(static_cast<std::size_t>(p->shape.numel()));
    read_elements(weights, model.file_tensors(*p), &delta, {0, std::ssize(values)}, values);
    write_parameter(*writer, model, *p, values);
    progress(std::ssize(values));
  }
  writer->finish();
}

}  // namespace tessera::tools
