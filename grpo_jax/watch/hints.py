"""Hints: messages about problems visible in the logged metrics, with the config fields that address them.

A function computes each hint from the logged lines and the config alone. It returns None if there is no problem.
`MetricHints` applies all `HINTS` to each new line and reports each hint once. A resumed run replays logged lines.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence

import jax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.models.devices import compute_dtype as resolve
from grpo_jax.watch.summary import finite_values
from grpo_jax.watch.writer import Line

KL_WINDOW = 50
"""Number of logged steps over which a steadily rising KL triggers a hint."""
WINDOW = 10
"""Number of logged steps over which a metric's current value is averaged."""
FIRST, LAST = 12, 100
"""Numbers of lines kept in memory: the first `FIRST` lines of the run and the latest `LAST` lines."""
SAMPLER_GAP, SAMPLER_GAP_FLOAT32 = 1.5, 1e-3
"""Largest difference between trainer and sampler log-probs that rounding can explain, in nats. The second value is for
exact float32 products, the first for all other cases.

The largest gap measured in models with 2 to 8 layers is 4e-5 in float32, 0.02 with operands rounded to TF32 (as on
GPUs), 0.1 with operands rounded to bfloat16 (as on TPUs), and 0.54 in bfloat16.
"""
ENGINE_DIFFERENCE = 0.1
"""Mean |log π_old − log π_sampler| per token, in nats, above which a hint is triggered (bfloat16 causes up to 0.01)."""
ENGINE_WEIGHT = 0.5
"""Mean importance weight of an engine's completions below which a hint is triggered."""
ONE_TURN = 1.02
"""Mean number of turns up to which a run is considered single-turn."""
History = Sequence[Line]


def sampler_gap_limit(compute_dtype: str) -> float:
    """Return `SAMPLER_GAP_FLOAT32` for float32 on CPUs, where operands are not rounded, else `SAMPLER_GAP`."""
    exact = jax.default_backend() == "cpu" and resolve(compute_dtype) == "float32"
    return SAMPLER_GAP_FLOAT32 if exact else SAMPLER_GAP


def equal_rewards(history: History, config: GRPOConfig) -> str | None:
    """Return a hint if almost all groups have equal rewards, and therefore advantages of 0."""
    fraction, unscored = _mean(history, "frac_reward_zero_std"), _mean(history, "rewards/unscored") or 0.0
    if fraction is None or fraction < 0.95:
        return None
    if unscored > 0.5:  # missing rewards count as equal
        return (
            f"{100 * unscored:.0f}% of the completions in the last {WINDOW} logged steps had no reward and did not"
            " contribute to the gradient. Check rewards/*/missing, and rewards/*/errors for errors in reward functions"
        )
    if config.distillation_coef > 0:  # the divergence from the teacher has a gradient even without reward functions
        return None
    return (
        f"{100 * fraction:.0f}% of the groups in the last {WINDOW} logged steps had equal rewards, and thus"
        " group-relative advantages of 0. If all completions are correct, the task is learned. Otherwise, use rewards"
        f" that distinguish completions, raise num_generations (now {config.num_generations}) or temperature (now"
        f" {config.temperature:g}), or set dynamic_sampling=True to sample other prompts instead"
    )


def truncated(history: History, config: GRPOConfig) -> str | None:
    """Return a hint if almost all completions are truncated. Their rewards are computed from incomplete text."""
    fraction, turns = _mean(history, "completions/clipped_ratio"), _mean(history, "turns/mean") or 0.0
    if fraction is None or fraction < (0.9 if turns > ONE_TURN else 0.995):
        return None
    return (
        f"{100 * fraction:.0f}% of the completions in the last {WINDOW} logged steps were truncated at"
        f" max_completion_length = {config.max_completion_length} tokens, which include observations. Raise this limit,"
        " limit the number of turns, or check that the model was trained with this chat template and EOS token."
        " mask_truncated_completions=True leaves truncated completions out of the loss"
    )


def kl_rising(history: History, config: GRPOConfig) -> str | None:
    """Return a hint if the KL to a frozen reference keeps rising. Runs that update the reference are not checked."""
    values = finite_values(history, "kl")[-KL_WINDOW:]
    if config.sync_ref_model or len(values) < KL_WINDOW:
        return None
    fifth = KL_WINDOW // 5
    means = [statistics.fmean(values[i : i + fifth]) for i in range(0, KL_WINDOW, fifth)]
    if not all(later > earlier for earlier, later in itertools.pairwise(means)) or means[-1] <= 2 * means[0]:
        return None
    return (
        f"the KL to the frozen reference rose from {means[0]:.3g} to {means[-1]:.3g} nats per token over the last"
        f" {KL_WINDOW} logged steps. To keep the policy closer to the reference, raise beta (now {config.beta:g}) or"
        " lower learning_rate. To update the reference instead, set sync_ref_model=True"
    )


def entropy_collapse(history: History, config: GRPOConfig) -> str | None:
    """Return a hint if the policy is almost deterministic, so that a group's completions are nearly identical."""
    values = finite_values(history, "entropy")
    if len(values) < 2 * WINDOW:
        return None
    first, now = statistics.fmean(values[:5]), statistics.fmean(values[-WINDOW:])
    if now >= 0.05 * first or now >= 0.05:
        return None
    return (
        f"the policy's entropy fell from {first:.3g} to {now:.3g} nats per token, so there is little exploration."
        " This is expected if the task is learned. Otherwise, set entropy_coef"
        f" (now {config.entropy_coef:g}) or use_adaptive_entropy=True, raise epsilon_high or temperature, or lower"
        " learning_rate"
    )


def engine_fault(metric: Callable[[str], float | None], config: GRPOConfig) -> str | None:
    """Return a hint if the `sampler/…` metrics show that a custom sampler does not match the policy.

    `metric` maps a metric's name to its value, or to None if it was not logged.
    """
    weight, gap = metric("sampler/importance_weight_mean"), metric("sampler/log_prob_difference_mean")
    advice = "check that the engine uses the current params and the same temperature, top_k, top_p and min_p"
    if weight is not None and weight < ENGINE_WEIGHT:
        return (
            f"the mean importance weight of the sampler's completions is {weight:.2g}, but should be about 1; {advice}."
            " If the sampler's log-probs are correct, change sampler_correction_max (now"
            f" {config.sampler_correction_max}) or sampler_correction (now {config.sampler_correction!r}) to weaken the"
            " correction"
        )
    if gap is not None and gap > ENGINE_DIFFERENCE and config.sampler_correction is None:
        return (
            f"the sampling engine's log-probs differ from the trainer's by {gap:.2g} nats per token; {advice},"
            " or set sampler_correction to apply importance weights to its completions"
        )
    return None


def sampler_mismatch(history: History, config: GRPOConfig) -> str | None:
    """Return a hint if the sampler and the trainer compute different log-probs for the same tokens."""
    if finite_values(history, "sampler/log_prob_difference_mean"):
        return engine_fault(lambda name: _mean(history, name), config)
    gap = _mean(history, "sampler_gap")
    # With several updates per batch, a gap is expected: the policy has changed since sampling.
    if gap is None or gap <= sampler_gap_limit(config.compute_dtype) or not config.on_policy:
        return None
    return (
        f"the trainer's log-probs differ from the sampler's by up to {gap:.2g} nats in the last {WINDOW} logged steps."
        ' Check that the model computes the same logits with and without a cache. compute_dtype="float32" reduces'
        " rounding errors, and off_policy_mask_threshold excludes completions with A < 0 and a large mean difference"
    )


def few_turns(history: History, config: GRPOConfig) -> str | None:
    """Return a hint if almost no completion has a second turn, or if at least half exceed the limit on tool calls."""
    turns, fraction = _mean(history, "turns/mean"), _mean(history, "turns/clipped_ratio")
    if fraction is not None and fraction >= 0.5:
        return (
            f"{100 * fraction:.0f}% of the completions in the last {WINDOW} logged steps ended with a tool call beyond"
            f" the limit. Raise max_tool_calling_iterations (now {config.max_tool_calling_iterations}), state the limit"
            " in the prompt, or reward shorter dialogues"
        )
    if turns is None or turns > ONE_TURN:
        return None
    return (
        f"completions in the last {WINDOW} logged steps had {turns:.2f} turns on average. The policy does not call"
        " tools, or the environments end after one turn. Show an example in the prompt, teach the call format with"
        f" SFT, or reward tool calls. A higher temperature (now {config.temperature:g}) and more completions per prompt"
        f" (num_generations, now {config.num_generations}) increase exploration"
    )


def failing_tools(history: History, config: GRPOConfig) -> str | None:
    """Return a hint if almost all tool calls fail."""
    lines = [line for line in history if finite_values([line], "tools/calls")][-WINDOW:]
    calls, failures = sum(finite_values(lines, "tools/calls")), sum(finite_values(lines, "tools/failures"))
    if len(lines) < WINDOW or calls == 0 or failures / calls < 0.9:
        return None
    return (
        f"{100 * failures / calls:.0f}% of the tool calls in the last {WINDOW} logged steps failed. Read the calls and"
        " their results (report.html, log_completions=True). Prompts contain only the tools' names, docstrings and type"
        f" hints{f'; calls fail after environment_timeout = {s:g} s' if (s := config.environment_timeout) else ''}"
    )


HINTS: dict[str, Callable[[History, GRPOConfig], str | None]] = {
    "equal rewards": equal_rewards,
    "truncated": truncated,
    "KL rising": kl_rising,
    "entropy collapse": entropy_collapse,
    "sampler mismatch": sampler_mismatch,
    "few turns": few_turns,
    "failing tools": failing_tools,
}


class MetricHints:
    """Hints for a run's metrics. Each hint is reported once."""

    def __init__(self, config: GRPOConfig):
        self._config = config
        self._pending = dict(HINTS)
        self._history: list[Line] = []

    def __call__(self, line: Line) -> list[str]:
        """Add a line of metrics and return the new hints."""
        self._history.append(line)
        if len(self._history) > FIRST + LAST:
            del self._history[FIRST]
        messages = {name: hint(self._history, self._config) for name, hint in self._pending.items()}
        self._pending = {name: hint for name, hint in self._pending.items() if messages[name] is None}
        return [message for message in messages.values() if message is not None]


def _mean(history: History, name: str) -> float | None:
    """Return the mean of a metric's last `WINDOW` values, or None if there are fewer."""
    values = finite_values(history, name)[-WINDOW:]
    return statistics.fmean(values) if len(values) == WINDOW else None
