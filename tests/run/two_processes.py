"""One of two processes that train together: `two_processes.py RUN_DIR raise|kill` and the flags of a run of several.

`play` and `learn` are called in one process too, as what the two are compared with.
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
from tiny import tiny_policy

from grpo_jax import GRPOConfig, generate, train
from grpo_jax.models.sharding import fetch
from grpo_jax.run import distributed
from grpo_jax.watch import monitor

ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh", "i", "jkl", "m", "no"]]
HELD_OUT = [{"prompt": f"held out {i}"} for i in range(5)]
SETTINGS = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8, "learning_rate": 1e-3,
    "lr_scheduler_type": "constant", "logging_steps": 1, "beta": 0.1, "seed": 0, "save_steps": 1,
    "per_device_eval_batch_size": 4, "mesh": {"data": 2, "fsdp": 2},
}  # fmt: skip
CALLS = collections.Counter()
"""Completions scored and episodes played in this process."""


def lower_case(fault):
    """A reward function with a fault ("raise", "kill" or None) in the second process at its second rewards of a run."""
    called = []

    def lower_case(prompts, completions):
        held_out = prompts[0].startswith("held out")
        CALLS["evaluation" if held_out else "training"] += len(completions)
        called.append(held_out)
        if jax.process_index() == 1 and called.count(False) == 2:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raise":
                raise KeyError("of one process alone")
        return [float(np.mean([char.islower() for char in text] or [0])) for text in completions]

    return lower_case


class Game:
    """Says something three times; what it was told decides the reward."""

    def reset(self, prompt, **row):
        CALLS["played"] += 1
        self.heard = []
        return " so " * len(prompt)

    def respond(self, text):
        self.heard.append(text)
        return None if len(self.heard) == 4 else f" {len(text)}: "

    def get_reward(self):
        return np.float32(sum(map(len, self.heard)) % 5)


def play(run_dir, fault=None):
    """Three iterations of several turns with a rollout ahead, whose collectives run in a thread during the rewards."""
    # A quarter of the bytes end a turn, so that most completions have several.
    policy = tiny_policy().replace(generation_config={"eos_token_id": [1, *range(2, 66)], "pad_token_id": 0})
    config = GRPOConfig(**SETTINGS | {"max_completion_length": 24}, max_steps=3, rollout_ahead=True)
    how = {"eval_dataset": HELD_OUT, "run_dir": run_dir, "environment_factory": Game}
    return train(policy, ROWS, lower_case(fault), config, **how)


def learn(run_dir, steps, fault=None):
    """Iterations of two updates with an engine that draws other tokens in the second process."""

    def engine(**how):
        made = fetch(generate(**how))
        tokens = (made.tokens + 7 * jax.process_index()) % 200
        return made.replace(tokens=tokens, log_probs=made.log_probs - 0.1 - jax.process_index())

    config = GRPOConfig(**SETTINGS, num_iterations=2, max_steps=steps)
    return train(tiny_policy(), ROWS, lower_case(fault), config, run_dir=run_dir, sampler=engine)


def main():
    # As in the tests of one process: no pictures.
    monitor.Monitor._report = lambda self, **_: None
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("fault", choices=["raise", "kill"])
    distributed.add_flags(parser)
    arguments = parser.parse_args()
    # The last of a flag counts: the settings of the tests, but for the number of devices.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    jax.config.update("jax_platforms", "cpu")
    distributed.start(arguments)
    if arguments.fault == "kill":
        learn(arguments.run_dir / "engine", 4, "kill")
    try:
        learn(arguments.run_dir / f"own-{jax.process_index()}", 2)
    except ValueError as error:
        CALLS["refused"] = "does not find what process 0 has written" in str(error)
    for _ in range(2):  # called again, the run is complete
        state = play(arguments.run_dir / "turns")
    whole = jax.tree.leaves(fetch({"params": state.params, "ref": state.ref_params}))
    if jax.process_index() == 0:
        np.savez(arguments.run_dir / "turns.npz", *whole)
    print("CALLS " + json.dumps(CALLS), flush=True)
    play(arguments.run_dir / "failing", "raise")


if __name__ == "__main__":
    main()
