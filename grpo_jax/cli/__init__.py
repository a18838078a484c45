"""The command `grpo-jax`: the Python API from a shell, with a run written down in a file.

jax is imported when a command runs, so that help and errors of the command line are immediate.
"""

from grpo_jax.cli.main import main

__all__ = ["main"]
