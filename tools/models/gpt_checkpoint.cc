#include "tools/models/gpt_checkpoint.h"

#include <optional>
#include <vector>

namespace tessera::tools {
namespace {

std::vector<engine::TensorSpec> tensor_specs(const Model& model,
                                             const std::vector<engine::Parameter*>& parameters) {
  std::vector<engine::TensorSpec> specs;
  for (const engine::Parameter* p : parameters) {
    const auto dims = p->shape.dims();
    specs.push_back({model.checkpoint_name(*p), {dims.begin(), dims.end()}});
  }
  return specs;
}

}  // namespace

Gpt2FileConfig gpt2_file_config(const GptConfig& config) {
  return {.n_layer = config.layers,
          .n_head = config.heads,
          .n_embd = config.dim,
          .n_positions = config.seq,
          .vocab_size = config.vocab,
          .layer_norm_epsilon = config.norm_eps,
          .resid_pdrop = config.dropout,
          .embd_pdrop = config.dropout,
          .attn_pdrop = 0};
}

GptConfig read_gpt_config(const std::string& folder) {
  const Gpt2FileConfig file = read_gpt2_config(folder);
  return {.layers = file.n_layer,
          .heads = file.n_head,
          .dim = file.n_embd,
          .seq = file.n_positions,
          .vocab = file.vocab_size,
          .norm_eps = file.layer_norm_epsilon};
}

void load_gpt(shard::Fsdp& fsdp, const Gpt& gpt, const std::string& folder) {
  Gpt2Weights weights(folder);
  const auto parameters = fsdp.parameters();
  const auto specs = tensor_specs(gpt, parameters);
  weights.check_complete(specs);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    fsdp.load(*parameters[i], weights.lookup(specs[i]));
  }
  fsdp.parameters_changed();
}

void check_can_save_gpt(const std::string& folder) {
  // The files are opened under temporary names, and removed again.
  const Gpt2Writer files(folder, {}, {});
  const engine::AtomicFile replaced(folder + "/" + kGpt2ReplacedConfig);
  engine::flush_folder_of(folder + "/config.json");
}

void save_gpt(shard::Fsdp& fsdp, const Gpt& gpt, const std::string& folder,
              comm::ProcessGroup& world) {
  const GptConfig& config = gpt.config();
  const auto parameters = fsdp.parameters();
  std::optional<Gpt2Writer> writer;
  if (world.rank() == 0) {
    const auto pause = world.pause_deadline();
    writer.emplace(folder, gpt2_file_config(config), tensor_specs(gpt, parameters));
  }
  for (const engine::Parameter* p : parameters) {
    const std::vector<float> values = fsdp.full_parameter(*p);
    if (!writer) continue;
    const auto pause = world.pause_deadline();
    writer->write(gpt.checkpoint_name(*p), values);
  }
  if (!writer) return;
  const auto pause = world.pause_deadline();
  writer->finish();
}

}  // namespace tessera::tools
