"""A launch as what each platform takes: a Slurm script, JobSets, a TrainJob, a program for Ray, a script for TPU VMs.

Every one gives the same command again after a failure, with the same run directory: the run goes on from its last
checkpoint.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import yaml

from grpo_jax.cli.launch import Job, Launch, Platform, read_launch
from grpo_jax.cli.runfile import read_run

Document = dict[str, object]
"""An object of YAML."""

PORT = 8476
"""Where process 0 listens."""


def slurm(job: Job) -> str:
    """Return a script for `sbatch`: one process for each GPU, or for each host without any.

    JAX gives a process of Slurm one GPU. Five minutes before `hours` are over the run saves, and the job is queued
    again.
    """
    launch = job.launch
    device = launch.device
    processes = device.per_host if device.kind != "cpu" else 1
    cpus = None if launch.cpus is None else max(launch.cpus // processes, 1)
    options: dict[str, object] = {
        "job-name": launch.name,
        "nodes": launch.hosts,
        "ntasks-per-node": processes,
        "gpus-per-node": None if device.kind == "cpu" else f"{device.kind.lower()}:{device.per_host}",
        "cpus-per-task": cpus,
        "mem": launch.memory,
        "time": None if launch.hours is None else math.ceil(60 * launch.hours),
        "partition": launch.partition,
        "account": launch.account,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --signal=B:USR1@300"]
    several = " --distributed auto" * (launch.hosts * processes > 1)
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "set -u",
            *(["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"] if cpus else []),  # srun does not ask by itself
            *_setup(launch),
            f"cd {shlex.quote(launch.workdir)} || exit 1",
            "",
            "# The time is nearly over: the run saves, and the job is queued again.",
            "over=0",
            "trap 'over=1; kill -TERM \"$step\"' USR1",
            f"for attempt in $(seq 0 {int(launch.restarts)}); do",
            '  echo "attempt $attempt"',
            f"  srun --kill-on-bad-exit=1 {job.command}{several} &",
            "  step=$!",
            '  wait "$step"',
            "  status=$?",
            "  if [ $over = 1 ]; then",
            '    wait "$step"',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "    exit",
            "  fi",
            "  if [ $status = 0 ]; then exit 0; fi",
            "done",
            'exit "$status"',
            "",
        ]
    )


def jobset(job: Job) -> str:
    """Return a JobSet of one Job, with a pod for each host; on GKE's labels of nodes where there are accelerators."""
    launch = job.launch
    address = f"{launch.name}-hosts-0-0.{launch.name}:{PORT}"
    flags = f" --coordinator {address} --num-processes {launch.hosts} --process-id $JOB_COMPLETION_INDEX"
    spec: Document = {
        "failurePolicy": {"maxRestarts": int(launch.restarts)},
        "replicatedJobs": [{"name": "hosts", "replicas": 1, "template": {"spec": _indexed_job(job, flags)}}],
    }
    about = _about(launch)
    if launch.device.tpu:  # no other pod is put on the hosts of the slice
        about["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return _documents({"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": about, "spec": spec})


def kubeflow(job: Job) -> str:
    """Return a TrainingRuntime of Kubeflow Trainer with its policy for JAX, and the TrainJob that runs it."""
    launch = job.launch
    flags = (
        ' --coordinator "$JAX_COORDINATOR_ADDRESS" --num-processes "$JAX_NUM_PROCESSES" --process-id "$JAX_PROCESS_ID"'
    )
    node: Document = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": _indexed_job(job, flags, name="node", sized=False),
        },
    }
    about = _about(launch)
    group = "trainer.kubeflow.org"
    runtime: Document = {
        "apiVersion": f"{group}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**about, "labels": {f"{group}/framework": "jax"}},
        "spec": {
            "mlPolicy": {"numNodes": launch.hosts, "jax": {}},
            "template": {"spec": {"failurePolicy": {"maxRestarts": int(launch.restarts)}, "replicatedJobs": [node]}},
        },
    }
    spec: Document = {
        "runtimeRef": {"apiGroup": group, "kind": "TrainingRuntime", "name": launch.name},
        "trainer": {"numNodes": launch.hosts, "resourcesPerNode": _resources(launch)},
    }
    if launch.hours is not None:
        spec["activeDeadlineSeconds"] = math.ceil(3600 * launch.hours)
    train_job: Document = {"apiVersion": f"{group}/v1alpha1", "kind": "TrainJob", "metadata": about, "spec": spec}
    return _documents(runtime, train_job)


def _about(launch: Launch) -> Document:
    """Return the metadata of a document."""
    about: Document = {"name": launch.name}
    return about | {"namespace": launch.namespace} if launch.namespace else about


def _indexed_job(job: Job, flags: str, *, name: str = "grpo-jax", sized: bool = True) -> Document:
    """Return the spec of a Job with a pod for each host; the JobSet around it restarts all of them together."""
    launch = job.launch
    command = f"exec {job.command}{flags if launch.hosts > 1 else ''}"
    container: Document = {
        "name": name,
        "image": launch.image,
        "workingDir": launch.workdir,
        "command": ["sh", "-c", command],
        "volumeMounts": [{"name": "runs", "mountPath": launch.storage}],
    }
    pod: Document = {
        "restartPolicy": "Never",
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": launch.claim}}],
        "containers": [container],
    }
    if launch.device.tpu:
        labels = {"gke-tpu-accelerator": launch.device.gke, "gke-tpu-topology": launch.device.topology}
        pod["nodeSelector"] = {f"cloud.google.com/{label}": value for label, value in labels.items()}
    elif launch.device.kind != "cpu":
        pod["nodeSelector"] = {"cloud.google.com/gke-accelerator": launch.device.gke}
    spec: Document = {"backoffLimit": 0, "completionMode": "Indexed", "template": {"spec": pod}}
    if sized:  # Kubeflow says these itself
        container["ports"] = [{"containerPort": PORT}]
        container["resources"] = _resources(launch)
        spec |= {"parallelism": launch.hosts, "completions": launch.hosts}
        if launch.hours is not None:
            spec["activeDeadlineSeconds"] = math.ceil(3600 * launch.hours)
    return spec


def _resources(launch: Launch) -> Document:
    """Return the resources of a host; devices are limits, of which Kubernetes makes requests too."""
    device = launch.device
    asked = {"cpu": None if launch.cpus is None else str(launch.cpus), "memory": launch.memory}
    requests = {name: value for name, value in asked.items() if value is not None}
    found: Document = {}
    if requests:
        found["requests"] = requests
    if device.kind != "cpu":
        found["limits"] = {"google.com/tpu" if device.tpu else "nvidia.com/gpu": str(device.per_host)}
    return found


def _documents(*documents: Document) -> str:
    """Return documents of Kubernetes as YAML."""
    return "---\n".join(yaml.safe_dump(dict(document), sort_keys=False, width=1000) for document in documents)


_RAY = '''"""Run by Ray's JaxTrainer: python FILE, on a host of the cluster. Made by grpo-jax launch."""

import os

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig


def work():
    """Run the command in this worker, a process of which JaxTrainer has made one of several."""
    from grpo_jax.cli import main

    os.chdir(%WORKDIR%)
    try:
        main(%ARGUMENTS%)
    except SystemExit as error:  # Ray takes it for the end of the worker, whatever its status
        if error.code:
            raise RuntimeError(str(error.code)) from error


if __name__ == "__main__":
    trainer = JaxTrainer(
        work,
        scaling_config=ScalingConfig(%SCALING%),
        jax_config=JaxConfig(%JAX%),
        run_config=RunConfig(
            name=%NAME%,
            storage_path=%STORAGE%,
            failure_config=FailureConfig(max_failures=%RESTARTS%),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": %PLATFORM%}},
        ),
    )
    trainer.fit()
'''


def ray(job: Job) -> str:
    """Return a program with Ray's JaxTrainer: a worker for each host.

    JaxTrainer starts `jax.distributed` for GPUs and TPUs only. CPUs are announced to it as GPUs, of which no worker
    asks for any: JAX_PLATFORMS says what they are.
    """
    launch = job.launch
    device = launch.device
    resources: dict[str, float] = {"CPU": launch.cpus or 1}
    scaling: dict[str, object] = {"num_workers": launch.hosts, "resources_per_worker": resources}
    platform = "cpu"
    if device.tpu:
        scaling |= {"use_tpu": True, "topology": device.topology, "accelerator_type": device.tpu.ray}
        resources["TPU"], platform = device.per_host, "tpu"
    elif device.kind != "cpu":
        scaling["use_gpu"] = True
        resources["GPU"], platform = device.per_host, "cuda"
    filled = {
        "%WORKDIR%": repr(launch.workdir),
        "%ARGUMENTS%": repr(job.arguments),
        "%SCALING%": ", ".join(f"{name}={value!r}" for name, value in scaling.items()),
        "%JAX%": "use_tpu=True" if device.tpu else "use_gpu=True",
        "%NAME%": repr(launch.name),
        "%STORAGE%": repr(f"{launch.storage}/ray"),
        "%RESTARTS%": str(int(launch.restarts)),
        "%PLATFORM%": repr(platform),
    }
    return re.sub("|".join(filled), lambda match: filled[match[0]], _RAY)


def tpu_vm(job: Job) -> str:
    """Return a script that makes a slice of TPU VMs with gcloud, copies the run's folder, and starts it on all hosts.

    The slice stays when the run is over: the last line says how to give it back.
    """
    launch = job.launch
    device = launch.device
    assert device.tpu is not None  # refused before
    chips = device.per_host * (device.hosts or 1) * device.tpu.cores
    several = " --distributed auto" * (launch.hosts > 1)
    lines = [*_setup(launch), f"cd {shlex.quote(launch.workdir)} && {job.command}{several}"]
    where = f"--zone={launch.zone}" + (f" --project={launch.project}" if launch.project else "")
    return "\n".join(
        [
            "#!/bin/bash",
            "# Run it in the folder of RUN.yaml.",
            "set -eu",
            f'tpu() {{ gcloud compute tpus tpu-vm "$@" {where}; }}',
            "",
            f"if ! tpu describe {launch.name} >/dev/null 2>&1; then",
            f"  tpu create {launch.name} --accelerator-type={device.tpu.cloud}-{chips} --version={device.tpu.version}",
            "fi",
            f"tpu ssh {launch.name} --worker=all --command={shlex.quote(f'mkdir -p {shlex.quote(launch.workdir)}')}",
            f"tpu scp --recurse --worker=all ./* {launch.name}:{shlex.quote(launch.workdir)}",
            f"for attempt in $(seq 0 {int(launch.restarts)}); do",
            '  echo "attempt $attempt"',
            f"  if tpu ssh {launch.name} --worker=all --command={shlex.quote(chr(10).join(lines))}; then",
            f'    echo "done; the slice is still there: gcloud compute tpus tpu-vm delete {launch.name} {where}"',
            "    exit 0",
            "  fi",
            "done",
            "exit 1",
            "",
        ]
    )


def _setup(launch: Launch) -> list[str]:
    """Return the lines of shell before the command."""
    return (launch.setup or "").splitlines()


MANIFESTS: dict[Platform, Callable[[Job], str]] = {
    "slurm": slurm,
    "jobset": jobset,
    "kubeflow": kubeflow,
    "ray": ray,
    "tpu-vm": tpu_vm,
}
"""Platform → the text that starts a job there."""

_TAKEN_BY: dict[Platform, tuple[str, ...]] = {
    "slurm": ("sbatch",),
    "jobset": ("kubectl", "create", "-f", "-"),
    "kubeflow": ("kubectl", "create", "-f", "-"),
    "ray": (sys.executable, "-"),
    "tpu-vm": ("bash", "-s"),
}
"""Platform → the command that reads a job from its standard input."""


def hand_over(text: str, platform: Platform) -> None:
    """Give the text of a job to the platform's own command.

    Raises:
      FileNotFoundError: the command is not here.
      ValueError: it has refused the job, or the job has failed where the command waits for it.
    """
    program, *arguments = _TAKEN_BY[platform]
    if shutil.which(program) is None:
        raise FileNotFoundError(f"{program}: is not here; use --print, and give what it prints to {platform} elsewhere")
    status = subprocess.run([program, *arguments], input=text, text=True, check=False).returncode
    if status:
        raise ValueError(f"{program} ended with status {status}; its own words stand above")


def launch(arguments: Namespace) -> None:
    """`grpo-jax launch`."""
    path = Path(arguments.run)
    asked = {"hosts": arguments.hosts, "accelerator": arguments.accelerator}
    instead = {name: value for name, value in asked.items() if value is not None}
    job = read_launch(read_run(path, arguments.keys), path, arguments.on, arguments.keys, instead)
    text = MANIFESTS[arguments.on](job)
    if arguments.print:
        print(text, end="")
    else:
        hand_over(text, arguments.on)
