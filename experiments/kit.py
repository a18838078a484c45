"""Train Qwen3-0.6B on GSM8K, from SFT to an exported checkpoint, in one session on a free notebook machine.

    python -m experiments.kit --out DIRECTORY [--machine v5e-8 | T4-2 | small] [--data DIRECTORY | hub] [--hours H]
    python -m experiments.kit --compile v5e-8        # memory and programs, from that machine's compiler

The notebooks kaggle_tpu.ipynb (TPU v5e-8) and kaggle_gpu.ipynb (T4 × 2) run the parts of this script: SFT on solutions,
GRPO with the rewards from `experiments.gsm8k`, greedy accuracy before and after each, and an export in Hugging Face's
layout. Each stage has a directory in `--out`. If a session is cut off, the same call resumes from the last checkpoint
(one every five minutes), and completed stages are skipped. `--hours` ends training before the session ends, so that
evaluation and export still run.

Time and results on these machines: to be measured. Memory and programs for every stage, from the machines' compilers,
are in docs/kit.json.
`--machine small` takes the same path on a CPU in a minute, with a tiny checkpoint whose answers are noise. The last
line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.common import Rates, Stopwatch, report_results, stop_after
from experiments.gsm8k import accuracy, load_problems, make_row, make_scratch, well_formed
from grpo_jax import (
    GRPOConfig,
    Policy,
    SFTConfig,
    TrainState,
    add_lora,
    evaluate,
    from_pretrained,
    merge_lora,
    plan,
    save_pretrained,
    sft,
    train,
)
from grpo_jax.models.sharding import make_mesh
from grpo_jax.run.placement import place_policy
from grpo_jax.watch.monitor import StopRun
from grpo_jax.watch.summary import short_number

MODEL = "Qwen/Qwen3-0.6B"
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
"""The fields of the model's config.json that its programs depend on."""
PROMPT = 256
"""Prompt length in tokens that a plan assumes."""
FIGURES = Path(__file__).parents[1] / "docs" / "kit.json"
"""Results of `--compile`, by machine and stage."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A notebook machine and its settings.

    Attributes:
      sft, grpo: settings for the two stages.
      lora: rank of the adapters, or None to train all weights.
      lessons: number of solutions for SFT.
      test_rows: number of test problems.
      eval_batch: test problems per batch.
    """

    sft: SFTConfig
    grpo: GRPOConfig
    lora: int | None
    lessons: int
    test_rows: int
    eval_batch: int


# Without this setting Qwen3 writes about a thousand tokens of reasoning.
_NO_THINKING: dict[str, object] = {"enable_thinking": False}
_SFT = functools.partial(
    SFTConfig, num_train_epochs=1, warmup_steps=10, save_minutes=5, logging_steps=5, chat_template_kwargs=_NO_THINKING
)
_GRPO = functools.partial(
    GRPOConfig,
    num_generations=8,
    reward_weights=[1.0, 0.2],
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=10,
    beta=0.0,
    save_minutes=5,
    logging_steps=1,
    chat_template_kwargs=_NO_THINKING,
)

MACHINES = {
    "v5e-8": Machine(
        sft=_SFT(max_length=640, per_device_train_batch_size=4, learning_rate=5e-6, mesh={"fsdp": 8}),
        grpo=_GRPO(
            max_completion_length=384,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,
            max_steps=400,
            learning_rate=1e-6,
            mesh={"fsdp": 8},
        ),
        lora=None,
        lessons=2000,
        test_rows=1319,
        eval_batch=512,
    ),
    "T4-2": Machine(
        sft=_SFT(
            max_length=512,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            learning_rate=1e-4,
            mesh={"data": 2},
        ),
        grpo=_GRPO(
            max_completion_length=256,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            max_steps=150,
            learning_rate=2e-5,
            mesh={"data": 2},
        ),
        lora=16,
        lessons=1000,
        test_rows=256,
        eval_batch=64,
    ),
    "small": Machine(
        sft=_SFT(
            max_steps=4, warmup_steps=1, max_length=256, per_device_train_batch_size=4, learning_rate=1e-3, save_steps=2
        ),
        grpo=_GRPO(
            max_completion_length=8,
            num_generations=2,
            warmup_steps=1,
            per_device_train_batch_size=4,
            max_steps=4,
            learning_rate=1e-3,
            save_steps=1,
        ),
        lora=None,
        lessons=16,
        test_rows=8,
        eval_batch=8,
    ),
}
"""Machines by name; "small" tests the code path on any machine."""


def this_machine() -> str:
    """Return this machine's name in `MACHINES`, or "small" if it is not listed.

    Example:
      >>> this_machine()
      'small'
    """
    kind, count = jax.devices()[0].device_kind, jax.device_count()
    found = {"TPU v5 lite": "v5e", "Tesla T4": "T4"}.get(kind, kind)
    return f"{found}-{count}" if f"{found}-{count}" in MACHINES else "small"


def load_data(data: str, machine: Machine) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Load the SFT lessons, the GRPO rows and the test rows, which do not overlap."""
    problems = load_problems(data)
    lessons = [
        {"prompt": make_row(problem, chat=True)["prompt"], "completion": [_solution(problem["answer"])]}
        for problem in problems["train"][: machine.lessons]
    ]
    rows, tests = (
        [make_row(problem, chat=True) for problem in some]
        for some in (problems["train"][machine.lessons :], problems["test"][: machine.test_rows])
    )
    return lessons, rows, tests


def _solution(answer: str) -> dict[str, str]:
    """Convert a solution to an assistant message, without the dataset's calculator annotations, <<48/2=24>>."""
    return {"role": "assistant", "content": re.sub(r"<<.*?>>", "", answer)}


def load_policy(machine: Machine, source: str | Path = MODEL) -> Policy:
    """Load the model onto the machine's devices, with adapters if its settings have a LoRA rank."""
    policy = from_pretrained(source)
    if machine.lora is not None:
        policy = add_lora(policy, jax.random.key(0), rank=machine.lora, alpha=2.0 * machine.lora)
    return place_policy(policy, make_mesh(machine.grpo.mesh) if machine.grpo.mesh else None)


def greedy_accuracy(
    policy: Policy, state: TrainState | None, rows: Sequence[Mapping[str, Any]], machine: Machine
) -> Rates:
    """Compute the shares of test problems answered correctly and in the requested format, greedily."""
    metrics, _ = evaluate(
        policy,
        rows,
        [accuracy, well_formed],
        params=None if state is None else state.params,
        temperature=0.0,
        max_completion_length=machine.grpo.max_completion_length,
        batch_size=machine.eval_batch,
        chat_template_kwargs=machine.grpo.chat_template_kwargs,
    )
    return {name: round(metrics[name], 4) for name in ("accuracy", "format")}


def once(out: Path, name: str, measure: Callable[[], Rates]) -> Rates:
    """Return a measurement's result, and keep it in `out` so that later sessions do not measure again.

    Example:
      >>> import tempfile
      >>> out = Path(tempfile.mkdtemp())
      >>> once(out, "before", lambda: {"accuracy": 0.25}), once(out, "before", lambda: {})
      ({'accuracy': 0.25}, {'accuracy': 0.25})
    """
    kept = out / f"{name}.json"
    if not kept.exists():
        made = measure()
        out.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(made), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def export(policy: Policy, state: TrainState, machine: Machine, directory: Path) -> None:
    """Write the trained model as a checkpoint for transformers, with adapters merged."""
    trained = policy.replace(params=state.params)
    save_pretrained(directory, trained if machine.lora is None else merge_lora(trained))


def run(out: Path, name: str, data: str, *, source: str | Path = MODEL, hours: float | None = None) -> dict[str, Any]:
    """Run both stages, or their remaining parts, and return the results."""
    machine, watch, stop = MACHINES[name], Stopwatch(), stop_after(hours)
    lessons, rows, tests = load_data(data, machine)
    if name == "small":
        source = base = out / "base"
        if not base.exists():
            make_scratch(base, load_problems(data)["train"], seed=0, lessons=32)
    policy = load_policy(machine, source)

    def measure(state: TrainState | None) -> Rates:
        with watch("evaluation"):
            return greedy_accuracy(policy, state, tests, machine)

    rates = {"before": once(out, "before", lambda: measure(None))}
    with watch("sft"):
        taught = sft(policy, lessons, machine.sft, run_dir=out / "sft", callbacks=[stop])
    rates["sft"] = once(out, f"sft-{int(taught.step)}", lambda: measure(taught))
    state = taught
    with contextlib.suppress(StopRun):
        stop(0, {})  # if SFT ran out of time, GRPO waits for a later session that completes it
        student = policy.replace(params=taught.params)
        with watch("grpo"):
            state = train(student, rows, [accuracy, well_formed], machine.grpo, run_dir=out / "grpo", callbacks=[stop])
        rates["grpo"] = once(out, f"grpo-{int(state.step)}", lambda: measure(state))
    export(policy, state, machine, out / "final")
    return report_results(out, {name: rates}, watch)


def compile_for(name: str) -> dict[str, dict[str, Any]]:
    """Compile each stage for a machine and return its memory and compile time, as stored in `docs/kit.json`."""
    machine, found = MACHINES[name], dict[str, dict[str, Any]]()
    stages: dict[str, SFTConfig | GRPOConfig] = {"SFT": machine.sft, "GRPO": machine.grpo}
    for stage, config in stages.items():
        begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        made = plan(QWEN3, config, prompt_length=PROMPT, device=name, lora=machine.lora)
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin
        found[stage] = {
            "peak_bytes": made.peak,
            "memory_bytes": made.memory,
            "cpu_seconds": round(seconds),
            "note": made.note,
        }
    return found


def table(name: str, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a machine's results as the table in its notebook.

    Example:
      >>> print(table("v5e-8", {"SFT": {"peak_bytes": 4e9, "memory_bytes": 16e9, "cpu_seconds": 9}}))
      | v5e-8 | peak of a device | of | CPU seconds to compile the largest |
      |---|---|---|---|
      | SFT | 4 GB | 16 GB | 9 |
    """
    lines = [f"| {name} | peak of a device | of | CPU seconds to compile the largest |", "|---|---|---|---|"]
    for stage, one in figures.items():
        peak, memory = (short_number(one[key], "B") for key in ("peak_bytes", "memory_bytes"))
        lines.append(f"| {stage} | {peak} | {memory} | {one['cpu_seconds']} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.kit", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, help="directory for the stages, which must outlive the session")
    add("--machine", choices=MACHINES, help="default: this machine if it is listed, otherwise small")
    add("--data", default="hub", help="directory with GSM8K's train.jsonl and test.jsonl (default: fetch them)")
    add("--model", default=MODEL, help="directory or hub name (default %(default)s)")
    add("--hours", type=float, help="end training after this many hours (default: never)")
    add("--compile", choices=[name for name in MACHINES if name != "small"], help="only compile, for this machine")
    arguments = parser.parse_args(argv)
    if arguments.out is None and arguments.compile is None:
        parser.error("--out is required: pass a directory that outlives the session")
    return arguments


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the kit, or compile it, and return the results that its last line prints."""
    arguments = parse(argv)
    if (name := arguments.compile) is not None:
        found = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
        found[name] = compile_for(name)
        FIGURES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(table(name, found[name]))
        return found
    name = arguments.machine or this_machine()
    return run(arguments.out, name, arguments.data, source=arguments.model, hours=arguments.hours)


if __name__ == "__main__":
    main()
