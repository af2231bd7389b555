// The page in headless Chromium: drawn without an error, wide and narrow, light and dark, by
// keyboard, with the figures of compare.json. Fails where there is no Chromium.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
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
  press(document.querySelector('#gantt .explore'), 'ArrowUp');
  root.dataset.slice = document.querySelector('#gantt .readout').textContent;
  // The second above, nothing below.
  const streams = [...document.querySelectorAll('#gantt select')];
  root.dataset.choices = streams.map((pick) => [...pick.options].map((o) => o.textContent).join('|')).join('; ');
  const pick = (values) => {
    streams.forEach((select, i) => { select.value = values[i]; });
    streams[1].dispatchEvent(new Event('change'));
  };
  const before = streams.map((select) => select.value);
  pick([0, -1]);
  root.dataset.picked = [...document.querySelectorAll('#gantt .title, #gantt rect[data-name="slice"]')]
      .map((node) => node.dataset.value || node.textContent).join('; ');
  pick(before);
  root.dataset.note = document.querySelector('#gantt figure .note').textContent;
}
document.querySelectorAll('#table thead button')[3].click();
root.dataset.first = document.querySelector('#table tbody th').textContent;
const rowsOf = (id) => [...document.querySelectorAll(`#${id} tbody tr`)]
    .map((row) => [...row.cells].map((cell) => cell.textContent).join('|')).join('; ');
for (const id of ['loss', 'memory', 'step-memory', 'communication']) root.setAttribute(`data-${id}-table`, rowsOf(id));
// Cells of one column that are not aligned alike, and words that leave their drawing.
const isStacked = window.innerWidth <= 620;  // then headings are apart from their columns
const isOfColumn = (cell) => cell && cell.colSpan === 1 && !(isStacked && cell.closest('thead'));
root.dataset.ragged = [...document.querySelectorAll('table')].flatMap((table) => [...table.rows[0].cells].map((_, i) => new Set(
    [...table.rows].map((row) => row.cells[i]).filter(isOfColumn).map((cell) => getComputedStyle(cell).textAlign)).size)).filter((n) => n > 1).length;
root.dataset.clipped = [...document.querySelectorAll('svg.plot text')].filter((node) => {
  const {x, y, width, height} = node.getBBox(), all = node.ownerSVGElement.viewBox.baseVal;
  return x < -1 || y < -2 || x + width > all.width + 1 || y + height > all.height + 2;
}).map((node) => node.textContent).join('; ');
root.dataset.width = window.innerWidth;
// What one would have to scroll for to the side.
root.dataset.scrolls = [...document.querySelectorAll('.scroller')].filter((node) => node.scrollWidth > node.clientWidth + 1).length;
const levels = [...document.querySelectorAll('h1, h2, h3')].map((node) => Number(node.tagName[1]));
root.dataset.levels = levels.every((level, i) => level <= (i === 0 ? 1 : levels[i - 1] + 1));
root.dataset.unscoped = document.querySelectorAll('th:not([scope])').length;
root.dataset.unnamed = [...document.querySelectorAll('svg[role="img"], select, [tabindex="0"]')]
    .filter((node) => !node.getAttribute('aria-label') && !node.getAttribute('aria-labelledby')).length;
// Contrast of each kind of text with what it stands on, of at least 4.5.
const colours = (text) => text.match(/[\d.]+/g).map(Number);
const light = (text) => colours(text).slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (colours(colour)[3] !== 0) return colour;
  }
};
root.dataset.faint = [...document.querySelectorAll('h1, h2, p, li, dt, dd, th, td, small, summary, .pill')].filter((node) => {
  if (node.getClientRects().length === 0 || !node.textContent.trim()) return false;
  const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05) < 4.5;
}).map((node) => node.textContent).join('; ');
root.dataset.cards = [...document.querySelectorAll('.card')].map((card) => [...card.children].map((node) => node.textContent).join('|')).join('; ');
// Where things are drawn, as lists of numbers.
const told = (selector, numbers) => JSON.stringify([...document.querySelectorAll(selector)].map(numbers));
const of = (node, ...names) => names.map((name) => Number(node.getAttribute(name)));
const corners = (selector) => JSON.stringify([...document.querySelectorAll(selector)]
    .flatMap((node) => (node.getAttribute('d').match(/[\d.]+ [\d.]+/g) || []).map((point) => point.split(' ').map(Number))));
const parsed = (node) => parseFloat(node.textContent.replaceAll(',', ''));
root.dataset.lossLine = corners('#loss figure:nth-of-type(1) path.line');
root.dataset.differenceLines = corners('#loss figure:nth-of-type(2) path.line');
root.dataset.differences = told('#loss circle[data-name="difference"]', (node) => of(node, 'data-value', 'cx', 'cy'));
root.dataset.zeros = told('#loss circle[data-name="exactly 0"]', (node) => of(node, 'data-value', 'cx', 'cy'));
root.dataset.scale = told('#loss figure:nth-of-type(2) text[text-anchor="end"]', (node) => [Number(node.textContent), ...of(node, 'y')]);
root.dataset.dots = told('#pareto .dot', (node) => [all.findIndex((c) => c.name === node.dataset.name), ...of(node, 'cx', 'cy')]);
root.dataset.front = corners('#pareto path.front');
root.dataset.numbers = told('#pareto .number', (node) => [parsed(node), ...of(node, 'x', 'y')]);
root.dataset.speeds = told('#pareto text[text-anchor="end"]', (node) => [parsed(node), ...of(node, 'y')]);
root.dataset.sizes = told('#pareto text[text-anchor="middle"]:not(.number)', (node) => [parsed(node), ...of(node, 'x')]);
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

// The page as paper has it: the rules of print, at the width of A4 between its margins.
constexpr const char* kPaper = R"(<script>
const root = document.documentElement;
for (const sheet of document.styleSheets) {
  for (const rule of sheet.cssRules) {
    if (rule instanceof CSSMediaRule) rule.media.mediaText = rule.media.mediaText === 'print' ? 'all' : 'not all';
  }
}
window.dispatchEvent(new Event('beforeprint'));
root.dataset.width = window.innerWidth;
const stands = (node) => node.getClientRects().length > 0;
root.dataset.cut = [...document.querySelectorAll('th, td, li, dd, h1, p, svg')].filter((node) => stands(node)
    && (node.getBoundingClientRect().right > root.clientWidth + 1 || node.getBoundingClientRect().left < 0
        || (node.matches('th, td') && node.scrollWidth > node.clientWidth + 1))).map((node) => node.textContent.slice(0, 40)).join('; ');
root.dataset.heads = [...document.querySelectorAll('#table thead th')].filter(stands).map((node) => node.textContent).join('; ');
root.dataset.smallest = Math.min(...[...document.querySelectorAll('#table td, #table th, #table small')].filter(stands)
    .map((node) => parseFloat(getComputedStyle(node).fontSize)));
root.dataset.bare = [...document.querySelectorAll('.legend i, .bars rect, .pill, .verdict, .plot path')]
    .filter((node) => getComputedStyle(node).printColorAdjust !== 'exact').length;
root.dataset.swatches = document.querySelectorAll('.legend i').length;
root.dataset.hints = [...document.querySelectorAll('.screen, .readout')].filter(stands).length;
root.dataset.plots = [...document.querySelectorAll('.plot')].map((node) => node.viewBox.baseVal.width).join(' ');
</script>)";

// What to take of a row.
auto metric(const char* name) {
  return [name](const ordered_json& row) -> const ordered_json& {
    return row.at("metrics").at(name).at("median");
  };
}
auto part(const char* name) {
  return [name](const ordered_json& row) -> const ordered_json& {
    return row.at("step_parts_ms").at(name);
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
  /// The same in a frame of so many pixels: a window cannot be as narrow as a telephone. What the
  /// probe told there is told of the whole.
  std::string drawn_in_frame(const ordered_json& data, const ordered_json& steps, int width,
                             const char* probe = kProbe) const {
    std::string page = probed(report_page(data, steps), probe);
    page = std::regex_replace(std::regex_replace(page, std::regex("&"), "&amp;"), std::regex("\""),
                              "&quot;");
    return dump("<!doctype html><html><head></head><body><iframe width=" + std::to_string(width) +
                    " height=800 srcdoc=\"" + page +
                    "\"></iframe><script>onload = () => Object.assign("
                    "document.documentElement.dataset, document.querySelector('iframe')"
                    ".contentDocument.documentElement.dataset);</script></body></html>",
                "1280,900", false);
  }
  std::string drawn_page(const std::string& page, const std::string& size,
                         bool dark = false) const {
    return dump(probed(page), size, dark);
  }

 private:
  static std::string probed(std::string page, const char* probe = kProbe) {
    return page.insert(page.rfind("</body>"), probe);
  }
  std::string dump(const std::string& page, const std::string& size, bool dark) const {
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

 protected:
  const TempFolder folder_;
};

std::string attribute(const std::string& page, const std::string& name) {
  std::smatch match;
  const std::regex pattern(" data-" + name + "=\"([^\"]*)\"");
  const std::string root = page.substr(0, page.find("<head"));
  return std::regex_search(root, match, pattern) ? match[1].str() : "none";
}

using Rows = std::vector<std::vector<double>>;
Rows numbers(const std::string& page, const std::string& name) {
  return ordered_json::parse(attribute(page, name)).get<Rows>();
}
std::vector<double> column(const Rows& rows, std::size_t i) {
  std::vector<double> values;
  for (const auto& row : rows) values.push_back(row.at(i));
  return values;
}

/// That `at`, in pixels, is linear in `values`; returns the pixels of 1.
double expect_linear(const std::vector<double>& at, const std::vector<double>& values) {
  EXPECT_EQ(at.size(), values.size());
  if (at.size() != values.size() || values.empty()) return 0;
  const auto low = std::ranges::min_element(values) - values.begin();
  const auto high = std::ranges::max_element(values) - values.begin();
  const auto i = static_cast<std::size_t>(low), j = static_cast<std::size_t>(high);
  const double scale = (at[j] - at[i]) / (values[j] - values[i]);
  EXPECT_GT(std::abs(at[j] - at[i]), 30) << "all at one place";
  for (std::size_t k = 0; k < at.size(); ++k) {
    EXPECT_NEAR(at[k], at[i] + scale * (values[k] - values[i]), 0.2) << values[k];
  }
  return scale;
}

void expect_has(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
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
    if (!row.at("same_plan_as").is_null()) continue;  // not trained
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
  EXPECT_EQ(marks(page, "time", "forward and backward"), of_rows(data, part("compute_ms")));
  EXPECT_EQ(marks(page, "time", "exposed communication"), of_rows(data, part("exposed_comm_ms")));
  EXPECT_EQ(marks(page, "time", "optimizer"), of_rows(data, part("optimizer_ms")));
  EXPECT_EQ(marks(page, "time", "data"), of_rows(data, part("data_ms")));
  EXPECT_EQ(marks(page, "time", "the rest"), of_rows(data, part("other_ms")));
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

// Figures in words, by hand from sample_comparison().
TEST_F(Browser, TablesTellTheFiguresOfTheJson) {
  const std::string page = drawn(sample_comparison(), sample_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "clipped"), "");
  EXPECT_EQ(attribute(page, "ragged"), "0") << "columns with cells to the left and to the right";
  expect_has(attribute(page, "memory-table"),
             {"ddp prefetch=0|optimizer|2 x 4 B x parameters|2 x 4 x 640000|4.88 MiB|4.77 MiB",
              "ddp prefetch=2|optimizer|2 x 4 B x parameters|2 x 4 x 640000|4.88 MiB|2.38 MiB"});
  expect_has(attribute(page, "communication-table"),
             {"ddp prefetch=0|2 x (n-1)/n x gradients|2 x 3/4 x 4 x 640000|3.66 MiB|3.81 MiB|3.81 "
              "MiB",
              "|3.66 MiB|4.96 MiB|3.81 MiB"});
  expect_has(attribute(page, "loss-table"),
             {"ddp prefetch=2|ddp prefetch=0|0|-|equal|must be equal",
              "|ddp prefetch=0|0.001|2|differ|must be equal"});
  EXPECT_EQ(attribute(page, "step-memory-table"),
            "optimizer|2 states x 4 B x &lt;i&gt;640,000&lt;/i&gt;|5,120,000|2,500,000; "
            "activations|1 x 700 B, gelu|700|9,000,000; |1 x 600 B, linear|600|; "
            "|1 x 500 B, layernorm|500|; |1 x 400 B, attention|400|; |1 x 300 B, add|300|; "
            "|2 smaller terms1 x 20 B, tokens: 20 B1 x 10 B, targets: 10 B|30|; "
            "optimizer, on the host|2 states x 4 B x 125,000|1,000,000|1,000,000");
  // The first beside the last, and beside the second, whose optimizer is on the host.
  const std::string outer = attribute(page, "outer"), inner = attribute(page, "inner");
  expect_has(
      outer,
      {"numbers|equal bits|differs by 0.001|", "last loss|3.250000|4.225000|× 1.30",
       "step|40.0 ms|30.8 ms|× 0.77", "· forward and backward|22.0 ms|16.9 ms|× 0.77",
       "· exposed communication|10.0 ms|7.69 ms|× 0.77", "· optimizer|4.00 ms|3.08 ms|× 0.77",
       "· data|1.00 ms|0.77 ms|× 0.77", "· the rest|3.00 ms|2.31 ms|× 0.77",
       "communication overlapped|80 %|80 %|× 1.00", "tokens/s|30,000|39,000|× 1.30",
       "peak memory|16.7 MiB|15.3 MiB|× 0.91", "· parameters|1.91 MiB|0.48 MiB|× 0.25",
       "· activations|8.58 MiB|8.58 MiB|× 1.00", "sent in a step|3.81 MiB|4.96 MiB|× 1.30",
       "collectives in a step|not measured|not measured|"});
  EXPECT_EQ(outer.find("on the host"), std::string::npos) << outer;
  expect_has(inner, {"on the host|not measured|0.95 MiB|; · optimizer|not measured|0.95 MiB|"});
}

// The fastest one's parity fails, and two others are nearly as fast.
TEST_F(Browser, CardsSayWhatTheirFiguresAreWorth) {
  ordered_json data = sample_comparison();
  data["configurations"][3]["name"] = data["fastest"]["name"] = "zero3";
  data["configurations"][1]["metrics"]["sent_bytes"]["median"] = 4e6;  // as the first
  const std::string cards = attribute(drawn(data, sample_steps(), "1280,900"), "cards");
  expect_has(cards,
             {"Equal bits|3 of 4|with ddp prefetch=0",
              "Fastest|39,000 tokens/s|zero3, whose parity fails, 30.8 ms a step; 2 others may be "
              "as fast",
              "Least memory on a rank|15.3 MiB|zero3, whose parity fails;",
              "Least sent in a step|3.81 MiB|ddp prefetch=0 and 1 other alike"});
  data["fastest"]["not_told_apart_from"].push_back("ddp prefetch=0");
  expect_has(attribute(drawn(data, sample_steps(), "1280,900"), "cards"),
             {"Fastest|None stands out|all 4 are as fast within noise"});
  data["fastest"] = {{"name", "ddp prefetch=2"}, {"not_told_apart_from", ordered_json::array()}};
  expect_has(attribute(drawn(data, sample_steps(), "1280,900"), "cards"),
             {"33,000 tokens/s|ddp prefetch=2, 36.4 ms a step;"});
  data["fastest"] = nullptr;
  expect_has(attribute(drawn(data, sample_steps(), "1280,900"), "cards"),
             {"Fastest|Too few rounds|to say: it takes --rounds=8"});
}

// On a logarithmic scale, with a lane for exactly 0.
TEST_F(Browser, LossesAreDrawnWhereTheyAre) {
  ordered_json data = sample_comparison();
  std::vector<double> loss = {5, 4.5, 4.75, 3, 3.25, 3.5, 3.75, 2.9, 2.8, 2.7, 2.6, 2.5};
  std::vector<double> difference = {0, 1e-4, 1e-3, 1e-1, 0, 2e-4, 0.03, 0, 1e-3, 0, 0, 5e-4};
  data["configurations"][0]["loss"] = loss;
  data["configurations"][3]["loss_difference"] = difference;
  const std::string page = drawn(data, sample_steps(), "1280,900");
  std::vector<double> steps;
  for (std::size_t i = 0; i < loss.size(); ++i) steps.push_back(static_cast<double>(i + 1));
  const Rows line = numbers(page, "loss-line");
  EXPECT_GT(expect_linear(column(line, 0), steps), 0);
  EXPECT_LT(expect_linear(column(line, 1), loss), 0);
  const Rows points = numbers(page, "differences");
  EXPECT_EQ(column(points, 0), difference);
  EXPECT_GT(expect_linear(column(points, 1), steps), 0);
  std::vector<double> at, logs;
  double lowest = 0, zero = 0;
  for (const auto& point : points) {
    if (point[0] == 0) {
      zero = point[2];
      continue;
    }
    at.push_back(point[2]);
    logs.push_back(std::log10(point[0]));
    lowest = std::max(lowest, point[2]);
  }
  int num_labels = 0;
  for (const auto& label : ordered_json::parse(attribute(page, "scale"))) {
    if (!label[0].is_number()) continue;  // "exactly 0"
    at.push_back(label[1].get<double>() - 4);
    logs.push_back(std::log10(label[0].get<double>()));
    ++num_labels;
  }
  EXPECT_GE(num_labels, 3);
  EXPECT_LT(expect_linear(at, logs), 0);
  EXPECT_GT(zero, lowest + 10);
  // A line through its points, and those that differ nowhere in the lane.
  const Rows lines = numbers(page, "difference-lines");
  EXPECT_EQ(lines.size(), points.size());
  for (std::size_t i = 0; i < std::min(lines.size(), points.size()); ++i) {
    EXPECT_NEAR(lines[i][0], points[i][1], 0.1);
    EXPECT_NEAR(lines[i][1], points[i][2], 0.1);
  }
  const Rows zeros = numbers(page, "zeros");
  EXPECT_EQ(zeros.size(), steps.size());
  for (const auto& point : points) {
    if (point[0] == 0) {
      EXPECT_EQ(point[2], zero);
    }
  }
  for (const auto& point : zeros) EXPECT_EQ(point[2], zero);
}

// Two of the front are nearly at one place.
TEST_F(Browser, TheFrontIsDrawnAndNumbered) {
  ordered_json data = sample_comparison();
  const std::vector<double> total = {12e6, 9e6, 17e6, 9.02e6}, speed = {20000, 30000, 52000, 30100};
  for (std::size_t i = 0; i < 4; ++i) {
    ordered_json& row = data["configurations"][i];
    row["peak_bytes"]["total"] = total[i];
    row["metrics"]["tokens_per_s"]["median"] = speed[i];
    row["on_pareto_front"] = i > 0;
  }
  for (const char* size : {"1280,900", "500,800"}) {
    const std::string page = drawn(data, sample_steps(), size);
    std::vector<double> x, y, bytes, speeds;
    std::map<int, std::vector<double>> at;  // by row
    for (const auto& dot : numbers(page, "dots")) {
      const int row = static_cast<int>(dot[0]);
      at[row] = {dot[1], dot[2]};
      x.push_back(dot[1]);
      y.push_back(dot[2]);
      bytes.push_back(total.at(static_cast<std::size_t>(row)));
      speeds.push_back(speed.at(static_cast<std::size_t>(row)));
    }
    ASSERT_EQ(at.size(), 4u);
    for (const auto& label : ordered_json::parse(attribute(page, "sizes"))) {
      if (!label[0].is_number()) continue;  // the name of the axis
      bytes.push_back(label[0].get<double>() * 1024 * 1024);
      x.push_back(label[1]);
    }
    for (const auto& label : numbers(page, "speeds")) {
      speeds.push_back(label[0]);
      y.push_back(label[1] - 4);
    }
    EXPECT_GT(bytes.size(), 5u);
    EXPECT_GT(speeds.size(), 5u);
    EXPECT_GT(expect_linear(x, bytes), 0);
    EXPECT_LT(expect_linear(y, speeds), 0);
    const std::vector<int> order = {1, 3, 2};  // by memory
    const Rows front = numbers(page, "front"), labels = numbers(page, "numbers");
    ASSERT_EQ(front.size(), order.size());
    ASSERT_EQ(labels.size(), order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      const std::vector<double>& dot = at.at(order[i]);
      EXPECT_NEAR(front[i][0], dot[0], 0.1);
      EXPECT_NEAR(front[i][1], dot[1], 0.1);
      EXPECT_EQ(labels[i][0], static_cast<double>(i + 1));
      EXPECT_LT(std::hypot(labels[i][1] - dot[0], labels[i][2] - 4 - dot[1]), 40);
      for (std::size_t j = 0; j < i; ++j) {
        EXPECT_GT(std::hypot(labels[i][1] - labels[j][1], labels[i][2] - labels[j][2]), 10);
      }
    }
    expect_has(page, {": 1 ddp prefetch=2; 2 zero3 &lt;/script&gt;"});
    EXPECT_EQ(attribute(page, "clipped"), "");
  }
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
  EXPECT_EQ(marks(page, "time", "forward and backward"), of_rows(data, part("compute_ms")));
  EXPECT_EQ(marks(page, "communication", "measured"), of_rows(data, metric("sent_bytes")));
  EXPECT_EQ(of_rows(data, theory).size(), 3u) << "ddp has no gathers for prefetch to hide";
  EXPECT_EQ(marks(page, "communication", "theory"), of_rows(data, theory));
  expect_has(page, {"same plan as ddp prefetch=0", "<dt>load at the start</dt>"});
  // The first beside the last, and beside the second: what differs, and nothing that does not.
  const std::string outer = attribute(page, "outer"), inner = attribute(page, "inner");
  for (const char* row : {"parallel.strategy|ddp|zero3|", "parallel.prefetch|0|1|"}) {
    EXPECT_NE(outer.find(row), std::string::npos) << outer;
  }
  EXPECT_NE(inner.find("parallel.strategy|ddp|zero3|"), std::string::npos) << inner;
  EXPECT_EQ(inner.find("parallel.prefetch"), std::string::npos) << inner;
  EXPECT_EQ(inner.find("model."), std::string::npos) << inner;
}

TEST_F(Browser, IsUsedByKeyboard) {
  const std::string page = drawn(sample_comparison(), sample_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "focused"), "true");
  EXPECT_EQ(attribute(page, "readout").find("ddp prefetch=2: parameters"), 0u)
      << attribute(page, "readout");
  EXPECT_EQ(attribute(page, "moment"),
            "at 4.00 ms: 10.0 MiB · optimizer 2.38 MiB · activations 7.63 MiB");
  EXPECT_EQ(attribute(page, "slice"),
            "linear: 9.25 ms on compute, from 6.00 ms on, ddp prefetch=0");
  EXPECT_EQ(attribute(page, "levels"), "true");
  EXPECT_EQ(attribute(page, "unscoped"), "0");
  EXPECT_EQ(attribute(page, "unnamed"), "0");
  EXPECT_EQ(attribute(page, "faint"), "");
  // The fastest step is that of the last one.
  EXPECT_EQ(attribute(page, "first").find("zero3 "), 0u) << attribute(page, "first");
}

TEST_F(Browser, StreamsAreThoseThatArePicked) {
  const std::string page = drawn(sample_comparison(), sample_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "choices"),
            "ddp prefetch=0|ddp prefetch=2; ddp prefetch=0|ddp prefetch=2|none");
  EXPECT_EQ(attribute(page, "picked"), "ddp prefetch=0: 25.0 ms; 9.25");
  expect_has(attribute(page, "note"), {"Planned: ", "One was traced and one is planned",
                                       "3 of the shortest slices of ddp prefetch=0"});
}

TEST_F(Browser, NothingIsCutOnPaperAndColoursStay) {
  ordered_json data = sample_comparison();
  for (ordered_json& row : data["configurations"]) {
    row["metrics"]["tokens_per_s"]["median"] = 1234567;
    row["metrics"]["step_ms"] = {{"median", 1234}, {"q1", 1133.1}, {"q3", 1345.6}};
    row["speed"]["slower_percent"] = {{"median", 123.4}, {"low", 101.1}, {"high", 145.6}};
  }
  data["configurations"][1]["name"] = "zero3 precision.param=bf16 prefetch=1 offload.optimizer=0.5";
  const std::string page = drawn_in_frame(data, sample_steps(), 703, kPaper);
  EXPECT_EQ(attribute(page, "width"), "703");
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "cut"), "");
  EXPECT_EQ(attribute(page, "heads"),
            "configuration; numbers; last loss; step, ms; slower, %; exposed, ms; tokens/s; "
            "peak, MiB; sent, MiB; overlap, %");
  EXPECT_GE(std::stod(attribute(page, "smallest")), 8.5) << "pixels: 6.4 points";
  EXPECT_GT(std::stoi(attribute(page, "swatches")), 15);
  EXPECT_EQ(attribute(page, "bare"), "0") << "drawn without its colour";
  EXPECT_EQ(attribute(page, "hints"), "0") << "asks for a pointer";
  EXPECT_EQ(attribute(page, "plots"), "332 332 640 640 640") << "drawn for the screen";
}

TEST_F(Browser, FitsNarrowScreensAndFollowsTheColourScheme) {
  const std::string page = drawn(sample_comparison(), sample_steps(), "500,800", true);
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "overflows"), "false");
  EXPECT_EQ(attribute(page, "clipped"), "");
  EXPECT_EQ(attribute(page, "dark"), "true");
  ordered_json steps = sample_steps();
  steps["steps"][1]["name"] = "zero3 prefetch=1 offload.optimizer=0.5 with prefetch=0";
  const std::string telephone = drawn_in_frame(sample_comparison(), steps, 360);
  EXPECT_EQ(attribute(telephone, "width"), "360");
  EXPECT_EQ(attribute(telephone, "scrolls"), "0") << "a side or a column is out of sight";
  EXPECT_EQ(attribute(page, "faint"), "");
  EXPECT_EQ(attribute(telephone, "errors"), "0");
  EXPECT_EQ(attribute(telephone, "drawn"), "yes");
  EXPECT_EQ(attribute(telephone, "overflows"), "false");
  EXPECT_EQ(attribute(telephone, "clipped"), "");
  EXPECT_EQ(attribute(telephone, "ragged"), "0");
}

TEST_F(Browser, WithLittleToShowItLeavesTheRestOut) {
  ordered_json data = sample_comparison();
  for (ordered_json& row : data["configurations"]) {
    for (auto& metric : row["metrics"]) metric = nullptr;
    row["step_parts_ms"] = nullptr;
    row["theory"]["sent"] = nullptr;
  }
  data["fastest"] = data["rounds_needed"] = nullptr;
  const std::string page = drawn(data, testing::no_steps(), "1280,900");
  EXPECT_EQ(attribute(page, "errors"), "0");
  EXPECT_EQ(attribute(page, "hidden"), "step-memory time communication pareto gantt");
}

}  // namespace
}  // namespace tessera::tools
