// Records of probes: one, or two to be compared. A line alone is the name of a tensor.
#include "tools/probe/probe_record.h"

#include "tests/fuzz/target.h"
#include "tests/testing/temp_folder.h"
#include "tools/probe/divergence.h"

namespace tessera::fuzz {
namespace {

/// What we would write for the same run reads the same.
void write_and_read(const tools::ProbeRun& run, const testing::TempFolder& folder) {
  std::string text = tools::header_text(run.header);
  for (const tools::ProbePart& part : run.parts) text += tools::part_text(part);
  text += tools::end_text(run.last_step, std::ssize(run.parts));
  const tools::ProbeRun again = tools::read_probe_run(folder.write("again", text));
  promise(again.parts.size() == run.parts.size(), "expected the same parts again");
  for (std::size_t i = 0; i < run.parts.size(); ++i) {
    promise(again.parts[i].key == run.parts[i].key &&
                again.parts[i].checksum.hash == run.parts[i].checksum.hash &&
                again.parts[i].values.size() == run.parts[i].values.size(),
            "expected the same part again");
  }
}

}  // namespace

const char* const kTarget = "probe_record";

void consume(std::string_view input) {
  static const testing::TempFolder folder;
  if (input.find('\n') == std::string_view::npos) {
    const tools::ProbeKey key = tools::parse_target(input);
    promise(tools::parse_target(tools::target_text(key)) == key, "expected the same name again");
    return;
  }
  const std::vector<std::string_view> parts = parts_of(input);
  const tools::ProbeRun a = tools::read_probe_run(folder.write("a", parts[0]));
  write_and_read(a, folder);
  // A line that ends the part is not between two.
  const std::string_view other = parts.size() > 1 ? parts[1] : parts[0];
  const tools::ProbeRun b = tools::read_probe_run(folder.write("b", other));
  const tools::DivergenceReport report = tools::compare_probes(a, b);
  promise(report.first.has_value() == (report.num_differing > 0), "expected the first difference");
  // A record may differ from itself where ranks hold the same elements with other bits.
  promise(parts.size() > 1 || !report.first || report.first->a.rank >= 0,
          "expected a record to equal itself");
}

}  // namespace tessera::fuzz
