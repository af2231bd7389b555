#!/usr/bin/env python3
"""Makes the golden files of low-rank adapters. Development only: no build or test runs this.

    python3 -m venv env && env/bin/pip install torch transformers peft numpy safetensors
    env/bin/python tests/golden/make_lora_golden.py          # rewrites tests/golden/lora/; run at the root of the sources

For each case NAME, NAME/adapter_config.json and NAME/adapter_model.safetensors are adapters of one of the other golden models, as PEFT saves
them: A as PEFT begins it, B random and small. sgd.json has what 8 steps of SGD with momentum make of them, the model itself frozen:

    base, tokens    the model and its tokens (uint16)
    batch           step s takes sequences 6s .. 6s+5; sequence i reads tokens [12i, 12i+12) and predicts the next ones
    loss, grad_norm of a step, before its update; the norm is over adapters
    final           of each tensor of the adapters after training, called as in the file: its L2 norm, and its product with cos(0), cos(1), ...
    logits          of the token after the first sequence, after training, by PEFT's merged model

The files in the tree were made with the versions under "versions" in sgd.json. Others give the same numbers to within rounding.
"""
import json
import platform
import shutil
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

HERE = Path("tests/golden")
FOLDER = HERE / "lora"
STEPS, BATCH, SEQ = 8, 6, 12
LR, MOMENTUM = 0.05, 0.9
CASES = {
    "gpt2_usual": ("gpt2_tiny", dict(r=4, lora_alpha=8)),
    "gpt2_all": ("gpt2_tiny", dict(r=3, lora_alpha=7, target_modules=["c_fc", "c_proj", "c_attn"])),
    "gpt2_one": ("gpt2_tiny", dict(r=2, lora_alpha=4, target_modules=["mlp.c_proj"])),
    "llama_usual": ("llama/llama_grouped", dict(r=4, lora_alpha=16)),
    "llama_all": ("llama/llama_biases", dict(r=2, lora_alpha=6, target_modules="all-linear")),
    "mistral_some": ("llama/mistral_grouped", dict(r=3, lora_alpha=8, target_modules=["k_proj", "o_proj", "down_proj"])),
    "qwen2_rslora": ("llama/qwen2_tied", dict(r=4, lora_alpha=4, use_rslora=True, target_modules=["q_proj", "k_proj", "v_proj", "up_proj"])),
    "qwen3_all": ("llama/qwen3_tied", dict(r=1, lora_alpha=2, target_modules="all-linear")),
    "neox_usual": ("gpt_neox/neox_whole", dict(r=4, lora_alpha=16)),
    "neox_all": ("gpt_neox/neox_quarter", dict(r=2, lora_alpha=5, target_modules="all-linear")),
    "neox_some": ("gpt_neox/neox_sequential", dict(r=3, lora_alpha=6, target_modules=["dense", "dense_h_to_4h"])),
}


def tokens_of(base):
    return "gpt2_tiny_tokens.bin" if base == "gpt2_tiny" else base.split("/")[0] + "/tokens.bin"


def run(name, base, options):
    model = transformers.AutoModelForCausalLM.from_pretrained(str(HERE / base), attn_implementation="eager").float()
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=base == "gpt2_tiny", **options)).eval()
    adapters = {key.replace(".default", ""): p for key, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for key, p in adapters.items():
            if "lora_B" in key:
                p.copy_(0.1 * torch.randn_like(p))
    model.save_pretrained(FOLDER / name)
    (FOLDER / name / "README.md").unlink(missing_ok=True)
    tokens = torch.from_numpy(np.fromfile(HERE / tokens_of(base), "<u2").astype(np.int64))
    optimizer = torch.optim.SGD(adapters.values(), lr=LR, momentum=MOMENTUM)
    loss, norms = [], []
    for step in range(STEPS):
        rows = torch.stack([tokens[SEQ * i:SEQ * i + SEQ + 1] for i in range(BATCH * step, BATCH * step + BATCH)])
        out = model(rows[:, :-1]).logits
        value = torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), rows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        value.backward()
        loss.append(value.item())
        norms.append(torch.sqrt(sum((p.grad.double() ** 2).sum() for p in adapters.values())).item())
        optimizer.step()
    final = {}
    for key, p in adapters.items():
        values = p.detach().double().numpy().ravel()
        final[key] = [float(np.linalg.norm(values)), float(values @ np.cos(np.arange(values.size)))]
    with torch.no_grad():
        logits = model.merge_and_unload()(tokens[None, :SEQ]).logits[0, -1].tolist()
    print(name, sum(p.numel() for p in adapters.values()), loss[0], loss[-1], norms[0])
    return dict(base=base, tokens=tokens_of(base), loss=loss, grad_norm=norms, final=final, logits=logits)


def main():
    torch.manual_seed(20261128)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    runs = {name: run(name, base, options) for name, (base, options) in CASES.items()}
    versions = dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__)
    training = dict(steps=STEPS, batch=BATCH, seq=SEQ, lr=LR, momentum=MOMENTUM)
    (FOLDER / "sgd.json").write_text(json.dumps(dict(versions=versions, training=training, runs=runs)) + "\n")


main()
