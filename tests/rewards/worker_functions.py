"""Reward functions for test_workers: they are sent to worker processes, so this module imports little."""

import asyncio
import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import time


def length(completions):
    return [len(text) for text in completions]


def whole_batch(completions, answer, trainer_state=None):
    """Return scores that encode the number of completions in the call, the step, and each length and answer."""
    start = 100 * len(completions) + (0 if trainer_state is None else trainer_state.global_step)
    return [start + len(text) + truth for text, truth in zip(completions, answer, strict=True)]


def is_told_to_end(completions):
    """Send SIGTERM to this process and to a child process, and return the child's exit code."""
    os.kill(os.getpid(), signal.SIGTERM)
    child = subprocess.Popen(["sleep", "60"])
    child.terminate()
    return [child.wait()] * len(completions)


def in_the_worker(completions):
    """Return properties of the worker process as numbers."""
    return [float("jax" in sys.modules), os.getpid(), os.getpgid(0), float(os.environ["JAX_PLATFORMS"] == "cpu")]


def by_text(completions):
    """Do for each completion what its text says."""
    return [misbehave([text], [text])[0] for text in completions]


async def row_of_worker(completion, row):
    await asyncio.sleep(0.2)
    return 6 / row["by"]


def starts_a_process(completions, pid_file):
    process = subprocess.Popen(["sleep", "600"])
    with open(pid_file[0], "w", encoding="ascii") as file:
        file.write(str(process.pid))
    if completions[0] == "exit":
        os._exit(3)
    process.wait()


def writes_its_pid_and_hangs(completions, pid_file):
    with open(pid_file[0], "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    while True:
        pass


def misbehave(completions, how):
    """Do what the first entry of `how` says; otherwise score the length."""
    action = ACTIONS.get(how[0])
    return length(completions) if action is None else action(completions)


def throw(error):
    raise error


def hang_deaf(completions):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


ACTIONS = {
    "raise": lambda completions: throw(KeyError("gold")),
    # One C call that holds the GIL, so that no signal handler and no other thread runs.
    "hang in C": lambda completions: re.match(r"(a+)+$", "a" * 64 + "b"),
    "hang deaf": hang_deaf,
    "slow async": lambda completions: asyncio.sleep(600),
    "told to end": is_told_to_end,
    "a None": lambda completions: [None, *length(completions)[1:]],
    "nan": lambda completions: [float("nan"), *length(completions)[1:]],
    "huge text": lambda completions: "x" * 5_000_000,
    "message without end": lambda completions: throw(ValueError("y" * 5_000_000)),
    # Zeros use address space, which the limit counts, but no physical memory.
    "memory": lambda completions: [bytes(2**22) for _ in itertools.count()],
    "exit": lambda completions: os._exit(3),
    "kill": lambda completions: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda completions: ctypes.string_at(0),
}
