"""Times the package tokenizers on a text, as one document and as one for each line, and on one letter many times.

    python tokenizers_texts.py FOLDER TEXT RUN...        prints one JSON object

FOLDER has the tokenizer.json; RUN is how many letters. One thread, by CPU time, by the call that makes ids alone.
"""

import importlib.metadata
import json
import os
import pathlib
import sys
import time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer  # noqa: E402  (it reads the environment)


def main():
    folder, text, *runs = sys.argv[1:]
    tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
    text = pathlib.Path(text).read_bytes().decode("utf-8", "replace")
    rows = []
    for documents in [[text], text.split("\n"), *([int(run) * "a"] for run in runs)]:
        begin = time.process_time()
        encoded = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
        rows.append({"s": time.process_time() - begin, "ids": sum(map(len, encoded))})
    print(json.dumps({"version": importlib.metadata.version("tokenizers"), "rows": rows}))


if __name__ == "__main__":
    main()
