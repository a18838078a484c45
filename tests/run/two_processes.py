"""One of two processes that train together: `two_processes.py RUN_DIR raise|kill` and the multi-process flags.

A test also calls `play` in a single process, for comparison.
"""

import argparse
import collections
import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from grpo_jax.models.sharding import fetch, gather_objects
from grpo_jax.rollout.ends import BY_EOS
from grpo_jax.run import distributed
from grpo_jax.run import run_dir as run_directories
from grpo_jax.run.sampler import generate_with_engine
from grpo_jax.watch import monitor

ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh", "i", "jkl", "m", "no"]]
HELD_OUT = [{"prompt": f"held out {i}"} for i in range(15)]
SETTINGS = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 24, "learning_rate": 1e-3,
    "lr_scheduler_type": "constant", "logging_steps": 1, "beta": 0.1, "seed": 0, "save_steps": 1,
    "per_device_eval_batch_size": 8, "mesh": {"data": 2, "fsdp": 2}, "rollout_ahead": True, "max_steps": 3,
    "gradient_checkpointing": False,
}  # fmt: skip
CALLS = collections.Counter()
"""Counts of completions scored and episodes played in this process."""


def lower_case(fails):
    """Return a reward function; if `fails`, it raises in the second process in the second training iteration."""
    called = []

    def lower_case(prompts, completions):
        held_out = prompts[0].startswith("held out")
        CALLS["evaluation" if held_out else "training"] += len(completions)
        called.append(held_out)
        if fails and jax.process_index() == 1 and called.count(False) == 2:
            raise KeyError("failed on one process")
        return [float(np.mean([char.islower() for char in text] or [0])) for text in completions]

    return lower_case


class Game:
    """An environment that responds three times and whose reward depends on the policy's turns."""

    def reset(self, prompt, **row):
        CALLS["played"] += 1
        self.heard = []
        return " so " * len(prompt)

    def respond(self, text):
        self.heard.append(text)
        return None if len(self.heard) == 4 else f" {len(text)}: "

    def get_reward(self):
        return np.float32(sum(map(len, self.heard)) % 5)


def policy():
    """Return a policy for which a quarter of the bytes end a turn, so that most completions have several."""
    from tiny import tiny_policy

    return tiny_policy().replace(generation_config={"eos_token_id": [1, *range(2, 66)], "pad_token_id": 0})


def play(run_dir, *, fails=False):
    """Train for three multi-turn iterations with `rollout_ahead`, whose collectives run in a thread during rewards."""
    from grpo_jax import GRPOConfig, train

    how = {"eval_dataset": HELD_OUT, "run_dir": run_dir, "environment_factory": Game}
    return train(policy(), ROWS, lower_case(fails), GRPOConfig(**SETTINGS), **how)


def drawn_by_an_engine():
    """Return the token ids and log-probs from a sampler that returns empty completions in the second process."""
    from grpo_jax import Completions, make_prompts

    def engine(prompts, num_generations, max_completion_length):
        shape = (1, num_generations, max_completion_length)
        tokens = np.full(shape, 7 + jax.process_index(), np.int32)
        log_probs = np.full(shape, -0.5 - jax.process_index(), np.float32)
        return Completions(tokens, np.full(shape, jax.process_index() == 0), log_probs, np.zeros(shape[:2], bool))

    settings = {"num_generations": 2, "max_completion_length": 3, **BY_EOS._asdict()}
    key, prompts = jax.random.key(0), make_prompts([[5]])
    made = generate_with_engine(engine, policy(), policy().model, policy().params, prompts, key, **settings)
    return sorted({*made.tokens.ravel().tolist(), *made.log_probs.ravel().tolist()})


def main():
    # As in the single-process tests, draw no reports, which would take seconds.
    monitor.Monitor.write_report = lambda self, **_: None
    run_directories.NETWORK_DELAY = 1  # the directories are local
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("fault", choices=["raise", "kill"])
    distributed.add_flags(parser)
    arguments = parser.parse_args()
    # The last occurrence of a flag wins, so this overrides only the tests' number of devices.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    jax.config.update("jax_platforms", "cpu")
    distributed.start(arguments)
    if arguments.fault == "kill":
        for n in range(1000):  # the first process waits for the second, which kills itself
            gather_objects(n)
            if n == 2 and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    try:
        play(arguments.run_dir / f"own-{jax.process_index()}")
    except ValueError as error:
        CALLS["refused"] = "is not the same directory in all processes" in str(error)
    for _ in range(2):  # the second call finds a complete run
        state = play(arguments.run_dir / "turns")
    whole = jax.tree.leaves(fetch({"params": state.params, "ref": state.ref_params}))
    if jax.process_index() == 0:
        np.savez(arguments.run_dir / "turns.npz", *whole)
    print("CALLS " + json.dumps({**CALLS, "drawn": drawn_by_an_engine()}), flush=True)
    play(arguments.run_dir / "failing", fails=True)


if __name__ == "__main__":
    main()
