"""Compare a KL to a frozen reference with a KL to a reference that follows the policy (TR-DPO).

    python -m experiments.reference_sync [--steps 160] [--seed N] [--out FILE]

A language model with 10 thousand random parameters is rewarded for writing vowels. There are two runs of `train` at a
small β and two at a large β, which differ only in `sync_ref_model`: in one of them the reference is pulled toward the
policy every 16 steps, ref ← 0.6·policy + 0.4·ref. Each run logs the KL to its reference (`kl`) and to its initial
policy (`kl_initial`; the same for a frozen reference).

Time: 48 CPU seconds, 12 per run.
Expect in the last quarter of the run: at β = 0.02 the KL to the frozen reference is 1.2 nats per token and rises more
and more slowly, while the KL to the synced reference never exceeds 0.1. The KL to the initial policy is 1.2 in both:
syncing bounds only the former, and the rewards are similar. At β = 0.5 and a frozen reference, the KL stays at 0.08,
where the penalty balances the reward, and the reward at 0.34; with a synced reference the reward is 0.87 and still
rising, 0.94 nats from the start. During the run a hint reports that the KL keeps rising and names `sync_ref_model`.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import add_device_flags, on_mesh, start_processes
from grpo_jax import GRPOConfig, Policy, init_policy, train
from grpo_jax.watch.plots import LIGHT, color

SYNC_STEPS = 16
"""Optimizer steps between syncs."""
ALPHA = 0.6
"""Weight of the policy in a sync."""
BETAS = (0.02, 0.5)
"""KL coefficients, in (normalized) reward per nat: one that lets the policy move away, and one that stops it."""
LONGEST = 16
"""Maximum tokens per completion."""
ARMS = {"frozen": False, "synced": True}

Line = Mapping[str, Any]
Runs = Mapping[tuple[float, str], Sequence[Line]]
"""Logged lines of each run, by β and arm."""


def make_tokenizer() -> Any:
    """Create a byte-level tokenizer for lowercase letters, the space and the end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    space = "Ġ"  # the space in byte-level vocabularies
    vocab = {token: i for i, token in enumerate(["<pad>", "<end>", space, *string.ascii_lowercase])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def make_policy(seed: int) -> Policy:
    """Create a small model with Qwen3's architecture and random weights."""
    tokenizer = make_tokenizer()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return init_policy(config, jax.random.key(seed), tokenizer=tokenizer)


def vowels(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the number of vowels in each completion, divided by its maximum length.

    Example:
      >>> vowels(["aeiouaeiouaeiou", "hello, world!", ""])
      [0.9375, 0.1875, 0.0]
    """
    return [sum(letter in "aeiou" for letter in text) / LONGEST for text in completions]


def make_config(*, beta: float, sync: bool, steps: int, seed: int) -> GRPOConfig:
    """Build the settings for one run."""
    return GRPOConfig(
        num_generations=8,
        per_device_train_batch_size=64,  # completions of 8 prompts
        max_completion_length=LONGEST,
        max_steps=steps,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        beta=beta,
        sync_ref_model=sync,
        ref_model_sync_steps=SYNC_STEPS,
        ref_model_mixup_alpha=ALPHA,
        gradient_checkpointing=False,
        pad_to_multiple_of=None,
        seed=seed,
        logging_steps=1,
    )


def run(policy: Policy, *, beta: float, sync: bool, steps: int, seed: int, mesh: str = "") -> list[Line]:
    """Train once and return the metrics logged at each step, always with `kl_initial`."""
    rows = [{"prompt": f"{a}{b}"} for a in "bcdfghjk" for b in "lmnpqrst"]
    lines: list[dict[str, Any]] = []
    config = on_mesh(make_config(beta=beta, sync=sync, steps=steps, seed=seed), mesh)
    keep = lambda step, metrics: lines.append({"step": step, **metrics})
    train(policy, rows, vowels, config, callbacks=[keep])
    # A frozen reference is the initial policy.
    return [{"kl_initial": line["kl"], **line} for line in lines]


def curve(lines: Sequence[Line], name: str) -> np.ndarray:
    """Return a metric as an array, [steps]."""
    return np.array([line[name] for line in lines], float)


def make_table(runs: Runs) -> list[dict[str, Any]]:
    """Build one row per run: means over its quarters, and the largest `kl`."""
    rows = []
    for (beta, name), lines in runs.items():
        kl, initial, reward = (np.array_split(curve(lines, metric), 4) for metric in ("kl", "kl_initial", "reward"))
        rows.append(
            {
                "beta": beta,
                "reference": name,
                "kl": [float(quarter.mean()) for quarter in kl],
                "kl_max": float(np.concatenate(kl).max()),
                "kl_initial": [float(quarter.mean()) for quarter in initial],
                "reward": [float(quarter.mean()) for quarter in reward],
            }
        )
    return rows


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table."""
    quarters = " ".join(f"{quarter:>8}" for quarter in ("1st", "2nd", "3rd", "4th", "largest"))
    print(f"\n{'β':<5} {'reference':<10} {'mean over a quarter':<24}   {quarters}")
    labels = {"kl": "KL to the reference", "kl_initial": "KL to the initial policy", "reward": "reward"}
    for row in rows:
        for metric, label in labels.items():
            most = f" {row['kl_max']:8.3f}" if metric == "kl" else ""
            means = " ".join(f"{mean:8.3f}" for mean in row[metric])
            print(f"{row['beta']:<5} {row['reference']:<10} {label:<24}   {means}{most}")


def draw(runs: Runs, out: Path) -> None:
    """Draw a row of panels for each β: KL to the reference, KL to the initial policy, and reward."""
    from matplotlib.figure import Figure

    panels = {
        "kl": ("KL to the reference", "nats per token"),
        "kl_initial": ("KL to the initial policy", "nats per token"),
        "reward": ("reward", "share of vowels"),
    }
    colors = {"frozen": color("high"), "synced": color("policy")}
    figure = Figure(figsize=(10, 2.8 * len(BETAS)), dpi=80, layout="constrained", facecolor=LIGHT.page)
    title = "A synced reference bounds the KL to itself, not to the start; a frozen one stops learning at a large β"
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    grid = figure.subplots(len(BETAS), len(panels), sharex=True, squeeze=False)
    for (beta, name), lines in runs.items():
        steps = curve(lines, "step")
        for axes, (metric, (what, unit)) in zip(grid[BETAS.index(beta)], panels.items(), strict=True):
            axes.plot(steps, curve(lines, metric), color=colors[name], lw=1.8, label=f"{name} reference")
            if metric == "kl" and ARMS[name]:
                for at in range(SYNC_STEPS, len(steps) + 1, SYNC_STEPS):
                    axes.axvline(at + 0.5, color=LIGHT.grid, lw=1.2, zorder=0)
            axes.set_ylabel(unit)
            axes.set_title(f"β = {beta}: {what}", loc="left", fontsize=10)
            axes.grid(axis="y", color=LIGHT.grid)
    for axes in grid.flat:
        axes.set_ylim(bottom=0)
    for axes, metric in zip(grid[-1], panels, strict=True):
        axes.set_xlabel("optimizer step" + (" (grey: syncs)" if metric == "kl" else ""))
    grid[0, 0].legend(fontsize=8, loc="upper left")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")
    print(f"\npicture: {out}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.reference_sync", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for weights and samples (default 0)")
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps per run (default 160)")
    add_device_flags(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/reference_sync.png"), help="the picture (default %(default)s)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the experiment and return the rows of its table."""
    arguments = parse(argv)
    start_processes(arguments)
    policy = make_policy(arguments.seed)
    settings = {"steps": arguments.steps, "seed": arguments.seed, "mesh": arguments.mesh}
    runs = {}
    for beta in BETAS:
        for name, sync in ARMS.items():
            print(f"\nβ = {beta}, {name} reference, {arguments.steps} steps")
            runs[beta, name] = run(policy, beta=beta, sync=sync, **settings)
    rows = make_table(runs)
    print_table(rows)
    draw(runs, arguments.out)
    return rows


if __name__ == "__main__":
    main()
