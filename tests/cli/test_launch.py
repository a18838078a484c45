"""The examples in experiments/launch: their commands parse, and the Ray program runs on this machine's CPUs."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from cli_files import write_run

from grpo_jax.cli.main import main
from grpo_jax.cli.runfile import read_run
from grpo_jax.watch.writer import read_lines

ROOT = Path(__file__).parents[2]
FILES = ROOT / "experiments" / "launch"
PYTHON = os.environ.get("GRPO_JAX_RAY_PYTHON")


@pytest.mark.quick
@pytest.mark.parametrize(
    "name", ["slurm.sh", "tpu-vm.sh", "jobset-cpu.yaml", "jobset-gpu.yaml", "jobset-tpu.yaml", "kubeflow.yaml"]
)
def test_launch_example_has_a_valid_command(name, monkeypatch):
    text = (FILES / name).read_text()
    if name.endswith(".yaml"):
        assert all("kind" in document for document in yaml.safe_load_all(text))
    else:
        subprocess.run(["bash", "-n", FILES / name], check=True)
    (command,) = re.findall(r"(?<=grpo-jax )train [^&'\n]*", text)
    seen = []
    monkeypatch.setattr("grpo_jax.cli.commands.train", seen.append)
    main([part if not part.startswith("$") else "1" for part in shlex.split(command)])
    (arguments,) = seen
    run = read_run(FILES / arguments.run, arguments.keys)
    assert str(run.run_dir) == "/mnt/runs/runs/gsm8k"
    assert (arguments.distributed == "auto") != (arguments.num_processes is not None)


SLOWLY = """
import os, pathlib, time

def slowly(completions, **columns):
    with open(pathlib.Path(__file__).with_name("pids"), "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.5)
    return [float(len(text)) for text in completions]
"""
ON_LOOPBACK = """
import runpy, sys, ray
ray.init(_node_ip_address="127.0.0.1", num_cpus=3, include_dashboard=False, log_to_driver=True)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def on_cpus(folder, run_file, store):
    """Return the GPU example edited for two workers with one CPU each in `folder`, as docs/launch.md describes."""
    text = (FILES / "ray-gpu.py").read_text()
    for example, here in {
        "/workspace": str(folder),
        "gsm8k.yaml": run_file.name,
        "/mnt/runs": str(store),
        # JaxTrainer starts `jax.distributed` for GPUs and TPUs only, so JaxConfig keeps use_gpu=True.
        '{"CPU": 16, "GPU": 8}, use_gpu=True': '{"CPU": 1}',
        '"cuda"': '"cpu"',
        "max_failures=3": "max_failures=1",
    }.items():
        assert example in text
        text = text.replace(example, here)
    return text


@pytest.mark.skipif(not PYTHON, reason="GRPO_JAX_RAY_PYTHON is not set to a Python with ray[train]")
def test_ray_resumes_a_run_after_a_worker_is_killed(tmp_path):
    """When one of two workers is killed after the second step, JaxTrainer restarts the command and the run resumes."""
    how = {"rewards": ["slow.py:slowly"], "mesh": "data=2", "per_device_train_batch_size": 4}
    path = write_run(tmp_path, run_dir=None, eval_data=None, max_steps=5, save_steps=1, **how)
    (tmp_path / "slow.py").write_text(SLOWLY)
    (tmp_path / "go.py").write_text(on_cpus(tmp_path, path, tmp_path / "store"))
    (tmp_path / "loopback.py").write_text(ON_LOOPBACK)
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)  # it sets the tests' number of devices
    log, run_dir = tmp_path / "log", tmp_path / "store" / "runs" / "gsm8k"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [PYTHON, "loopback.py", "go.py"], cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 300
        while not (run_dir / "checkpoints" / "2").exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        os.kill(int((tmp_path / "pids").read_text().split()[-1]), signal.SIGKILL)
        assert process.wait(timeout=300) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert len(set((tmp_path / "pids").read_text().split())) == 4, "expected two workers and two replacements"
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert np.isfinite([line["reward"] for line in lines]).all()
