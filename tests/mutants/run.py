#!/usr/bin/env python3
"""Plants known bugs, one at a time, and sees whether the tests find them.

    tests/mutants/run.py            every mutant
    tests/mutants/run.py NAME...    some of them

A mutant is tests/mutants/NAME.patch: a git patch below comment lines that say what goes wrong, which tests must fail,
and where needed the configuration of the build:

    # A query sees the token after its own.
    # Fails: //tests/ops:attention_test
    # Config: --config=cuda_emulation

It is found when it builds and every test that it names fails. Patches are applied to a temporary worktree of HEAD, so
a new test is committed before its mutant is tried. The tree at hand is never touched.
"""

import collections
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
# What Bazel calls it, in words.
STATUS = {"PASSED": "passed", "FAILED": "failed", "TIMEOUT": "timed out", "NO_STATUS": "did not build or run"}

Mutant = collections.namedtuple("Mutant", "name patch tests config")


def git(folder, *words, check=True):
    return subprocess.run(["git", "-C", folder, *words], check=check).returncode == 0


def read_mutant(name):
    patch = FOLDER / f"{name}.patch"
    fields = {"Fails": [], "Config": []}
    for line in patch.read_text().splitlines():
        if not line.startswith("#"):
            break
        key, _, value = line.strip("# ").partition(":")
        if key in fields:
            fields[key] += value.split()
    if not fields["Fails"]:
        sys.exit(f"[mutants] expected a line '# Fails: //tests/...', got none ({patch.name})")
    return Mutant(name, patch, fields["Fails"], tuple(fields["Config"]))


class Worktree:
    """HEAD in a temporary folder, and what Bazel builds of it: kept from mutant to mutant, removed at the end."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tessera-mutants-"))
        self.tree = self.folder / "tree"
        self.configs = set()

    def __enter__(self):
        git(ROOT, "worktree", "add", "--quiet", "--detach", self.tree, "HEAD")
        if (ROOT / "user.bazelrc").exists():
            shutil.copy(ROOT / "user.bazelrc", self.tree)
        return self

    def __exit__(self, *_):
        for config in self.configs:  # stops the server, too
            subprocess.run([*self.bazel(config), "clean", "--expunge"], cwd=self.tree, stderr=subprocess.DEVNULL)
        git(ROOT, "worktree", "remove", "--force", self.tree)
        shutil.rmtree(self.folder, ignore_errors=True)

    def bazel(self, config):
        # An output base for each configuration: going from one to the other would build everything again.
        name = "output" + "".join(config).replace("/", "_")
        return ["./bazelw", f"--output_base={self.folder / name}"]

    def apply(self, patch):
        return git(self.tree, "apply", "--whitespace=nowarn", patch, check=False)

    def revert(self):
        git(self.tree, "reset", "--quiet", "--hard")
        git(self.tree, "clean", "--quiet", "-fd")

    def test(self, tests, config):
        """What became of each test, as Bazel calls it, and all that Bazel said."""
        self.configs.add(config)
        events = self.folder / "events.json"
        events.write_text("")
        options = ["--keep_going", "--noshow_progress", "--color=no", f"--build_event_json_file={events}"]
        bazel = subprocess.run([*self.bazel(config), "test", *config, *options, *tests], cwd=self.tree,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace")
        results = dict.fromkeys(tests, "NO_STATUS")
        for event in map(json.loads, events.read_text().splitlines()):
            label = event["id"].get("testSummary", {}).get("label")
            if label in results and "testSummary" in event:
                results[label] = event["testSummary"]["overallStatus"]
        return results, bazel.stdout


def others(results, wanted):
    """The tests that came to something else, in words; empty if all did as wanted."""
    return ", ".join(f"{test} {STATUS.get(got, got)}" for test, got in results.items() if got != wanted)


def check_unchanged(worktree, mutants):
    """A test that fails anyway finds nothing."""
    for config in sorted({mutant.config for mutant in mutants}):
        tests = sorted({test for mutant in mutants if mutant.config == config for test in mutant.tests})
        results, output = worktree.test(tests, config)
        if wrong := others(results, "PASSED"):
            sys.exit(f"{output}\n[mutants] expected tests that pass as long as nothing is planted, got {wrong}")


def miss(worktree, mutant):
    """Why the mutant was not found; empty if it was."""
    try:
        if not worktree.apply(mutant.patch):
            return "the patch does not apply"
        results, output = worktree.test(mutant.tests, mutant.config)
    finally:
        worktree.revert()
    if "NO_STATUS" in results.values():
        print(output)
    return others(results, "FAILED")


def main():
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.exit(print(__doc__))
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.patch"))
    unknown = [name for name in names if not (FOLDER / f"{name}.patch").exists()]
    if unknown:
        sys.exit(f"[mutants] expected names of patches in {FOLDER}, got {', '.join(unknown)}\n{__doc__}")
    mutants = sorted(map(read_mutant, names), key=lambda mutant: mutant.config)
    num_found = 0
    with Worktree() as worktree:
        check_unchanged(worktree, mutants)
        for mutant in mutants:
            reason = miss(worktree, mutant)
            num_found += not reason
            print(f"{mutant.name}: {'MISSED, ' + reason if reason else 'found'}", flush=True)
    print(f"{num_found} found, {len(mutants) - num_found} missed")
    sys.exit(num_found < len(mutants))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("[mutants] interrupted")
