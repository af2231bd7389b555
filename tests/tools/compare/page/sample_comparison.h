// A comparison as compare.json holds it, without a training: 2 x 2 configurations with all figures
// there can be, one of which differs, and names that HTML must not take for its own.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/testing/json.h"

namespace tessera::testing {

inline nlohmann::ordered_json sample_comparison(int num_steps = 12) {
  using nlohmann::ordered_json;
  ordered_json all = {
      {"format", 3},
      {"verdict",
       {{"passed", false},
        {"complete", true},
        {"lines",
         {"Parity fails: <b>zero3</b> & more.",
          "Fastest: ddp with 33,000 tokens/s; run more --rounds."}}}},
      {"baseline", "ddp prefetch=0"},
      {"rounds", 1},
      {"warmup_steps", 3},
      {"tolerance", 0.05},
      {"steps", num_steps},
      {"model", {{"preset", "small"}, {"parameters", 640000}, {"layers", 3}, {"dim", 128}}},
      {"devices", {"cpu, v3"}},
      {"rounds_needed", 8},
      {"made_by",
       {{"begun", "2026-11-26 01:02:03 UTC"},
        {"command", "bazel run //tools:compare -- '--sweep=a=<1>,2'"},
        {"commit", {{"id", std::string(40, 'c')}, {"changed", true}}},
        {"cpu", "A <fast> one"},
        {"cores", 16},
        {"usable_cores", 2},
        {"load", {1.25, 0.5, 0.25}},
        {"memory_bytes", std::int64_t{3} << 30},
        {"compiler", "GCC 12.2.0, optimised"},
        {"kept_trainings", 3},
        {"made_again", {{"the <data> have changed", 2}}}}},
      {"configurations", ordered_json::array()}};
  int i = 0;
  for (const char* name : {"ddp prefetch=0", "ddp prefetch=2", "zero3 prefetch=0",
                           "zero3 </script><img src=x onerror=alert(1)> '\""}) {
    const double x = 1 + 0.1 * i++;
    const bool differs = i == 4;
    const auto spread = [&](double median) {
      return ordered_json{{"median", median}, {"q1", median * 0.9}, {"q3", median * 1.1}};
    };
    ordered_json row = {
        {"name", name}, {"folder", "runs/x"}, {"state", "done"}, {"failure", ""}, {"rounds", 1}};
    row["strategy"] = i <= 2 ? "ddp" : "zero3";
    row["ranks"] = 4;
    row["steps"] = num_steps;
    row["model"] = all["model"];
    row["shard_ranks"] = 4;
    row["overrides"] = ordered_json::object();
    row["class"] = 0;
    row["same_plan_as"] = nullptr;
    row["parity"] = {{"kind", differs ? "differs" : "equal bits"},
                     {"reference", "ddp prefetch=0"},
                     {"text", differs ? "differs by \"1e-3\"" : "equal bits"},
                     {"changes_arithmetic", ordered_json::array()},
                     {"max_loss_difference", differs ? 1e-3 : 0.0},
                     {"first_step", differs ? ordered_json(2) : ordered_json()},
                     {"equal_parameters", !differs}};
    row["params_sha256"] = {"ab"};
    row["last_loss"] = 3.25 * x;
    row["metrics"] = {{"step_ms", spread(40 / x)},    {"exposed_comm_ms", spread(4 * x)},
                      {"compute_ms", spread(20 / x)}, {"optimizer_ms", spread(3)},
                      {"data_ms", spread(0.5)},       {"tokens_per_s", spread(30000 * x)},
                      {"overlap", spread(0.8)},       {"sent_bytes", spread(4e6 * x)},
                      {"num_collectives", nullptr}};
    row["speed"] = {{"tokens_per_s_of_rounds", {30000 * x}},
                    {"slower_percent", i == 4 ? ordered_json()
                                              : ordered_json{{"median", 12.5 * i},
                                                             {"low", 10.0 * i},
                                                             {"high", 15.0 * i},
                                                             {"told_apart", i > 2}}}};
    // Which the medians of the parts do not tell: those leave 12.5 ms of the first one's 40.
    row["step_parts_ms"] = {{"compute_ms", 22 / x},
                            {"exposed_comm_ms", 10 / x},
                            {"optimizer_ms", 4 / x},
                            {"data_ms", 1 / x},
                            {"other_ms", 3 / x}};
    row["peak_bytes"] = {{"parameter_shard", 2000000 / i},
                         {"gathered_parameter", 300000 * (i - 1)},
                         {"gradient", 2500000},
                         {"optimizer", 5000000 / i},
                         {"activation", 9000000},
                         {"communication", 80},
                         {"workspace", 70000},
                         {"total", 18000000 - 500000 * i}};
    row["host_peak_bytes"] =
        i == 2 ? ordered_json{{"optimizer", 1000000}, {"total", 1000000}} : ordered_json();
    row["planned"] = {{"peak_bytes", {{"total", 19048576 - 500000 * i}}},
                      {"sent_bytes", 4000000},
                      {"num_collectives", nullptr}};
    row["on_pareto_front"] = i >= 3;
    row["loss"] = ordered_json::array();
    row["loss_difference"] = ordered_json::array();
    for (int step = 0; step < num_steps; ++step) {
      row["loss"].push_back(5 - 0.01 * step);
      row["loss_difference"].push_back(differs && step == num_steps / 2 ? 1e-3 : 0.0);
    }
    row["options"] = {{"parallel.prefetch", i}, {"data.path", name}};
    all["configurations"].push_back(row);
  }
  const ordered_json& rows = all["configurations"];
  const ordered_json fastest = {{"name", rows[3]["name"]},
                                {"not_told_apart_from", {rows[1]["name"], rows[2]["name"]}}};
  all["fastest"] = fastest;
  all["classes"] = {
      {{"label", ""},
       {"configurations", {rows[0]["name"], rows[1]["name"], rows[2]["name"], rows[3]["name"]}},
       {"reference", rows[0]["name"]},
       {"is_another_training", false},
       {"measured_against", nullptr},
       {"changes", ordered_json::array()}}};
  return all;
}

inline nlohmann::ordered_json no_steps() {
  return parse_ordered_json(R"({"steps":[],"streams":[]})");
}

// What steps_to_show() finds of it.
inline nlohmann::ordered_json sample_steps() {
  return parse_ordered_json(R"({"streams":[1,0],"steps":[
    {"name":"ddp prefetch=0","source":"trace","duration_ms":25,"left_out":3,"slices":["linear"],
     "threads":[{"name":"compute","slices":[[6,9.25,0]]}],
     "memory":{"ms":[0,5,20],"bytes":{"optimizer":[5000000,5000000,5000000],"activation":[0,9000000,1000000]},
               "total":[5000000,14000000,6000000]},"terms":[]},
    {"name":"ddp prefetch=2","source":"plan","duration_ms":20,"left_out":0,"slices":["linear","<b>","all_gather"],
     "threads":[{"name":"compute","slices":[[0,9,0],[9.5,8,1]]},{"name":"gather","slices":[[1,6,2]]}],
     "memory":{"ms":[0,4,8],"bytes":{"optimizer":[2500000,2500000,2500000],"activation":[0,8000000,1000]},
               "total":[2500000,10500000,2501000]},
     "terms":[{"category":"optimizer","text":"2 states x 4 B x <i>640,000</i>","bytes":5120000},
              {"category":"activation","text":"1 x 700 B, gelu","bytes":700},
              {"category":"activation","text":"1 x 600 B, linear","bytes":600},
              {"category":"activation","text":"1 x 500 B, layernorm","bytes":500},
              {"category":"activation","text":"1 x 400 B, attention","bytes":400},
              {"category":"activation","text":"1 x 300 B, add","bytes":300},
              {"category":"activation","text":"1 x 20 B, tokens","bytes":20},
              {"category":"activation","text":"1 x 10 B, targets","bytes":10}],
     "host_terms":[{"category":"optimizer","text":"2 states x 4 B x 125,000","bytes":1000000}],
     "sent_terms":[{"text":"3 x 1,000,000 B, all_gather <b>h.0</b> to h.2 forward","bytes":3000000},
                   {"text":"1,000,000 B, reduce_scatter root gradient","bytes":1000000}]}]})");
}

}  // namespace tessera::testing
