"""The programs of a run, compiled beside its first iteration: no later iteration waits for a compiler.

Which programs a run can need follows from its sizes; which of them it needs first, from what the policy does. The first
iteration compiles what it needs itself, and a thread beside it the rest.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax

from grpo_jax.devices.program import Program
from grpo_jax.devices.streams import beside
from grpo_jax.rollout.draw import DecodeSettings
from grpo_jax.rollout.programs import RolloutShapes
from grpo_jax.run.run import Run
from grpo_jax.types import Batch, Prompts
from grpo_jax.update.objective import sampling_of
from grpo_jax.update.programs import update_programs
from grpo_jax.update.state import TrainState


def programs_of(run: Run, state: TrainState) -> list[Program]:
    """The programs whose turn depends on what the policy does, the least likely first."""
    config, sizes = run.config, run.sizes
    params = state.params if state.old_params is None else state.old_params
    batch = abstract_batch(run, state)
    programs = [*update_programs(run.updater, state, batch).by_length]
    if run.sampler is None and run.interaction is None:  # what is read between turns has no size known before
        rollout = RolloutShapes.of(
            *(run.policy.model, params, sizes.prompts, run.prompt_length),
            num_generations=config.num_generations,
            max_completion_length=config.max_completion_length,
            batch_size=config.rollout_batch_size,
            settings=DecodeSettings(run.policy.eos_token_ids, run.policy.pad_token_id, sampling_of(config)),
        )
        programs = [*(() if rollout is None else rollout.programs()), *programs]
    return programs[::-1]


def abstract_batch(run: Run, state: TrainState) -> Batch:
    """The shapes of a minibatch, which comes from the host."""
    shape: Any = jax.ShapeDtypeStruct
    b, g, t = run.sizes.prompts_per_update, run.config.num_generations, run.config.max_completion_length
    log_probs = shape((b, g, t), "float32")
    return Batch(
        prompts=Prompts(tokens=shape((b, run.prompt_length), "int32"), lengths=shape((b,), "int32")),
        tokens=shape((b, g, t), "int32"),
        mask=shape((b, g, t), "bool"),
        advantages=shape((b, g), "float32"),
        sampling_log_probs=log_probs,
        ref_log_probs=None if state.ref_params is None else log_probs,
        initial_log_probs=None if state.initial_params is None else log_probs,
        counted=shape((b,), "bool") if run.config.dynamic_sampling else None,
        old_log_probs=None if run.sampler is None else log_probs,
    )


@contextlib.contextmanager
def compiled_ahead(run: Run, state: TrainState, *, say: Callable[[str], None]) -> Iterator[None]:
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
    if jax.process_count() > 1:
        programs.clear()

    def compile_all() -> None:
        for program in programs:
            if done.is_set():
                return
            with contextlib.suppress(Exception):  # whoever needs the program meets the fault, and tells of it
                program.lower().compile()

    with beside(compile_all):
        try:
            yield
        finally:
            done.set()
