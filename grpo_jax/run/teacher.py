"""A run's teacher: validation of the `teacher` argument, and the teacher's log-probs for a batch.

| teacher | `distillation_mode` | distillation target |
|---|---|---|
| policy | "full_logits" | distributions over the whole vocabulary, computed in the update |
| policy or scorer | "sampled_token" | log-probs of the sampled tokens, computed before the update |
| scorer | "topk_logits" | log-probs of k tokens at each position, computed before the update |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import raise_all, shorten, show
from grpo_jax.models.sharding import fetch
from grpo_jax.policy import Policy
from grpo_jax.run.sampler import ROUNDING
from grpo_jax.types import Batch, Completions, Model, Prompts, TeacherLogProbs, as_jit_argument
from grpo_jax.update.objective import Teacher
from grpo_jax.update.step import Updater


class Scorer(Protocol):
    """A teacher that returns log-probs, such as an inference engine. `engines.vllm_scorer` returns one.

    `score` receives prompts [B, P] and completions [B, G, T] as NumPy arrays, and returns the log-prob of each token
    given its prompt and the previous tokens, at the run's temperature, as `TeacherLogProbs` or an array of log-probs.

    Two attributes are optional. `tokenizer` must have the policy's vocabulary. The method `check(config)` is called
    before sampling and must raise ValueError for settings that the teacher does not support.
    """

    def score(self, prompts: Prompts, completions: Completions) -> TeacherLogProbs | np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class TeacherScoring:
    """A validated teacher: either a scorer, or a model with params and the updater that computes its log-probs."""

    local: Teacher | None = None
    updater: Updater | None = None
    scorer: Scorer | None = None

    def add_log_probs(self, batch: Batch, completions: Completions, config: GRPOConfig) -> Batch:
        """Add the teacher's log-probs to a batch on the host. With "full_logits", the batch is returned unchanged."""
        if config.distillation_mode == "full_logits":
            return batch
        if self.local is not None and self.updater is not None:
            clipped = self.local.clip_to_vocab(batch.tokens)
            l = fetch(self.updater.log_probs(self.local.params, batch.prompts, clipped, batch.mask))
            # As with "full_logits", a token beyond the teacher's vocabulary is not compared: its divergence is 0.
            old = batch.sampling_log_probs if batch.old_log_probs is None else batch.old_log_probs
            return batch.replace(teacher_log_probs=np.where(batch.tokens == clipped, l, old))
        assert self.scorer is not None
        as_numpy = jax.tree.map(np.asarray, completions)
        result = _read_result(self.scorer.score(batch.prompts, as_numpy), as_numpy.mask, config)
        log_probs, ids, top = (None if x is None else x[:, :, : batch.mask.shape[2]] for x in result)
        if config.distillation_mode == "sampled_token":
            return batch.replace(teacher_log_probs=log_probs)
        return batch.replace(teacher_top_ids=ids, teacher_top_log_probs=top)


def check_teacher(teacher: object, policy: Policy, config: GRPOConfig, *, has_rewards: bool) -> None:
    """Raise ValueError if the teacher is invalid, missing, or incompatible with the policy or the config."""
    if teacher is None:
        if config.distillation_coef > 0:
            raise ValueError(
                f"distillation_coef={config.distillation_coef} needs a teacher; pass `teacher`, or set"
                " distillation_coef=0.0"
            )
        return
    if not isinstance(teacher, Policy) and not callable(getattr(teacher, "score", None)):
        raise ValueError(
            "teacher must be a Policy, or an object with the method score(prompts, completions)"
            f" (run.teacher.Scorer); got {show(teacher)}"
        )
    raise_all("teacher", list(_contradictions(isinstance(teacher, Policy), config, has_rewards=has_rewards)))
    check_same_tokenizer(policy.tokenizer, getattr(teacher, "tokenizer", policy.tokenizer))
    if isinstance(teacher, Policy):
        teacher.check_held()
    elif hasattr(teacher, "check"):
        teacher.check(config)


def _contradictions(is_policy: bool, config: GRPOConfig, *, has_rewards: bool) -> Iterator[str]:
    """Yield an error message for each setting that is incompatible with the teacher."""
    if config.distillation_coef == 0:
        yield "distillation_coef must be positive with a teacher; got 0.0. Set distillation_coef, or omit teacher"
    if not is_policy and config.distillation_mode == "full_logits":
        yield (
            "distillation_mode='full_logits' needs a Policy as the teacher, because a scorer returns log-probs for a"
            " few tokens only. Use 'sampled_token', or 'topk_logits' with distillation_topk"
        )
    if is_policy and config.distillation_mode == "topk_logits":
        yield (
            "distillation_mode='topk_logits' needs a scorer. Use 'full_logits', which has the same cost if the teacher"
            " is a Policy"
        )
    if config.distillation_mode == "sampled_token" and config.distillation_divergence != "reverse_kl":
        yield (
            "distillation_mode='sampled_token' supports only distillation_divergence='reverse_kl'; got"
            f" {config.distillation_divergence!r}. Use 'reverse_kl' or a different distillation_mode"
        )
    if not is_policy and jax.process_count() > 1:
        yield "a scorer cannot be the teacher in a run with several processes; use a Policy"
    if config.dynamic_sampling and not has_rewards:
        yield (
            "dynamic_sampling=True needs rewards to select groups; pass a reward function, or set"
            " dynamic_sampling=False"
        )


def check_same_tokenizer(ours: Any, theirs: Any) -> None:
    """Raise ValueError if both tokenizers are given and do not assign the same ids to the same tokens."""
    if ours is theirs or ours is None or theirs is None:
        return
    our_ids, their_ids = ours.get_vocab(), theirs.get_vocab()
    different = sorted(token for token in {*our_ids, *their_ids} if our_ids.get(token) != their_ids.get(token))
    if different:
        examples = shorten([f"{token!r} ({our_ids.get(token)}, {their_ids.get(token)})" for token in different], 3)
        raise ValueError(
            f"teacher.tokenizer must have the policy's vocabulary, but ids differ for {len(different)} of the tokens"
            f" (policy, teacher): {examples}. Use a teacher from the same model family"
        )


def make_teacher_scoring(teacher: Policy | Scorer, make_updater: Callable[[Model], Updater]) -> TeacherScoring:
    """Build a `TeacherScoring` from a scorer, or from a `Policy` whose params are on the run's devices."""
    if isinstance(teacher, Policy):
        return TeacherScoring(Teacher(as_jit_argument(teacher.model), teacher.params), make_updater(teacher.model))
    return TeacherScoring(scorer=teacher)


def _read_result(result: TeacherLogProbs | np.ndarray, mask: np.ndarray, config: GRPOConfig) -> TeacherLogProbs:
    """Validate a scorer's result, and set values to 0 where the mask is False."""
    result = TeacherLogProbs._make(result) if isinstance(result, tuple) else TeacherLogProbs(result)
    log_probs = _read_array(result.log_probs, "log_probs", mask)
    if config.distillation_topk is None:
        return TeacherLogProbs(log_probs)
    top_mask = np.repeat(mask[..., None], config.distillation_topk, axis=-1)
    ids = _read_array(result.top_ids, "top_ids", top_mask)
    return TeacherLogProbs(log_probs, ids, _read_array(result.top_log_probs, "top_log_probs", top_mask))


def _read_array(value: object, name: str, mask: np.ndarray) -> np.ndarray:
    """Validate one array of a scorer's result. Returns int32 ids, or float32 log-probs clipped to at most 0."""
    x = np.asarray(value)
    if x.shape != mask.shape:
        raise ValueError(f"teacher.score must return {name} of shape {mask.shape}; got {x.shape}")
    unmasked = x[mask]
    if name == "top_ids":
        if x.dtype.kind not in "iu" or (unmasked < 0).any():
            raise ValueError(f"teacher.score must return {name} as integers ≥ 0; got {show(x)} ({x.dtype})")
        return np.where(mask, x, 0).astype(np.int32)
    if not np.isfinite(unmasked).all() or (unmasked > ROUNDING).any():
        raise ValueError(
            f"teacher.score must return {name} that are finite and ≤ 0 (natural logarithms); got values from"
            f" {unmasked.min()} to {unmasked.max()}"
        )
    return np.where(mask, np.minimum(x, 0), 0).astype(np.float32)
