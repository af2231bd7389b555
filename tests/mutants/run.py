#!/usr/bin/env python3
"""Plants known bugs, one at a time, and sees whether the tests find them.

    tests/mutants/run.py                     every mutant
    tests/mutants/run.py WORDS...            those of a source (shard/schedule.cc) or folder (shard), or with that name
    tests/mutants/run.py --changed[=COMMIT]  those whose source, entry or test differs from COMMIT (HEAD~1 unless given)
    tests/mutants/run.py --sample=N          N of them, others each time
    tests/mutants/run.py --check             plants none: sees that each can be planted

The mutants of shard/schedule.cc are in tests/mutants/shard/schedule.cc.toml:

    [[mutant]]
    name = "early update is late"
    what = "All units are updated in finish_step()."
    fails = ["//tests/shard:early_update_test"]
    config = ["--config=cuda_emulation"]        # options of the build, where it needs any
    find = 'if (!is_last_) return;'             # stands in the source exactly once
    replace = 'if (is_last_) return;'

Where several places change, each is a [[mutant.edit]] with `find`, `replace`, and `source` where it is another file.

A mutant is found when it builds and every test that it names fails. The bugs are planted in a temporary worktree of
HEAD, so a new test is committed before its mutant is tried. The tree at hand is never touched.
"""

import argparse
import collections
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
# What Bazel calls it, in words.
STATUS = {"PASSED": "passed", "FAILED": "failed", "TIMEOUT": "timed out", "NO_STATUS": "did not build or run"}
KEYS = {"name", "what", "fails", "config", "find", "replace", "edit"}
EDIT_KEYS = {"source", "find", "replace"}

Edit = collections.namedtuple("Edit", "source find replace")
Mutant = collections.namedtuple("Mutant", "source name edits tests config")


def git(folder, *words):
    return subprocess.run(["git", "-C", folder, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def read_mutant(source, entry):
    edits = [Edit(edit.get("source", source), edit["find"], edit["replace"]) for edit in entry.get("edit", [entry])]
    parts = [entry.keys() - KEYS] + [edit.keys() - EDIT_KEYS for edit in entry.get("edit", [])]
    if unknown := set().union(*parts):
        raise KeyError(", ".join(unknown))
    if not entry["what"] or not entry["fails"]:
        raise KeyError("what, fails")
    return Mutant(source, entry["name"], edits, entry["fails"], tuple(entry.get("config", ())))


def read_mutants():
    mutants = []
    for path in sorted(FOLDER.rglob("*.toml")):
        source = str(path.relative_to(FOLDER).with_suffix(""))
        try:
            mutants += [read_mutant(source, entry) for entry in tomllib.loads(path.read_text())["mutant"]]
        except (KeyError, tomllib.TOMLDecodeError) as error:
            sys.exit(f"[mutants] expected [[mutant]] with name, what, fails, find and replace, got {error} ({path.name})")
    names = collections.Counter(mutant.name for mutant in mutants)
    if twice := [name for name, count in names.items() if count > 1]:
        sys.exit(f"[mutants] expected names of one mutant each, got twice: {', '.join(twice)}")
    return mutants


def files_of(mutant):
    """Those that say whether it is found: what it changes, where it is written, and its tests."""
    tests = [f"{package[2:]}/{name}.cc" for package, name in (test.split(":") for test in mutant.tests)]
    return [edit.source for edit in mutant.edits] + [f"tests/mutants/{mutant.source}.toml"] + tests


def chosen(mutants, options):
    """What the command line asks for."""
    if options.changed is not None:
        changed = set(git(ROOT, "diff", "--name-only", options.changed).splitlines())
        return [m for m in mutants if not changed.isdisjoint(files_of(m))]
    if options.sample is not None:
        return random.sample(mutants, min(options.sample, len(mutants)))
    found = []
    for word in options.words:
        those = [m for m in mutants if word == m.name or f"{m.source}/".startswith(word.rstrip("/") + "/")]
        if not those:
            sys.exit(f"[mutants] expected names of mutants, or sources or folders that have some, got '{word}'")
        found += [m for m in those if m not in found]
    return found if options.words else mutants


def planted(mutant, folder):
    """{file: its text with the bug}. Raises ValueError where the bug cannot be planted."""
    texts, spots = {}, collections.defaultdict(list)
    for edit in mutant.edits:
        path = folder / edit.source
        if not path.is_file():
            raise ValueError(f"there is no {edit.source}")
        text = texts.setdefault(path, path.read_text())
        if (count := text.count(edit.find)) != 1 or edit.find == edit.replace:
            raise ValueError(f"expected `find` exactly once in {edit.source} and another `replace`, got {count} times: {edit.find}")
        spots[path].append((text.index(edit.find), edit))
    for path, edits in spots.items():
        for at, edit in sorted(edits, reverse=True):
            texts[path] = texts[path][:at] + edit.replace + texts[path][at + len(edit.find):]
    return texts


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

    def plant(self, mutant):
        for path, text in planted(mutant, self.tree).items():
            path.write_text(text)

    def revert(self):
        git(self.tree, "reset", "--quiet", "--hard")

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
        worktree.plant(mutant)
        results, output = worktree.test(mutant.tests, mutant.config)
    except ValueError as error:
        return str(error)
    finally:
        worktree.revert()
    if "NO_STATUS" in results.values():
        print(output)
    return others(results, "FAILED")


def check(mutants):
    """Says which cannot be planted in the tree at hand."""
    num_stale = 0
    for mutant in mutants:
        try:
            planted(mutant, ROOT)
        except ValueError as error:
            num_stale += 1
            print(f"{mutant.name}: {error}")
    print(f"{len(mutants)} mutants, {num_stale} cannot be planted")
    return num_stale > 0


def run(mutants):
    num_found = 0
    with Worktree() as worktree:
        check_unchanged(worktree, mutants)
        for mutant in sorted(mutants, key=lambda mutant: mutant.config):
            reason = miss(worktree, mutant)
            num_found += not reason
            print(f"{mutant.name}: {'MISSED, ' + reason if reason else 'found'}", flush=True)
    print(f"{num_found} found, {len(mutants) - num_found} missed")
    return num_found < len(mutants)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="tests/mutants/run.py [--check] [--changed[=COMMIT] | --sample=N | WORDS...]")
    parser.add_argument("--changed", metavar="COMMIT", nargs="?", const="HEAD~1", help=argparse.SUPPRESS)
    parser.add_argument("--sample", metavar="N", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if sum((options.changed is not None, options.sample is not None, bool(options.words))) > 1:
        parser.error("expected one of --changed, --sample and names")
    mutants = chosen(read_mutants(), options)
    sys.exit(check(mutants) if options.check else run(mutants))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("[mutants] interrupted")
