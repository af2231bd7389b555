// Words of the pages: those that CONTRIBUTING asks not to use, as far as they can be found.
#include <gtest/gtest.h>

#include <regex>
#include <string>

#include "tests/docs/pages.h"

namespace tessera::testing {
namespace {

TEST(Words, ReadOnce) {
  // "The same" at the beginning of a sentence, an item or a cell needs the one above it.
  const std::regex refused("\\b([Aa]new|[Bb]eside|Behind|The same)\\b|\\| the same\\b");
  for (const std::string& page : pages()) {
    bool is_rule = false;  // which names them
    for (const std::string& line : lines_of(page)) {
      if (line.empty() || line.starts_with("**Plain words.**")) is_rule = !line.empty();
      EXPECT_TRUE(is_rule || !std::regex_search(line, refused)) << page << ": " << line;
    }
  }
}

}  // namespace
}  // namespace tessera::testing
