"""Measure the time and memory of one GRPO iteration, and compare them with TRL and Tunix on the same workload.

    python -m experiments.benchmark [--preset S] [--variant fixed] [--steps 6] [--drop 2] [--root bench-out]
    python -m experiments.benchmark --peers trl "ENV/bin/python trl_bench.py" --cases S:fixed S:eos
    python -m experiments.benchmark --device gpu [--preset 0.5B]

One iteration runs `train` on 8 prompts × 8 completions in float32: sampling, rewards, reference log-probs, loss,
gradient and AdamW step. The medians exclude the first `--drop` iterations, which compile. The checkpoint is read from
`<root>/ckpt-<preset>` (or `-eos`), which the peers' `make_ckpt.py` creates.

The last line is `RESULT {json}` with the same fields as the peers' scripts: `step_seconds` for every iteration;
`median` with the seconds in each phase; tokens per second; the share of padding among the trained columns; peak memory;
the number of compiled programs and their compilation time; and the seconds from the start of the process to the end of
its first iteration.

`--device gpu` selects a larger workload that suits one GPU: the shapes of Qwen2.5-0.5B or 1.5B with random weights in
bfloat16, and 32 prompts of 256 tokens × 8 completions of 512. The result then also says how close each phase comes to
its bound: `decode_bandwidth_share` (memory bandwidth) and `update_flops_share` (peak of the matrix units; `bounds.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.bounds import Work, peaks_of
from experiments.common import use_compile_cache
from grpo_jax import GRPOConfig, Policy, from_pretrained, init_policy, train

WORKLOAD: dict[str, Any] = {
    "num_prompts": 8,
    "group_size": 8,
    "seed": 0,
    "algo": {"beta": 0.04, "epsilon": 0.2},
    "optimizer": {"lr": 1e-6, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0},
    "presets": {"S": {"vocab_size": 8192}, "M": {"vocab_size": 32768}},
    "variants": {
        "fixed": {"ckpt": "ckpt-{preset}", "prompt_len": [128, 128], "max_new_tokens": 128},
        "varprompt": {"ckpt": "ckpt-{preset}", "prompt_len": [32, 128], "max_new_tokens": 128},
        "eos": {"ckpt": "ckpt-{preset}-eos", "prompt_len": [128, 128], "max_new_tokens": 256},
        "longprompt": {"ckpt": "ckpt-{preset}", "prompt_len": [512, 512], "max_new_tokens": 64},
    },
}
"""The default workload; --workload reads a JSON file with the same fields instead."""

_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

GPU_WORKLOAD: dict[str, Any] = {
    **WORKLOAD,
    "num_prompts": 32,
    "dtype": "bfloat16",
    "micro_batch": 32,
    "presets": {
        "0.5B": {
            **_QWEN,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
        },
        "1.5B": {
            **_QWEN,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "head_dim": 128,
        },
    },
    "variants": {"fixed": {"prompt_len": [256, 256], "max_new_tokens": 512}},
}
"""The workload for --device gpu. Its presets are complete model configs, initialized with random weights."""

ALLOCATOR = {
    "OMP_NUM_THREADS": "2",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_ARENA_MAX": "1",
}
"""Environment variables that keep freed memory in the process: on a small VM, new pages cost seconds per gigabyte."""


def make_rows(workload: Mapping[str, Any], preset: str, variant: str, count: int) -> list[dict[str, str]]:
    """Create prompts of random words. The n-th prompt does not depend on `count`."""
    shortest, longest = workload["variants"][variant]["prompt_len"]
    rows = []
    for i in range(count):
        rng = np.random.default_rng(workload["seed"] * 100003 + i)
        length = shortest if shortest == longest else int(rng.integers(shortest, longest + 1))
        words = rng.integers(3, workload["presets"][preset]["vocab_size"], length)
        rows.append({"prompt": " ".join(f"w{word}" for word in words)})
    return rows


def count_words(completions: Sequence[str], **_: Any) -> list[float]:
    """Reward each completion with its number of distinct words."""
    return [float(len(set(completion.split()))) for completion in completions]


def make_policy(config: Mapping[str, Any], dtype: str) -> Policy:
    """Create a policy with random weights and a tokenizer for the words `w3`, `w4`, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, config["vocab_size"])}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    return init_policy(config, jax.random.key(0), dtype=dtype).replace(tokenizer=fast)


def make_config(workload: Mapping[str, Any], variant: str, steps: int) -> GRPOConfig:
    """Translate a workload into a `GRPOConfig`."""
    group, optimizer = workload["group_size"], workload["optimizer"]
    completions = workload["num_prompts"] * group
    micro = workload.get("micro_batch", completions)
    return GRPOConfig(
        num_generations=group,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=completions // micro,
        compute_dtype=workload.get("dtype", "float32"),
        max_completion_length=workload["variants"][variant]["max_new_tokens"],
        max_steps=steps,
        shuffle_dataset=False,
        loss_type="grpo",
        beta=workload["algo"]["beta"],
        epsilon=workload["algo"]["epsilon"],
        learning_rate=optimizer["lr"],
        lr_scheduler_type="constant",
        adam_beta1=optimizer["b1"],
        adam_beta2=optimizer["b2"],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["max_grad_norm"],
        seed=workload["seed"],
        logging_steps=1,
        save_steps=None,
    )


class CompileCount:
    """Counter of the programs that XLA compiles after its construction, and their seconds; cache hits do not count."""

    def __init__(self) -> None:
        self.programs, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.programs += 1
            self.seconds += duration_secs


def process_seconds() -> float:
    """Return the seconds since this process started."""
    started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def benchmark(
    workload: Mapping[str, Any], preset: str, variant: str, *, root: str, steps: int, drop: int
) -> dict[str, Any]:
    """Run `steps` iterations and return the fields of the RESULT line."""
    compiles = CompileCount()
    if "dtype" in workload:
        policy = make_policy(workload["presets"][preset], workload["dtype"])
    else:
        policy = from_pretrained(str(Path(root) / workload["variants"][variant]["ckpt"].format(preset=preset)))
    prompts = workload["num_prompts"]
    started: list[float] = []
    iterations: list[dict[str, float]] = []
    counts: list[int] = []

    def record(step: int, metrics: Mapping[str, float]) -> None:
        started.append(process_seconds())
        counts.append(compiles.programs)
        iterations.append({**metrics})

    train(
        policy,
        make_rows(workload, preset, variant, prompts * steps),
        count_words,
        make_config(workload, variant, steps),
        callbacks=[record],
    )
    kept = iterations[drop:] or iterations
    totals = [0.0, *(i["num_tokens"] for i in iterations)]
    tokens = [after - before for before, after in itertools.pairwise(totals)]
    kept_tokens = tokens[drop:] or tokens
    names = sorted({name for i in kept for name in i if name.startswith("seconds/")})
    median = {name.removeprefix("seconds/"): statistics.median(i.get(name, 0.0) for i in kept) for name in names}
    median["step"] = median.pop("total")
    seconds = [i["seconds/total"] for i in iterations]
    rate = lambda name: statistics.median(t / i[name] for t, i in zip(kept_tokens, kept, strict=True))
    mean_length = statistics.mean(i["completions/mean_length"] for i in kept)
    result = {
        "peer": "grpo_jax",
        "preset": preset,
        "variant": variant,
        "versions": {name: version(name) for name in ("grpo_jax", "jax", "flax")},
        "step_seconds": [round(x, 3) for x in seconds],
        "dropped": drop,
        "median": {name: round(x, 4) for name, x in median.items()},
        "min_step": round(min(seconds[drop:] or seconds), 3),
        "max_step": round(max(seconds[drop:] or seconds), 3),
        "gen_tok_per_s": round(rate("seconds/rollout"), 1),
        "iter_tok_per_s": round(rate("seconds/total"), 1),
        "update_tok_per_s": round(rate("seconds/update"), 1),
        "mean_len": round(mean_length, 2),
        "padding_share": round(statistics.mean(i["padding_share"] for i in kept), 4)
        if "padding_share" in kept[0]
        else None,
        "malloc_env": {name: x for name, x in os.environ.items() if name.startswith("MALLOC_")},
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "first_iteration_done": round(started[0], 2),
        "compiles": counts[-1],
        "compiles_after_drop": counts[-1] - counts[drop - 1] if drop else counts[-1],
        "compile_seconds": round(compiles.seconds, 2),
    }
    device = jax.devices()[0]
    peaks = peaks_of(device.device_kind)
    if peaks is not None:
        shape = policy.model.config
        length = workload["variants"][variant]["prompt_len"][1]
        itemsize = np.dtype(shape.dtype).itemsize
        work = Work(shape, prompts, workload["group_size"], length, mean_length, itemsize)
        result["device"] = device.device_kind
        result["decode_bandwidth_share"] = round(work.decode_bytes / median["rollout"] / peaks[1], 4)
        result["update_flops_share"] = round(work.update_operations / median["update"] / peaks[0], 4)
        result["peak_device_gb"] = round((device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9, 2)
    return result


def measure(command: Sequence[str]) -> dict[str, Any]:
    """Run a benchmark command in a separate process, with the same allocator settings for every library."""
    done = subprocess.run(command, env={**os.environ, **ALLOCATOR}, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run this library and its peers in turn on the same cases, and print a table with the ratios."""
    ours = [sys.executable, "-m", "experiments.benchmark"]
    commands = {"grpo_jax": ours, **{name: shlex.split(line) for name, line in arguments.peers}}
    results = []
    for case in arguments.cases or [f"{arguments.preset}:{arguments.variant}"]:
        preset, variant = case.split(":")
        options = ["--preset", preset, "--variant", variant, "--root", arguments.root]
        options += ["--steps", str(arguments.steps), "--drop", str(arguments.drop)]
        row = {name: measure([*command, *options]) for name, command in commands.items()}
        results.append(row)
        for result in row.values():
            print("RESULT " + json.dumps(result), flush=True)
    print("\n" + table(results))
    return {"cases": results}


def table(results: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """Format the median seconds and peak memory as a Markdown table, with each peer's ratios to grpo_jax.

    Example:
      >>> run = lambda seconds, memory: {"preset": "S", "variant": "eos", "median": {"step": seconds},
      ...                                "peak_rss_gb": memory, "padding_share": 0.1}
      >>> print(table([{"grpo_jax": run(2.0, 1.0), "trl": run(12.0, 4.0)}]))
      | case | grpo_jax | trl |
      |---|---|---|
      | S eos | 2.00 s, 1.0 GB | 12.00 s (6.00 ×), 4.0 GB (4.0 ×) |
    """
    names = list(results[0])
    lines = ["| case | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in results:
        own = row["grpo_jax"]
        cells = [f"{own['preset']} {own['variant']}"]
        for name in names:
            seconds, memory = row[name]["median"]["step"], row[name]["peak_rss_gb"]
            times = "" if name == "grpo_jax" else f" ({seconds / own['median']['step']:.2f} ×)"
            more = "" if name == "grpo_jax" else f" ({memory / own['peak_rss_gb']:.1f} ×)"
            cells.append(f"{seconds:.2f} s{times}, {memory:.1f} GB{more}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmark", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="gpu: a larger workload")
    parser.add_argument("--preset", help="model size (default S; with --device gpu 0.5B)")
    parser.add_argument("--variant", default="fixed", help="prompt and completion lengths (default fixed)")
    parser.add_argument("--steps", type=int, default=6, help="iterations (default 6)")
    parser.add_argument("--drop", type=int, default=2, help="initial iterations to exclude (default 2)")
    parser.add_argument("--root", default="bench-out", help="directory of the checkpoints (default bench-out)")
    parser.add_argument(
        "--peers",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "COMMAND"),
        help="a peer to compare with: its name and the command that runs its script, 'ENV/bin/python trl_bench.py'",
    )
    parser.add_argument("--cases", nargs="*", metavar="PRESET:VARIANT", help="with --peers: the cases to run")
    parser.add_argument("--workload", help="a JSON file instead of the built-in workload")
    arguments = parser.parse_args(argv)
    arguments.preset = arguments.preset or ("S" if arguments.device == "cpu" else "0.5B")
    if arguments.device == "gpu" and jax.default_backend() != "gpu":
        parser.error(
            f"--device gpu: JAX found no GPU, only {jax.default_backend()}. Install jax[cuda13] or jax[cuda12]."
        )
    return arguments


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and return the result that its last line prints."""
    arguments = parse(argv)
    if arguments.peers:
        return compare(arguments)
    use_compile_cache()
    workload = GPU_WORKLOAD if arguments.device == "gpu" else WORKLOAD
    if arguments.workload:
        workload = json.loads(Path(arguments.workload).read_text())
    result = benchmark(
        workload, arguments.preset, arguments.variant, root=arguments.root, steps=arguments.steps, drop=arguments.drop
    )
    print("RESULT " + json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    main()
