// Documents of texts and of .jsonl files, however lines and chunks fall; prompts and chats.
#include "tools/data/documents.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using testing::error_of;
using testing::has;

class Documents : public ::testing::Test {
 protected:
  std::vector<std::string> of(const std::string& path, const std::string& field = "text") const {
    std::vector<std::string> all;
    visit_documents(path, {.text = field},
                    [&](const Document& document) { all.push_back(document.parts[0].text); });
    return all;
  }
  /// The parts of the only line, those that are read only in brackets.
  std::string parts(std::string_view line, const DocumentFields& fields) const {
    std::string all;
    visit_documents(folder_.write("a.jsonl", line), fields, [&](const Document& document) {
      for (const DocumentPart& part : document.parts)
        all += (part.is_learned ? "" : "[") + part.text + (part.is_learned ? "|" : "]");
    });
    return all;
  }
  const testing::TempFolder folder_;
};

using Texts = std::vector<std::string>;

TEST_F(Documents, ATextIsOne) {
  EXPECT_EQ(of(folder_.write("a.txt", "a\nb\n")), (Texts{"a\nb\n"}));
  EXPECT_EQ(of(folder_.write("b.txt", "")), (Texts{""}));
  const std::string large = folder_.write("large.txt", "a");
  std::filesystem::resize_file(large, (std::uintmax_t{1} << 30) + 1);  // of holes
  EXPECT_TRUE(has(error_of<engine::IoError>([&] { of(large); }),
                  {"a text of at most 1073741824 bytes, got 1073741825", "large.txt"}));
}

TEST_F(Documents, EachLineOfAJsonlIsOne) {
  const std::string path = folder_.write(
      "a.jsonl", "{\"text\": \"a\\nb\", \"more\": 1}\r\n\n{\"text\": \"\"}\n{\"text\": \"c\"}");
  EXPECT_EQ(of(path), (Texts{"a\nb", "", "c"}));
}

// Lines that go over the ends of what is read at a time, and one that holds several.
TEST_F(Documents, LongLinesAreWhole) {
  Texts expected;
  std::string lines;
  for (const std::size_t size : {std::size_t{3} << 20, std::size_t{9} << 20, std::size_t{1}}) {
    expected.emplace_back(size, static_cast<char>('a' + expected.size()));
    lines += "{\"text\":\"" + expected.back() + "\"}\n";
  }
  EXPECT_TRUE(of(folder_.write("a.jsonl", lines)) == expected);
}

// What looks like a text by its name, and is none.
TEST_F(Documents, FilesOfOtherKindsAreRefused) {
  const auto error = [&](const std::string& name, std::string_view bytes) {
    return error_of<IoError>([&] { of(folder_.write(name, bytes)); });
  };
  for (const std::string name : {"a.txt", "a.jsonl"}) {
    EXPECT_TRUE(has(error(name, "\x1f\x8b\x08"),
                    {"expected text, got a gzip file: unpack it: gunzip", name}));
    EXPECT_TRUE(has(error(name, "version https://git-lfs.github.com/spec/v1\n"), {"git lfs pull"}));
    EXPECT_TRUE(has(error(name, "PAR1...."), {"got a Parquet file: write its text to a file"}));
    EXPECT_TRUE(has(error(name, "\xff\xfeH"), {"got UTF-16", "iconv -f UTF-16"}));
    EXPECT_TRUE(has(error(name, std::string_view("ab\0c", 4)), {"got a binary file", name}));
  }
}

TEST_F(Documents, WhatIsOddOfATextIsSaid) {
  const auto remark = [&](const std::string& name, std::string_view bytes) {
    std::string said;
    visit_documents(folder_.write(name, bytes), {.text = "text"},
                    [&](const Document& document) { said = document.remark; });
    return said;
  };
  EXPECT_EQ(remark("a.txt",
                   "stra\xc3\x9f"
                   "e"),
            "");
  EXPECT_EQ(remark("a.jsonl", "{\"text\": \"\"}\n"), "");
  EXPECT_TRUE(has(remark("a.txt",
                         "stra\xdf"
                         "e"),
                  {"not UTF-8", "U+FFFD", "iconv"}));
  EXPECT_TRUE(has(remark("a.json", "[{\"text\": 1}]"), {"is JSON", "name it .jsonl", "--field"}));
  EXPECT_TRUE(has(remark("a.txt", "<!DOCTYPE html>\n"), {"an HTML page"}));
}

TEST_F(Documents, ErrorsNameTheLine) {
  const auto error = [&](std::string_view text) {
    return error_of<IoError>([&] { of(folder_.write("a.jsonl", text)); });
  };
  const std::string place = folder_ / "a.jsonl:2";
  EXPECT_TRUE(has(error("{\"text\": \"\"}\n{"), {"expected JSON", place}));
  EXPECT_TRUE(has(error("\n[]"), {"a JSON object", place}));
  EXPECT_TRUE(has(error("\n{\"other\": 1}"), {"a text at key text, got none", place}));
  EXPECT_TRUE(has(error("\n{\"text\": 1}"), {"a text at key text, got another value", place}));
}

TEST_F(Documents, APromptIsReadOnly) {
  const char* line = R"({"text": "b", "ask": "a"})";
  EXPECT_EQ(parts(line, {.text = "text", .prompt = "ask"}), "[a]b|");
  EXPECT_EQ(parts(line, {.text = "text", .prompt = "ask", .learns_all = true}), "ab|");
  EXPECT_EQ(parts(R"({"text": "", "ask": "a"})", {.text = "text", .prompt = "ask"}), "[a]|");
}

TEST_F(Documents, OfAChatTheAssistantsWordsAreLearned) {
  DocumentFields fields{.text = "messages", .chat = ChatTemplate("<{role}>\\n{content}</s>\\n")};
  const char* line = R"({"messages": [{"role": "system", "content": "Be brief."},
      {"role": "user", "content": "1+1?", "name": "x"}, {"role": "assistant", "content": "2"},
      {"role": "user", "content": "2+{2}?"}, {"role": "assistant", "content": "4"}]})";
  std::string one_line(line);
  std::erase(one_line, '\n');
  EXPECT_EQ(parts(one_line, fields),
            "[<system>\nBe brief.</s>\n<user>\n1+1?</s>\n<assistant>\n]2</s>\n|"
            "[<user>\n2+{2}?</s>\n<assistant>\n]4</s>\n|");
  fields.learns_all = true;
  EXPECT_EQ(parts(one_line, fields),
            "<system>\nBe brief.</s>\n<user>\n1+1?</s>\n<assistant>\n2</s>\n<user>\n2+{2}?</s>\n"
            "<assistant>\n4</s>\n|");
  fields.learns_all = false;
  EXPECT_EQ(parts(R"({"messages": [{"role": "assistant", "content": "a", "weight": 0},)"
                  R"( {"role": "assistant", "content": "b", "weight": 1, "tool_calls": []}]})",
                  fields),
            "[<assistant>\na</s>\n<assistant>\n]b</s>\n|");
  const DocumentFields bare{.text = "messages", .chat = ChatTemplate("{content}")};
  EXPECT_EQ(parts(R"({"messages": [{"role": "user", "content": ""}]})", bare), "[]")
      << "one at least";
  const auto error = [&](std::string_view text) {
    return error_of<IoError>([&] { parts(text, fields); });
  };
  const std::string place = folder_ / "a.jsonl:1";
  EXPECT_TRUE(has(error(R"({"messages": [{"role": "a", "content": "", "tool_calls": [1]}]})"),
                  {"messages of text, got tool_calls", "(message 0, ", place}));
  EXPECT_TRUE(has(error(R"({"messages": [{"role": "a", "content": "", "weight": 0.5}]})"),
                  {"a weight of 0 or 1", "(message 0, ", place}));
  for (const char* none : {"{}", R"({"messages": []})", R"({"messages": "hello"})"}) {
    EXPECT_TRUE(has(error(none), {"a list of messages at key messages, got ", place}));
  }
  EXPECT_TRUE(has(error(R"({"messages": ["hello"]})"), {"a message with role and content"}));
  EXPECT_TRUE(has(error(R"({"messages": [{"role": "user", "content": "a"}, {"role": "user"}]})"),
                  {"a text at key content, got none (message 1, ", place}));
  EXPECT_TRUE(has(error(R"({"messages": [{"role": "user", "content": [1]}]})"),
                  {"a text at key content, got another value (message 0, ", place}));
}

TEST(ChatTemplate, IsAPatternWithItsContentOnce) {
  const auto text = [](std::string_view pattern) {
    std::vector<DocumentPart> parts;
    ChatTemplate(pattern).add("R", "C", /*is_learned=*/true, parts);
    std::string all;
    for (const DocumentPart& part : parts) all += part.text + (part.is_learned ? "+" : "-");
    return all;
  };
  EXPECT_EQ(text("{content}"), "C+");
  EXPECT_EQ(text("{role}: {content} {role}"), "R: -C R+");
  EXPECT_EQ(text(R"({{{role}}}\n\t\\n{content})"), "{R}\n\t\\n-C+");
  for (const char* bad :
       {"", "{role}", "{content}{content}", "{contents}", "{", "{content}}", "\\x"}) {
    EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { text(bad); }), {"[chat_template]"}))
        << bad;
  }
}

}  // namespace
}  // namespace tessera::tools
