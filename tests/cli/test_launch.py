"""The description of a launch: what it is read as, and what is refused before anything is handed to a cluster."""

from pathlib import Path

import pytest
import yaml

from grpo_jax.cli.launch import Accelerator, read_launch
from grpo_jax.cli.runfile import read_run

GOOD = {"hosts": 2, "accelerator": "H100-8", "storage": "/mnt/runs", "image": "i:1", "claim": "runs", "zone": "z"}


def job(folder, platform="slurm", *, keys=None, instead=None, **changes):
    """The job of a file with that launch, changed; `run` changes its other keys."""
    values = {"mesh": {"data": 16}} | changes.pop("run", {})
    launch = {name: value for name, value in (GOOD | changes).items() if value is not None}
    path = folder / "My run.yaml"
    path.write_text(yaml.safe_dump({**values, "launch": launch}))
    return read_launch(read_run(path, keys), path, platform, keys, instead)


@pytest.mark.quick
def test_what_a_file_says_and_what_follows_from_it(tmp_path):
    found = job(tmp_path)
    launch = found.launch
    assert (launch.name, launch.hosts, launch.workdir, launch.restarts) == ("my-run", 2, str(tmp_path), 3)
    assert found.arguments == ["train", "My run.yaml", "--run_dir", "/mnt/runs/runs/My run"]
    assert found.command == "grpo-jax train 'My run.yaml' --run_dir '/mnt/runs/runs/My run'"
    # A slice says how many hosts it has; what the command line sets goes into the command.
    found = job(tmp_path, "jobset", hosts=None, accelerator="v5e-16", keys={"beta": "0.1", "run_dir": "here"})
    assert found.launch.hosts == 4
    assert found.arguments == ["train", "My run.yaml", "--run_dir", "/mnt/runs/here", "--beta", "0.1"]
    found = job(tmp_path, instead={"hosts": 1, "accelerator": "A100-4"}, keys={"mesh": "data=4"})
    assert (found.launch.hosts, found.launch.device) == (1, Accelerator("A100", 4))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "per_host", "hosts", "topology"),
    [
        ("v5e-1", 1, 1, "1x1"),
        ("v5e-8", 8, 1, "2x4"),
        ("v6e-16", 4, 4, "4x4"),
        ("v6e-256", 4, 64, "16x16"),
        ("v5p-4", 4, 1, "2x2x1"),
        ("v4-64", 4, 16, "4x4x4"),
    ],
)
def test_slices(name, per_host, hosts, topology):
    device = Accelerator.read(name)
    assert (device.per_host, device.hosts, device.topology) == (per_host, hosts, topology)
    sides = [int(side) for side in topology.split("x")]
    product = 1
    for side in sides:
        product *= side
    assert product == per_host * hosts == int(name.split("-")[1])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("platform", "changes", "said"),
    [
        ("slurm", {"hostes": 3}, r"launch.hostes: no such field; did you mean hosts\?"),
        ("slurm", {"hosts": 0}, "launch.hosts = 0: must be at least 1; use a whole number from 1 up"),
        ("slurm", {"hours": "8"}, "launch.hours = '8': must be a number, not str"),
        ("slurm", {"accelerator": "H10-8"}, r"launch.accelerator = 'H10-8': did you mean H100\? give one of cpu, T4,"),
        ("slurm", {"accelerator": "H100-9"}, "launch.accelerator = 'H100-9': .*GPUs of a host .up to 8."),
        ("jobset", {"accelerator": "v5e-12"}, "launch.accelerator = 'v5e-12': v5e has slices of 1, 4, 8, 16, 32, 64"),
        ("jobset", {"accelerator": "v5e-16", "hosts": 3}, "launch.hosts = 3: a slice v5e-16 has 4; leave it out"),
        ("slurm", {"accelerator": "v5e-16", "hosts": 4}, "Slurm has no TPUs here; use jobset or tpu-vm"),
        ("tpu-vm", {}, "launch.accelerator = 'H100-8': tpu-vm takes a slice, such as v5e-16"),
        ("jobset", {"image": None}, "launch.image: is missing; jobset needs it"),
        ("kubeflow", {"claim": None}, "launch.claim: is missing; kubeflow needs it"),
        ("slurm", {"partition": "a\n#SBATCH --b"}, "launch.partition = .*: use letters, digits and"),
        ("slurm", {"name": "Big_Run"}, "launch.name = 'Big_Run': use up to 40 small letters"),
        ("slurm", {"storage": None}, "launch.storage = '': give a directory that all hosts share"),
        ("slurm", {"storage": "gs://b/runs"}, "launch.storage = 'gs://b/runs': is in an object store, .*gcloud"),
        ("slurm", {"run": {"run_dir": None, "mesh": {"data": 16}}}, "run_dir: null keeps nothing, and a restart"),
        ("slurm", {"run": {"run_dir": "/home/x"}}, "run_dir = '/home/x': is not in launch.storage"),
        ("slurm", {"run": {"mesh": {"data": 8}}}, "mesh = .*: takes 8 of the 16 devices of launch; give mesh: data=16"),
        ("slurm", {"run": {"mesh": None}}, "mesh: is missing; the run takes 1 of the 16 devices"),
    ],
)
def test_what_is_refused(tmp_path, platform, changes, said):
    with pytest.raises(ValueError, match=said):
        job(tmp_path, platform, **changes)


@pytest.mark.quick
def test_a_file_without_a_description(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("beta: 0.1")
    with pytest.raises(ValueError, match=r"^launch = None: give a mapping, such as \{hosts: 2,"):
        read_launch(read_run(path), Path(path), "slurm")
