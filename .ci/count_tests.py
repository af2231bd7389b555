"""Counts test cases: count_tests.py FOLDER_OF_BAZEL_EVENTS CHECKS_PASSED [PROBLEM ...]

Only the results that this run of Bazel reports (cached ones too) are counted, so that a log left from an older run
cannot be. A check besides the tests counts as one test case, a PROBLEM as one failure. Exits with 1 if anything failed or nothing ran.
"""

import glob
import json
import sys
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree


def results(folder):
    """(label, status, path of test.xml or None) of every test run; of a repeated one the last attempt."""
    found = {}
    for path in sorted(glob.glob(folder + "/*.json")):
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                event = json.loads(line)
                if "testResult" not in event:
                    continue
                key, result = event["id"]["testResult"], event["testResult"]
                xml = [file["uri"] for file in result.get("testActionOutput", []) if file["name"] == "test.xml"]
                xml = urllib.request.url2pathname(urllib.parse.urlparse(xml[0]).path) if xml else None
                found[path, key["label"], key.get("shard", 0), key.get("run", 0)] = (key["label"], result["status"], xml)
    return found.values()


def cases(xml):
    """(name, outcome) of every test case in a test.xml."""
    try:
        root = ElementTree.parse(xml).getroot()
    except (OSError, TypeError, ElementTree.ParseError):
        return
    for case in root.iter("testcase"):
        name = "%s.%s" % (case.get("classname", ""), case.get("name", ""))
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed"
        elif case.find("skipped") is not None or case.get("result") in ("skipped", "suppressed"):
            yield name, "skipped"
        elif case.get("status") == "notrun":
            yield name, "skipped"
        else:
            yield name, "passed"


def main():
    count = {"passed": int(sys.argv[2]), "failed": 0, "skipped": 0}
    for label, status, xml in results(sys.argv[1]):
        outcomes = list(cases(xml))
        for name, outcome in outcomes:
            count[outcome] += 1
            if outcome != "passed":
                print("%s: %s %s" % (outcome, label, name))
        # A program that died or ran too long may have reported no failed case.
        if status != "PASSED" and not any(outcome == "failed" for _, outcome in outcomes):
            count["failed"] += 1
            print("failed: %s (%s)" % (label, status))
    for problem in sys.argv[3:]:
        count["failed"] += 1
        print("failed: " + problem)
    if count["skipped"]:
        print("%d skipped" % count["skipped"])
    print("%d passed, %d failed" % (count["passed"], count["failed"]))
    return 1 if count["failed"] or not count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
