#include "tools/trace/trace_flows.h"

#include <algorithm>

namespace tessera::tools {
namespace {

constexpr std::string_view kGradient = " gradient";

}  // namespace

void TraceFlows::add_unit(const std::string& unit, const std::vector<std::string>& blocks) {
  units_.insert(unit);
  for (const std::string& block : blocks) unit_of_block_[block] = unit;
}

std::string TraceFlows::unit_of_block(std::string_view block) const {
  const auto it = unit_of_block_.find(block);
  return it == unit_of_block_.end() ? std::string(block) : it->second;
}

std::string TraceFlows::unit_of_label(std::string_view label) const {
  if (units_.contains(label)) return std::string(label);
  const std::size_t space = label.rfind(' ');
  if (space == std::string_view::npos) return "";
  const std::string_view unit = label.substr(0, space);
  return units_.empty() || units_.contains(unit) ? std::string(unit) : "";
}

std::shared_ptr<LaunchPoint> TraceFlows::enqueue(const engine::LaunchRequest& request,
                                                 bool computes) {
  if (computes) {
    if (request.scope.block.empty()) return nullptr;
    const std::string unit = unit_of_block(request.scope.block);
    auto point = std::make_shared<LaunchPoint>();
    if (const auto it = gathers_.find(unit); it != gathers_.end()) {
      for (const Gather& gather : it->second) flows_.push_back({"gathered", gather.point, point});
      gathers_.erase(it);
    }
    last_compute_[unit] = point;
    return point;
  }
  const std::string_view label = request.work.detail;
  const std::string unit = unit_of_label(label);
  if (unit.empty()) return nullptr;
  if (label.ends_with(kGradient)) {
    const auto it = last_compute_.find(unit);
    if (it == last_compute_.end()) return nullptr;
    auto point = std::make_shared<LaunchPoint>();
    flows_.push_back({"gradient", it->second, point});
    last_compute_.erase(it);
    return point;
  }
  if (request.work.name != "all_gather") return nullptr;
  gathers_[unit].push_back({std::make_shared<LaunchPoint>()});
  return gathers_[unit].back().point;
}

void TraceFlows::end_step() {
  for (auto& [unit, gathers] : gathers_) {
    std::erase_if(gathers, [](const Gather& gather) { return gather.is_old; });
    for (Gather& gather : gathers) gather.is_old = true;
  }
}

std::vector<TraceFlows::Flow> TraceFlows::take_told() {
  const auto pending = std::stable_partition(flows_.begin(), flows_.end(), [](const Flow& flow) {
    return flow.from->is_told && flow.to->is_told;
  });
  std::vector<Flow> told(flows_.begin(), pending);
  flows_.erase(flows_.begin(), pending);
  return told;
}

}  // namespace tessera::tools
