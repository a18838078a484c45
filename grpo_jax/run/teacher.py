"""The teacher of a run: checks of the argument, and the log-probs that it adds to a batch.

```
Policy ─► in the update its whole distributions ("full_logits"), or before it the log-probs of the sampled tokens
scorer ─► before the update log-probs of the sampled tokens, or of k tokens at each position ("topk_logits")
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import raise_all, show, some
from grpo_jax.models.sharding import fetch
from grpo_jax.policy import Policy
from grpo_jax.run.resume import fingerprint
from grpo_jax.run.sampler import ROUNDING
from grpo_jax.types import Batch, Completions, Json, Model, Prompts, TeacherLogProbs, as_argument
from grpo_jax.update.step import Updater
from grpo_jax.update.teaching import Teacher


class Scorer(Protocol):
    """A teacher that returns log-probs, such as an engine with a model of its own; `engines.vllm_scorer` makes one.

    `prompts` are [B, P], the completions [B, G, T], NumPy's arrays. The log-probs are of each token given its prompt
    and the tokens before it, at the run's temperature: a `TeacherLogProbs`, or the array of its `log_probs`.

    An attribute `tokenizer`, if there is one, must be the policy's. A method `check(config)`, if there is one, is
    called before anything is sampled, and raises a `ValueError` for settings that do not go with the teacher.
    """

    def score(self, prompts: Prompts, completions: Completions) -> TeacherLogProbs | np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Teaching:
    """A checked teacher.

    Attributes:
      teacher: model and params; None for a scorer.
      updater: scores completions by that model; None for a scorer.
      scorer: returns log-probs; None for a model.
    """

    teacher: Teacher | None = None
    updater: Updater | None = None
    scorer: Scorer | None = None

    @property
    def identity(self) -> Json:
        """A description for checkpoints, which a resumed run must match."""
        if self.teacher is None:
            return {"kind": "scorer", "scorer": type(self.scorer).__name__}
        return {"kind": "policy", "params": fingerprint((self.teacher.model, self.teacher.params))}

    def add_log_probs(self, batch: Batch, completions: Completions, config: GRPOConfig) -> Batch:
        """The batch, on the host, with the teacher's log-probs; unchanged if the update reads its distributions.

        `completions` are the batch's; their T may be longer.
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


def kind_of(teacher: object) -> Literal["policy", "scorer"]:
    """Return the kind of a teacher; raise a `ValueError` for another object."""
    if isinstance(teacher, Policy):
        return "policy"
    if callable(getattr(teacher, "score", None)):
        return "scorer"
    raise ValueError(
        f"teacher is {show(teacher)}: give a Policy, or an object with score(prompts, completions) (run.teacher.Scorer)"
    )


def check_teacher(teacher: object, policy: Policy, config: GRPOConfig, *, has_rewards: bool = True) -> None:
    """Raise a `ValueError` unless a run can learn from the teacher, or without one.

    Args:
      has_rewards: whether there is a reward function.
    """
    if teacher is None:
        if config.distillation_coef > 0:
            raise ValueError(f"distillation_coef = {config.distillation_coef}: there is no teacher; pass one to train")
        return
    kind = kind_of(teacher)
    raise_all("teacher", list(_contradictions(kind, config, has_rewards=has_rewards)))
    if isinstance(teacher, Policy):
        teacher.check_held()
    check_same_tokenizer(policy.tokenizer, getattr(teacher, "tokenizer", policy.tokenizer))
    own_check = getattr(teacher, "check", None) if kind == "scorer" else None
    if callable(own_check):
        own_check(config)


def _contradictions(kind: str, config: GRPOConfig, *, has_rewards: bool) -> Iterator[str]:
    """Yield an error line for each setting that contradicts a teacher of that kind."""
    if config.distillation_coef == 0:
        yield "distillation_coef = 0.0: the teacher would have no effect; set it above 0, or leave teacher out"
    if kind == "scorer" and config.distillation_mode == "full_logits":
        yield (
            "distillation_mode = 'full_logits': a scorer returns log-probs of a few tokens only; use 'sampled_token',"
            " or 'topk_logits' with distillation_topk"
        )
    if kind != "scorer" and config.distillation_mode == "topk_logits":
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
    if kind == "scorer" and jax.process_count() > 1:
        yield "a scorer serves one process, and this run has several; give a Policy"
    if config.dynamic_sampling and not has_rewards:
        yield "dynamic_sampling = True: groups are chosen by rewards; give a reward function, or use False"


def check_same_tokenizer(ours: object, theirs: object) -> None:
    """Raise a `ValueError` unless two tokenizers have the same ids for the same tokens."""
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


def make_teaching(teacher: Policy | Scorer | None, make_updater: Callable[[Model], Updater]) -> Teaching | None:
    """The teacher of a run: a placed `Policy`, scored by the updater that `make_updater` makes, or a scorer."""
    if isinstance(teacher, Policy):
        return Teaching(Teacher(as_argument(teacher.model), teacher.params), make_updater(teacher.model))
    return None if teacher is None else Teaching(scorer=teacher)


def _read_scores(scores: TeacherLogProbs | np.ndarray, mask: np.ndarray, config: GRPOConfig) -> TeacherLogProbs:
    """Validate the result of a scorer."""
    scores = TeacherLogProbs(*scores) if isinstance(scores, tuple) else TeacherLogProbs(scores)
    k = config.distillation_topk
    wanted = {"log_probs": mask.shape} | (
        {} if k is None else dict.fromkeys(TeacherLogProbs._fields[1:], (*mask.shape, k))
    )
    arrays: dict[str, np.ndarray] = {}
    for name, shape in wanted.items():
        x = np.asarray(getattr(scores, name))
        if x.shape != shape:
            raise ValueError(f"teacher.score: its {name} are {x.shape}; give {list(shape)}")
        seen = x[mask]
        if name == "top_ids":
            if x.dtype.kind not in "iu" or (seen.size and seen.min() < 0):
                raise ValueError(f"teacher.score: its {name} are not ids of tokens, {x.dtype}; give integers from 0 on")
            arrays[name] = np.where(mask[..., None], x, 0).astype(np.int32)
            continue
        if not np.isfinite(seen).all() or (seen > ROUNDING).any():
            raise ValueError(f"teacher.score: its {name} are not all finite and at most 0; they are natural logarithms")
        here = mask.reshape(mask.shape + (1,) * (x.ndim - 3))
        arrays[name] = np.where(here, np.minimum(x, 0), 0).astype(np.float32)
    return TeacherLogProbs(arrays["log_probs"], arrays.get("top_ids"), arrays.get("top_log_probs"))
