#!/usr/bin/env python3
"""Makes tests/golden/tokenizers: small tokenizers, texts, and the ids that the tokenizers package gives them.

Eleven have a tokenizer.json, whose settings are drawn at random; gpt2_files has GPT-2's vocab.json and merges.txt. bytes.json has what is
not UTF-8, as hexadecimal digits, and what Python and the package make of it; runs.json has how many ids a long run of one letter has, and
the last of them.

  python3 -m venv V && V/bin/pip install tokenizers==0.23.3
  V/bin/python tests/golden/make_tokenizer_golden.py TEXT [TOOL [SEEDS]]

TEXT is something to train on, such as bazel-bin/third_party/data/kjv.txt. With TOOL, which is bazel-bin/tools/tokenize/tokenize, it
writes nothing, and compares what the tool says of tokenizers that are drawn at random: as many as SEEDS, on the same texts.
With `TOOL FOLDER=DIR FILE...` it compares the ids of files, which are texts, with the tokenizer.json in DIR, and says how many.
"""
import importlib.metadata, json, os, pathlib, random, subprocess, sys, tempfile

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import AddedToken, ByteLevelBPETokenizer, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = pathlib.Path(__file__).resolve().parent / "tokenizers"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BEHAVIORS = ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]
PATTERNS = [LLAMA3, O200K, r"\w+|[^\w\s]+", r"\s+", r"[\p{Han}\p{Hiragana}]+", r"\d", r"(?=\p{Lu})", r"^.|,$", r"(?<=e)\S?+"]


def texts():
    r = random.Random(7)
    some = [chr(c) for c in range(0x20, 0x2FFFF) if not 0xD800 <= c < 0xE000 and chr(c).isprintable()]
    return [
        "",
        " ",
        "In the beginning God created the heaven and the earth.\n\nAnd the earth was without form, and void; I'll SEE 12345 of 6.",
        "".join(map(chr, range(33))) + "".join(map(chr, range(126, 162))),
        "Zażółć gęślą jaźń, Ａﬁ ½ ² Ⅷ e\u0301 \u0344 \u1100\u1161\u11a8 ﷺ \u212b 한국어 日本語テスト ไทย हिन्दी",
        "👨‍👩‍👧‍👦 🏳️‍🌈👍🏽 🇩🇪 \ud7ff\ue000\ufffd\uffff\U00010000\U0010ffff \u200d\ufeff x\u180ey\u0085z\u00a0\u2028\u3000w",
        "  two  spaces   three\t\ttabs \r\n\r\n \n end  ",
        "a<s>b</s> <s> </s>  [X]  [X]word[X] w [X], <mask> x<mask>\n<|end|><|end|> <|e <TOK> <tok> ½[Y] tok ",
        "int main() { return f(x1, 0x1F) != 'a' ? 1'000 : -2.5e-3; }  // it's, we'LL, ſ'ſ\n",
        "".join(r.choice(some) for _ in range(150)),
        "a" * 300 + "ab" * 60 + " " * 90 + "." * 70,
        "▁under ▁ <0x41> <0x0A> Ġspace Ċ the▁the",
    ]


def all_texts():
    """With one on which nothing is trained."""
    return texts() + ["a<|endoftext|> b<|endoftext|><|endoftext|>\n<|endoftext"]


def broken_texts():
    """Bytes that are not UTF-8: each way of being none, and some at random."""
    r = random.Random(11)
    parts = ["80", "bf", "c080", "c1bf", "c2", "c241", "e08080", "e0a0", "e0a041", "e180e180", "ed9f", "eda080", "edbfbf", "efbf", "f0808080",
             "f09080", "f0908041", "f1808080", "f48f", "f4908080", "f5808080", "f8888080", "fe", "ff", "fffe", "e2e282ac", "f0f09f9880"]
    lines = [b"a " + bytes.fromhex(part) + b" b\xc3\xa9" for part in parts] + [b"in" + bytes.fromhex(part) for part in parts]
    whole = "In \u00e9\u20ac\U0001f600 \u1ea1 the".encode()
    lines += [whole[:i] + whole[i + 1:] for i in range(len(whole))]
    for length in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
        lines += [r.randbytes(length), bytes(r.choice([0x41, 0x80, 0xbf, 0xc3, 0xe2, 0xed, 0xf0, 0xf4]) for _ in range(length))]
    return lines


def added(r):
    """Tokens with every flag."""
    tokens = [AddedToken("<s>", special=True, normalized=False), AddedToken("</s>", special=True, normalized=False)]
    more = [("[X]", dict(lstrip=True)), ("<mask>", dict(lstrip=True, rstrip=True)), ("tok", dict(single_word=True)), ("<|end|>", {}),
            ("<|end|><|end|>", {}), ("<TOK>", dict(normalized=True)), ("1/2[Y]", dict(normalized=True)), ("é", dict(rstrip=True))]
    for content, flags in r.sample(more, r.randrange(len(more) + 1)):
        flags.setdefault("normalized", r.random() < 0.3)
        tokens.append(AddedToken(content, special=r.random() < 0.5, **flags))
    return tokens


def drawn(seed, kind, corpus, split=None):
    """The text of a tokenizer.json. The kind says what its words are: bytes, or characters with <0x0A> or an unknown token.

    With `split`, an expression, words are what it matches, whatever was drawn."""
    r = random.Random(seed)
    unknown = None if kind == "bytes" else "<unk>"
    t = Tokenizer(models.BPE(unk_token=unknown, fuse_unk=r.random() < 0.5))
    forms = [normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD()]
    steps = [r.choice(forms)] if r.random() < 0.5 else []
    if r.random() < 0.2:
        steps.append(normalizers.Replace(r.choice([Regex(r"\s+"), Regex("[aeiou]$"), "the", "."]), r.choice([" ", "", "xyz"])))
    words = []
    if r.random() < 0.5 and kind != "llama":
        pattern = Regex(r.choice(PATTERNS)) if r.random() < 0.8 else r.choice([" ", ".", "the", "\n"])
        words.append(pre_tokenizers.Split(pattern, r.choice(BEHAVIORS), invert=r.random() < 0.3))
    if split:
        words = [pre_tokenizers.Split(Regex(split), "isolated")]
    if r.random() < 0.3:
        words.append(pre_tokenizers.Digits(individual_digits=r.random() < 0.5))
    if kind == "bytes":
        words.append(pre_tokenizers.ByteLevel(add_prefix_space=r.random() < 0.4, use_regex=r.random() < 0.6))
        t.decoder = decoders.ByteLevel()
    elif kind == "llama":
        steps += [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        scheme = r.choice(["always", "first", "never"])
        words.append(pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=r.random() < 0.7))
        t.decoder = decoders.Metaspace("▁", prepend_scheme=scheme)
    if steps:
        t.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)
    if words:
        t.pre_tokenizer = words[0] if len(words) == 1 else pre_tokenizers.Sequence(words)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" and r.random() < 0.7 else []
    special = ["<s>", "</s>"] + ([unknown] if unknown else [])
    t.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=r.randrange(350, 650), special_tokens=special, initial_alphabet=alphabet,
                                                      show_progress=False, max_token_length=r.choice([None, 6])))
    t.add_tokens(added(r))
    if r.random() < 0.6:
        bos, eos = [(token, t.token_to_id(token)) for token in ("<s>", "</s>")]
        t.post_processor = processors.TemplateProcessing(single=r.choice(["<s> $A", "<s> $A </s>", "$A </s>", "<s> <s> $A"]), pair="$A $B",
                                                         special_tokens=[bos, eos])
        if kind == "bytes" and r.random() < 0.5:
            t.post_processor = processors.Sequence([processors.ByteLevel(), t.post_processor])
    file = json.loads(t.to_str())
    model = file["model"]
    if kind == "llama":  # with tokens of bytes, not all in some
        model["byte_fallback"] = True
        model["vocab"] = {text: id for text, id in model["vocab"].items()}
        shift, first = 256, len(model["vocab"])
        for token in file["added_tokens"]:
            if token["id"] >= first:
                token["id"] += shift
        for byte in range(256):
            model["vocab"][f"<0x{byte:02X}>"] = first + byte
    if r.random() < 0.3:  # tokens that no merge makes
        model["ignore_merges"] = True
        model["merges"] = [merge for merge in model["merges"] if r.random() < 0.9]
    if r.random() < 0.4:
        model["merges"] = [" ".join(merge) for merge in model["merges"]]
    return json.dumps(file, ensure_ascii=False, separators=(",", ":"))


def corpus_of(path):
    lines = pathlib.Path(path).read_text().splitlines()
    return lines[:2000] + [text for text in texts() if len(text) < 400] * 3


def difference(tool, folder, tokenizer, files):
    """What the tool says otherwise, as text; empty if nothing."""
    return compared(tool, folder, tokenizer, files)[0]


def compared(tool, folder, tokenizer, files):
    """difference(), and the number of ids that were equal."""
    num_ids = 0
    for special in (True, False):
        done = subprocess.run([tool, "--tokenizer=" + folder, f"--special={str(special).lower()}", *files], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
        if done.returncode:
            return done.stderr, num_ids
        if len(lines := done.stdout.splitlines()) != len(files):
            return f"{len(lines)} lines", num_ids
        for file, line in zip(files, lines):
            expected = tokenizer.encode(pathlib.Path(file).read_bytes().decode("utf-8", "replace"), add_special_tokens=special).ids
            got = json.loads(line)
            if got != expected:
                at = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
                show = lambda ids: [tokenizer.id_to_token(id) for id in ids[max(at - 3, 0):at + 6]]
                return f"{file}: token {at}: expected {show(expected)}, got {show(got)}", num_ids
            num_ids += len(got) if special else 0
    return "", num_ids


def compare(tool, first, rest, corpus):
    if first.startswith("FOLDER="):
        folder = first[len("FOLDER="):]
        found, num_ids = compared(tool, folder, Tokenizer.from_file(folder + "/tokenizer.json"), rest)
        if found:
            sys.exit(found)
        nbytes = sum(pathlib.Path(file).stat().st_size for file in rest)
        print(f"{len(rest)} files, {nbytes:,} bytes, {num_ids:,} ids: equal to those of tokenizers {VERSION}")
        return
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for i, text in enumerate(all_texts()):
            files.append(f"{folder}/{i}.txt")
            pathlib.Path(files[-1]).write_bytes(text.encode())
        for extra in rest:
            files.append(extra)
        num_different = 0
        for seed in range(int(first)):
            kind = ["bytes", "bytes", "llama", "metaspace"][seed % 4]
            text = drawn(seed, kind, corpus)
            pathlib.Path(folder + "/tokenizer.json").write_text(text)
            found = difference(tool, folder, Tokenizer.from_str(text), files)
            if found:
                num_different += 1
                file = json.loads(text)
                print(seed, kind, found, json.dumps({key: file[key] for key in ("normalizer", "pre_tokenizer")}))
        print(num_different, "of", first, "differ")


def main():
    corpus = corpus_of(sys.argv[1])
    if len(sys.argv) > 2:
        return compare(sys.argv[2], sys.argv[3], sys.argv[4:], corpus)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "texts.json").write_text(json.dumps(all_texts(), indent=0) + "\n")
    made = {}
    for number, (kind, seed, *split) in enumerate(KINDS):
        text = drawn(seed, kind, corpus, *split)
        name = f"{number}_{kind}"
        (FOLDER / name).mkdir(exist_ok=True)
        (FOLDER / name / "tokenizer.json").write_text(text + "\n")
        made[name] = Tokenizer.from_str(text)
    made["gpt2_files"] = gpt2_files(corpus, FOLDER / "gpt2_files")
    for name, t in made.items():
        lines = []
        for sample in all_texts():
            ids = t.encode(sample).ids
            plain = t.encode(sample, add_special_tokens=False).ids
            lines.append(json.dumps({"ids": ids, "plain": plain if plain != ids else None, "text": t.decode(ids, skip_special_tokens=True),
                                     "all_text": t.decode(ids, skip_special_tokens=False)}, separators=(",", ":")))
        (FOLDER / name / "expected.jsonl").write_text("\n".join(lines) + "\n")
    broken = [{"hex": line.hex(), "text": (text := line.decode("utf-8", errors="replace")),
               "ids": {name: made[name].encode(text).ids for name in BROKEN_IN}} for line in broken_texts()]
    write_lines(FOLDER / "bytes.json", broken)
    runs = []
    for name, letter in RUNS:
        ids = made[name].encode(letter * RUN_LENGTH).ids
        runs.append({"folder": name, "letter": letter, "num_letters": RUN_LENGTH, "num_ids": len(ids), "last": ids[-8:]})
    write_lines(FOLDER / "runs.json", runs)


def gpt2_files(corpus, place):
    """A tokenizer of GPT-2's shape, with merges of one letter too, from the files that it writes to `place`."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(corpus + ["e" * 64] * 40, vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False)
    place.mkdir(exist_ok=True)
    trained.save_model(str(place))
    t = ByteLevelBPETokenizer(str(place / "vocab.json"), str(place / "merges.txt"))
    t.add_special_tokens(["<|endoftext|>"])
    return t


def write_lines(path, values):
    path.write_text("[\n" + ",\n".join(json.dumps(value, separators=(",", ":")) for value in values) + "\n]\n")


VERSION = importlib.metadata.version("tokenizers")
KINDS = [("bytes", 5), ("bytes", 14, LLAMA3), ("bytes", 22, O200K), ("bytes", 4), ("bytes", 21), ("llama", 3), ("llama", 10), ("llama", 20),
         ("metaspace", 8), ("metaspace", 16, r"\w+|[^\w\s]+"), ("bytes", 48)]
BROKEN_IN = ["3_bytes", "5_llama", "gpt2_files"]
RUN_LENGTH = 1_000_003  # odd
RUNS = [("gpt2_files", "e"), ("gpt2_files", " "), ("1_bytes", "l"), ("2_bytes", "l"), ("5_llama", "l"), ("6_llama", "l"), ("9_metaspace", "l"),
        ("10_bytes", "\uff4c")]  # that some merge doubles, but in 5_llama; the last one is an l by its normal form

if __name__ == "__main__":
    main()
