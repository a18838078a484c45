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
from grpo_jax.update.programs import constant_programs, update_programs
from grpo_jax.update.state import TrainState


def programs_of(run: BaseRun, state: TrainState) -> list[Program]:
    """The programs of a run, in the order in which a thread beside the first iteration compiles them.

    The iteration compiles by itself what comes first, the prefill. So the thread begins with the decode after it, then
    the update, of completions of any length, and the rollout from its end. Last come an update's other shapes.
    """
    batch, rollout = abstract_batch(run, state), None
    by_length = update_programs(run.updater, state, batch).by_length
    # Of each shape of a packed sequence, an update and what measures and scores beside it.
    shapes = [i for i, program in enumerate(by_length) if program.function is by_length[0].function]
    second = [*shapes, len(by_length)][1] if by_length else 0
    if isinstance(run, Run) and run.interaction is None:  # what is read between turns has no size known before
        rollout = rollout_programs(run, state.params if state.old_params is None else state.old_params)
    sampling = [] if rollout is None else [*rollout.programs()]
    decode = [program for program in sampling if program.name.startswith("decode")][:1]
    others = [program for program in sampling if program not in decode][::-1]
    update = [*by_length[:second], *constant_programs(run.updater, state, batch)]
    return [*decode, *update, *others, *by_length[second:]]


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
                program.compile()

    with beside(compile_all):
        try:
            yield
        finally:
            done.set()
