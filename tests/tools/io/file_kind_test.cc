#include "tools/io/file_kind.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace tessera::tools {
namespace {

using namespace std::literals;

TEST(FileKind, IsToldByTheFirstBytes) {
  std::string tar(257, 'a');
  tar += "ustar";
  const std::string lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n";
  const std::pair<std::string, std::string_view> cases[] = {
      {lfs, "git-lfs pointer"},
      {"<!DOCTYPE html>\n<html>", "HTML"},
      {"\n <HTML><head>", "HTML"},
      {"PK\3\4\0\0\0\0archive/data.pkl"s, "PyTorch"},
      {"PK\3\4\0\0\0\0arr_0.npy"s, ".npz"},
      {"PK\3\4\0\0\0\0book.txt"s, "zip archive"},
      {"\x80\2\x8a\nl\xfc"s, "pickle"},
      {"\x80\4\x95\0\0"s, "pickle"},
      {"\x1f\x8b\x08\0"s, "gzip"},
      {"\x28\xb5\x2f\xfd\x04", "zstd"},
      {"\xfd\x37zXZ\0\0"s, "xz"},
      {"BZh91AY&SY", "bzip2"},
      {"\x93NUMPY\1\0"s, ".npy"},
      {"PAR1\x15\4", "Parquet"},
      {"ARROW1\0\0"s, "Arrow"},
      {"\x89HDF\r\n\x1a\n", "HDF5"},
      {"GGUF\3\0"s, "GGUF"},
      {"%PDF-1.7", "PDF"},
      {tar, "tar"},
      {"{\"text\": \"In the beginning\"}\n", "JSON"},
      {"\xef\xbb\xbf[\n  {\"a\": 1}]", "JSON"},
      {"\x10\0\0\0\0\0\0\0{\"a\":{}}"s, "safetensors"},
  };
  for (const auto& [head, part] : cases) {
    const FileKind* kind = file_kind(head);
    ASSERT_NE(kind, nullptr) << part;
    EXPECT_NE(kind->name.find(part), std::string_view::npos) << kind->name << ", not " << part;
    EXPECT_FALSE(kind->as_data.empty()) << part;
    EXPECT_EQ(kind->as_weights.empty(), kind->is_safetensors) << part;
  }
}

TEST(FileKind, SaysHowWhatIsPackedIsUnpackedForAnyUse) {
  EXPECT_EQ(file_kind("\x1f\x8b\x08\0"s)->to_unpack(), ": unpack it: gunzip");
  EXPECT_NE(file_kind("<html>")->to_unpack().find(": download the file itself"), std::string::npos);
  for (const std::string& head : {"{\"a\": 1}"s, "%PDF-1.7"s, "\x10\0\0\0\0\0\0\0{\"a\":{}}"s}) {
    EXPECT_EQ(file_kind(head)->to_unpack(), "");
  }
}

TEST(FileKind, TextAndTokensAreNone) {
  for (const std::string& head :
       {""s, "a"s, "In the beginning"s, "{ braces }"s, "[1] a footnote"s, "<p>"s, "PK"s,
        "BZh is no word"s, "version 2"s, "\xff\xfe"s, "\x1f\x8b\x09\0"s, "\x80\2\x41\0"s,
        std::string(600, '\0'), "\x10\0\0\0\0\0\0\0[1]"s}) {
    EXPECT_EQ(file_kind(head), nullptr) << head;
  }
}

}  // namespace
}  // namespace tessera::tools
