"""Devices: the mesh and its sharding table, the platform, several processes, streams of a CPU."""

from grpo_jax.devices.distributed import add_flags, initialize, start
from grpo_jax.devices.sharding import make_mesh

__all__ = ["add_flags", "initialize", "make_mesh", "start"]
