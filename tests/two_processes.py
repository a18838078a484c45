"""One of two processes that train together: `two_processes.py RUN_DIR STEPS PROCESS PORT`; PROCESS −1 is alone."""

import json
import os
import sys

ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh", "i", "jkl", "m", "no"]]
SETTINGS = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "beta": 0.1,
    "num_iterations": 2,
    "seed": 0,
    "save_steps": 1,
    "mesh": {"data": 2, "fsdp": 2},
}


def main(run_dir, steps, process, port):
    # Before JAX is imported: pytest imports this file too, for its examples, and has settings of its own.
    devices = 4 if process < 0 else 2
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"

    import jax
    import numpy as np

    if process >= 0:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=10)

    from tiny import tiny_policy

    from grpo_jax import GRPOConfig, train
    from grpo_jax.sharding import fetch

    calls = []

    def lower_case(completions):
        calls.append(len(completions))
        return [float(np.mean([char.islower() for char in text] or [0])) for text in completions]

    state = train(tiny_policy(), ROWS, lower_case, GRPOConfig(**SETTINGS, max_steps=steps), run_dir=run_dir)
    whole = fetch({"params": state.params, "ref": state.ref_params})
    if process <= 0:
        np.savez(run_dir + ".npz", *jax.tree.leaves(whole))
    print("CALLS " + json.dumps(calls))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
