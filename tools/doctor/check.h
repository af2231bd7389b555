// What the doctor finds: one line for each thing it looks at.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tools/io/jsonl.h"

namespace tessera::tools {

enum class Verdict {
  kOk,
  kWarn,  ///< trainings run, but slower, or otherwise than meant
  kFail,  ///< some training cannot run, or computes wrong numbers
};
/// "ok", "warn", "FAIL".
std::string_view name_of(Verdict verdict);

struct Check {
  std::string name;  ///< "huge pages"
  Verdict verdict = Verdict::kOk;
  std::string found = {};  ///< what there is, on one line
  std::string fix = {};    ///< what to do; not empty unless kOk
  JsonRecord facts = {};   ///< the figures in `found`, for programs
};
using Checks = std::vector<Check>;

/// The worst of them; kOk for none.
Verdict verdict_of(const Checks& checks);
/// A line, and one for its fix. Names and values are escaped.
std::string text_of(const Check& check);
/// A line that counts them.
std::string summary_of(const Checks& checks);
/// {"verdict":"ok","checks":[{"name":...,"verdict":...,"found":...,"fix":...,facts...}, ...]}
std::string json_of(const Checks& checks);

}  // namespace tessera::tools
