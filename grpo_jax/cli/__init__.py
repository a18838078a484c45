"""The `grpo-jax` command: the Python API from a shell, with runs described in YAML files.

jax is imported only when a command runs, so that help and usage errors are immediate.
"""
