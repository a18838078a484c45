"""Dry runs: tokenize the data, sample one group, call each reward function, run one update, and report problems.

Memory use is taken from XLA's analysis of the largest programs, compiled at the run's full size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.models.devices import compile_program, memory_of
from grpo_jax.models.sharding import commit_to_devices, device_bytes, lower_call
from grpo_jax.policy import Policy
from grpo_jax.run.collect import RolloutSource, collect
from grpo_jax.run.memory import rollout_call, update_calls
from grpo_jax.run.prepare import prepare
from grpo_jax.run.run import Run, new_state
from grpo_jax.run.session import describe_non_finite
from grpo_jax.text.sources import Dataset
from grpo_jax.types import Batch, RewardFn, as_jit_argument
from grpo_jax.update.state import TrainState
from grpo_jax.watch.hints import engine_fault, sampler_gap_limit
from grpo_jax.watch.monitor import Phases
from grpo_jax.watch.summary import describe_run, short_number

SLOW_REWARD = 10.0
"""Seconds per iteration above which a reward function is reported as slow."""


@dataclasses.dataclass(frozen=True)
class DryRun:
    """Results of a dry run.

    Attributes:
      sizes: description of the run's sizes.
      memory: bytes per device, by part: the training state, the caller's policy, the frozen vision tower, and each
        program (its arguments, results and temporaries).
      seconds: duration of each phase, including compilation.
      suspicious: likely problems, one sentence each.
      rows: the sampled group, in the format of `completions.jsonl`.
      metrics: metrics from the rollout and the update.
    """

    sizes: str
    memory: dict[str, int]
    seconds: dict[str, float]
    suspicious: tuple[str, ...]
    rows: list[dict[str, Any]]
    metrics: dict[str, float]

    def __str__(self) -> str:
        memory = " · ".join(f"{name} {short_number(size, 'B')}" for name, size in self.memory.items() if size)
        seconds = " · ".join(f"{name.removeprefix('seconds/')} {x:.1f} s" for name, x in self.seconds.items())
        problems = ["suspicious:", *(f"  - {line}" for line in self.suspicious)]
        lines = ["dry run: one group of completions, one update, nothing written", self.sizes, f"memory: {memory}"]
        lines += [f"time, including compilation: {seconds}", *(problems if self.suspicious else ["nothing suspicious"])]
        return "\n".join(lines)


def rehearse(
    policy: Policy,
    dataset: Dataset,
    reward_fns: RewardFn | Sequence[RewardFn],
    config: GRPOConfig,
    *,
    donate: bool = False,
    **arguments: Any,
) -> DryRun:
    """Run each phase of `train` once on a single group of completions and print a report. No files are written.

    Args:
      policy: policy to train, as in `train`.
      dataset: training data, as in `train`.
      reward_fns: reward functions, as in `train`. Each is called once.
      config: settings, as in `train`.
      donate: whether to donate the params of `policy`, as in `train`. The reported memory depends on it.
      arguments: other arguments to `train`: `eval_dataset`, `optimizer`, `tools`, `environment_factory`, `sampler`,
        `advantage_fn`, `surrogate` and `teacher`.

    Returns:
      A `DryRun` with sizes, memory, duration of each phase, and likely problems.

    Raises:
      ValueError: if an argument is invalid, as in `train`.

    Example:
      >>> report = rehearse(policy, rows, reward, GRPOConfig(max_steps=30))  # doctest: +SKIP
      dry run: one group of completions, one update, nothing written
      ...
      >>> report.suspicious  # doctest: +SKIP
      ('all advantages are 0, so the group has no training signal',)
    """
    phase = Phases()
    with phase("load and tokenize"):
        run = prepare(policy, dataset, reward_fns, config, **arguments)
    config = run.config  # mesh and compute dtype are resolved for the devices
    with phase("state"):
        state = jax.block_until_ready(commit_to_devices(new_state(run, donate=donate)))
        run.policy.release_params()
        if donate:
            policy.release_params()
    sizes = describe_run(config, state, num_rows=len(run.data.rows))
    # Dynamic sampling would replace a group whose rewards are equal, and hide the problem.
    config = dataclasses.replace(config, dynamic_sampling=False)
    micro_shape = (1, run.sizes.micro_completions)
    # With `skip_zero_signal`, the backward pass would not run for equal rewards.
    updater = dataclasses.replace(run.updater, config=config, micro_shape=micro_shape, skip_zero_signal=False)
    group_run = dataclasses.replace(run, config=config, updater=updater)
    batch, rollout, rows = collect(group_run, state, RolloutSource(group_run, num_prompts=1), phase=phase)
    with phase("update"):
        updated_state, update_metrics = updater.update(state, batch)
        metrics = {name: float(value) for name, value in jax.device_get(update_metrics).items()}
    suspicious = list(_group_problems(run, batch, rollout, rows, metrics))
    if dropped := len(run.data.dropped):
        total, limit = len(run.data.rows) + dropped, config.max_prompt_length
        suspicious.append(f"{dropped} of {total} prompts are longer than max_prompt_length = {limit} and are dropped")
    if metrics["update_skipped"]:
        cause = describe_non_finite(updater, updated_state.params, batch, metrics, run.policy.tokenizer)
        suspicious.append(f"the update was skipped: {cause}")
    persistent = {
        "training state": device_bytes(updated_state),
        "policy": device_bytes((as_jit_argument(policy.model), () if donate else policy.params)),
        "vision tower": device_bytes(getattr(run.data.image_encoder, "params", None)),
    }
    with phase("memory analysis"):
        programs = _programs(run, updated_state)
    limit = memory_of(jax.devices()[0])
    fix = ", or use compute_dtype='bfloat16'" if config.compute_dtype == "float32" else ""
    params = run.param_bytes(updated_state.params)  # also among the arguments of each program
    peak = sum(persistent.values()) + max(programs.values(), default=params) - params
    if limit is not None and peak > limit:
        suspicious.append(
            f"up to {peak / 1e9:.1f} GB may be needed, but the device has only {limit / 1e9:.1f} GB; reduce"
            f" per_device_train_batch_size or max_completion_length{fix}"
        )
    report = DryRun(sizes, persistent | programs, phase.take(), tuple(suspicious), rows, rollout | metrics)
    if jax.process_index() == 0:
        print(report)
    return report


def _programs(run: Run, state: TrainState) -> dict[str, int]:
    """Return XLA's memory estimates for the largest decode and update programs, including arguments, in bytes."""
    batch = jax.eval_shape(lambda: run.zero_batch(state))
    calls = {"decode": rollout_call(run, state.params), "update": update_calls(run.updater, state, batch).update}
    costs = {name: compile_program(lower_call(call)) for name, call in calls.items() if call is not None}
    return {name: cost.arguments + cost.results + cost.temporaries for name, cost in costs.items()}


def _group_problems(
    run: Run, batch: Batch, rollout: dict[str, float], rows: list[dict[str, Any]], metrics: dict[str, float]
) -> Iterator[str]:
    """Yield a sentence for each likely problem with the completions, the rewards or the update."""
    config, g = run.config, len(rows)
    if not any(row["ended"] for row in rows):
        yield (
            f"all {g} completions were truncated at max_completion_length = {config.max_completion_length}, and none"
            f" ended with an id in policy.eos_token_ids = {list(run.policy.eos_token_ids)}; increase the limit, or"
            " check the EOS token and the chat template"
        )
    elif rollout["completions/max_length"] <= 1:
        yield f"all {g} completions are empty: the first sampled token ends each of them; check policy.eos_token_ids"
    if len({str(row["completion"]) for row in rows}) == 1:
        yield f"all {g} completions are identical: {rows[0]['completion']!r:.80}; increase temperature"
    yield from _reward_problems(run, rollout, rows)
    if not np.any(batch.advantages) and run.teacher_scoring is None:
        yield "all advantages are 0, so the group has no training signal"
    elif metrics["tokens"] == 0:
        yield "no token contributes to the loss; check max_completion_length and mask_truncated_completions"
    elif metrics["grad_norm"] == 0:
        yield "the gradient is 0 despite a training signal; check masks, clipping and top_entropy_quantile"
    if run.sampler is not None:
        yield from filter(None, [engine_fault(rollout.get, config)])
    elif metrics["sampler_gap"] > sampler_gap_limit(config.compute_dtype):
        yield (
            f"the trainer's log-probs differ from the sampler's by up to {metrics['sampler_gap']:.2g} nats; check that"
            " the model computes the same logits with and without a cache"
        )


def _reward_problems(run: Run, rollout: dict[str, float], rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each reward function that returns no rewards or equal rewards, or is slow."""
    g = len(rows)
    for name in rows[0]["rewards"]:
        values = np.array([row["rewards"][name] for row in rows], float)
        scored = values[~np.isnan(values)]
        if not scored.size:
            yield f"reward function {name!r} returned no reward for any of the {g} completions"
        elif np.ptp(scored) == 0:
            yield f"reward function {name!r} gave all scored completions ({scored.size}/{g}) the reward {scored[0]:g}"
        seconds = rollout.get(f"rewards/{name}/seconds", 0.0) * run.sizes.prompts_per_iteration
        if seconds > SLOW_REWARD:
            yield (
                f"reward function {name!r} would take about {seconds:.0f} s per iteration; make it async, run it in"
                " worker processes with `isolated`, or set rollout_ahead=True to sample in the meantime"
            )
