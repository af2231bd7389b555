#!/usr/bin/env python3
"""What transformers generates greedily with the small models of tests/golden: for each the ids after a prompt. Development only.

  python3 -m venv V && V/bin/pip install torch transformers
  V/bin/python tests/golden/make_generate_golden.py > tests/golden/generate.json

Made with transformers 5.24. Prints to stderr by how much the likeliest token leads, at least, which is far more than rounding.
"""
import glob, json, os, sys, torch
from transformers import AutoModelForCausalLM

root = os.path.dirname(os.path.abspath(__file__))
prompt, num_tokens = [3, 1, 4, 1, 5, 9, 2, 6], 20
made = {}
for folder in sorted(glob.glob(root + "/*/*/model.safetensors") + [root + "/gpt2_tiny/model.safetensors"]):
    folder = os.path.dirname(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0,
                             output_logits=True, return_dict_in_generate=True)
    two = torch.stack([logits[0].topk(2).values for logits in out.logits])
    name = os.path.relpath(folder, root)
    print(name, f"{float((two[:, 0] - two[:, 1]).min()):.5f}", file=sys.stderr)
    made[name] = out.sequences[0, len(prompt):].tolist()
print(json.dumps({"prompt": prompt, "models": made}).replace('], "', '],\n"'))
