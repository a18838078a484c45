"""Train with Ray's JaxTrainer: run `python FILE` on a host in the cluster."""

import os

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig


def work():
    """Run grpo-jax in this worker, one of the processes that JaxTrainer has connected."""
    from grpo_jax.cli.main import main

    os.chdir("/workspace")
    try:
        main(["train", "gsm8k.yaml", "--run_dir", "/mnt/runs/runs/gsm8k"])
    except SystemExit as error:  # Ray ignores the status of a SystemExit
        if error.code:
            raise RuntimeError(str(error.code)) from error


if __name__ == "__main__":
    trainer = JaxTrainer(
        work,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 16, "GPU": 8}, use_gpu=True),
        jax_config=JaxConfig(use_gpu=True),
        run_config=RunConfig(
            name="gsm8k",
            storage_path="/mnt/runs/ray",
            failure_config=FailureConfig(max_failures=3),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cuda"}},
        ),
    )
    trainer.fit()
