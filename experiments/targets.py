"""Compile updates and rollouts for accelerators, and write their memory and compile time to docs/accelerators.md.

    pip install '.[plan-tpu,plan-gpu]'
    python -m experiments.targets

Time: per line, half a CPU minute for GPUs and two to three for TPUs (30B: up to six), nearly all of it in the
compilers. Results are kept in a file (--results) and not computed again. Expect: each line says whether a model fits,
the peak memory per device in GB, the longest completion that fits, and the CPU seconds for compiling its programs. The
last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax import GRPOConfig, plan
from grpo_jax.models.devices import Target

MACHINES = {"H100": "H100 × 1", "H100-8": "H100 × 8", "v5e-8": "v5e-8", "v5p-8": "v5p-8", "v6e-8": "v6e-8"}
LENGTHS = (1024, 8192, 32768)
PROMPT, GROUP, GROUPS = 512, 8, 4
ONE_AT_A_TIME = "one group at a time"

_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
}


def _qwen(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return {**_QWEN, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


MODELS = {
    "Qwen2.5-0.5B": _qwen(896, 4864, 24, 14, 2),
    "Qwen2.5-1.5B": _qwen(1536, 8960, 28, 12, 2),
    "Qwen2.5-7B": _qwen(3584, 18944, 28, 28, 4, vocab_size=152064, tie_word_embeddings=False),
    "Qwen3-30B-A3B": _qwen(
        *(2048, 6144, 48, 32, 4),
        architectures=["Qwen3MoeForCausalLM"],
        tie_word_embeddings=False,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
}


def config_of(
    machine: str, length: int, *, group: int = GROUP, groups: int = GROUPS, micro: int = 1, at_once: int | None = None
) -> GRPOConfig:
    """Build a config with `groups` groups per device and iteration, `micro` per micro-batch, and params sharded.

    `at_once` is the number of groups that a device decodes at a time; None means all.
    """
    devices = Target.read(machine).count
    return GRPOConfig(
        num_generations=group,
        per_device_train_batch_size=micro * group,
        gradient_accumulation_steps=groups // micro,
        max_completion_length=length,
        rollout_batch_size=None if at_once is None else at_once * devices * group,
        mesh={"fsdp": devices} if devices > 1 else None,
        gradient_checkpointing=True,
    )


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and its finished children, since `plan` compiles in a child process."""
    return sum(os.times()[:4])


def measure(model: Mapping[str, Any], machine: str, config: GRPOConfig) -> dict[str, Any]:
    """Return the numbers from a plan, or the error if there is none."""
    begin = _cpu_seconds()
    try:
        found = plan(model, config, prompt_length=PROMPT, device=machine, donate=True)
    except ValueError as error:
        return {"error": str(error)}
    return {
        "memory": found.memory,
        "held": sum(found.held.values()),
        "peaks": {phase: cost.peak for phase, cost in found.programs.items()},
        "seconds": _cpu_seconds() - begin,
    }


def fits(cell: Mapping[str, Any]) -> bool:
    """Return whether all phases of a cell fit in a device's memory."""
    return "peaks" in cell and max(cell["peaks"].values()) <= cell["memory"]


def only_the_rollout_is_too_large(cell: Mapping[str, Any]) -> bool:
    """Return whether decoding fewer completions at a time could make a cell fit."""
    return "peaks" in cell and not fits(cell) and cell["peaks"]["update"] <= cell["memory"]


def longest_that_fits(cells: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the T in tokens at which a phase's peak reaches the memory, interpolated between the compiled lengths."""
    lengths = [t for t in LENGTHS if "peaks" in cells.get(t, {})]
    if not lengths:
        return "?"
    memory = cells[lengths[0]]["memory"]
    peak = lambda t, phase: cells[t]["peaks"][phase]
    reached = []
    for phase in cells[lengths[0]]["peaks"]:
        over = [t for t in lengths if peak(t, phase) > memory]
        if not over:
            continue
        at = lengths.index(over[0])
        if at == 0:
            return "none" if lengths[0] == LENGTHS[0] else "?"
        below, above = lengths[at - 1], over[0]
        share = (memory - peak(below, phase)) / (peak(above, phase) - peak(below, phase))
        reached.append(int(below + share * (above - below)) // 64 * 64)
    return f"{min(reached):,}" if reached else f"≥ {lengths[-1]:,}"


def line(name: str, length: int, cell: Mapping[str, Any], longest: str, *, yes: str = "yes") -> str:
    """Format one line of a table. `yes` is the entry for a cell that fits."""
    if "peaks" not in cell:
        return f"| {name} | {length:,} | {cell['error']} | | | | |"
    gigabytes = lambda bytes_: f"{bytes_ / 1e9:.1f}"
    peaks = cell["peaks"]
    memory = (gigabytes(x) for x in (cell["held"], peaks["rollout"], peaks["update"]))
    seconds = f"{cell['seconds']:.0f}"
    say = (yes if fits(cell) else "**no**", *memory, longest, seconds)
    return f"| {name} | {length:,} | {' | '.join(say)} |"


def with_tables(page: str, results: Mapping[str, Any]) -> str:
    """Replace the tables of docs/accelerators.md, which are between its first heading "###" and the next "##"."""
    tables, missing = list[str](), list[str]()
    for machine, title in MACHINES.items():
        target = Target.read(machine)
        there = [name for name in MODELS if f"{machine} {name} {LENGTHS[0]}" in results]
        missing += [f"{name} on {title}" for name in MODELS if name not in there]
        if not there:
            continue
        lines = [f"### {title}, {target.memory / 1e9:.0f} GB each\n\n{COLUMNS}"]
        for name in there:
            cells = {t: results[key] for t in LENGTHS if (key := f"{machine} {name} {t}") in results}
            longest = longest_that_fits(cells)
            for t, cell in cells.items():
                fewer = results.get(f"{machine} {name} {t} {ONE_AT_A_TIME}", cell)
                here, yes = (cell, "yes") if fits(cell) or not fits(fewer) else (fewer, ONE_AT_A_TIME)
                lines.append(line(name, t, here, longest, yes=yes))
        tables.append("\n".join(lines))
    if missing:
        tables.append(f"Not compiled yet: {'; '.join(missing)}.")
    head, _, rest = page.partition("### ")
    return "\n\n".join([head.rstrip(), *tables, "## " + rest.partition("\n## ")[2]])


COLUMNS = """\
| model | T | fits | held | rollout | update | longest T | compile, CPU s |
|---|---|---|---|---|---|---|---|"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.targets", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("docs/accelerators.json"), help="the stored results")
    parser.add_argument("--page", type=Path, default=Path("docs/accelerators.md"), help="the page with the tables")
    parser.add_argument("--machines", nargs="*", default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compile the missing cells and write the page."""
    arguments = parse(argv)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}

    def write_page() -> None:
        text = arguments.page.read_text(encoding="utf-8")
        arguments.page.write_text(with_tables(text, results), encoding="utf-8")

    def note(key: str, model: Mapping[str, Any], machine: str, config: GRPOConfig) -> None:
        if key not in results:
            results[key] = measure(model, machine, config)
            print(f"{key}: {results[key]}", file=sys.stderr, flush=True)
            arguments.results.write_text(json.dumps(results, indent=1) + "\n")
            write_page()

    for machine in arguments.machines:
        for name in arguments.models:
            for length in LENGTHS:
                note(f"{machine} {name} {length}", MODELS[name], machine, config_of(machine, length))
                cell = results[f"{machine} {name} {length}"]
                if only_the_rollout_is_too_large(cell):
                    key = f"{machine} {name} {length} {ONE_AT_A_TIME}"
                    note(key, MODELS[name], machine, config_of(machine, length, at_once=1))
                    cell = results[key]
                if not fits(cell):
                    break
    write_page()
    return {"cells": len(results)}


if __name__ == "__main__":
    print(json.dumps(main()))
