"""The description of a launch (`launch` in a RUN.yaml): hosts, accelerator, image, storage; and its check."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_type_hints

from grpo_jax.cli.runfile import RunFile
from grpo_jax.config.fields import Count, NotNegative, Positive, read, unknown_field
from grpo_jax.messages import nearest, problems_of, raise_all, show
from grpo_jax.types import Json
from grpo_jax.watch.writer import refuse_bucket

Platform = Literal["slurm", "jobset", "kubeflow", "ray", "tpu-vm"]
"""The platforms that start processes."""


class _Chips(NamedTuple):
    """A generation of TPUs, as GKE, Google Cloud and Ray call it; `cores` of a chip count in a slice's cloud name."""

    gke: str
    cloud: str
    cores: int
    version: str
    ray: str


_TPUS = {
    "v4": _Chips("tpu-v4-podslice", "v4", 2, "tpu-ubuntu2204-base", "TPU-V4"),
    "v5e": _Chips("tpu-v5-lite-podslice", "v5litepod", 1, "v2-alpha-tpuv5-lite", "TPU-V5LITEPOD"),
    "v5p": _Chips("tpu-v5p-slice", "v5p", 2, "v2-alpha-tpuv5", "TPU-V5P"),
    "v6e": _Chips("tpu-v6e-slice", "v6e", 1, "v2-alpha-tpuv6e", "TPU-V6E"),
}
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}

_GPUS = {
    "T4": "nvidia-tesla-t4",
    "L4": "nvidia-l4",
    "A100": "nvidia-tesla-a100",
    "H100": "nvidia-h100-80gb",
    "H200": "nvidia-h200-141gb",
    "B200": "nvidia-b200",
}
"""GPU → the label of its nodes in GKE."""


class Accelerator(NamedTuple):
    """The devices that the hosts compute with.

    Attributes:
      kind: "cpu", a GPU or a TPU.
      per_host: devices of a host: 1 for a CPU.
      hosts: of a TPU's slice; None where it may be any number.
    """

    kind: str
    per_host: int
    hosts: int | None = None

    @classmethod
    def read(cls, name: str) -> Accelerator:
        """Read its name: "cpu", "H100-8" (GPUs of one host) or "v5e-16" (chips of a slice).

        Raises:
          ValueError: no such accelerator, or not in this number.

        Example:
          >>> Accelerator.read("H100-8"), Accelerator.read("v5e-16")
          (Accelerator(kind='H100', per_host=8, hosts=None), Accelerator(kind='v5e', per_host=4, hosts=4))
        """
        found = re.fullmatch(r"(\w+?)(?:-(\d+))?", name)
        kind, count = (found[1], int(found[2] or 1)) if found else (name, 0)
        if name == "cpu":
            return cls("cpu", 1)
        if kind in _GPUS and 1 <= count <= 8:
            return cls(kind, count)
        if kind in _TPUS:
            slices = _CUBES if _TPUS[kind].cores == 2 else _FLAT
            if count not in slices:
                raise ValueError(f"{kind} has slices of {', '.join(map(str, slices))} chips; give one, as {kind}-16")
            per_host = count if slices is _FLAT and count <= 8 else 4
            return cls(kind, per_host, count // per_host)
        known = ("cpu", *_GPUS, *_TPUS)
        close = nearest(kind, known)
        raise ValueError(
            (f"did you mean {close}? " if close else "")
            + f"give one of {', '.join(known)}, with how many after a hyphen: GPUs of a host (up to 8), as H100-8, or"
            " chips of a slice, as v5e-16"
        )

    @property
    def tpu(self) -> _Chips | None:
        """The names of its generation, None where it is no TPU."""
        return _TPUS.get(self.kind)

    @property
    def topology(self) -> str:
        """How the chips of a slice lie."""
        chips = self.per_host * (self.hosts or 1)
        return (_CUBES if _TPUS[self.kind].cores == 2 else _FLAT)[chips]

    @property
    def gke(self) -> str:
        """The label of its nodes in GKE."""
        return self.tpu.gke if self.tpu else _GPUS[self.kind]


class Launch(NamedTuple):
    """The fields of `launch`.

    Attributes:
      name: of the job; default that of the file.
      hosts: machines; of a TPU's slice they follow from it.
      accelerator: "cpu", GPUs of each host ("H100-8"), or a TPU's slice ("v5e-16").
      image: of the container, with grpo_jax in it (jobset, kubeflow).
      workdir: the folder of RUN.yaml as the hosts have it; default where it is here.
      storage: a directory that all hosts share; the run directory is made in it.
      claim: name of the PersistentVolumeClaim that is mounted at `storage` (jobset, kubeflow).
      cpus: of each host.
      memory: of each host, as Kubernetes and Slurm write it: "64G".
      hours: after which the job is ended (slurm, jobset, kubeflow).
      restarts: how often the same command is given again after a failure.
      setup: lines of shell before the command, such as `source venv/bin/activate` (slurm, tpu-vm).
      partition: of Slurm.
      account: of Slurm.
      namespace: of Kubernetes.
      zone: of Google Cloud (tpu-vm).
      project: of Google Cloud; default that of gcloud's configuration.
    """

    name: str = ""
    hosts: Count = 1
    accelerator: str = "cpu"
    image: str | None = None
    workdir: str = ""
    storage: str = ""
    claim: str | None = None
    cpus: Count | None = None
    memory: str | None = None
    hours: Positive | None = None
    restarts: NotNegative = 3
    setup: str | None = None
    partition: str | None = None
    account: str | None = None
    namespace: str | None = None
    zone: str | None = None
    project: str | None = None

    @property
    def device(self) -> Accelerator:
        """The accelerator."""
        return Accelerator.read(self.accelerator)


class Job(NamedTuple):
    """A launch that is checked, and the command of each process, as arguments of `grpo-jax`."""

    launch: Launch
    arguments: list[str]

    @property
    def command(self) -> str:
        """The command as a line of shell."""
        return shlex.join(["grpo-jax", *self.arguments])


_NEEDED = {"jobset": ("image", "claim"), "kubeflow": ("image", "claim"), "tpu-vm": ("zone",)}
_NOT_PASSED_ON = ("run_dir", "launch")
_NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
_ONE_WORD = ("image", "claim", "memory", "partition", "account", "namespace", "zone", "project")


def read_launch(
    run: RunFile,
    path: Path,
    platform: Platform,
    keys: Mapping[str, str] | None = None,
    instead: Mapping[str, object] | None = None,
) -> Job:
    """Read the description of a run's launch, and refuse what that platform cannot do.

    Args:
      run: its `launch` key, mesh and run directory.
      path: of RUN.yaml.
      keys: those that the command line sets, which the command of the job sets too.
      instead: fields in the place of those of the file.

    Raises:
      ValueError: with one line per fault.
    """
    stated = run.values.get("launch")
    if not isinstance(stated, dict):
        raise ValueError(
            f"launch = {show(stated)}: give a mapping, such as {{hosts: 2, accelerator: H100-8, storage: /mnt/runs}}"
        )
    folder = path.expanduser().resolve().parent
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")
    launch, problems = _fields({"name": name, "workdir": str(folder), **stated, **(instead or {})})
    problems += [] if problems else [*_problems(launch, platform)]
    device = None if problems else launch.device
    if device is not None:
        launch = launch._replace(hosts=device.hosts or launch.hosts)
        problems += _mesh_problems(run, launch)
    storage = Path(launch.storage)
    run_dir = storage / (run.run_dir or "")
    if run.run_dir is None:
        problems.append("run_dir: null keeps nothing, and a restart would begin anew; leave it out, or give a name")
    elif storage not in run_dir.parents:
        problems.append(f"run_dir = {str(run.run_dir)!r}: is not in launch.storage; give a name, as runs/{launch.name}")
    raise_all(f"launch of {path.name} on {platform}", problems)
    own = {"run_dir": str(run_dir)} | {name: text for name, text in (keys or {}).items() if name not in _NOT_PASSED_ON}
    return Job(launch, ["train", path.name, *(part for name, text in own.items() for part in (f"--{name}", text))])


def _fields(stated: Json) -> tuple[Launch, list[str]]:
    """Return the fields that a mapping states, and the error lines of those that are none, or of another type."""
    kinds = get_type_hints(Launch, include_extras=True)
    problems = [f"launch.{unknown_field(name, set(kinds), {})}" for name in stated if name not in kinds]
    values = dict(Launch._field_defaults)
    for name, value in stated.items():
        if name in kinds:
            values[name], fault = read(kinds[name], value)
            problems += [f"launch.{name} = {show(value)}: {fault}"] if fault else []
    return Launch() if problems else Launch._make(values[name] for name in Launch._fields), problems


def _problems(launch: Launch, platform: Platform) -> list[str]:
    """Return the error lines of a launch whose fields have the right types."""
    problems = []
    if not re.fullmatch(_NAME, launch.name):
        problems.append(
            f"launch.name = {launch.name!r}: use up to 40 small letters, digits and hyphens, from a letter on"
        )
    for name in _NEEDED.get(platform, ()):
        if getattr(launch, name) is None:
            problems.append(f"launch.{name}: is missing; {platform} needs it")
    for name in _ONE_WORD:
        value = getattr(launch, name)
        if value is not None and not re.fullmatch(r"[\w./:@-]+", value):
            problems.append(f"launch.{name} = {value!r}: use letters, digits and ./:@_- only")
    try:
        refuse_bucket(launch.storage, argument="launch.storage")
        if not launch.storage.startswith("/"):
            problems.append(
                f"launch.storage = {launch.storage!r}: give a directory that all hosts share, from / on, as /mnt/runs"
            )
    except ValueError as error:
        problems += problems_of(error)
    return [*problems, *_accelerator_problems(launch, platform)]


def _accelerator_problems(launch: Launch, platform: Platform) -> list[str]:
    """Return the error lines of the accelerator, and of the hosts and the platform that it does not go with."""
    asked = f"launch.accelerator = {launch.accelerator!r}"
    try:
        device = launch.device
    except ValueError as error:
        return [f"{asked}: {line}" for line in problems_of(error)]
    problems = []
    if device.hosts is not None and launch.hosts not in (1, device.hosts):
        problems.append(
            f"launch.hosts = {launch.hosts}: a slice {launch.accelerator} has {device.hosts}; leave it out, or take"
            " another slice"
        )
    if platform == "slurm" and device.tpu:
        problems.append(f"{asked}: Slurm has no TPUs here; use jobset or tpu-vm")
    if platform == "tpu-vm" and not device.tpu:
        problems.append(f"{asked}: tpu-vm takes a slice, such as v5e-16")
    return problems


def _mesh_problems(run: RunFile, launch: Launch) -> list[str]:
    """Return an error line if the run's mesh is not of all devices of the launch."""
    total, used = launch.hosts * launch.device.per_host, math.prod((run.config.mesh or {}).values())
    if used == total:
        return []
    used_by = (
        f"mesh = {show(run.config.mesh)}: takes {used}" if run.config.mesh else "mesh: is missing; the run takes 1"
    )
    return [f"{used_by} of the {total} devices of launch; give mesh: data={total}, or another of {total}"]
