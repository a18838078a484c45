"""Hints during a run: signs of a problem in the logged numbers, and the fields that change it.

A hint is a pure function of the logged lines and the config that returns a message or None; `HINTS` is their table.
`Hints` applies them to each new line and reports each hint once. A resumed run replays the lines in its files first.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.models.devices import compute_dtype as resolve
from grpo_jax.watch.summary import metric_names, numbers
from grpo_jax.watch.writer import Line

KL_WINDOW = 50
"""Logged steps over which a KL has to keep rising."""
WINDOW = 10
"""Logged steps whose mean is the present value."""
FIRST, LAST = 12, 100
"""Lines that are kept: the first ones of the run and the newest."""
SAMPLER_GAP = {"float32": 1e-3, "tensorfloat32": 0.1, "bfloat16": 1.5}
"""Largest |l − l_sampling| of a batch in nats that rounding may explain, by the precision of products.

Measured on a CPU: the largest gap of stories260K (5 layers, 4,096 tokens, temperatures 1 and 0.5) and of random models
of 2 to 8 layers is 4e-5 in float32, 0.02 with operands rounded to TF32's 10 bits, 0.1 with operands rounded to
bfloat16's 7 (a TPU does so in float32 products), and 0.54 in bfloat16. The limits allow for more layers and tokens.
"""
ENGINE_DIFFERENCE = 0.1
"""Mean |log π_old − log π_sampler| per token in nats that rounding may explain: engines in bfloat16 reach 0.01."""
ENGINE_WEIGHT = 0.5
"""Lowest mean importance weight of an engine's completions without a hint."""
ONE_TURN = 1.02
"""Mean number of turns below which hardly any completion has a second one."""

History = Sequence[Line]


def sampler_gap_limit(compute_dtype: str) -> float:
    """Return the entry of `SAMPLER_GAP` for the products that JAX makes here of operands in `compute_dtype`.

    Unless `jax_default_matmul_precision` is higher, a TPU rounds float32 operands to bfloat16, and a GPU to TF32.
    """
    settings: Any = jax.config  # its fields are added at run time
    precision, platform = settings.jax_default_matmul_precision, jax.default_backend()
    if resolve(compute_dtype) == "float32" and (platform == "cpu" or precision in ("highest", "float32")):
        return SAMPLER_GAP["float32"]
    if resolve(compute_dtype) == "float32" and (platform != "tpu" or precision in ("high", "tensorfloat32")):
        return SAMPLER_GAP["tensorfloat32"]
    return SAMPLER_GAP["bfloat16"]


def equal_rewards(history: History, config: GRPOConfig) -> str | None:
    """Nearly all groups have equal rewards, so that all advantages are 0."""
    share, unscored = _now(history, "frac_reward_zero_std"), _now(history, "rewards/unscored") or 0.0
    if share is None or share < 0.95:
        return None
    if unscored > 0.5:  # NaN counts as equal
        return (
            f"{100 * unscored:.0f} % of the completions of the last {WINDOW} logged steps have no reward and give no"
            " gradient: see rewards/*/missing, and rewards/*/errors for functions that failed"
        )
    further = "" if config.dynamic_sampling else ", or set dynamic_sampling=True, which samples other prompts instead"
    return (
        f"{100 * share:.0f} % of the groups of the last {WINDOW} logged steps had equal rewards and gave no gradient:"
        " if all are right, the task is learned; if not, give rewards that distinguish completions, raise"
        f" num_generations (now {config.num_generations}) or temperature (now {config.temperature:g}){further}"
    )


def truncated(history: History, config: GRPOConfig) -> str | None:
    """Nearly all completions were truncated, so that rewards see half an answer."""
    share, turns = _now(history, "completions/clipped_ratio"), _now(history, "turns/mean") or 0.0
    if share is None or share < (0.9 if turns > ONE_TURN else 0.995):
        return None
    length = f"max_completion_length = {config.max_completion_length} tokens"
    if turns <= ONE_TURN:
        return (
            f"nearly all completions of the last {WINDOW} logged steps were truncated at {length}: raise it, or check"
            " that the model knows its EOS and chat template; mask_truncated_completions=True keeps truncated"
            " completions out of the loss"
        )
    observed, tokens = _now(history, "completions/observation_tokens"), _now(history, "completions/mean_length")
    part = f"; {observed:.0f} of their {tokens:.0f} tokens were observations" if observed and tokens else ""
    return (
        f"{100 * share:.0f} % of the completions of the last {WINDOW} logged steps were truncated at {length}, with"
        f" {turns:.1f} turns on average{part}: raise it (all turns and observations share it), shorten the"
        " observations, or end after fewer turns (by max_tool_calling_iterations, or None from respond)"
    )


def kl_rising(history: History, config: GRPOConfig) -> str | None:
    """The KL to a frozen reference has risen for a long stretch (what TR-DPO was made for)."""
    values = numbers(history, "kl")[-KL_WINDOW:]
    if config.sync_ref_model or len(values) < KL_WINDOW:
        return None
    fifth = KL_WINDOW // 5
    means = [statistics.fmean(values[i : i + fifth]) for i in range(0, KL_WINDOW, fifth)]
    if not all(later > earlier for earlier, later in itertools.pairwise(means)) or means[-1] <= 2 * means[0]:
        return None
    return (
        f"the KL to the frozen reference has risen over the last {KL_WINDOW} logged steps, from {means[0]:.3g} to"
        f" {means[-1]:.3g} nats per token: sync_ref_model=True lets the reference follow, a larger beta (now"
        f" {config.beta:g}) or a smaller learning_rate holds the policy back"
    )


def entropy_collapse(history: History, config: GRPOConfig) -> str | None:
    """The policy is almost deterministic, so that groups repeat one answer."""
    values = numbers(history, "entropy")
    if len(values) < 2 * WINDOW:
        return None
    first, now = statistics.fmean(values[:5]), statistics.fmean(values[-WINDOW:])
    if now >= 0.05 * first or now >= 0.05:
        return None
    return (
        f"the entropy of the policy has fallen from {first:.3g} to {now:.3g} nats per token, and it hardly"
        f" explores: fine if the task is learned; if not, set entropy_coef (now {config.entropy_coef:g}) or"
        " use_adaptive_entropy=True, raise epsilon_high or temperature, or lower learning_rate"
    )


def much_clipped(history: History, config: GRPOConfig) -> str | None:
    """Much of the batch lies outside the clip range and gives no gradient."""
    share = _now(history, "clip_fraction")
    if share is None or share < 0.3:
        return None
    return (
        f"a share of {share:.2f} of the tokens of the last {WINDOW} logged steps had a clipped ratio: the policy moves"
        f" too far in one iteration. Lower learning_rate (now {config.learning_rate:g}), num_iterations (now"
        f" {config.num_iterations}) or steps_per_generation"
    )


def engine_fault(measured: Callable[[str], float | None], config: GRPOConfig) -> str | None:
    """Return the fault of a run's own sampler that its metrics `sampler/…` show, or None.

    `measured(name)` returns the value of a metric, or None.

    Example:
      >>> metrics = {"sampler/log_prob_difference_mean": 0.4, "sampler/importance_weight_mean": 0.2}
      >>> engine_fault(metrics.get, GRPOConfig()).split(":")[0]
      "the mean importance weight of the sampler's completions is 0.2, where about 1 is to be expected"
    """
    weight, gap = measured("sampler/importance_weight_mean"), measured("sampler/log_prob_difference_mean")
    advice = "does the engine have the present params, and the same temperature, top_k, top_p and min_p?"
    if weight is not None and weight < ENGINE_WEIGHT:
        return (
            f"the mean importance weight of the sampler's completions is {weight:.2g}, where about 1 is to be"
            f" expected: {advice} Where its log-probs are right, other bounds (sampler_correction_max, now"
            f" {config.sampler_correction_max}) or another sampler_correction (now {config.sampler_correction!r})"
            " leave less out"
        )
    if gap is not None and gap > ENGINE_DIFFERENCE and config.sampler_correction is None:
        return (
            f"the log-probs of the sampler's engine differ from the trainer's by {gap:.2g} nats per token: {advice}"
            " sampler_correction weighs its completions by what they differ"
        )
    return None


def sampler_mismatch(history: History, config: GRPOConfig) -> str | None:
    """Sampler and trainer disagree about tokens that both should give the same log-probs."""
    if numbers(history, "sampler/log_prob_difference_mean"):
        return engine_fault(lambda name: _now(history, name), config)
    gap = _now(history, "sampler_gap")
    # After an update the policies differ, and so may their log-probs.
    if gap is None or gap <= sampler_gap_limit(config.compute_dtype) or not config.on_policy:
        return None
    return (
        f"the trainer's log-probs differ from the sampler's by up to {gap:.2g} nats in the last {WINDOW} logged steps:"
        ' check that the model computes the same with and without a cache; compute_dtype="float32" rounds less, and'
        " off_policy_mask_threshold leaves the worst completions out"
    )


def reward_hacking(history: History, config: GRPOConfig) -> str | None:
    """One reward has risen while another has fallen, each by half of its spread over completions."""
    moves: dict[str, tuple[float, float, float]] = {}  # (change in spreads, first mean, present mean)
    for name in metric_names(history[-1:]):
        match = re.fullmatch(r"rewards/(.+)/mean", name)
        means = numbers(history, name)
        if match is None or len(means) < 3 * WINDOW:
            continue
        spreads = numbers(history, f"rewards/{match[1]}/std")
        spread = max((statistics.fmean(part) for part in (spreads[:WINDOW], spreads[-WINDOW:]) if part), default=0.0)
        first, now = statistics.fmean(means[:WINDOW]), statistics.fmean(means[-WINDOW:])
        if spread > 0:
            moves[match[1]] = (now - first) / spread, first, now
    up, down = max(moves, key=moves.__getitem__, default=""), min(moves, key=moves.__getitem__, default="")
    if not moves or moves[up][0] < 0.5 or moves[down][0] > -0.5:
        return None
    return (
        f"the reward {up!r} has risen from {moves[up][1]:.3g} to {moves[up][2]:.3g} while {down!r} has fallen from"
        f" {moves[down][1]:.3g} to {moves[down][2]:.3g}: the policy may be gaming the one at the expense of the other."
        " Read its completions (report.html, log_completions=True), then change reward_weights or the function, or"
        f" raise beta (now {config.beta:g})"
    )


def few_turns(history: History, config: GRPOConfig) -> str | None:
    """Hardly any completion has a second turn, or most of them end with a call beyond the limit."""
    turns, share = _now(history, "turns/mean"), _now(history, "turns/clipped_ratio")
    if share is not None and share >= 0.5:
        return (
            f"{100 * share:.0f} % of the completions of the last {WINDOW} logged steps ended with a call that was not"
            f" made: raise max_tool_calling_iterations (now {config.max_tool_calling_iterations}), state in the prompt"
            " how many calls there are, or reward an answer that comes sooner"
        )
    if turns is None or turns > ONE_TURN:
        return None
    return (
        f"completions of the last {WINDOW} logged steps had {turns:.2f} turns on average: the policy calls no tool, or"
        " its environment ends at once. Show an example in the prompt, teach the form of a call by supervised examples,"
        f" or reward one; a higher temperature (now {config.temperature:g}) and more completions of a prompt"
        f" (num_generations, now {config.num_generations}) explore more"
    )


def failing_tools(history: History, config: GRPOConfig) -> str | None:
    """Nearly all calls of tools fail, or many episodes end with an error of their environment."""
    lines = [line for line in history if numbers([line], "tools/calls")][-WINDOW:]
    calls, failures = sum(numbers(lines, "tools/calls")), sum(numbers(lines, "tools/failures"))
    seconds = config.environment_timeout
    if len(lines) == WINDOW and calls > 0 and failures / calls >= 0.9:
        late = "" if seconds is None else f"; a call that takes longer than environment_timeout = {seconds:g} s fails"
        return (
            f"{100 * failures / calls:.0f} % of the tool calls of the last {WINDOW} logged steps failed: read what the"
            " policy wrote and what it was answered (report.html, log_completions=True). Its prompt has only the names,"
            f" docstrings and type hints of the tools{late}"
        )
    errors, count = _now(history, "environment/errors"), config.sizes().completions
    if errors is None or errors < 0.1 * count:
        return None
    return (
        f"environments failed {errors:.3g} times per rollout of {count} completions in the last {WINDOW} logged steps;"
        " such an episode ends there, and the policy learns from the reward that its environment still gives:"
        ' on_environment_error="raise" ends the run at the first one and names its row; environment_timeout (now'
        f" {seconds}) is the time that a call may take"
    )


HINTS: dict[str, Callable[[History, GRPOConfig], str | None]] = {
    "equal rewards": equal_rewards,
    "truncated": truncated,
    "KL rising": kl_rising,
    "entropy collapse": entropy_collapse,
    "much clipped": much_clipped,
    "sampler mismatch": sampler_mismatch,
    "reward hacking": reward_hacking,
    "few turns": few_turns,
    "failing tools": failing_tools,
}


class Hints:
    """The hints of one run; each is reported once."""

    def __init__(self, config: GRPOConfig):
        self._config = config
        self._pending = dict(HINTS)
        self._history: list[Line] = []

    def __call__(self, line: Line) -> list[str]:
        """Take the next line of a run's metrics, and return the new hints."""
        self._history.append(line)
        if len(self._history) > FIRST + LAST:
            del self._history[FIRST]
        messages = {name: hint(self._history, self._config) for name, hint in self._pending.items()}
        self._pending = {name: hint for name, hint in self._pending.items() if messages[name] is None}
        return [message for message in messages.values() if message is not None]


def _now(history: History, name: str) -> float | None:
    """Return the mean of the last `WINDOW` values of a metric; None if there are fewer."""
    values = numbers(history, name)[-WINDOW:]
    return statistics.fmean(values) if len(values) == WINDOW else None
