#!/usr/bin/env python3
"""What was clean when, as messages of commits say: "Clean: PART TREE", where PART is one of .ci/run, and TREE the commit's own.

    .ci/clean.py tests PART TARGET...  the tests among the targets that changed since the newest commit that says so, a label a line
    .ci/clean.py record TREE PART...   says it in the message of HEAD

A test changed if a file that it is made of or reads did, other than in comments of C++, or a target of a BUILD file that it depends
on, and all did if what gives them their flags did: of .bazelrc and .ci/run what PART has from there. They are all listed where no
commit says that PART was clean.
"""

import os
import re
import subprocess
import sys
import tempfile

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FLAGS = ("WORKSPACE", ".bzl")  # ends of paths that give all tests their flags
_LIBRARIES = "third_party/"
_RC, _RUN = ".bazelrc", ".ci/run"


def git(*arguments):
    """What git prints, or None where it fails."""
    done = subprocess.run(["git", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=_ROOT)
    return done.stdout if done.returncode == 0 else None


def clean_commit(part):
    """The newest commit that says that `part` was clean; None where there is none."""
    log = git("log", "--format=%H %T %(trailers:key=Clean,valueonly,separator=%x20)", "--grep=^Clean: " + part) or ""
    for commit, tree, *said in map(str.split, log.splitlines()):
        if (part, tree) in zip(said[::2], said[1::2]):  # a commit that was amended keeps the line, and is another tree
            return commit
    return None


# Texts and numbers, in which // and quotes are no comment and no text. Whole lines of comments go with their line.
_TEXT_OR_NUMBER = r'R"([^()\\\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|\d[\w.\']*'
_COMMENT = r"^[ \t]*//[^\n]*\n|[ \t]*//[^\n]*|/\*.*?\*/"
_READ_BY_TOOLS = r"NOLINT|clang-format|^/\*\w+=\*/$|\\$"  # the last two: of an argument, and one that goes on


def without_comments(source):
    """The text of C++ without comments, but for those that tools read."""
    def code_of(match):
        is_kept = match.group("comment") is None or re.search(_READ_BY_TOOLS, match.group(), flags=re.MULTILINE)
        return match.group() if is_kept else " " * match.group().startswith("/*")

    return re.sub("%s|(?P<comment>%s)" % (_TEXT_OR_NUMBER, _COMMENT), code_of, source, flags=re.MULTILINE | re.DOTALL)


def only_comments_differ(path, commit):
    """Whether a file of C++ is the code that it was in a commit."""
    now = os.path.join(_ROOT, path)
    if not path.endswith((".h", ".cc", ".cu", ".cuh")) or not os.path.exists(now):
        return False
    before = git("show", commit + ":" + path)
    with open(now, encoding="utf-8") as file:
        return before is not None and without_comments(before) == without_comments(file.read())


def changed_files(commit):
    """Those that differ from a commit, in more than comments; None where that cannot be said."""
    differ = git("diff", "--name-only", "--no-renames", commit, "--") if commit else None
    new = git("ls-files", "--others", "--exclude-standard")
    if differ is None or new is None:
        return None
    return {path for path in differ.splitlines() if not only_comments_differ(path, commit)}.union(new.splitlines())


def definitions(script):
    """{name: text} of the functions and lists of a shell script that begin and end at the edge, and what is left without them."""
    found = {}

    def keep(match):
        found[match.group(1)] = match.group(0)
        return ""

    pattern = r"^(\w+)(?:\(\) \{|=\()(?:.*[})]$|.*\n(?:[^})\n].*\n|\n)*[})]$)"
    rest = re.sub(pattern, keep, script, flags=re.MULTILINE)
    return found, [line for line in rest.splitlines() if line.strip()]


def flags_of(part, rc, run, tidy):
    """All that a part has from the texts of .bazelrc and .ci/run, without comments: what its function calls, in any depth, what is
    in no function, and the lines for all and for configurations that are named in what was found, or in .ci/tidy for tidy."""
    known, rest = definitions(re.sub(r"^ *#.*\n| +# .*$", "", run, flags=re.MULTILINE))
    wanted = ["part_" + part]
    for name in wanted:
        wanted += [word for word in dict.fromkeys(re.findall(r"\w+", known[name])) if word in known and word not in wanted]
    found = [known[name] for name in wanted]
    lines = [line for line in rc.splitlines() if line.strip() and not line.startswith("#")]
    if any(re.match(r"\s*import|.*platform_specific|.*\\$", line) for line in lines):
        return [*rest, *found, *lines]  # more than is read here
    of_all = [line for line in lines if not re.match(r"[\w-]+:", line)]
    configs, texts = [], [*found, *of_all] + ([tidy] if part == "tidy" else [])
    while texts:
        new = [name for text in texts for name in re.findall(r"--config[= ]([\w.-]+)", text) if name not in configs]
        configs += dict.fromkeys(new)
        texts = [line for line in lines if (match := re.match(r"[\w-]+:(\S+)\s", line)) and match.group(1) in new]
        found += texts
    return [*rest, *found, *of_all]


def only_adds_libraries(path, commit):
    """Whether all that differs in a file of third_party is that a library came, which no test had: a new file, or entries of deps.bzl.
    A test that has it is of a BUILD file that names it, and changed."""
    before = git("show", commit + ":" + path)
    if before is None:
        return path.startswith(_LIBRARIES + "sys/") and path.endswith(".BUILD")
    if path != _LIBRARIES + "deps.bzl":
        return False
    with open(os.path.join(_ROOT, path), encoding="utf-8") as file:
        after = file.read()
    entry = re.compile(r'^    "\w+": dict\(\n(?:        .*\n)*    \),\n', flags=re.MULTILINE)
    return set(entry.findall(before)) <= set(entry.findall(after)) and entry.sub("", before) == entry.sub("", after)


def flags_differ(part, commit, changed):
    """Whether what all of a part depends on is other than it was in a commit, of which these files are `changed`."""
    flags = [path for path in changed if path.endswith(_FLAGS) or path.startswith(_LIBRARIES)]
    if not all(only_adds_libraries(path, commit) for path in flags):
        return True
    if changed.isdisjoint([_RC, _RUN]):
        return False
    paths, texts = (_RC, _RUN, ".ci/tidy"), []
    for path in paths:
        with open(os.path.join(_ROOT, path), encoding="utf-8") as file:
            texts.append(file.read())
    before = [git("show", commit + ":" + path) for path in paths]
    return None in before or flags_of(part, *before) != flags_of(part, *texts)


def record(tree, parts):
    if git("rev-parse", "HEAD^{tree}").strip() != tree or git("status", "--porcelain") != "":
        sys.exit("clean: expected the tree that was tested, %s, as HEAD, and nothing uncommitted" % tree)
    trailers = [word for part in parts for word in ("--trailer", "Clean: %s %s" % (part, tree))]
    subprocess.run(["git", "commit", "--quiet", "--amend", "--no-edit", *trailers], check=True, cwd=_ROOT)


def stanzas(build):
    """The statements of a BUILD file, without what stands between them."""
    found, lines = set(), []
    for line in build.splitlines():
        if line and not line.startswith("#"):
            lines.append(line)
            if line[0] != " " and line[-1] in ")]":
                found.add("\n".join(lines))
                lines = []
    return found.union(lines)


def labels_of(path, commit):
    """What Bazel calls what changed with a file: of a BUILD file the targets that differ. All of the package for a file that is no more."""
    package = os.path.dirname(path)
    while package and not os.path.exists(os.path.join(_ROOT, package, "BUILD")):
        package = os.path.dirname(package)
    name = os.path.relpath(path, package or ".")
    names = [name]
    if not os.path.exists(os.path.join(_ROOT, path)):
        names = ["all"]
    elif name == "BUILD":
        with open(os.path.join(_ROOT, path), encoding="utf-8") as file:
            differ = stanzas(file.read()) ^ stanzas(git("show", commit + ":" + path) or "")
        differ = {stanza for stanza in differ if not stanza.startswith("package_group(")}  # who may see a target is no part of it
        found = [re.search(r'^    name = "([^"]+)",$', stanza, flags=re.MULTILINE) for stanza in differ]
        names = [match.group(1) for match in found] if all(found) else ["all"]
    return ["//%s:%s" % (package, name) for name in names]


def tests_among(targets, labels=None):
    """The labels of tests among the targets, of those that depend on one of `labels` where these are given."""
    minus = [target[1:] for target in targets if target.startswith("-")]
    plus = [target for target in targets if not target.startswith("-")]
    query = "tests(%s) except tests(set(%s))" % (" union ".join(plus), " ".join(minus))
    if labels is not None:
        labels = sorted({"'%s'" % label for label in labels})
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
            commit = clean_commit(part)
            changed = changed_files(commit)
            every = left = tests_among(targets)
            if changed is not None and not flags_differ(part, commit, changed):
                own = changed - {_RC, _RUN}
                left = tests_among(targets, [label for path in own for label in labels_of(path, commit)])
            print("%s: %d of %d tests are to be run" % (part, len(left), len(every)), file=sys.stderr)
            sys.stdout.writelines(label + "\n" for label in left)
        case ["record", tree, *parts] if parts:
            record(tree, parts)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
