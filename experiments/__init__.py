"""Runnable experiments. Each module docstring gives the command, the run time and the expected results."""

import os

# The experiments do not need PyTorch, so the warning from transformers that it was not found would be misleading.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
