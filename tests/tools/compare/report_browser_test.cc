// The page in headless Chromium: drawn without an error, wide and narrow, light and dark, by
// keyboard, with the figures of compare.json. Fails where there is no Chromium.
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/compare/sample_comparison.h"
#include "tests/tools/compare/tiny_comparison.h"
#include "tools/compare/report_page.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;
using testing::Outcome;
using testing::run_program;
using testing::sample_comparison;
using testing::sample_steps;
using testing::TempFolder;

constexpr const char* kChromium = "/usr/bin/chromium";

// What a person would do and see, told in attributes of the root that the dump shows.
constexpr const char* kProbe = R"(<script>
const root = document.documentElement;
root.dataset.overflows = String(root.scrollWidth > window.innerWidth);
root.dataset.dark = String(getComputedStyle(document.body).backgroundColor === 'rgb(16, 21, 28)');
const bars = document.querySelector('#memory .bars');
bars.focus();
root.dataset.focused = String(document.activeElement === bars);
bars.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown'}));
bars.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown'}));
root.dataset.readout = document.querySelector('#memory .readout').textContent;
const press = (node, key) => node.dispatchEvent(new KeyboardEvent('keydown', {key}));
const moments = document.querySelector('#step-memory .explore');
if (moments) {
  press(moments, 'ArrowRight');
  press(moments, 'ArrowRight');
  root.dataset.moment = document.querySelector('#step-memory .readout').textContent;
  root.dataset.terms = document.querySelector('#step-memory tbody').textContent;
  press(document.querySelector('#gantt figure'), 'ArrowUp');
  root.dataset.slice = document.querySelector('#gantt .readout').textContent;
}
document.querySelectorAll('#table thead button')[3].click();
root.dataset.first = document.querySelector('#table tbody th').textContent;
root.dataset.hidden = [...document.querySelectorAll('section')].filter((s) => s.hidden).map((s) => s.id).join(' ');
root.dataset.images = document.images.length;
const sides = () => [...document.querySelectorAll('#sides tbody tr')]
    .map((row) => [...row.children].map((cell) => cell.textContent).join('|')).join('; ');
root.dataset.outer = sides();
const picks = document.querySelectorAll('#sides select');
if (picks.length === 2) {
  picks[1].selectedIndex = 1;
  picks[1].dispatchEvent(new Event('change'));
}
root.dataset.inner = sides();
</script>)";

// What to take of a row.
auto metric(const char* name) {
  return [name](const ordered_json& row) -> const ordered_json& {
    return row.at("metrics").at(name).at("median");
  };
}
auto peak(const char* name) {
  return [name](const ordered_json& row) -> const ordered_json& {
    return row.at("peak_bytes").at(name);
  };
}

class Browser : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(::access(kChromium, X_OK), 0)
        << "expected " << kChromium << ": apt-get install chromium";
  }

  /// The page's document once its scripts have run.
  std::string drawn(const ordered_json& data, const ordered_json& steps, const std::string& size,
                    bool dark = false) const {
    return drawn_page(report_page(data, steps), size, dark);
  }
  std::string drawn_page(std::string page, const std::string& size, bool dark = false) const {
    page.insert(page.rfind("</body>"), kProbe);
    const std::string path = folder_.write("report.html", page);
    std::vector<std::string> words = {"120",
                                      kChromium,
                                      "--headless",
                                      "--no-sandbox",
                                      "--disable-gpu",
                                      "--disable-dev-shm-usage",
                                      "--enable-logging=stderr",
                                      "--user-data-dir=" + folder_ / "profile",
                                      "--window-size=" + size,
                                      "--dump-dom",
                                      "file://" + path};
    if (dark) words.insert(words.end() - 1, "--blink-settings=preferredColorScheme=0");
    const Outcome outcome = run_program("/usr/bin/timeout", words, {{"HOME", folder_.path()}});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.err.find("CONSOLE"), std::string::npos) << outcome.err;
    return outcome.out;
  }

  const TempFolder folder_;
};

std::string attribute(const std::string& page, const std::string& name) {
  std::smatch match;
  const std::regex pattern(" data-" + name + "=\"([^\"]*)\"");
  const std::string root = page.substr(0, page.find("<head"));
  return std::regex_search(root, match, pattern) ? match[1].str() : "none";
}

/// What is drawn in a section: a value for each mark called `name`.
std::vector<double> marks(const std::string& page, const std::string& section,
                          const std::string& name) {
  const std::size_t begin = page.find("<section id=\"" + section + "\"");
  const std::string part = page.substr(begin, page.find("</section>", begin) - begin);
  const std::regex pattern("data-name=\"" + name + "\" data-value=\"([^\"]*)\"");
  std::vector<double> values;
  for (std::sregex_iterator i(part.begin(), part.end(), pattern), end; i != end; ++i) {
    values.push_back(std::stod((*i)[1].str()));
  }
  return values;
}

template <class Get>
std::vector<double> of_rows(const ordered_json& data, Get get) {
  std::vector<double> values;
  for (const ordered_json& row : data.at("configurations")) {
    const ordered_json& value = get(row);
    if (value.is_number() && value.get<double>() > 0) values.push_back(value.get<double>());
  }
  return values;
}

TEST_F(Browser, DrawsTheFiguresOfTheJsonWithoutAnError) {
  const ordered_json data = sample_comparison();
  const std::string page = drawn(data, sample_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "drawn"), "yes");
  EXPECT_EQ(attribute(page, "hidden"), "");
  EXPECT_EQ(attribute(page, "images"), "0") << "a name became an element";
  EXPECT_EQ(attribute(page, "overflows"), "false");
  EXPECT_EQ(attribute(page, "dark"), "false");
  EXPECT_EQ(marks(page, "memory", "parameters"), of_rows(data, peak("parameter_shard")));
  EXPECT_EQ(marks(page, "memory", "gathered parameters"),
            of_rows(data, peak("gathered_parameter")));
  EXPECT_EQ(marks(page, "memory", "activations"), of_rows(data, peak("activation")));
  EXPECT_EQ(marks(page, "memory", "peak"), of_rows(data, peak("total")));
  EXPECT_EQ(marks(page, "time", "forward and backward"), of_rows(data, metric("compute_ms")));
  EXPECT_EQ(marks(page, "time", "exposed communication"), of_rows(data, metric("exposed_comm_ms")));
  EXPECT_EQ(marks(page, "communication", "measured"), of_rows(data, metric("sent_bytes")));
  std::vector<double> formulas;
  for (const ordered_json& row : data.at("configurations")) {
    const ordered_json& sent = row.at("theory").at("sent");
    if (!sent.is_null()) formulas.push_back(sent.at("bytes").get<double>());
  }
  EXPECT_EQ(formulas.size(), 4u);
  EXPECT_EQ(marks(page, "communication", "theory"), formulas);
  EXPECT_EQ(marks(page, "memory", "optimizer").size(), 5u) << "one lies on the host";
  // Of the last one, which is picked at first.
  EXPECT_EQ(marks(page, "step-memory", "activations"), std::vector<double>{8000000});
  EXPECT_EQ(marks(page, "step-memory", "optimizer"), std::vector<double>{2500000});
  EXPECT_EQ(marks(page, "step-memory", "most at one time"), std::vector<double>{10500000});
  EXPECT_EQ(marks(page, "step-memory", "measured peak"), std::vector<double>{17000000});
  EXPECT_EQ(marks(page, "gantt", "slice"), (std::vector<double>{9, 8, 6, 9.25}));
}

// As the program leaves it, of trainings.
TEST_F(Browser, DrawsARealComparison) {
  const Outcome compared = run_program("tools/compare/compare", testing::tiny_comparison(folder_));
  ASSERT_EQ(compared.exit_code, 0) << compared.err;
  const ordered_json data = ordered_json::parse(folder_.read("out/compare.json"));
  const std::string page = drawn_page(folder_.read("out/report.html"), "1280,900");
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "drawn"), "yes");
  EXPECT_EQ(attribute(page, "hidden"), "");
  const auto theory = [](const ordered_json& row) -> const ordered_json& {
    return row.at("theory").at("sent").at("bytes");
  };
  EXPECT_EQ(marks(page, "memory", "parameters"), of_rows(data, peak("parameter_shard")));
  EXPECT_EQ(marks(page, "memory", "optimizer"), of_rows(data, peak("optimizer")));
  EXPECT_EQ(marks(page, "memory", "peak"), of_rows(data, peak("total")));
  EXPECT_EQ(marks(page, "time", "forward and backward"), of_rows(data, metric("compute_ms")));
  EXPECT_EQ(marks(page, "communication", "measured"), of_rows(data, metric("sent_bytes")));
  EXPECT_EQ(of_rows(data, theory).size(), 4u);
  EXPECT_EQ(marks(page, "communication", "theory"), of_rows(data, theory));
  // The first beside the last, and beside the second: what differs, and nothing that does not.
  const std::string outer = attribute(page, "outer"), inner = attribute(page, "inner");
  for (const char* row : {"parallel.strategy|ddp|zero3|", "parallel.prefetch|0|1|"}) {
    EXPECT_NE(outer.find(row), std::string::npos) << outer;
  }
  EXPECT_NE(inner.find("parallel.prefetch|0|1|"), std::string::npos) << inner;
  EXPECT_EQ(inner.find("parallel.strategy"), std::string::npos) << inner;
  EXPECT_EQ(inner.find("model."), std::string::npos) << inner;
}

TEST_F(Browser, IsUsedByKeyboard) {
  const std::string page = drawn(sample_comparison(), sample_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "focused"), "true");
  EXPECT_EQ(attribute(page, "readout").find("ddp prefetch=2: parameters"), 0u)
      << attribute(page, "readout");
  EXPECT_EQ(attribute(page, "moment"),
            "at 4.00 ms: 10.0 MiB · optimizer 2.38 MiB · activations 7.63 MiB");
  EXPECT_EQ(attribute(page, "terms").find("optimizer2 states x 4 B x &lt;i&gt;640,000"), 0u)
      << attribute(page, "terms");
  EXPECT_EQ(attribute(page, "slice"),
            "linear: 9.25 ms on compute, from 6.00 ms on, ddp prefetch=0");
  // The fastest step is that of the last one.
  EXPECT_EQ(attribute(page, "first").find("zero3 "), 0u) << attribute(page, "first");
}

TEST_F(Browser, FitsNarrowScreensAndFollowsTheColourScheme) {
  const std::string page = drawn(sample_comparison(), sample_steps(), "500,800", true);
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "overflows"), "false");
  EXPECT_EQ(attribute(page, "dark"), "true");
}

TEST_F(Browser, WithLittleToShowItLeavesTheRestOut) {
  ordered_json data = sample_comparison();
  for (ordered_json& row : data["configurations"]) {
    for (auto& metric : row["metrics"]) metric = nullptr;
    row["theory"]["sent"] = nullptr;
  }
  const std::string page = drawn(data, testing::no_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "hidden"), "step-memory time communication pareto gantt");
}

}  // namespace
}  // namespace tessera::tools
