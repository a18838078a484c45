"""Environments for test_instances: they are made in worker processes, so this module imports little."""

import asyncio
import functools
import os
import random
import subprocess
import sys
import time
from pathlib import Path


class Number(float):
    """A number that JSON writes as one."""


class Half:
    """A number that JSON has none for."""

    def __float__(self):
        return 0.5

    def __str__(self):
        return "one half"


class Game:
    """Speaks text, and misbehaves when it is told to."""

    def __init__(self, start=0):
        self.total = start

    def reset(self, **row):
        self.row, self.heard = row, []
        return "(begin) "

    async def respond(self, text):
        self.heard.append(text)
        await asyncio.sleep(0.001)
        misbehave(text)
        return None if text == "bye" else f"{len(self.heard)}: {text}"

    def get_reward(self):
        return float(len(self.heard))


class Cursed(Game):
    """What happens depends on the row."""

    async def respond(self, text):
        misbehave(["hang", "print", "exit", ""][self.row["target"]])
        return await super().respond(text[:3])


class Desk:
    """Has tools, and nothing else."""

    def reset(self, **row):
        self.total = 0

    def add(self, n: int, times: int = 1) -> int:
        """Add to the sum.

        Args:
            n: how much
            times: how often
        """
        self.total += n * times
        return self.total

    async def later(self, text: str) -> str:
        """Say something a little later.

        Args:
            text: what is said
        """
        await asyncio.sleep(0.01)
        misbehave(text)
        return text

    @staticmethod
    def double(n: int) -> int:
        """Double a number.

        Args:
            n: the number
        """
        return 2 * n

    @classmethod
    def named(cls, what: str) -> str:
        """Say what this is.

        Args:
            what: a word
        """
        return f"{cls.__name__} {what}"

    def give(self, what: str):
        """Return something odd.

        Args:
            what: which
        """
        odd = {"bytes": b"caf\xc3\xa9\xff", "half": Half(), "list": [1, (2, {"a": None})], "number": Number(1.5)}
        odd |= {"none": None, "text": "ü\ud83d", "set": {1}, "long": "x" * 100_000, "object": object}
        return odd[what]

    def process(self) -> list:
        """Tell of its process."""
        package = any(name.split(".")[0] in ("jax", "grpo_jax") for name in sys.modules)
        return [os.getpid(), os.getpgid(0), package, random.random()]

    def get_reward(self):
        return Half()


class Breaks:
    """Cannot be made."""

    def __init__(self):
        raise OSError("no such level")

    def respond(self, text):
        return None


def make_game():
    return Game(start=7)


def make_local():
    class Local:
        def respond(self, text):
            return None

    return Local()


started = functools.partial(Game, 3)


def misbehave(text):
    """What a text asks for."""
    if text == "hang":
        time.sleep(600)
    if text == "spin":
        while True:
            pass
    if text == "exit":
        os._exit(3)
    if text == "crash":
        os.kill(os.getpid(), 11)
    if text == "print":
        print("x" * 3_000_000)
    if text == "memory":
        [0] * 10**9
    if text == "raise":
        raise LookupError("lost my way")
    if text == "quit":
        raise SystemExit(4)
    if text.startswith("child "):
        child = subprocess.Popen(["sleep", "600"])
        Path(text.removeprefix("child ")).write_text(str(child.pid), encoding="ascii")
        time.sleep(600)
    if text == "said":
        print("hello from the game")
