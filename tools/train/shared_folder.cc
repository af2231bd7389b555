#include "tools/train/shared_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "comm/host_gather.h"
#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/host.h"
#include "engine/io/late_files.h"
#include "shard/checkpoint/folder.h"

namespace tessera::tools {
namespace {

// The file of rank 0, removed in the end. Its name is that of a checkpoint that is being written:
// should this process die, the next run removes it.
class TestFile {
 public:
  explicit TestFile(const std::string& folder)
      : path_(shard::temporary_path(folder, 0, static_cast<std::uint64_t>(::getpid()))) {
    std::filesystem::create_directories(folder);
    engine::AtomicFile file(path_);
    file.write(std::as_bytes(std::span(path_)));
    file.commit();
  }
  ~TestFile() { (void)::unlink(path_.c_str()); }
  TestFile(const TestFile&) = delete;
  TestFile& operator=(const TestFile&) = delete;

  std::string name() const { return std::filesystem::path(path_).filename().string(); }

 private:
  const std::string path_;
};

std::unique_ptr<TestFile> leave_file(const std::string& folder) {
  try {
    return std::make_unique<TestFile>(folder);
  } catch (const std::exception&) {
    return nullptr;
  }
}

bool find_file(const std::string& path) {
  return engine::seen_late(path, [&] {
    try {
      const engine::InputFile file(path);
      return true;
    } catch (const engine::IoError&) {
      return false;
    }
  });
}

}  // namespace

void check_shared_folder(comm::ProcessGroup& world, const std::string& folder,
                         const engine::Memory& memory, const engine::Stream& stream) {
  const std::unique_ptr<TestFile> left = world.rank() == 0 ? leave_file(folder) : nullptr;
  const std::string name = comm::gather_texts(world, left ? left->name() : "", memory, stream,
                                              "a file in the folder")[0];
  if (name.empty()) return;
  const bool is_there = [&] {
    const std::shared_ptr<const void> pause = world.pause_deadline();
    return world.rank() == 0 || find_file(folder + "/" + name);
  }();
  const auto lacking = comm::gather_texts(world, is_there ? "" : engine::host_name(), memory,
                                          stream, "who sees the folder");
  const auto first = std::ranges::find_if(lacking, [](const auto& text) { return !text.empty(); });
  engine::require<engine::IoError>(first == lacking.end(),
                                   "[checkpoint] expected a folder that all hosts share, got one "
                                   "in which rank {} on {} does not "
                                   "see what rank 0 has written (checkpoint.dir, {})",
                                   first - lacking.begin(), first == lacking.end() ? "" : *first,
                                   folder);
}

}  // namespace tessera::tools
