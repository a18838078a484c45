"""The teacher of a run: checked at the door, asked after the rewards, and heard in the update.

```
Policy   ─► its whole distributions, in the update ("full_logits"), or its log-probs of the drawn tokens, before it
"self"   ─► likewise, by the policy's own params, behind the prompts that `teacher_prompt` makes
a scorer ─► log-probs that it tells before the update: of the drawn tokens, or of k tokens as well ("topk_logits")
```
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol, TypeVar

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.sharding import fetch
from grpo_jax.maths.distillation import failed_routes, pass_rate_weights
from grpo_jax.messages import raise_all, show, some
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import function_name
from grpo_jax.run.teacher_prompts import Heard, TeacherPrompt, ask, check_teacher_prompt, own_prompts
from grpo_jax.turns.interaction import Interaction
from grpo_jax.types import Batch, Completions, Model, Params, Prompts, Tokenizer, Told, as_argument
from grpo_jax.update.packed import Updater
from grpo_jax.update.state import TrainState
from grpo_jax.update.teaching import Teacher

_Array = TypeVar("_Array", jax.Array, np.ndarray)

ROUNDING = 1e-2
"""Nats by which a scorer's log-prob may be above 0."""


class Scorer(Protocol):
    """A teacher that only tells log-probs, such as an engine with a model that is not here.

    `prompts` are [B, P], the completions [B, G, T], both NumPy's; with a `teacher_prompt` they are B·G groups of one.
    The log-probs are those of the distribution at the run's temperature, of each token given its prompt and the tokens
    before it: a `Told`, or the array of `log_probs` alone. If it has an attribute `tokenizer`, that has to be the
    policy's; if not, its tokens are taken to be. If it has a method `check(config)`, that is called before anything is
    sampled, and raises what stands against a run with these settings. `engines.vllm_scorer` makes one.
    """

    def score(self, prompts: Prompts, completions: Completions) -> Told | np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Teaching:
    """The teacher of a run, its arguments checked.

    Attributes:
      kind: what it is.
      teacher: model and params; of the policy itself without params; None for a scorer.
      updater: scores completions by that model; None for a scorer.
      scorer: what tells log-probs; None for a model.
      tokenizer: of the policy.
      prompt: the `TeacherPrompt`; None: the teacher reads the policy's prompts.
      longest: positions that the teacher has; None: not known.
      identity: a JSON object that says who it is.
    """

    kind: Literal["policy", "self", "scorer"]
    teacher: Teacher | None
    updater: Updater | None
    scorer: Scorer | None
    tokenizer: Tokenizer
    prompt: TeacherPrompt | None
    longest: int | None
    identity: dict[str, str | None]

    @property
    def params(self) -> Params | None:
        """Those that the run holds beside its state."""
        return None if self.teacher is None else self.teacher.params


def kind_of(teacher: object) -> Literal["policy", "self", "scorer"]:
    """Return what a teacher is.

    Raises:
      ValueError: it is none.
    """
    if isinstance(teacher, Policy):
        return "policy"
    if isinstance(teacher, str) and teacher == "self":
        return "self"
    if callable(getattr(teacher, "score", None)):
        return "scorer"
    raise ValueError(
        f'teacher is {show(teacher)}: give a Policy, "self", or an object with score(prompts, completions)'
        " (run.teacher.Scorer)"
    )


def check_teacher(
    teacher: object,
    prompt: object,
    policy: Policy,
    config: GRPOConfig,
    *,
    columns: Sequence[str] | None = None,
    has_rewards: bool = True,
) -> None:
    """Raise a `ValueError` unless a run can learn from the teacher; it may be None.

    Args:
      prompt: the `teacher_prompt`.
      columns: of the dataset; None: not known.
      has_rewards: whether there is a reward function.
    """
    if teacher is None:
        if prompt is not None:
            raise ValueError('teacher_prompt: there is no teacher to read it; pass teacher too, such as "self"')
        if config.distillation_coef > 0:
            raise ValueError(f"distillation_coef = {config.distillation_coef}: there is no teacher; pass one to train")
        return
    kind = kind_of(teacher)
    raise_all("teacher", [*_contradictions(kind, prompt, config), *([] if has_rewards else _needs_rewards(config))])
    check_teacher_prompt(prompt, columns)
    if isinstance(teacher, Policy):
        teacher.check_held()
    check_same_tokenizer(policy.tokenizer, getattr(teacher, "tokenizer", policy.tokenizer))
    own_check = getattr(teacher, "check", None) if kind == "scorer" else None
    if callable(own_check):
        own_check(config)


def _contradictions(kind: str, prompt: object, config: GRPOConfig) -> Iterator[str]:
    """Yield an error line for each setting that does not go with a teacher of that kind."""
    if config.distillation_coef == 0:
        yield "distillation_coef = 0.0: nothing would be learned from it; set it above 0, or leave teacher out"
    if kind == "scorer" and config.distillation_mode == "full_logits":
        yield (
            "distillation_mode = 'full_logits': a scorer tells log-probs of a few tokens alone; use 'sampled_token', or"
            " 'topk_logits' with distillation_topk"
        )
    if kind != "scorer" and config.distillation_mode == "topk_logits":
        yield (
            "distillation_mode = 'topk_logits': a teacher that is a model has its whole distribution at hand, for no"
            " more; use 'full_logits'"
        )
    if config.distillation_mode == "sampled_token" and config.distillation_divergence != "reverse_kl":
        yield (
            f"distillation_divergence = {config.distillation_divergence!r}: the drawn token alone tells the reverse KL;"
            " use 'reverse_kl', or another distillation_mode"
        )
    if config.distillation_alpha != 0.5 and config.distillation_divergence != "jsd":
        yield (
            f"distillation_alpha = {config.distillation_alpha}: only distillation_divergence = 'jsd' has this weight;"
            " leave it at 0.5"
        )
    if kind == "scorer" and jax.process_count() > 1:
        yield "a scorer serves one process, and this run has several; give a Policy"
    if kind == "self" and prompt is None:
        yield "'self' would know no more than the policy; pass teacher_prompt too"


def _needs_rewards(config: GRPOConfig) -> Iterator[str]:
    """Yield an error line for each setting that has no meaning without reward functions."""
    for name, plain in (
        ("distillation_routing", "all"),
        ("distillation_weighting", "uniform"),
        ("dynamic_sampling", False),
    ):
        value = getattr(config, name)
        if value != plain:
            yield f"{name} = {value!r}: there is no reward function by which it goes; give one, or use {plain!r}"


def check_same_tokenizer(ours: object, theirs: object) -> None:
    """Raise a `ValueError` unless two tokenizers have the same ids for the same tokens."""
    if ours is theirs or ours is None or theirs is None:
        return
    one, other = (getattr(tokenizer, "get_vocab", None) for tokenizer in (ours, theirs))
    if one is None or other is None:
        raise ValueError("teacher.tokenizer has no get_vocab(), by which it could be seen to be that of the policy")
    one, other = one(), other()
    different = sorted(token for token in {*one, *other} if one.get(token) != other.get(token))
    if different:
        examples = some([f"{token!r} ({one.get(token)}, {other.get(token)})" for token in different], 3)
        raise ValueError(
            f"teacher.tokenizer is not that of the policy: {len(different)} tokens have other ids (policy, teacher):"
            f" {examples}. A teacher judges the policy's tokens one by one: give one of the same family"
        )


def make_teaching(
    teacher: Policy | Scorer | str | None,
    prompt: TeacherPrompt | None,
    policy: Policy,
    make_updater: Callable[[Model], Updater],
    place: Callable[[Policy], Policy],
) -> Teaching | None:
    """The teacher of a run whose arguments have been checked; None where there is none.

    Args:
      policy: of the run, on its devices.
      make_updater: of a model, an updater that scores by it.
      place: of a `Policy`, it with the run's settings on the run's devices.
    """
    if teacher is None:
        return None
    asked = prompt if prompt is None or isinstance(prompt, str) else function_name(prompt)
    kind: Literal["policy", "self"] = "policy" if isinstance(teacher, Policy) else "self"
    if not isinstance(teacher, Policy | str):
        told = {"kind": "scorer", "scorer": type(teacher).__name__, "prompt": asked}
        return Teaching("scorer", None, None, teacher, policy.tokenizer, prompt, None, told)
    own = place(teacher) if isinstance(teacher, Policy) else policy
    shape = own.model.config if isinstance(own.model, Transformer | LoraModel) else None
    longest = None if shape is None else shape.max_position_embeddings
    who = {"kind": kind, "params": None if kind == "self" else _fingerprint(own), "prompt": asked}
    held = Teacher(as_argument(own.model), None if kind == "self" else own.params)
    return Teaching(kind, held, make_updater(own.model), None, policy.tokenizer, prompt, longest, who)


def _fingerprint(policy: Policy) -> str:
    """A hash of the first numbers of every array of a policy."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((as_argument(policy.model), policy.params)):
        digest.update(fetch(leaf[(0,) * (leaf.ndim - 1)][:64] if leaf.ndim else leaf).tobytes())
    return digest.hexdigest()


def ask_teacher(
    teaching: Teaching | None, heard: Heard, interaction: Interaction | None, config: GRPOConfig
) -> np.ndarray | None:
    """The teacher's prompts, as of `ask`; None: it reads those of the policy, or there is none."""
    if teaching is None or teaching.prompt is None:
        return None
    return ask(teaching.prompt, heard, teaching.tokenizer, interaction, config, teaching.longest)


def with_teacher(
    teaching: Teaching | None,
    state: TrainState,
    batch: Batch,
    completions: Completions,
    rewards: np.ndarray,
    asked: np.ndarray | None,
    config: GRPOConfig,
) -> tuple[Batch, dict[str, float]]:
    """The batch with what the teacher has to do with it, and metrics.

    Args:
      batch: on the host, with its advantages.
      completions: its completions, whose T may be longer.
      rewards: [B, G], weighted sums.
      asked: of `ask`.
    """
    if teaching is None:
        return batch, {}
    b, g = batch.mask.shape[:2]
    taught = np.ones((b, g), bool) if asked is None else np.array([[one is not None for one in row] for row in asked])
    weights = taught.astype(np.float32)
    with np.errstate(invalid="ignore"):
        passed = np.asarray(rewards) >= config.success_reward_threshold
    if config.distillation_routing == "failed":
        routed = np.asarray(failed_routes(passed, taught))
        weights *= routed
        advantages = np.asarray(batch.advantages)
        routed = routed.reshape(routed.shape + (1,) * (advantages.ndim - 2))
        batch = batch.replace(advantages=np.where(routed, np.float32(0), advantages))
    if config.distillation_weighting == "pass_rate":
        weights *= np.asarray(pass_rate_weights(passed))[:, None]
    metrics = {"teacher/share": float((weights > 0).mean())}
    own = None if asked is None else own_prompts(asked, batch.prompts, config)
    batch = batch.replace(distillation_weights=weights)
    if config.distillation_mode == "full_logits":
        return batch.replace(teacher_prompts=own), metrics
    return _told(teaching, state, batch, completions, own, config), metrics


def _told(
    teaching: Teaching,
    state: TrainState,
    batch: Batch,
    completions: Completions,
    own: Prompts | None,
    config: GRPOConfig,
) -> Batch:
    """The batch with the log-probs that a teacher tells, behind prompts of its `own`; the update reads none of them."""
    b, g, t = batch.mask.shape
    prompts = batch.prompts
    if own is not None:
        prompts = Prompts(own.tokens.reshape(b * g, -1), own.lengths.reshape(-1))

    def shaped(x: _Array) -> _Array:
        return x if own is None else x.reshape(b * g, 1, *x.shape[2:])

    if teaching.scorer is None:
        assert teaching.teacher is not None, "it is a model"
        assert teaching.updater is not None, "of which there is one for each"
        params = teaching.teacher.held(state).params
        l = teaching.updater.score(params, prompts, shaped(batch.tokens), shaped(batch.mask))
        return batch.replace(teacher_log_probs=fetch(l).reshape(b, g, t))
    laid_out = jax.tree.map(lambda x: shaped(np.asarray(x)), completions)
    told = _read_told(teaching.scorer.score(prompts, laid_out), np.asarray(completions.mask), config)
    log_probs, ids, top = (None if x is None else x[:, :, :t] for x in told)
    if config.distillation_mode == "sampled_token":
        return batch.replace(teacher_log_probs=log_probs)
    return batch.replace(teacher_top_ids=ids, teacher_top_log_probs=top)


def _read_told(told: Told | np.ndarray, mask: np.ndarray, config: GRPOConfig) -> Told:
    """Check what a scorer returned."""
    told = Told(*told) if isinstance(told, tuple) else Told(told)
    k = config.distillation_topk
    wanted = {"log_probs": mask.shape} | ({} if k is None else dict.fromkeys(Told._fields[1:], (*mask.shape, k)))
    arrays: dict[str, np.ndarray] = {}
    for name, shape in wanted.items():
        x = np.asarray(getattr(told, name))
        if x.shape not in (shape, (shape[0] * shape[1], 1, *shape[2:])):  # [B·G, 1, …] where prompts are its own
            raise ValueError(f"teacher.score: its {name} are {x.shape}; give {list(shape)}")
        x = x.reshape(shape)
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
    return Told(arrays["log_probs"], arrays.get("top_ids"), arrays.get("top_log_probs"))
