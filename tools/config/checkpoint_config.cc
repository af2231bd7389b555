#include "tools/config/checkpoint_config.h"

#include <fmt/format.h>

#include "engine/error.h"

namespace tessera::tools {

using engine::require;

void CheckpointConfig::add_to(FlagSet& flags) {
  if (!is_offered) return;
  flags.add(
      "checkpoint.every", &every,
      {.help = "steps between checkpoints, from which a run that was interrupted goes on with "
               "the bits of one that was not; one more is saved at the end; 0: none",
       .min = 0});
  flags.add("checkpoint.dir", &dir,
            {.help = "folder of the run's checkpoints, made if need be; empty: checkpoints in the "
                     "output folder"});
  flags.add("checkpoint.keep", &keep,
            {.help = "how many checkpoints stay, the newest; 0: all", .min = 0, .max = 1 << 20});
  flags.add(
      "checkpoint.async", &async,
      {.help =
           "write checkpoints while training goes on, from a copy in memory of the host as large "
           "as what a rank saves; false: training waits"});
  flags.add(
      "checkpoint.strict", &strict,
      {.help = "what is resumed must have all states of the optimizer and nothing else; false: "
               "states that are missing start from nothing, and what is over is ignored"});
  flags.add(
      "resume", &resume,
      {.help = "none: a new run; auto: go on from the newest checkpoint of checkpoint.dir that "
               "verifies, or begin where there is none; or a folder: a checkpoint, or one of "
               "checkpoints, of which the newest"});
}

void CheckpointConfig::validate(const FlagSet& flags) const {
  for (const char* option : {"checkpoint.keep", "checkpoint.async"}) {
    require(saves() || !flags.is_given(option),
            "[config] expected checkpoint.every with {}, got none: nothing is saved", option);
  }
  require(saves() || dir.empty() || resume == "auto",
          "[config] expected checkpoint.every or resume=auto with checkpoint.dir, got neither ({})",
          dir);
  require(resumes() || strict, "[config] expected resume with checkpoint.strict=false, got none");
  require(!resume.empty(), "[config] expected none, auto or a folder, got an empty value (resume)");
}

std::string CheckpointConfig::folder(const std::string& out) const {
  return resolve_user_path(dir.empty() ? fmt::format("{}/checkpoints", out) : dir);
}

void CheckpointConfig::check_apart(const std::string& out, std::span<const RunFile> files) const {
  check_files_outside(files, {"the checkpoints", folder(out)});
  if (resumes() && resume != "auto") {
    check_files_outside(files, {"the checkpoints", resolve_user_path(resume)});
  }
}

}  // namespace tessera::tools
