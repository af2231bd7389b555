// Logs of trainings, as a comparison reads them.
#include "tools/compare/comparison/run_record.h"

#include "tests/fuzz/target.h"
#include "tests/testing/temp_folder.h"

namespace tessera::fuzz {

const char* const kTarget = "run_record";

void consume(std::string_view input) {
  static const testing::TempFolder folder;
  const tools::RunRecord run = tools::read_run_record(folder.write("log.jsonl", input));
  for (const auto& [name, values] : run.metrics) {
    promise(values.size() == run.loss.size(), "expected as many values as steps");
  }
  tools::spread_of(run.loss);
}

}  // namespace tessera::fuzz
