"""Devices without hardware: the real compilers of TPUs and NVIDIA GPUs, where they are installed, on any machine.

What is lowered for such devices compiles to the program that the machine would run. It cannot be run here; what it
holds, reads, sends and calls can be read.

    pip install libtpu             # for TPUs: the extra `plan-tpu`
    pip install jax-cuda12-plugin  # for NVIDIA GPUs: the extra `plan-gpu`; of jax's own version
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

CHIPS = {
    "v4": ("v4", 32e9, "2x2x1"),
    "v5e": ("v5e", 16e9, "2x2"),
    "v5p": ("v5p", 95e9, "2x2x1"),
    "v6e": ("v6e", 32e9, "2x2"),
}
"""TPUs: name in a topology, bytes of a chip, and the smallest slice that the compiler knows."""

_SLICES = {8: {"v5e": "2x4", "v6e": "2x4", "v4": "2x2x2", "v5p": "2x2x2"}, 16: {"v5e": "4x4", "v6e": "4x4"}}


class GPU(NamedTuple):
    """An NVIDIA GPU, from the vendor's data sheets: bandwidth in bytes a second, memories in bytes.

    Each core has float32 lanes, threads and shared memory, of which a block may ask for `opt_in` bytes.
    """

    cores: int
    bandwidth: int
    l2: int
    ghz: float
    memory: float
    capability: tuple[int, int]
    lanes: int = 128
    threads: int = 2048
    shared: int = 233472
    opt_in: int = 232448


GPUS = {
    "H100": GPU(132, 3352320000000, 52428800, 1.98, 80e9, (9, 0)),
    "A100": GPU(108, 2039000000000, 41943040, 1.41, 80e9, (8, 0), lanes=64, shared=167936, opt_in=166912),
    "T4": GPU(40, 320064000000, 4194304, 1.59, 15.6e9, (7, 5), lanes=64, threads=1024, shared=65536, opt_in=65536),
}
"""NVIDIA GPUs that the compiler can be told of."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",  # a TPU's compiler ends the process at a flag that is not its own
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # only the compiler is used: another process may have it, or real TPUs
}
"""Variables with which a process that has no accelerator starts."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device, and how many.

    Attributes:
      kind: "H100", "A100", "T4", "v4", "v5e", "v5p" or "v6e".
      count: devices, chips of a TPU.
    """

    kind: str
    count: int

    @classmethod
    def read(cls, name: str) -> Target:
        """A target by its name.

        Raises:
          ValueError: a name of no known kind or number.

        Example:
          >>> Target.read("H100"), Target.read("v5e-8")
          (Target(kind='H100', count=1), Target(kind='v5e', count=8))
        """
        found = re.fullmatch(r"(\w+?)(?:-(\d+))?", name)
        kind, count = (found[1], int(found[2] or 1)) if found else (name, 0)
        counts = (
            range(1, 9) if kind in GPUS else (1, 2, 4, 8, *(n for n, of in _SLICES.items() if n > 8 and kind in of))
        )
        if kind not in (*GPUS, *CHIPS) or count not in counts:
            known = ", ".join((*GPUS, *CHIPS))
            raise ValueError(
                f"device is {name!r}: give one of {known}, with how many of them after a hyphen, as H100-8 or v5e-8"
                " (chips; up to 8 GPUs of a host, and 1, 2, 4 or 8 chips, of v5e and v6e 16 too)"
            )
        return cls(kind, count)

    @property
    def memory(self) -> float:
        """Bytes of one device."""
        return CHIPS[self.kind][1] if self.kind in CHIPS else GPUS[self.kind].memory

    @property
    def missing(self) -> str | None:
        """The package that its compiler comes in, if it is not installed."""
        module, package = ("libtpu", "libtpu") if self.kind in CHIPS else ("jax_cuda12_plugin", "jax-cuda12-plugin")
        return None if importlib.util.find_spec(module) else package

    def devices(self) -> Sequence[jax.Device]:
        """The devices. The process has to have been started with `ENVIRONMENT`."""
        return _tpus(self.kind, self.count) if self.kind in CHIPS else _gpus(self.kind, self.count)


def _tpus(kind: str, count: int) -> Sequence[jax.Device]:
    from jax.experimental import topologies

    name, _, smallest = CHIPS[kind]
    slices = _SLICES.get(count, {}).get(kind, smallest)
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{slices}").devices[:count]


def _gpus(kind: str, count: int) -> Sequence[jax.Device]:
    # jax has no public door to its CUDA plugin's topologies on a machine without a GPU.
    from jax._src import xla_bridge
    from jax._src.lib import xla_client

    library: Any = xla_client
    for step in (xla_bridge._discover_and_register_pjrt_plugins, lambda: library._xla.initialize_pjrt_plugin("cuda")):
        with contextlib.suppress(Exception):  # it was done already
            step()
    gpu = GPUS[kind]
    major, minor = gpu.capability
    config = f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {gpu.shared} threads_per_core_limit: {gpu.threads} core_count: {gpu.cores}
      fpus_per_core: {gpu.lanes} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {gpu.bandwidth} l2_cache_size: {gpu.l2} clock_rate_ghz: {gpu.ghz}
      device_memory_size: {int(gpu.memory)} shared_memory_per_block_optin: {gpu.opt_in}
      cuda_compute_capability {{ major: {major} minor: {minor} }} registers_per_core_limit: 65536
      registers_per_block_limit: 65536 }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
      device_description_str: "NVIDIA {kind}" """
    make = library._xla.get_default_c_api_topology
    return make("cuda", "", {"target_config": config, "topology": f"1x1x{count}"})._make_compile_only_devices()
