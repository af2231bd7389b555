#include "tools/models/language_model.h"

namespace tessera::tools {

std::vector<engine::TensorSpec> LanguageModel::file_tensors(const engine::Parameter& p) const {
  const auto dims = p.shape.dims();
  return {{p.name, {dims.begin(), dims.end()}}};
}

}  // namespace tessera::tools
