// A page in headless Chromium: what a person would do and see, and what is drawn.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tools/compare/page/report_page.h"

namespace tessera::tools {

inline constexpr const char* kChromium = "/usr/bin/chromium";

// What a person would do and see, told in attributes of the root that the dump shows.
inline constexpr const char* kProbe = R"(<script>
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
inline constexpr const char* kPaper = R"(<script>
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
inline auto metric(const char* name) {
  return [name](const nlohmann::ordered_json& row) -> const nlohmann::ordered_json& {
    return row.at("metrics").at(name).at("median");
  };
}
inline auto part(const char* name) {
  return [name](const nlohmann::ordered_json& row) -> const nlohmann::ordered_json& {
    return row.at("step_parts_ms").at(name);
  };
}
inline auto peak(const char* name) {
  return [name](const nlohmann::ordered_json& row) -> const nlohmann::ordered_json& {
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
  std::string drawn(const nlohmann::ordered_json& data, const nlohmann::ordered_json& steps,
                    const std::string& size, bool dark = false) const {
    return drawn_page(report_page(data, steps), size, dark);
  }
  /// drawn() in a frame of so many pixels: a window cannot be as narrow as a telephone. What the
  /// probe told there is told of the whole.
  std::string drawn_in_frame(const nlohmann::ordered_json& data,
                             const nlohmann::ordered_json& steps, int width,
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
    const testing::Outcome outcome =
        testing::run_program("/usr/bin/timeout", words, {{"HOME", folder_.path()}});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.err.find("CONSOLE"), std::string::npos) << outcome.err;
    return outcome.out;
  }

 protected:
  const testing::TempFolder folder_;
};

inline std::string attribute(const std::string& page, const std::string& name) {
  std::smatch match;
  const std::regex pattern(" data-" + name + "=\"([^\"]*)\"");
  const std::string root = page.substr(0, page.find("<head"));
  return std::regex_search(root, match, pattern) ? match[1].str() : "none";
}

using Rows = std::vector<std::vector<double>>;
inline Rows numbers(const std::string& page, const std::string& name) {
  return testing::parse_ordered_json(attribute(page, name)).get<Rows>();
}
inline std::vector<double> column(const Rows& rows, std::size_t i) {
  std::vector<double> values;
  for (const auto& row : rows) values.push_back(row.at(i));
  return values;
}

/// Expects that `at`, in pixels, is linear in `values`; returns the pixels of 1.
inline double expect_linear(const std::vector<double>& at, const std::vector<double>& values) {
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

inline void expect_has(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
}

/// What is drawn in a section: a value for each mark called `name`.
inline std::vector<double> marks(const std::string& page, const std::string& section,
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
inline std::vector<double> of_rows(const nlohmann::ordered_json& data, Get get) {
  std::vector<double> values;
  for (const nlohmann::ordered_json& row : data.at("configurations")) {
    if (!row.at("same_plan_as").is_null()) continue;  // not trained
    const nlohmann::ordered_json& value = get(row);
    if (value.is_number() && value.get<double>() > 0) values.push_back(value.get<double>());
  }
  return values;
}

}  // namespace tessera::tools
