"""Reward functions for test_reward_workers: they are sent to worker processes, so this module imports little."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time


def length(completions):
    return [len(text) for text in completions]


def whole_batch(completions, answer):
    """Length and number of completions at once: a score that depends on how the batch was cut."""
    return [100 * len(completions) + len(text) + truth for text, truth in zip(completions, answer, strict=True)]


def by_state(completions, trainer_state):
    return [trainer_state["step"] + len(text) for text in completions]


def slow_when_long(completions):
    time.sleep(0.05 * len(completions[0]))
    return length(completions)


def is_told_to_end(completions):
    """Its process gets a SIGTERM, and so does one that it has started; how that one ended."""
    os.kill(os.getpid(), signal.SIGTERM)
    child = subprocess.Popen(["sleep", "60"])
    child.terminate()
    return [child.wait()] * len(completions)


def sleeps(completions):
    time.sleep(0.8)
    return length(completions)


def in_the_worker(completions):
    """Facts of the worker's process, as numbers."""
    package = any(name.split(".")[0] in ("jax", "grpo_jax") for name in sys.modules)
    return [float(package), os.getpid(), os.getpgid(0), float(os.environ["JAX_PLATFORMS"] == "cpu")]


def by_text(completions):
    """Each completion says what happens to it."""
    return [misbehave([text], [text])[0] for text in completions]


def row_of_worker(completion, row):
    return 6 / row["by"]


async def row_of_worker_async(completion, row):
    await asyncio.sleep(0.2)
    return float(row["by"])


def prints(completions):
    print("said", completions[0])
    return length(completions)


def starts_a_process(completions, pid_file):
    process = subprocess.Popen(["sleep", "600"])
    with open(pid_file[0], "w", encoding="ascii") as file:
        file.write(str(process.pid))
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


def _raise(completions):
    raise KeyError("gold")


def _hang(completions):
    while True:
        pass


def _hang_in_c(completions):
    # One call that keeps the interpreter lock: no signal handler and no thread gets a word in.
    re.match(r"(a+)+$", "a" * 64 + "b")


def _hang_deaf(completions):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


async def _slow_async(completions):
    await asyncio.sleep(600)


async def _async_raise(completions):
    raise KeyError("gold")


def _memory(completions):
    hoard = []
    while True:
        hoard.append(bytes(2**22))  # zeros that no page is given for: the limit counts addresses, the machine is spared


def _print_without_end(completions):
    while True:
        print("x" * 100)


def _print_a_little_too_much(completions):
    # Less than a buffer: it reaches the file only after the function has returned.
    print("x" * 5000)
    return length(completions)


def _huge_text(completions):
    return "x" * 5_000_000


def _huge_values(completions):
    return ["x" * 5_000_000, *length(completions)[1:]]


def _message_without_end(completions):
    raise ValueError("y" * 5_000_000)


def _generator_without_end(completions):
    while True:
        yield 1.0


ACTIONS = {
    "raise": _raise,
    "hang": _hang,
    "hang in C": _hang_in_c,
    "hang deaf": _hang_deaf,
    "slow async": _slow_async,
    "async raise": _async_raise,
    "wrong count": lambda completions: [1.0] * (len(completions) + 7),
    "returns None": lambda completions: None,
    "a None": lambda completions: [None, *length(completions)[1:]],
    "nan": lambda completions: [float("nan"), *length(completions)[1:]],
    "inf": lambda completions: [float("inf"), *length(completions)[1:]],
    "huge int": lambda completions: [10**400, *length(completions)[1:]],
    "string": lambda completions: ["1.0", *length(completions)[1:]],
    "scalar": lambda completions: 1.0,
    "complex": lambda completions: [1j, *length(completions)[1:]],
    "print without end": _print_without_end,
    "print a little too much": _print_a_little_too_much,
    "huge text": _huge_text,
    "huge values": _huge_values,
    "message without end": _message_without_end,
    "generator without end": _generator_without_end,
    "memory": _memory,
    "sys.exit": lambda completions: sys.exit(3),
    "exit": lambda completions: os._exit(3),
    "kill": lambda completions: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda completions: ctypes.string_at(0),
}
