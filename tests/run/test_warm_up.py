"""Compiling ahead: what a run needs later is there, whatever its policy turns to, and there is not much of it."""

import threading

import jax
import pytest
from tiny import tiny_policy

from grpo_jax import GRPOConfig, plan, train
from grpo_jax.devices import pieces
from grpo_jax.devices.program import Program
from grpo_jax.run import loop, warm_up
from grpo_jax.run.beginning import new_state
from grpo_jax.run.prepare import prepare
from grpo_jax.run.run import Arguments
from grpo_jax.run.warm_up import programs_of
from grpo_jax.update import packed

TEXTS = ["ab", "c", "defgh", "gh ijk lmn", "i", "jkl"]


def config_of(**settings):
    return GRPOConfig(
        **{
            "num_generations": 16,
            "per_device_train_batch_size": 64,
            "max_completion_length": 192,
            "learning_rate": 4e-2,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "max_steps": 12,
            "beta": 1e-3,
        }
        | settings
    )


class _End:
    """The last program: it says that all others have been compiled."""

    name = "the end"

    def __init__(self):
        self.reached = threading.Event()

    def lower(self):
        return self

    def compile(self):
        self.reached.set()


def compiled_late(monkeypatch, config):
    """(names of the programs that were compiled after the second iteration, mean length of each iteration)."""
    end, names, lengths = _End(), [], []
    monkeypatch.setattr(warm_up, "programs_of", lambda *given: [*programs_of(*given), end])
    jax.monitoring.clear_event_listeners()

    def listen(event, seconds, **about):
        if event.endswith("backend_compile_duration") and len(lengths) >= 2:
            names.append(about.get("fun_name"))

    def shorter(completion_ids):
        return [-float(len(ids)) for ids in completion_ids]

    def callback(step, metrics):
        if "completions/mean_length" not in metrics:
            return  # a further pass over the same completions
        if len(lengths) == 1:
            assert end.reached.wait(300), "the programs of the run were compiled beside its first iterations"
        lengths.append(metrics["completions/mean_length"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        train(tiny_policy(), [{"prompt": text} for text in TEXTS], shorter, config, callbacks=[callback])
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(lengths) == 12
    return names, lengths


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_generations": 8, "max_completion_length": 240, "rollout_batch_size": 24},
        {"num_generations": 4, "max_completion_length": 200, "num_iterations": 2, "max_steps": 24, "beta": 0.0},
        {"per_device_train_batch_size": 16, "mesh": {"data": 2, "fsdp": 2}, "max_completion_length": 100},
    ],
    ids=["the workload of the issue", "prompts that wait", "two passes", "a mesh"],
)
def test_after_the_second_iteration_hardly_anything_is_compiled(monkeypatch, settings):
    """Completions shrink from hundreds of tokens to a few: every layout comes up, and every shape of an update."""
    names, lengths = compiled_late(monkeypatch, config_of(**settings))
    assert lengths[1] > 3 * min(lengths), "the completions got shorter, or this test sees nothing"
    assert len(names) <= 2, names


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.0},
        {"beta": 1e-3, "gradient_checkpointing": True},
        {"beta": 1e-3, "num_generations": 8, "rollout_batch_size": 24},
        {"num_iterations": 2, "max_steps": 2},
        {"per_device_train_batch_size": 16, "mesh": {"data": 2, "fsdp": 2}, "max_completion_length": 100, "beta": 0.0},
        {"beta": 0.0, "pad_to_multiple_of": 64},
    ],
    ids=["no reference", "in pieces", "prompts that wait", "two passes", "a mesh", "each prompt alone"],
)
def test_what_is_compiled_ahead_is_what_the_run_calls(monkeypatch, settings):
    """Where all of it is there before the first iteration, the iteration compiles none of these functions."""
    end, names, begin = _End(), [], loop._begin_iteration
    monkeypatch.setattr(warm_up, "programs_of", lambda *given: [*programs_of(*given), end])
    functions = {"prefill", "refill", "decode", "move", "add_gradients", "measure"}
    functions |= {"read_some", "add_prompts", "apply_sums"}
    if "pad_to_multiple_of" in settings:  # a prompt fills a sequence: those of zero-signal groups are read apart
        monkeypatch.setattr(packed, "CPU_TOKENS", 64)
    if "gradient_checkpointing" in settings:
        monkeypatch.setattr(pieces, "CACHED", -1)
        functions |= {"layer_piece", "other_piece"}

    def begin_when_all_is_there(state):
        if not end.reached.is_set():
            assert end.reached.wait(300), "the programs of the run were compiled before its first iteration"
            jax.monitoring.register_event_duration_secs_listener(listen)
        return begin(state)

    def listen(event, seconds, **about):
        if event.endswith("backend_compile_duration"):
            names.append(about["fun_name"].removeprefix("jit(").removesuffix(")"))

    monkeypatch.setattr(loop, "_begin_iteration", begin_when_all_is_there)
    config = config_of(**{"max_steps": 1, "max_completion_length": 40} | settings)
    rewards = lambda completions: [float(i == 0) for i in range(len(completions))]  # one group has a gradient
    try:
        train(tiny_policy(), [{"prompt": text} for text in TEXTS], rewards, config)
    finally:
        jax.monitoring.clear_event_listeners()
    assert names, "small functions are compiled when they are called"
    if "mesh" in settings:  # which takes what others leave, wherever XLA has put that
        functions -= {"read_some", "add_prompts", "apply_sums"}
    late = functions & set(names)
    assert not late, (late, names)


def run_of(policy, config):
    rows = [{"prompt": text} for text in TEXTS]
    return prepare(Arguments(policy, rows, lambda completions: [0.0] * len(completions), config))


@pytest.mark.parametrize(("beta", "second"), [(0.1, "score"), (0.0, "measure")])
def test_plan_lists_what_the_first_iteration_says_it_compiles(monkeypatch, beta, second):
    policy, config = tiny_policy(), config_of(beta=beta)
    run = run_of(policy, config)
    names = [program.name for program in programs_of(run, new_state(run))]
    assert sorted(plan(policy.config, config, prompt_length=run.prompt_length).programs) == sorted(names)
    nothing = jax.jit(lambda: None)
    monkeypatch.setattr(warm_up, "programs_of", lambda *given: [Program.of(name, nothing) for name in names])
    said = []
    with warm_up.compiled_ahead(run, new_state(run), say=said.append):
        pass
    counts = {kind: sum(name.startswith(kind) for name in names) for kind in ("decode", second, "update")}
    assert all(f"{kind} × {n}" in said[0] for kind, n in counts.items()), said
    assert counts["update"] > 1
    assert counts[second] == counts["update"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 24),
        ({"max_completion_length": 16, "num_generations": 2, "per_device_train_batch_size": 8}, 8),
        ({"num_generations": 8, "rollout_batch_size": 16}, 16),
        ({"per_device_train_batch_size": 1024, "max_completion_length": 240}, 29),
    ],
)
def test_programs_are_few_and_follow_from_the_sizes(settings, most):
    run = run_of(tiny_policy(), config_of(**settings))
    names = [program.name for program in programs_of(run, new_state(run))]
    assert len(names) == len(set(names)) <= most, names
    assert sum(name.startswith("decode") for name in names) >= 1
    assert any(name.startswith("refill") for name in names) == ("rollout_batch_size" in settings)
