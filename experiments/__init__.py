"""Scripts that run: each starts with its command, its time and what to expect."""

import os

# They need no PyTorch, and the advice of transformers that it was not found reads like a fault.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
