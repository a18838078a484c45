"""Run by Ray's JaxTrainer: python FILE, on a host of the cluster."""

import os

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig


def work():
    """Run the command in this worker, a process of which JaxTrainer has made one of several."""
    from grpo_jax.cli import main

    os.chdir("/workspace")
    try:
        main(["train", "gsm8k.yaml", "--run_dir", "/mnt/runs/runs/gsm8k"])
    except SystemExit as error:  # Ray takes it for the end of the worker, whatever its status
        if error.code:
            raise RuntimeError(str(error.code)) from error


if __name__ == "__main__":
    trainer = JaxTrainer(
        work,
        scaling_config=ScalingConfig(
            num_workers=4,
            resources_per_worker={"CPU": 16, "TPU": 4},
            use_tpu=True,
            topology="4x4",
            accelerator_type="TPU-V5LITEPOD",
        ),
        jax_config=JaxConfig(use_tpu=True),
        run_config=RunConfig(
            name="gsm8k",
            storage_path="/mnt/runs/ray",
            failure_config=FailureConfig(max_failures=3),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "tpu"}},
        ),
    )
    trainer.fit()
