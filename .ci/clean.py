#!/usr/bin/env python3
"""What was clean when, as messages of commits say: "Clean: PART TREE", where PART is one of .ci/run, and TREE the commit's own.

    .ci/clean.py tests PART TARGET...  the tests among the targets that changed since the newest commit that says so, a label a line
    .ci/clean.py record TREE PART...   says it in the message of HEAD

A test changed if a file that it is made of or reads did, or the BUILD file of such a file's package, and all did if what
gives them their flags did. They are all listed where no commit says that PART was clean.
"""

import os
import subprocess
import sys
import tempfile

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FLAGS = (".bazelrc", "WORKSPACE", ".bzl", ".ci/run")  # ends of paths that give all tests their flags
_LIBRARIES = "third_party/"


def git(*arguments):
    """What git prints, or None where it fails."""
    done = subprocess.run(["git", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=_ROOT)
    return done.stdout if done.returncode == 0 else None


def changed_files(part):
    """Files that differ from the newest commit that says that `part` was clean; None where there is no such commit."""
    log = git("log", "--format=%H %T %(trailers:key=Clean,valueonly,separator=%x20)", "--grep=^Clean: " + part) or ""
    for commit, tree, *said in map(str.split, log.splitlines()):
        if (part, tree) in zip(said[::2], said[1::2]):  # a commit that was amended keeps the line, and is another tree
            differ = git("diff", "--name-only", "--no-renames", commit, "--")
            new = git("ls-files", "--others", "--exclude-standard")
            return None if differ is None or new is None else set(differ.splitlines() + new.splitlines())
    return None


def record(tree, parts):
    if git("rev-parse", "HEAD^{tree}").strip() != tree or git("status", "--porcelain") != "":
        sys.exit("clean: expected the tree that was tested, %s, as HEAD, and nothing uncommitted" % tree)
    trailers = [word for part in parts for word in ("--trailer", "Clean: %s %s" % (part, tree))]
    subprocess.run(["git", "commit", "--quiet", "--amend", "--no-edit", *trailers], check=True, cwd=_ROOT)


def label_of(path):
    """What Bazel calls a file: all of its package where it is a BUILD file, or is no more, so that no target names it."""
    package = os.path.dirname(path)
    while package and not os.path.exists(os.path.join(_ROOT, package, "BUILD")):
        package = os.path.dirname(package)
    name = os.path.relpath(path, package or ".")
    return "//%s:%s" % (package, name if name != "BUILD" and os.path.exists(os.path.join(_ROOT, path)) else "all")


def tests_among(targets, changed):
    """The labels of tests among the targets, of those that depend on a changed file; of all where `changed` is None."""
    minus = [target[1:] for target in targets if target.startswith("-")]
    plus = [target for target in targets if not target.startswith("-")]
    query = "tests(%s) except tests(set(%s))" % (" union ".join(plus), " ".join(minus))
    if changed is not None:
        labels = sorted({"'%s'" % label_of(path) for path in changed})
        query = "let wanted = %s in $wanted intersect rdeps($wanted, set(%s))" % (query, " ".join(labels))
    with tempfile.NamedTemporaryFile("w", suffix=".query") as file:
        file.write(query)
        file.flush()
        # It goes on after a file that no target names, as a page that no test reads.
        done = subprocess.run([_ROOT + "/bazelw", "query", "--keep_going", "--noshow_progress", "--query_file=" + file.name],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=_ROOT)
    if done.returncode not in (0, 3):
        sys.exit(done.stderr)
    return done.stdout.split()


def main():
    match sys.argv[1:]:
        case ["tests", part, *targets] if targets:
            changed = changed_files(part)
            if changed is not None and any(path.endswith(_FLAGS) or path.startswith(_LIBRARIES) for path in changed):
                changed = None
            every, left = tests_among(targets, None), tests_among(targets, changed)
            print("%s: %d of %d tests are to be run" % (part, len(left), len(every)), file=sys.stderr)
            sys.stdout.writelines(label + "\n" for label in left)
        case ["record", tree, *parts] if parts:
            record(tree, parts)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
