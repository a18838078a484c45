"""A command's process has few heaps, by glibc's own account, and what the user says of them counts."""

import os
import platform
import subprocess
import sys

import pytest

COUNT = """
import ctypes, os, sys, tempfile, threading

from grpo_jax.cli import main

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.fopen.argtypes, libc.fclose.argtypes = [ctypes.c_char_p] * 2, [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]

def count():
    # Threads that are there at the same time and allocate: each asks for a heap of its own.
    together = threading.Barrier(8)
    def work():
        together.wait()
        libc.malloc(100_000)
        together.wait()
    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    path = os.path.join(tempfile.mkdtemp(), "info").encode()
    file = libc.fopen(path, b"w")
    libc.malloc_info(0, file), libc.fclose(file)
    print("heaps", open(path).read().count("<heap nr="))

os.cpu_count = lambda: int(sys.argv[1])
import grpo_jax.cli.commands as commands
commands.COMMANDS = {"report": lambda arguments: count()}
main(["report", "somewhere"])
"""


def heaps(cores, **variables):
    """How many heaps a command has that allocates in eight threads."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
    command = [sys.executable, "-c", COUNT, str(cores)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert found.returncode == 0, found.stderr
    return int(found.stdout.split()[-1])


@pytest.mark.quick
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such heaps")
def test_a_command_has_a_heap_for_four_cores():
    assert heaps(2) == 1
    assert heaps(16) == 4
    assert heaps(2, MALLOC_ARENA_MAX="3") == 3
