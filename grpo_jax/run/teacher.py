"""The teacher of a run: checks of the argument, and the log-probs that it adds to a batch.

| teacher | `distillation_mode` | what is learned from |
|---|---|---|
| policy | "full_logits" | its whole distributions, computed in the update |
| policy, scorer | "sampled_token" | log-probs of the sampled tokens, computed before the update |
| scorer | "topk_logits" | log-probs of k tokens at each position, computed before the update |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import raise_all, show, some
from grpo_jax.models.sharding import fetch
from grpo_jax.policy import Policy
from grpo_jax.run.function_sources import fingerprint
from grpo_jax.run.sampler import ROUNDING
from grpo_jax.types import Batch, Completions, Json, Model, Prompts, TeacherLogProbs, as_argument
from grpo_jax.update.step import Updater
from grpo_jax.update.teaching import Teacher


class Scorer(Protocol):
    """A teacher that returns log-probs, such as an engine with another model; `engines.vllm_scorer` makes one.

    `score` receives prompts [B, P] and completions [B, G, T] as NumPy arrays. It returns the log-prob of each token,
    given its prompt and the tokens before it, at the run's temperature: a `TeacherLogProbs`, or only the array of its
    `log_probs`.

    An optional attribute `tokenizer` must have the policy's vocabulary. An optional method `check(config)` is called
    before anything is sampled; it raises a `ValueError` for settings that the teacher does not support.
    """

    def score(self, prompts: Prompts, completions: Completions) -> TeacherLogProbs | np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Teaching:
    """A checked teacher: a model with its params and the updater that scores by it, or a scorer."""

    teacher: Teacher | None = None
    updater: Updater | None = None
    scorer: Scorer | None = None

    @property
    def identity(self) -> Json:
        """Description stored in checkpoints, which a resumed run must match."""
        if self.teacher is None:
            return {"kind": "scorer", "scorer": type(self.scorer).__name__}
        return {"kind": "policy", "params": fingerprint((self.teacher.model, self.teacher.params))}

    def add_log_probs(self, batch: Batch, completions: Completions, config: GRPOConfig) -> Batch:
        """Add the teacher's log-probs to a batch on the host, unless the update computes its distributions.

        T of `completions` may be longer than the batch's.
        """
        if config.distillation_mode == "full_logits":
            return batch
        if self.teacher is not None and self.updater is not None:
            l = self.updater.score(self.teacher.params, batch.prompts, batch.tokens, batch.mask)
            return batch.replace(teacher_log_probs=fetch(l))
        assert self.scorer is not None
        on_host = jax.tree.map(np.asarray, completions)
        scores = _read_scores(self.scorer.score(batch.prompts, on_host), on_host.mask, config)
        t = batch.mask.shape[2]
        log_probs, ids, top = (None if x is None else x[:, :, :t] for x in scores)
        if config.distillation_mode == "sampled_token":
            return batch.replace(teacher_log_probs=log_probs)
        return batch.replace(teacher_top_ids=ids, teacher_top_log_probs=top)


def check_teacher(teacher: object, policy: Policy, config: GRPOConfig, *, has_rewards: bool) -> None:
    """Raise a `ValueError` if the teacher cannot be used, contradicts the config, or is missing."""
    if teacher is None:
        if config.distillation_coef > 0:
            raise ValueError(f"distillation_coef = {config.distillation_coef}: there is no teacher; pass one to train")
        return
    if not isinstance(teacher, Policy) and not callable(getattr(teacher, "score", None)):
        raise ValueError(
            f"teacher is {show(teacher)}: give a Policy, or an object with score(prompts, completions)"
            " (run.teacher.Scorer)"
        )
    raise_all("teacher", list(_contradictions(isinstance(teacher, Policy), config, has_rewards=has_rewards)))
    check_same_tokenizer(policy.tokenizer, getattr(teacher, "tokenizer", policy.tokenizer))
    if isinstance(teacher, Policy):
        teacher.check_held()
    elif callable(own_check := getattr(teacher, "check", None)):
        own_check(config)


def _contradictions(is_policy: bool, config: GRPOConfig, *, has_rewards: bool) -> Iterator[str]:
    """Yield an error line for each setting that contradicts the teacher."""
    if config.distillation_coef == 0:
        yield "distillation_coef = 0.0: the teacher would have no effect; set it above 0, or leave teacher out"
    if not is_policy and config.distillation_mode == "full_logits":
        yield (
            "distillation_mode = 'full_logits': a scorer returns log-probs of a few tokens only; use 'sampled_token',"
            " or 'topk_logits' with distillation_topk"
        )
    if is_policy and config.distillation_mode == "topk_logits":
        yield (
            "distillation_mode = 'topk_logits': a teacher that is a model gives its whole distribution at the same"
            " cost; use 'full_logits'"
        )
    if config.distillation_mode == "sampled_token" and config.distillation_divergence != "reverse_kl":
        yield (
            f"distillation_divergence = {config.distillation_divergence!r}: sampled tokens give the reverse KL only;"
            " use 'reverse_kl', or another distillation_mode"
        )
    if config.distillation_alpha != 0.5 and config.distillation_divergence != "jsd":
        yield (
            f"distillation_alpha = {config.distillation_alpha}: only distillation_divergence = 'jsd' has this weight;"
            " leave it at 0.5"
        )
    if not is_policy and jax.process_count() > 1:
        yield "a scorer serves one process, and this run has several; give a Policy"
    if config.dynamic_sampling and not has_rewards:
        yield "dynamic_sampling = True: groups are chosen by rewards; give a reward function, or use False"


def check_same_tokenizer(ours: object, theirs: object) -> None:
    """Raise a `ValueError` unless both tokenizers give the same ids to the same tokens."""
    if ours is theirs or ours is None or theirs is None:
        return
    one, other = (getattr(tokenizer, "get_vocab", None) for tokenizer in (ours, theirs))
    if one is None or other is None:
        raise ValueError("teacher.tokenizer has no get_vocab(), which is compared with the policy's tokenizer")
    one, other = one(), other()
    different = sorted(token for token in {*one, *other} if one.get(token) != other.get(token))
    if different:
        examples = some([f"{token!r} ({one.get(token)}, {other.get(token)})" for token in different], 3)
        raise ValueError(
            f"teacher.tokenizer differs from the policy's: {len(different)} tokens have other ids (policy, teacher):"
            f" {examples}. A teacher scores the policy's tokens: give one of the same family"
        )


def make_teaching(teacher: Policy | Scorer, make_updater: Callable[[Model], Updater]) -> Teaching:
    """The teacher of a run: a scorer, or a placed `Policy` with the updater that scores by it."""
    if isinstance(teacher, Policy):
        return Teaching(Teacher(as_argument(teacher.model), teacher.params), make_updater(teacher.model))
    return Teaching(scorer=teacher)


def _read_scores(scores: TeacherLogProbs | np.ndarray, mask: np.ndarray, config: GRPOConfig) -> TeacherLogProbs:
    """Validate the result of a scorer; values where the mask is False become 0."""
    scores = TeacherLogProbs._make(scores) if isinstance(scores, tuple) else TeacherLogProbs(scores)
    log_probs = _read_array(scores.log_probs, "log_probs", mask)
    if config.distillation_topk is None:
        return TeacherLogProbs(log_probs)
    top_mask = np.repeat(mask[..., None], config.distillation_topk, axis=-1)
    ids = _read_array(scores.top_ids, "top_ids", top_mask)
    return TeacherLogProbs(log_probs, ids, _read_array(scores.top_log_probs, "top_log_probs", top_mask))


def _read_array(given: object, name: str, mask: np.ndarray) -> np.ndarray:
    """One array of a scorer's result as int32 ids, or as float32 log-probs of at most 0."""
    x = np.asarray(given)
    if x.shape != mask.shape:
        raise ValueError(f"teacher.score returned {name} of the shape {x.shape}: make it {list(mask.shape)}")
    seen = x[mask]
    if name == "top_ids":
        if x.dtype.kind not in "iu" or (seen < 0).any():
            raise ValueError(f"teacher.score returned {name} that are not token ids, {x.dtype}: give integers ≥ 0")
        return np.where(mask, x, 0).astype(np.int32)
    if not np.isfinite(seen).all() or (seen > ROUNDING).any():
        raise ValueError(f"teacher.score returned {name} that are not all finite and ≤ 0: give natural logarithms")
    return np.where(mask, np.minimum(x, 0), 0).astype(np.float32)
