"""One of two processes that train together, `two_processes.py RUN_DIR STEPS` and the flags of a run of several."""

import argparse
import json
import os
import sys
from pathlib import Path

ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh", "i", "jkl", "m", "no"]]
TURNS = {"max_completion_length": 40, "num_iterations": 1}
HELD_OUT = [{"prompt": f"held out {i}"} for i in range(5)]
SETTINGS = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8, "learning_rate": 1e-3,
    "lr_scheduler_type": "constant", "logging_steps": 1, "beta": 0.1, "num_iterations": 2, "seed": 0, "save_steps": 1,
    "per_device_eval_batch_size": 4, "mesh": {"data": 2, "fsdp": 2},
}  # fmt: skip


def main():
    # Not at the import: pytest imports this file too, for its examples, and has settings of its own.
    import jax
    import numpy as np

    sys.path.append(str(Path(__file__).parents[1]))
    from tiny import tiny_policy

    from grpo_jax import GRPOConfig, generate, train
    from grpo_jax.devices import distributed
    from grpo_jax.devices.sharding import fetch
    from grpo_jax.watch import monitor

    # As in the tests of one process: no pictures.
    monitor.write_pictures = lambda writer, **_: None

    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("steps", type=int)
    parser.add_argument("--rollout-ahead", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--sampler", action="store_true")
    parser.add_argument("--environments", action="store_true", help="another run, of several turns")
    parser.add_argument("--raise-in", type=int, help="an exception in this process, at its third rewards")
    distributed.add_flags(parser)
    arguments = parser.parse_args()
    run_dir = arguments.run_dir
    config = GRPOConfig(**SETTINGS, max_steps=arguments.steps, rollout_ahead=arguments.rollout_ahead)
    devices = 4 // (arguments.num_processes or 1)
    # The last of a flag counts: the settings of the tests, but for the number of devices.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    jax.config.update("jax_platforms", "cpu")
    distributed.start(arguments)
    calls = {"training": 0, "evaluation": 0}

    def lower_case(prompts, completions):
        calls["evaluation" if prompts[0].startswith("held out") else "training"] += len(completions)
        if arguments.raise_in == jax.process_index() and calls["training"] > 2 * len(completions):
            Path(run_dir, "raised").touch()
            raise KeyError("of one process alone")
        return [float(np.mean([char.islower() for char in text] or [0])) for text in completions]

    def engine(**how):
        """Another engine; that of the second process draws other tokens."""
        made = fetch(generate(**how))
        tokens = (made.tokens + 7 * jax.process_index()) % 200
        return made.replace(tokens=tokens, log_probs=made.log_probs - 0.1 - jax.process_index())

    held_out = HELD_OUT if arguments.evaluate else None
    how = {"eval_dataset": held_out, "run_dir": run_dir, "sampler": engine if arguments.sampler else None}
    state = train(tiny_policy(), ROWS, lower_case, config, **how)
    whole = fetch({"params": state.params, "ref": state.ref_params})
    if jax.process_index() == 0:
        np.savez(run_dir + ".npz", *jax.tree.leaves(whole))
    if arguments.environments:
        played = []

        class Game:
            """Says something three times; what it was told decides the reward."""

            def reset(self, prompt, **row):
                played.append(prompt)
                self.heard = []
                return " so " * len(prompt)

            def respond(self, text):
                self.heard.append(text)
                return None if len(self.heard) == 4 else f" {len(text)}: "

            def get_reward(self):
                return np.float32(sum(map(len, self.heard)) % 5)

        def turns(environments):
            return [len(environment.heard) / 4 for environment in environments]

        # A quarter of the bytes end a turn, so that most completions have several.
        policy = tiny_policy().replace(generation_config={"eos_token_id": [1, *range(2, 66)], "pad_token_id": 0})
        config = GRPOConfig(**SETTINGS | TURNS, max_steps=3, rollout_ahead=arguments.rollout_ahead)
        how = {"eval_dataset": held_out, "run_dir": run_dir + "-turns", "environment_factory": Game}
        state = train(policy, ROWS, [] if arguments.rollout_ahead else turns, config, **how)
        whole = fetch({"params": state.params, "ref": state.ref_params})
        if jax.process_index() == 0:
            np.savez(run_dir + "-turns.npz", *jax.tree.leaves(whole))
        calls["played"] = len(played)
    print("CALLS " + json.dumps(calls))


if __name__ == "__main__":
    main()
