#include "tools/doctor/check.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/io/text.h"

namespace tessera::tools {

std::string_view name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "ok";
    case Verdict::kWarn:
      return "warn";
    case Verdict::kFail:
      return "FAIL";
  }
  return "";
}

Verdict verdict_of(const Checks& checks) {
  Verdict worst = Verdict::kOk;
  for (const Check& check : checks) worst = std::max(worst, check.verdict);
  return worst;
}

std::string text_of(const Check& check) {
  std::string text = fmt::format("{:<5} {:<14} {}\n", name_of(check.verdict), check.name,
                                 engine::escaped(check.found));
  if (!check.fix.empty()) text += fmt::format("{:20} fix: {}\n", "", engine::escaped(check.fix));
  return text;
}

std::string summary_of(const Checks& checks) {
  const auto count = [&](Verdict verdict) {
    return std::ranges::count(checks, verdict, &Check::verdict);
  };
  return fmt::format("{} ok, {} warning{}, {} failed\n", count(Verdict::kOk), count(Verdict::kWarn),
                     count(Verdict::kWarn) == 1 ? "" : "s", count(Verdict::kFail));
}

std::string json_of(const Checks& checks) {
  std::vector<std::string> records;
  for (const Check& check : checks) {
    records.push_back(JsonRecord()
                          .add("name", check.name)
                          .add("verdict", name_of(check.verdict))
                          .add("found", check.found)
                          .add("fix", check.fix)
                          .add_all(check.facts)
                          .text());
  }
  return JsonRecord()
      .add("verdict", name_of(verdict_of(checks)))
      .add_literal("checks", fmt::format("[{}]", engine::join(records, ",")))
      .line();
}

}  // namespace tessera::tools
