#!/usr/bin/env python3
"""Checks that transformers and PEFT go on with what we save, and we with what transformers saves. Development only: no build or test runs this.

    python3 -m venv env && env/bin/pip install torch transformers peft numpy safetensors
    ./bazelw build //tools/programs:train_transformer
    env/bin/python tests/golden/check_hf_roundtrip.py bazel-bin      # at the root of the sources

For a golden model of each family: we train 3 steps of SGD with momentum on 2 ranks and save; transformers loads that without a missing, unexpected or
mismatched key, and has the loss that we have of it; it makes one step of SGD and saves, and we have the loss that it then has. In the line of "shards"
both sides save shards with an index. A loss is of 72 tokens that neither trained on before.

For some golden models we train adapters, which PEFT loads, all of them and no others; log probabilities of all tokens after the first 12 of the data are
equal. We find ours as losses of documents that differ in the last token, the only one that is learned.

Bounds, in f32: 1e-5 of a loss, relative, and 5e-5 of a log probability, which are those of lora_golden_test for a loss and a logit. Written for torch
2.15, transformers 5.24 and peft 0.21. Prints a line for each check, and ends with 1 if one failed.
"""
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import peft
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

HERE = Path("tests/golden")
SEQ, STEPS, BATCH = 12, 3, 6  # step s takes sequences 6s .. 6s+5 of the data
LOSS_BOUND, LOG_PROBABILITY_BOUND, LR = 1e-5, 5e-5, 0.02
MODELS = {  # and GiB of weights in a file
    "gpt2": ("gpt2_tiny", 46), "llama": ("llama/llama_scaled", 46), "mistral": ("llama/mistral_grouped", 46), "qwen2": ("llama/qwen2_tied", 46),
    "qwen3": ("llama/qwen3_biases", 46), "gpt_neox": ("gpt_neox/neox_quarter", 46), "shards": ("llama/llama_biases", 5e-6),
}
ADAPTERS = {"gpt2": ("gpt2_tiny", "c_attn,c_fc"), "llama": ("llama/llama_biases", "all-linear"), "gpt_neox": ("gpt_neox/neox_whole", "all-linear")}

if len(sys.argv) != 2:
    sys.exit(__doc__)
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)
failures = []


def check(name, passed, what):
    print(f"{'ok    ' if passed else 'FAILED'} {name}: {what}", flush=True)
    if not passed:
        failures.append(name)


def tokens_of(base):
    return HERE / ("gpt2_tiny_tokens.bin" if base == "gpt2_tiny" else base.split("/")[0] + "/tokens.bin")


def ours(base, data, steps, lr, *flags, batch=BATCH, ranks=1):
    """The losses of a training."""
    command = [f"{sys.argv[1]}/tools/programs/train_transformer", f"--init.from={base}", f"--data.path={data}", "--data.order=sequential",
               "--data.val_fraction=0", f"--model.seq={SEQ}", f"--train.steps={steps}", f"--train.batch={batch // ranks}", "--train.optimizer=sgd",
               f"--train.lr={lr}", "--train.schedule=constant", "--train.warmup=0", "--train.grad_clip=0", f"--parallel.ranks={ranks}", "--device=cpu",
               "--log.peak_ms=0", "--sample.tokens=0", f"--out={folder}/run", *flags]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    records = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def load(path):
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    return model.eval(), {key: list(names) for key, names in info.items() if names}


def check_model(name, base, shard_gib):
    data = np.fromfile(tokens_of(base), "<u2")
    saved, returned = folder / name / "ours", folder / name / "theirs"
    ours(HERE / base, tokens_of(base), STEPS, LR, f"--save.final={saved}", f"--save.shard_gib={shard_gib}", ranks=2)
    model, wrong = load(saved)
    check(f"{name}, keys", not wrong, f"{len(model.state_dict())} tensors of {len(list(saved.glob('*.safetensors')))} files, {wrong or 'all there'}")

    part = data[SEQ * BATCH * STEPS:][:SEQ * BATCH + 1]
    part.tofile(folder / "part.bin")
    rows = torch.from_numpy(np.stack([part[SEQ * i:SEQ * i + SEQ + 1] for i in range(BATCH)]).astype(np.int64))

    def compare(what, path):
        loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        mine, theirs = ours(path, folder / "part.bin", 1, 0)[0], loss.item()
        check(f"{name}, loss {what}", abs(mine - theirs) <= LOSS_BOUND * theirs, f"{mine:.7f} ours, {theirs:.7f} theirs")
        return loss

    loss = compare("as we saved it", saved)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    model.save_pretrained(returned, max_shard_size=int(shard_gib * 2**30))
    compare(f"after their step, from {len(list(returned.glob('*.safetensors')))} files", returned)
    shards = [len(list(path.glob("*.safetensors"))) > 1 and (path / "model.safetensors.index.json").exists() for path in (saved, returned)]
    if name == "shards":
        check("shards, index", all(shards), f"{shards}")


def check_adapter(name, base, targets):
    saved = folder / name / "adapter"
    ours(HERE / base, tokens_of(base), STEPS, 2.0, "--lora.rank=3", "--lora.alpha=6", f"--lora.targets={targets}", f"--save.final={saved}", ranks=2)
    plain, _ = load(HERE / base)
    prompt = np.fromfile(tokens_of(base), "<u2")[:SEQ].astype(np.int64)

    def log_probabilities(model):
        with torch.no_grad():
            return torch.log_softmax(model(torch.from_numpy(prompt)[None]).logits[0, -1], -1)

    before = log_probabilities(plain)
    model = peft.PeftModel.from_pretrained(plain, saved).eval()
    theirs = log_probabilities(model)
    in_file, loaded = safetensors.torch.load_file(saved / "adapter_model.safetensors"), peft.get_peft_model_state_dict(model)
    check(f"adapters of {name}, keys", in_file.keys() == loaded.keys() and all(torch.equal(in_file[key], loaded[key].float()) for key in in_file),
          f"{len(in_file)} tensors in the file, {len(loaded)} of PEFT")

    vocab = theirs.numel()
    write_documents(folder / "last.bin", [np.append(prompt, last) for last in range(vocab)])
    mine = -torch.tensor(ours(HERE / base, folder / "last.bin", vocab, 0, f"--lora.from={saved}", batch=1))
    worst, moved = (mine - theirs).abs().max().item(), (theirs - before).abs().max().item()
    check(f"adapters of {name}, log probabilities", worst <= LOG_PROBABILITY_BOUND and moved > 0.1,
          f"at most {worst:.1e} apart for {vocab} tokens, which the adapters moved by up to {moved:.2f}")


def write_documents(path, documents):
    """As docs/data.md lays such a file out; of each document the last token alone is learned."""
    header = np.zeros(256, "<i4")
    header[:2] = 20261128, 1
    ids = [np.append(document[:-1] | 1 << 31, document[-1]) for document in documents]
    ends = np.cumsum([len(document) for document in documents], dtype="<i8")
    with open(path, "wb") as file:
        for part in header, np.array([ends[-1], len(ends)], "<i8"), ends, np.concatenate(ids).astype("<u4"):
            file.write(part.tobytes())


torch.set_num_threads(1)
logging.disable_progress_bar()
warnings.simplefilter("ignore", FutureWarning)  # of PEFT about transformers
for name, (base, shard_gib) in MODELS.items():
    check_model(name, base, shard_gib)
for name, (base, targets) in ADAPTERS.items():
    check_adapter(name, base, targets)
sys.exit(1 if failures else 0)
