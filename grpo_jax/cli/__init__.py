"""The command `grpo-jax`: the Python API from a shell, with a run written down in a file.

Nothing here imports jax before a command does its work, so that help and completion answer at once.
"""

from grpo_jax.cli.main import main

__all__ = ["main"]
