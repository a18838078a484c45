"""Show that a run that is killed repeatedly ends with the same bytes as an undisturbed run.

    python -m experiments.kill_and_resume [--kills N] [--terms N] [--seed N] [--run-dir DIR]

A small run (three passes over two minibatches, a synced reference, more than two epochs of a shuffled dataset, a
checkpoint every second step) is first run undisturbed twice, with newly compiled programs and with programs from the
compilation cache. Then it is killed with SIGKILL and restarted in the same directory until it is complete: at random
times, and every second time while a checkpoint is half written. `--terms` adds SIGTERMs, after which the run must save
and exit with status 143. Each complete run is compared with the first: params, optimizer, references and counters bit
for bit, the files except for their timings, and the multiset of (epoch, prompt).

Time: about eight seconds per kill on an idle core. Expect: "the same" in every line, and exit status 0. The seconds
from SIGTERM to exit are not a measure of a step here: saving and the interpreter's shutdown take longer than a step.
The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import fresh_directory
from experiments.sort_digits import make_policy, make_rows
from grpo_jax import GRPOConfig, train
from grpo_jax.watch.writer import read_lines

ROWS = 10
SETTINGS: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "steps_per_generation": 2,
    "num_iterations": 3,
    "max_completion_length": 6,
    "max_steps": 36,
    "learning_rate": 1e-2,
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 2,
    "ref_model_mixup_alpha": 0.6,
    "gradient_checkpointing": False,
    "eval_steps": 5,
    "logging_steps": 3,
    "save_steps": 2,
    "save_total_limit": 3,
}


def digits(completions: Sequence[str]) -> list[float]:
    """Reward the share of digits among the characters."""
    return [sum(char.isdigit() for char in text) / max(len(text), 1) for text in completions]


def run_to_the_end(run_dir: Path, cache: Path) -> None:
    """Train or resume, and write a hash of each array of the final state to `final.json`."""
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    rows, _ = make_rows(0, train_rows=ROWS, held_out=2)
    policy = make_policy(0, width=16, layers=1)
    state = train(policy, rows, digits, GRPOConfig(**SETTINGS), eval_dataset=rows[:2], run_dir=run_dir)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the run has ended, so signals no longer test anything
    state = state.replace(key=jax.random.key_data(state.key))
    leaves = {
        jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    (run_dir / "final.partial").write_text(json.dumps(leaves))
    (run_dir / "final.partial").rename(run_dir / "final.json")


def start(run_dir: Path, cache: Path) -> subprocess.Popen[bytes]:
    """Start `run_to_the_end` in a separate process."""
    run_dir.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "experiments.kill_and_resume", "--child", str(run_dir), str(cache)]
    with open(run_dir / "log.txt", "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def wait_for(child: subprocess.Popen[bytes], condition: Callable[[], bool], seconds: float = 600) -> int | None:
    """Wait until the condition holds (return None) or the process has ended (return its exit status)."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (status := child.poll()) is not None:
            return status
        if condition():
            return None
        time.sleep(0.0005)
    raise TimeoutError(f"process {child.pid} did not reach the condition in {seconds} s.")


def checkpoints(run_dir: Path) -> tuple[list[int], list[str]]:
    """Return the steps of the complete checkpoints and the names of the half-written ones."""
    directory = run_dir / "checkpoints"
    names = [path.name for path in directory.iterdir()] if directory.exists() else []
    return sorted(int(name) for name in names if name.isdigit()), [name for name in names if "tmp" in name]


def result_of(run_dir: Path) -> dict[str, Any]:
    """Read everything that must be the same in two runs."""
    timing = ("seconds", "tokens_per_second")
    metrics = [
        {name: value for name, value in line.items() if not any(part in name for part in timing)}
        for line in read_lines(run_dir / "metrics.jsonl")
    ]
    completions = list(read_lines(run_dir / "completions.jsonl"))
    prompts = [row["prompt"] for row in completions[:: SETTINGS["num_generations"]]]
    return {
        "state": json.loads((run_dir / "final.json").read_text()),
        "metrics": metrics,
        "completions": completions,
        "epochs and prompts": sorted(collections.Counter((n // ROWS, p) for n, p in enumerate(prompts)).items()),
    }


def interrupt(
    child: subprocess.Popen[bytes], run_dir: Path, kind: str, draw: random.Random, seconds: float
) -> tuple[str, float]:
    """Send one signal at a moment of this kind. Return a description ("" if the run had ended) and the seconds."""
    began = time.monotonic()
    if kind == "mid-save":
        seen: set[str] = set()
        count = draw.randint(1, 6)

        def half_written() -> bool:
            seen.update(checkpoints(run_dir)[1])
            return len(seen) >= count and bool(checkpoints(run_dir)[1])

        before = set(checkpoints(run_dir)[1])  # left by the previous kill; the run removes it
        if wait_for(child, lambda: not before & set(checkpoints(run_dir)[1])) is not None:
            return "", 0.0
        alive = wait_for(child, half_written) is None
    else:
        if kind == "SIGTERM":  # SIGTERM is handled once the run has started, which is when its config is written
            config = run_dir / "run.json"
            old = config.stat().st_mtime_ns if config.exists() else 0
            if wait_for(child, lambda: config.exists() and config.stat().st_mtime_ns != old) is not None:
                return "", 0.0
            began = time.monotonic()
        moment = draw.uniform(0, seconds)
        alive = wait_for(child, lambda: time.monotonic() - began >= moment) is None
    if not alive:
        return "", 0.0
    sent = time.monotonic()
    child.send_signal(signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
    status, ended = child.wait(), time.monotonic()
    whole, half = checkpoints(run_dir)
    if (run_dir / "final.json").exists():
        return "", 0.0
    expected = 128 + signal.SIGTERM if kind == "SIGTERM" else -signal.SIGKILL
    if status != expected:
        raise SystemExit(f"{kind}: exit status {status}, expected {expected}; see {run_dir / 'log.txt'}")
    took = ended - sent
    return (
        f"after {sent - began:.1f} s, newest complete checkpoint {whole[-1] if whole else None}"
        f"{', one half written' if half else ''}{f', {took:.1f} s to the exit' if kind == 'SIGTERM' else ''}"
    ), took


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="total number of SIGKILLs (default %(default)s)")
    parser.add_argument("--terms", type=int, default=8, help="total number of SIGTERMs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed for the times of the signals")
    parser.add_argument("--run-dir", help="an empty or new directory")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        run_to_the_end(Path(options.child[0]), Path(options.child[1]))
        return {}
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    directory, draw = fresh_directory(options.run_dir, "kill_and_resume"), random.Random(options.seed)
    cache = directory / "programs"

    def left_alone(name: str) -> tuple[dict[str, Any], float]:
        began = time.monotonic()
        if status := wait_for(start(directory / name, cache), lambda: False):
            raise SystemExit(f"{name}: ended with {status}; see {directory / name / 'log.txt'}")
        return result_of(directory / name), time.monotonic() - began

    whole, cold = left_alone("alone")
    again, seconds = left_alone("alone-cached")
    lines = [line for line in read_lines(directory / "alone-cached" / "metrics.jsonl") if "seconds/total" in line]
    steps = [line["seconds/total"] / SETTINGS["logging_steps"] for line in lines]
    counts = {"programs from the cache, same": int(again == whole)}
    print(f"undisturbed: {cold:.1f} s; with cached programs: {seconds:.1f} s; the same: {again == whole}", flush=True)

    kinds = [("uniform", "mid-save")[i % 2] for i in range(options.kills)] + ["SIGTERM"] * options.terms
    draw.shuffle(kinds)
    done, runs, same, half = 0, 0, 0, 0
    to_the_exit: list[float] = []
    while done < len(kinds) or runs == 0:
        runs += 1
        run_dir = directory / f"killed-{runs}"
        while True:
            child, began = start(run_dir, cache), time.monotonic()
            if done == len(kinds):
                words = ""
                if status := wait_for(child, lambda: False):
                    raise SystemExit(f"{run_dir}: ended with {status}; see log.txt there")
            else:
                kind = kinds[done]
                words, took = interrupt(child, run_dir, kind, draw, seconds)
                if words:
                    done += 1
                    to_the_exit += [took] * (kind == "SIGTERM")
                    half += "half written" in words
                    print(f"{done:3d} run {runs} {kind:8s} {words}", flush=True)
            if not words:
                seconds = min(seconds, time.monotonic() - began)  # the first run may have been slowed down
                break
        found = result_of(run_dir)
        differing = [name for name in whole if found[name] != whole[name]]
        same += not differing
        print(f"run {runs} is complete: {'the same' if not differing else f'DIFFERENT in {differing}'}", flush=True)
    results = {
        "kills": options.kills,
        "terms": options.terms,
        "with a checkpoint half written": half,
        "runs": runs,
        "runs the same": same,
        **counts,
        "most seconds from SIGTERM to the exit": round(max(to_the_exit, default=0.0), 2),
        "median seconds of a step": round(statistics.median(steps), 4),
    }
    print(json.dumps(results), flush=True)
    if same < runs or again != whole:
        sys.exit(1)
    return results


if __name__ == "__main__":
    main()
