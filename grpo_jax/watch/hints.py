"""Hints while a run goes: signs in the logged numbers that something is off, and the fields that change it.

A hint is a pure function of the logged lines and the config that returns a message or None; `HINTS` is their table.
`Hints` feeds them a run's lines as they come and lets each speak once. A resumed run feeds it the lines that are
there already, and so goes on as if it had never stopped.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.platform import compute_dtype as resolve
from grpo_jax.turns.episodes import WORKERS
from grpo_jax.watch.standstill import hardly_moved
from grpo_jax.watch.summary import metric_names, numbers
from grpo_jax.watch.writer import Line

_NO_REWARD = "have no reward, and teach nothing: see rewards/*/missing, and rewards/*/errors for functions that failed"
KL_WINDOW = 50
"""Logged steps over which a KL has to go on rising."""
WINDOW = 10
"""Logged steps of which the mean stands for the present."""
FIRST, LAST = 12, 100
"""Lines that are kept: the first ones of the run and the newest."""
SAMPLER_GAP = {"float32": 1e-3, "tensorfloat32": 0.1, "bfloat16": 1.5}
"""Largest |l − l_sampling| of a batch in nats that rounding may explain, by the precision of products.

Measured on a CPU: the largest gap of stories260K (5 layers, 4,096 tokens, temperatures 1 and 0.5) and of random models
of 2 to 8 layers is 4e-5 in float32, 0.02 with operands rounded to TF32's 10 bits, 0.1 with operands rounded to
bfloat16's 7 (as a TPU rounds those of float32 products), and 0.54 in bfloat16. The limits leave room for more layers
and tokens.
"""
ENGINE_DIFFERENCE = 0.1
"""Mean |log π_old − log π_sampler| in nats a token that rounding may explain: engines in bfloat16 come to 0.01."""
ENGINE_WEIGHT = 0.5
"""Lowest mean importance weight of another engine's completions that is as it should be."""
ONE_TURN = 1.02
"""Mean turns of completions of which hardly any has had a second one."""

History = Sequence[Line]


def sampler_gap_limit(compute_dtype: str) -> float:
    """Return the entry of `SAMPLER_GAP` for the products that JAX makes here of operands in `compute_dtype`.

    Unless `jax_default_matmul_precision` asks for more, a TPU rounds float32 operands to bfloat16, and a GPU to TF32.

    Example:
      >>> sampler_gap_limit("bfloat16")
      1.5
    """
    settings: Any = jax.config  # its fields are added at run time
    precision, platform = settings.jax_default_matmul_precision, jax.default_backend()
    if resolve(compute_dtype) == "float32" and (platform == "cpu" or precision in ("highest", "float32")):
        return SAMPLER_GAP["float32"]
    if resolve(compute_dtype) == "float32" and (platform != "tpu" or precision in ("high", "tensorfloat32")):
        return SAMPLER_GAP["tensorfloat32"]
    return SAMPLER_GAP["bfloat16"]


def equal_rewards(history: History, config: GRPOConfig) -> str | None:
    """Nearly all groups have equal rewards, so that all advantages are 0.

    Example:
      >>> equal_rewards([{"frac_reward_zero_std": 1.0}] * 10, GRPOConfig()).split(":")[0]
      '100 % of the groups of the last 10 logged steps had equal rewards and taught nothing'
    """
    share, unscored = _now(history, "frac_reward_zero_std"), _now(history, "rewards/unscored") or 0.0
    if share is None or share < 0.95:
        return None
    if unscored > 0.5:  # NaN counts as equal, and the cause is another one
        return f"{100 * unscored:.0f} % of the completions of the last {WINDOW} logged steps {_NO_REWARD}"
    further = "" if config.dynamic_sampling else ", or set dynamic_sampling=True, which samples other prompts instead"
    return (
        f"{100 * share:.0f} % of the groups of the last {WINDOW} logged steps had equal rewards and taught nothing:"
        " if all are right, the task is learned; if not, give rewards that tell completions apart, raise"
        f" num_generations (now {config.num_generations}) or temperature (now {config.temperature:g}){further}"
    )


def all_truncated(history: History, config: GRPOConfig) -> str | None:
    """Nearly all completions were cut off, so that rewards see half an answer."""
    share, turns = _now(history, "completions/clipped_ratio"), _now(history, "turns/mean")
    if share is None or share < 0.995 or (turns or 0) > ONE_TURN:  # of several turns, `no_room_for_turns` tells more
        return None
    return (
        f"nearly all completions of the last {WINDOW} logged steps were cut off at max_completion_length ="
        f" {config.max_completion_length} tokens: raise it, or check that the model knows its EOS and chat template;"
        " mask_truncated_completions=True keeps what was cut off out of the loss"
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
    """The policy has become all but certain, so that groups hold one answer many times."""
    values = numbers(history, "entropy")
    if len(values) < 2 * WINDOW:
        return None
    first, now = statistics.fmean(values[:5]), statistics.fmean(values[-WINDOW:])
    if now >= 0.05 * first or now >= 0.05:
        return None
    return (
        f"the entropy of the policy has fallen from {first:.3g} to {now:.3g} nats per token, and it hardly explores any"
        f" more: fine if the task is learned; if not, set entropy_coef (now {config.entropy_coef:g}) or"
        " use_adaptive_entropy=True, raise epsilon_high or temperature, or lower learning_rate"
    )


def much_clipped(history: History, config: GRPOConfig) -> str | None:
    """Much of the batch lies outside the clip, so that it teaches nothing."""
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
    # Where the policy is no longer that of the sampler, the gap is no fault.
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


def slower(history: History, config: GRPOConfig) -> str | None:
    """Tokens per second have fallen to less than half of what they were."""
    rates = numbers(history, "tokens_per_second")[1:]  # the first line compiles
    if len(rates) < 2 * WINDOW:
        return None
    first, now = statistics.median(rates[:WINDOW]), statistics.median(rates[-WINDOW:])
    if now >= first / 2:
        return None
    more: dict[str, float] = {}  # phase → seconds that it has grown by
    for name in history[-1]:
        values = numbers(history, name)
        if name.startswith("seconds/") and name != "seconds/total" and len(values) > WINDOW:
            growth = statistics.median(values[-WINDOW:]) - statistics.median(values[1 : 1 + WINDOW])
            more[name.removeprefix("seconds/")] = growth
    phase = max(more, key=more.__getitem__, default="")
    longer = "are completions longer? max_completion_length bounds them"
    advice = {
        "rollout": longer,
        "rewards": "is a reward function slow? make it async, give it workers with isolated, or use rollout_ahead=True",
        "evaluation": "raise eval_steps",
        "update": longer,
        "reference": longer,
    }
    longest = f" {phase!r} has grown most ({advice.get(phase, 'see the phase times')})," if more else ""
    return (
        f"{now:,.0f} completion tokens per second in the last {WINDOW} logged steps, {first:,.0f} at the beginning:"
        f"{longest} unless the machine is shared with others now"
    )


def never_answered(history: History, config: GRPOConfig) -> str | None:
    """There is somebody to answer, and hardly any completion has a second turn.

    Example:
      >>> never_answered([{"turns/mean": 1.0}] * 10, GRPOConfig()).split(":")[0]
      'completions of the last 10 logged steps had 1.00 turns on average, so hardly any was answered'
    """
    turns = _now(history, "turns/mean")
    if turns is None or turns > ONE_TURN:
        return None
    return (
        f"completions of the last {WINDOW} logged steps had {turns:.2f} turns on average, so hardly any was answered:"
        " the policy calls no tool, or its environment ends at once. Show an example in the prompt, teach the form of a"
        f" call by supervised examples, or reward one; a higher temperature (now {config.temperature:g}) and more"
        f" completions of a prompt (num_generations, now {config.num_generations}) try more"
    )


def tools_fail(history: History, config: GRPOConfig) -> str | None:
    """Nearly all calls of tools fail."""
    lines = [line for line in history if numbers([line], "tools/calls")][-WINDOW:]
    calls, failures = sum(numbers(lines, "tools/calls")), sum(numbers(lines, "tools/failures"))
    if len(lines) < WINDOW or calls == 0 or failures / calls < 0.9:
        return None
    seconds = config.environment_timeout
    late = "" if seconds is None else f"; a call that takes longer than environment_timeout = {seconds:g} s fails too"
    return (
        f"{100 * failures / calls:.0f} % of the tool calls of the last {WINDOW} logged steps failed: read what the"
        " policy wrote and what it was told (report.html, log_completions=True). Of the tools its prompt has only the"
        f" names, docstrings and type hints{late}"
    )


def no_room_for_turns(history: History, config: GRPOConfig) -> str | None:
    """Nearly all completions of several turns are cut off before they end."""
    share, turns = _now(history, "completions/clipped_ratio"), _now(history, "turns/mean")
    if share is None or share < 0.9 or turns is None or turns <= ONE_TURN:
        return None
    observed, length = _now(history, "completions/observation_tokens"), _now(history, "completions/mean_length")
    told = f"; {observed:.0f} of their {length:.0f} tokens were observations" if observed and length else ""
    return (
        f"{100 * share:.0f} % of the completions of the last {WINDOW} logged steps ran out of room, with {turns:.1f}"
        f" turns on average{told}: raise max_completion_length (now {config.max_completion_length}), which all turns"
        " and observations share, let environments and tools say less, or end after fewer turns (by"
        " max_tool_calling_iterations, or None from respond)"
    )


def out_of_turns(history: History, config: GRPOConfig) -> str | None:
    """Most completions end with a call that is not made any more.

    Example:
      >>> out_of_turns([{"turns/clipped_ratio": 0.75}] * 10, GRPOConfig(max_tool_calling_iterations=3)).split(":")[0]
      '75 % of the completions of the last 10 logged steps ended with a call that was not made'
    """
    share = _now(history, "turns/clipped_ratio")
    if share is None or share < 0.5:
        return None
    return (
        f"{100 * share:.0f} % of the completions of the last {WINDOW} logged steps ended with a call that was not made:"
        f" raise max_tool_calling_iterations (now {config.max_tool_calling_iterations}), tell the policy in its prompt"
        " how many calls it has, or reward an answer that comes sooner"
    )


def slow_environments(history: History, config: GRPOConfig) -> str | None:
    """Environments and tools are at work for most of the rollout.

    At most `WORKERS` calls, and one per completion, are under way at a time: so at least one is under way for no less
    than the sum of their seconds divided by that number.
    """
    lines, count = history[-WINDOW:], _completions(history, config)
    rollout = sum(numbers(lines, "seconds/rollout"))
    if count is None or rollout <= 0:
        return None
    at_once = min(WORKERS, count)
    share = sum(numbers(lines, "environment/seconds")) * _rollouts(config) / at_once / rollout
    if share < 0.5:
        return None
    return (
        f"environments and tools were at work during {100 * min(share, 1):.0f} % of the rollouts of the last {WINDOW}"
        f" logged steps or more, with at most {at_once:.0f} calls at a time: make a call do less, or put off what reset"
        f" need not do. Up to {WORKERS} calls run at a time, in threads: more completions per rollout"
        " (per_device_train_batch_size, gradient_accumulation_steps) share the waiting, not Python's own work"
    )


def environment_errors(history: History, config: GRPOConfig) -> str | None:
    """Many episodes are ended by an error of their environment."""
    errors, count = _now(history, "environment/errors"), _completions(history, config)
    if errors is None or count is None or errors < 0.1 * count:
        return None
    return (
        f"environments failed {errors:.3g} times per rollout of {count:.0f} completions in the last {WINDOW} logged"
        " steps; such an episode ends there, and the policy learns from what reward its environment still gives:"
        ' on_environment_error="raise" ends the run at the first one and names its row; environment_timeout (now'
        f" {config.environment_timeout}) is the time that a call may take"
    )


HINTS: dict[str, Callable[[History, GRPOConfig], str | None]] = {
    "equal rewards": equal_rewards,
    "all truncated": all_truncated,
    "KL rising": kl_rising,
    "entropy collapse": entropy_collapse,
    "much clipped": much_clipped,
    "sampler mismatch": sampler_mismatch,
    "reward hacking": reward_hacking,
    "slower": slower,
    "never answered": never_answered,
    "tools fail": tools_fail,
    "no room for turns": no_room_for_turns,
    "out of turns": out_of_turns,
    "slow environments": slow_environments,
    "environment errors": environment_errors,
    "hardly moved": hardly_moved,
}


class Hints:
    """The hints of one run, each of which speaks once.

    Example:
      >>> hints = Hints(GRPOConfig())
      >>> [len(hints({"completions/clipped_ratio": 1.0})) for _ in range(12)]
      [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    """

    def __init__(self, config: GRPOConfig):
        self._config = config
        self._silent = dict(HINTS)
        self._history: list[Line] = []

    def __call__(self, line: Line) -> list[str]:
        """Take the next line of a run's metrics, and return what there is to say."""
        self._history.append(line)
        if len(self._history) > FIRST + LAST:
            del self._history[FIRST]
        messages = {name: hint(self._history, self._config) for name, hint in self._silent.items()}
        self._silent = {name: hint for name, hint in self._silent.items() if messages[name] is None}
        return [message for message in messages.values() if message is not None]


def _now(history: History, name: str) -> float | None:
    """Return the mean of the last `WINDOW` values of a metric; None if there are fewer."""
    values = numbers(history, name)[-WINDOW:]
    return statistics.fmean(values) if len(values) == WINDOW else None


def _rollouts(config: GRPOConfig) -> float:
    """Return how many rollouts a logged line covers if it has any."""
    return max(1.0, config.logging_steps / config.sizes().updates)


def _completions(history: History, config: GRPOConfig) -> float | None:
    """Return completions per rollout over the last `WINDOW` lines that have any, by their tokens; None if too few."""
    counts = []
    for before, line in itertools.pairwise(history):
        tokens, length = numbers([before, line], "num_tokens"), line.get("completions/mean_length")
        if len(tokens) == 2 and length:
            counts.append((tokens[1] - tokens[0]) / length / _rollouts(config))
    return statistics.fmean(counts[-WINDOW:]) if len(counts) >= WINDOW else None
