#include "tools/models/language_model.h"

#include "engine/error.h"

namespace tessera::tools {

void LanguageModel::add_lora(const LoraOptions&) {
  engine::fail("[lora] expected a model to which adapters can be added, got another (lora.rank)");
}

std::vector<engine::TensorSpec> LanguageModel::file_tensors(const engine::Parameter& p) const {
  const auto dims = p.shape.dims();
  return {{p.name, {dims.begin(), dims.end()}}};
}

}  // namespace tessera::tools
