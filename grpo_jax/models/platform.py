"""The platform that computes: its memory, and the dtype of matrix products that suits it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import jax

CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""Where Linux says what the processes of a container may take."""


def platform_of(devices: Sequence[jax.Device] = ()) -> tuple[str, float]:
    """Return the platform of devices of one kind, and an NVIDIA GPU's compute capability, else 0.

    Without any, those of the device that computes where none is named.
    """
    first = devices[0] if len(devices) else _default_device()
    return first.platform, float(getattr(first, "compute_capability", 0))


def _default_device() -> jax.Device:
    settings: Any = jax.config  # its fields are added at run time
    chosen = settings.jax_default_device
    return jax.devices(chosen)[0] if isinstance(chosen, str) else chosen or jax.devices()[0]


def compute_dtype(name: str, devices: Sequence[jax.Device] = ()) -> Literal["float32", "bfloat16"]:
    """The dtype of matrix products that `GRPOConfig.compute_dtype` names; "auto" is decided by the devices."""
    if name != "auto":
        return cast(Literal["float32", "bfloat16"], name)
    platform, capability = platform_of(devices)
    return "bfloat16" if platform == "tpu" or capability >= 8 else "float32"


def has_wide_sums(devices: Sequence[jax.Device] = ()) -> bool:
    """Whether products of bfloat16 matrices are fastest if XLA gives their sums in float32 (`models.matmul`).

    That is so on CPUs from jax 0.10 on, which multiplies by the processor's matrix units; before, it was the slowest
    way.
    """
    return platform_of(devices)[0] == "cpu" and jax.__version_info__ >= (0, 10)


def memory_of(device: jax.Device) -> int | None:
    """Return the bytes that a device's programs may hold: of a CPU those of the machine, or of the container.

    None where nothing says so.
    """
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None or device.platform != "cpu":
        return limit
    found = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of control groups, the second and the first version
        path = CONTROL_GROUPS / name
        if path.is_file() and (text := path.read_text(encoding="utf-8").strip()).isdigit():
            found.append(int(text))
    return min(found, default=None)
