"""Device memory and preferred dtypes, and ahead-of-time compilation for absent TPUs and NVIDIA GPUs.

A `Target` needs a compiler: the package libtpu (the extra `plan-tpu`) or jax-cuda12-plugin (`plan-gpu`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import jax

MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""File that contains the memory limit of a Linux container (control groups v2)."""


def platform_of(devices: Sequence[jax.Device] = ()) -> tuple[str, float]:
    """Return the platform and compute capability (0 if not a GPU) of the first device, or of JAX's default device."""
    settings: Any = jax.config  # typed as Any, since its fields are added at run time
    chosen = devices[0] if len(devices) else settings.jax_default_device
    first = jax.devices(chosen)[0] if isinstance(chosen, str) else chosen or jax.devices()[0]
    return first.platform, float(getattr(first, "compute_capability", 0))


def compute_dtype(name: str, devices: Sequence[jax.Device] = ()) -> Literal["float32", "bfloat16"]:
    """Return the dtype for matrix products, given a `GRPOConfig.compute_dtype`.

    "auto" selects bfloat16 on TPUs, and on GPUs with a compute capability of at least 8.0, otherwise float32.
    """
    if name != "auto":
        return cast(Literal["float32", "bfloat16"], name)
    platform, capability = platform_of(devices)
    return "bfloat16" if platform == "tpu" or capability >= 8 else "float32"


def has_fast_float32_sums(devices: Sequence[jax.Device] = ()) -> bool:
    """Return whether bfloat16 matrix products are fastest with float32 sums. This is true on CPUs from jax 0.10 on."""
    return platform_of(devices)[0] == "cpu" and jax.__version_info__ >= (0, 10)


def memory_of(device: jax.Device) -> int | None:
    """Return a device's memory in bytes, or None if unknown. For a CPU, this is the machine's or container's memory."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None or device.platform != "cpu":
        return limit
    limits = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if MEMORY_LIMIT.is_file() and (text := MEMORY_LIMIT.read_text(encoding="utf-8").strip()).isdigit():
        limits.append(int(text))
    return min(limits, default=None)


CHIPS = {
    "v4": (32e9, {4: "2x2x1", 8: "2x2x2"}),
    "v5e": (16e9, {4: "2x2", 8: "2x4", 16: "4x4"}),
    "v5p": (95e9, {4: "2x2x1", 8: "2x2x2"}),
    "v6e": (32e9, {4: "2x2", 8: "2x4", 16: "4x4"}),
}
"""TPUs: memory per chip in bytes, and slice topologies by number of chips. 1 or 2 chips use the topology for 4."""


class GPU(NamedTuple):
    """Specification of an NVIDIA GPU, from the vendor's data sheets. Sizes are in bytes."""

    cores: int  # number of streaming multiprocessors
    bandwidth: int  # bytes per second
    l2: int  # size of the L2 cache
    ghz: float  # maximum clock rate
    memory: float
    capability: tuple[int, int]  # compute capability (major, minor)
    lanes: int = 128  # float32 lanes per core
    threads: int = 2048  # maximum threads per core
    shared: int = 233472  # shared memory per core
    opt_in: int = 232448  # maximum shared memory per block


GPUS = {
    "H100": GPU(132, 3352320000000, 52428800, 1.98, 80e9, (9, 0)),
    "A100": GPU(108, 2039000000000, 41943040, 1.41, 80e9, (8, 0), lanes=64, shared=167936, opt_in=166912),
    "T4": GPU(40, 320064000000, 4194304, 1.59, 15.6e9, (7, 5), lanes=64, threads=1024, shared=65536, opt_in=65536),
}
"""NVIDIA GPUs supported as compilation targets."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",  # the TPU compiler aborts the process on unknown flags
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # only the compiler is used, so another process may use real TPUs
}
"""Environment variables for a process that compiles for absent devices."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Absent devices to compile for: `count` GPUs or TPU chips of a kind in `GPUS` or `CHIPS`."""

    kind: str
    count: int

    @classmethod
    def read(cls, name: str) -> Target:
        """Parse a name such as H100 or v5e-8. Raises ValueError if the kind or the count is not supported."""
        match = re.fullmatch(r"(\w+?)(?:-(\d+))?", name)
        kind, count = (match[1], int(match[2] or 1)) if match else (name, 0)
        counts = {1, 2, *CHIPS[kind][1]} if kind in CHIPS else range(1, 9)
        if kind not in (*GPUS, *CHIPS) or count not in counts:
            raise ValueError(
                f"device must be one of {', '.join((*GPUS, *CHIPS))}, optionally followed by the number of devices, as"
                f" in H100-8 or v5e-8; got {name!r}. Supported numbers are 1 to 8 GPUs, and 1, 2, 4, 8 or (for v5e and"
                " v6e) 16 TPU chips"
            )
        return cls(kind, count)

    @property
    def memory(self) -> float:
        """Memory of one device, in bytes."""
        return CHIPS[self.kind][0] if self.kind in CHIPS else GPUS[self.kind].memory

    @property
    def missing(self) -> str | None:
        """Name of the compiler package if it is not installed, else None."""
        module, package = ("libtpu", "libtpu") if self.kind in CHIPS else ("jax_cuda12_plugin", "jax-cuda12-plugin")
        return None if importlib.util.find_spec(module) else package

    def devices(self) -> Sequence[jax.Device]:
        """Create devices that this machine does not have. The process must have the variables in `ENVIRONMENT` set."""
        if self.kind in GPUS:
            return _gpus(self.kind, self.count)
        from jax.experimental import topologies

        slices = CHIPS[self.kind][1]
        name = f"{self.kind}:{slices.get(self.count, slices[4])}"
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices[: self.count]


def _gpus(kind: str, count: int) -> Sequence[jax.Device]:
    # jax has no public API for its CUDA plugin's topologies on machines without a GPU.
    from jax._src import xla_bridge
    from jax._src.lib import xla_client

    library: Any = xla_client
    with contextlib.suppress(Exception):  # already registered
        xla_bridge._discover_and_register_pjrt_plugins()
    with contextlib.suppress(Exception):  # already initialized
        library._xla.initialize_pjrt_plugin("cuda")
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
    options = {"target_config": config, "topology": f"1x1x{count}"}
    return library._xla.get_default_c_api_topology("cuda", "", options)._make_compile_only_devices()


class ProgramCost(NamedTuple):
    """Per-device cost of a program that was compiled, or rejected because it exceeds the memory. Sizes are in bytes."""

    arguments: int  # size of the arguments; 0 for a rejected program if the error does not count them
    temporaries: int  # size of temporary buffers; for a rejected program, all memory except the arguments
    results: int  # size of the results that do not reuse an argument's memory
    flops: float  # number of floating-point operations per call, excluding custom kernels; NaN if unknown
    seconds: float  # time to compile
    peak: int = 0  # peak device memory while the program runs, including the run's other arrays


def compile_program(lowered: jax.stages.Lowered, arguments: int = 0) -> ProgramCost:
    """Compile a program and return its cost. If it does not fit on a TPU, the size is read from the error message.

    `arguments` is the size of the params in bytes per device. It is subtracted if the size in the error includes it.
    """
    key = hash((lowered.as_text(), arguments))  # cached, because `plan` needs the update's cost twice
    if key not in _costs:
        _costs[key] = _compile(lowered, arguments)
    return _costs[key]


_costs: dict[int, ProgramCost] = {}


def _compile(lowered: jax.stages.Lowered, arguments: int) -> ProgramCost:
    begin = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # Find the size in the TPU compiler's error message. In some versions, it includes the program's arguments.
        without_arguments = re.search(r"Used ([\d.]+)([KMGT]) of", str(error))
        match = without_arguments or re.search(r"HLO temporaries \(([\d.]+)([KMGT])\)", str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or match is None:
            raise
        size = int(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1))
        counted = 0 if without_arguments else arguments
        return ProgramCost(counted, max(0, size - counted), 0, math.nan, time.monotonic() - begin)
    seconds, stats = time.monotonic() - begin, compiled.memory_analysis()
    assert stats is not None, "memory_analysis must be available on CPUs, GPUs and TPUs"
    flops = math.nan
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a jaxlib older than the compiler cannot parse its output
        flops = (compiled.cost_analysis() or {}).get("flops", math.nan)
    return ProgramCost(
        stats.argument_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        flops,
        seconds,
    )
