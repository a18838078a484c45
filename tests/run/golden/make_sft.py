"""Make `sft.npz`: what TRL's `SFTTrainer` computes of one batch of rows, with PyTorch and a tiny Qwen3.

    python tests/run/golden/make_sft.py

Needs torch and trl 1.16. For each of the cases in `CASES`: the loss of the trainer's first step and the gradient of
each parameter, before clipping, under the names of the checkpoint's tensors.
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2])]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROWS = [
    {"prompt": "ab", "completion": "cde"},
    {"prompt": "the ", "completion": "cat sat on"},
    {"prompt": "x", "completion": "y"},
    {"prompt": "one two ", "completion": "three"},
]
TALKS = [
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "so"},
            {"role": "assistant", "content": "fine"},
        ]
    },
    {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]},
]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<eos>{% endgeneration %}{% else %}{{ m['content'] }}<eos>{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CASES = {
    "completion": (ROWS, {}),
    "whole": (ROWS, {"completion_only_loss": False}),
    "cut": (ROWS, {"max_length": 10}),
    "dft": (ROWS, {"loss_type": "dft"}),
    "accumulated": (ROWS, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "messages": (TALKS, {}),
    "assistant": (TALKS, {"assistant_only_loss": True}),
}
"""Name → rows, and the settings that are not the defaults of either config."""


def batch_sizes(rows, settings):
    """The settings by which the first update learns from all rows."""
    return {"per_device_train_batch_size": len(rows), **settings}


def trl_update(directory, tokenizer, rows, settings):
    """Loss and gradients {name: array} of the first step of TRL's trainer."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    found = {}

    class Trainer(SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            found["loss"] = found.get("loss", 0.0) + float(loss.detach())
            return loss

        def _clip_grad_norm(self, model):
            found["grads"] = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
            return super()._clip_grad_norm(model)

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as out:
        config = SFTConfig(
            output_dir=out,
            max_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            **batch_sizes(rows, settings),
        )
        Trainer(model, args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer).train()
    return found["loss"], found["grads"]


def all_updates():
    """Case → (loss, gradients) by TRL, of `tiny_policy()`."""
    import copy

    from tiny import tiny_policy

    from grpo_jax import save_pretrained

    with tempfile.TemporaryDirectory() as directory:
        save_pretrained(directory, tiny_policy())
        tokenizer = copy.copy(tiny_policy().tokenizer)
        tokenizer.chat_template = TEMPLATE
        return {name: trl_update(directory, tokenizer, rows, settings) for name, (rows, settings) in CASES.items()}


if __name__ == "__main__":
    arrays = {}
    for case, (loss, grads) in all_updates().items():
        print(f"{case}: loss {loss:.6f}")
        arrays[f"{case}/loss"] = np.float32(loss)
        arrays |= {f"{case}/{name}": grad for name, grad in grads.items()}
    np.savez_compressed(Path(__file__).with_name("sft.npz"), **arrays)
