"""The process that `plan` starts: a request on standard input, and its plan on standard output."""

import sys

from grpo_jax.planning.estimate import answer

if __name__ == "__main__":
    print(answer(sys.stdin.read()))
