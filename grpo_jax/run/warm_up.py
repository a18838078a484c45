"""The programs of a run, compiled beside its first iteration: no later iteration waits for a compiler.

Which programs a run can need follows from its sizes; which of them it needs first, from what the policy does. The first
iteration compiles what it needs itself, and a thread beside it the rest.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import jax

from grpo_jax.devices.program import Program
from grpo_jax.devices.streams import beside
from grpo_jax.run.programs import abstract_batch, rollout_programs
from grpo_jax.run.run import BaseRun, Run
from grpo_jax.update.programs import update_programs
from grpo_jax.update.state import TrainState


def programs_of(run: BaseRun, state: TrainState) -> list[Program]:
    """The programs whose turn depends on what the policy does, the least likely first."""
    programs = [*update_programs(run.updater, state, abstract_batch(run, state)).by_length]
    if isinstance(run, Run) and run.interaction is None:  # what is read between turns has no size known before
        rollout = rollout_programs(run, state.params if state.old_params is None else state.old_params)
        programs = [*(() if rollout is None else rollout.programs()), *programs]
    return programs[::-1]


@contextlib.contextmanager
def compiled_ahead(run: BaseRun, state: TrainState, *, say: Callable[[str], None]) -> Iterator[None]:
    """Compile the programs of a run while the block runs, one after another; its end waits for the present one.

    How many there are is said first, so that nobody wonders what a first iteration waits for.

    Not with several processes: a GPU's compiler shares its trials of kernels among them, and waits for those that have
    stopped compiling.
    """
    done = threading.Event()
    programs = programs_of(run, state)
    if programs:
        kinds = Counter(program.name.split()[0] for program in programs)
        say(f"the first iteration compiles: {', '.join(f'{kind} × {n}' for kind, n in sorted(kinds.items()))}")
    ahead = programs if jax.process_count() == 1 else []

    def compile_all() -> None:
        for program in ahead:
            if done.is_set():
                return
            with contextlib.suppress(Exception):  # whoever needs the program meets the fault, and tells of it
                program.lower().compile()

    with beside(compile_all):
        try:
            yield
        finally:
            done.set()
