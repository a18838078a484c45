"""The axes, and the frozen pytrees and protocols that the package shares.

Axis letters, used in every docstring of this package:

| letter | meaning |
|---|---|
| B | prompts in a batch |
| G | completions of one prompt (`num_generations`) |
| P | prompt tokens, right-padded |
| T | completion tokens, right-padded |
| K | reward functions |
| V | vocabulary |
| D | model width |

The group is an axis: prompts are `[B, P]`, everything about completions is `[B, G, ...]`. A reduction over axis 1 is a
reduction over a group and cannot mix prompts. Tokens are right-padded with lengths, so a position is its index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Params = Any
"""A pytree of arrays: nested dicts for the models of this package."""

Json = Mapping[str, Any]
"""A JSON object, such as the content of a config.json."""

Row = dict[str, Any]
"""A row of a dataset: its columns by name, among them `prompt`."""

Message = dict[str, Any]
"""A message of a conversation: its `role`, its `content`, and the `tool_calls` of an assistant's."""

Messages = list[Message]
"""A conversation."""


class Prompts(flax.struct.PyTreeNode):
    """Token ids of a batch of prompts.

    Attributes:
      tokens: [B, P] int32, right-padded; values at and after `lengths` are ignored.
      lengths: [B] int32, in 1..P.
    """

    tokens: jax.Array
    lengths: jax.Array


class Completions(flax.struct.PyTreeNode):
    """The sampled completions of a batch of prompts.

    ```
    t              0     1     2     3     4
    tokens       "the" "cat"  EOS    0     0
    mask           1     1     1     0     0
    log_probs    -1.2  -0.7  -0.1    0     0     log-prob of tokens[t], given the prompt and tokens[:t]
    ended = True: the completion ended by itself. One that was cut off at T has ended = False (it was truncated).
    ```

    Attributes:
      tokens: [B, G, T] int32 sampled tokens and, with several turns, the observations in between; then the pad id.
      mask: [B, G, T] bool; True on sampled tokens: with one turn up to and including the first EOS, with several turns
        in every turn, but not on observations.
      log_probs: [B, G, T] float32 under the distribution that the token was sampled from; 0 where `mask` is False.
      ended: [B, G] bool; False if the completion was cut off at T, from the sampler's own record.
      present: [B, G, T] bool; True on all tokens of a completion of several turns, observations included. None: `mask`.
      old_log_probs: [B, G, T] float32 under the policy that sampled, by the trainer's own scorer; 0 where `mask` is
        False. None: the sampler was the built-in one (one turn or several), and `log_probs` are the old log-probs.
    """

    tokens: jax.Array
    mask: jax.Array
    log_probs: jax.Array
    ended: jax.Array
    present: jax.Array | None = None
    old_log_probs: jax.Array | None = None


class TeacherLogProbs(NamedTuple):
    """Log-probs from an external teacher (`run.teacher.Scorer`), as NumPy arrays.

    Attributes:
      log_probs: [B, G, T] floats ≤ 0, nats, of the sampled tokens; ignored where the mask is False.
      top_ids: [B, G, T, k] integers, k different tokens, usually the most probable ones; None for sampled tokens only.
      top_log_probs: [B, G, T, k] floats ≤ 0, nats, of these tokens.
    """

    log_probs: np.ndarray
    top_ids: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None


class Batch(flax.struct.PyTreeNode):
    """The completions of an iteration, or a minibatch of them: all inputs of a gradient except the params.

    Attributes:
      prompts: `Prompts`, tokens [B, P].
      tokens: [B, G, T] int32 completion tokens.
      mask: [B, G, T] bool; the tokens that count in the loss.
      advantages: [B, G] float32, or [B, G, T] for an advantage of each token.
      sampling_log_probs: [B, G, T] float32, `Completions.log_probs`: the old log-probs of the ratio, unless there are
        `old_log_probs`. If `GRPOConfig.on_policy` (a single update by the policy that sampled), neither is read: the
        ratio is exp(l − sg(l)). The built-in sampler computes them as it samples (`rollout.draw`), in every turn.
      ref_log_probs: [B, G, T] float32 under the reference, computed by `run.collect` before the first update
        (`Updater.score`); None if beta is 0.
      initial_log_probs: [B, G, T] float32 under the initial policy; None if the reference is that policy.
      counted: [B] bool, False for a group that only fills the batch (its mask is 0 too); None: all count.
      old_log_probs: [B, G, T] float32 under the policy that sampled, if an engine samples; None: `sampling_log_probs`.
      teacher_log_probs: [B, G, T] float32 of the sampled tokens under a teacher; None unless the update reads them.
      teacher_top_ids: [B, G, T, k] int32 tokens with log-probs of a teacher; None unless the update reads them.
      teacher_top_log_probs: [B, G, T, k] float32 log-probs of these tokens, nats.
    """

    prompts: Prompts
    tokens: jax.Array
    mask: jax.Array
    advantages: jax.Array
    sampling_log_probs: jax.Array
    ref_log_probs: jax.Array | None = None
    initial_log_probs: jax.Array | None = None
    counted: jax.Array | None = None
    old_log_probs: jax.Array | None = None
    teacher_log_probs: jax.Array | None = None
    teacher_top_ids: jax.Array | None = None
    teacher_top_log_probs: jax.Array | None = None


class Model(Protocol):
    """The minimal interface of a model: a Flax module, or any object with its `apply`.

    `apply({"params": params}, tokens)` takes [B, T] int32 right-padded tokens and returns [B, T, V] float32 logits in
    which position t sees tokens 0..t only.
    """

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any: ...


class CachedModel(Model, Protocol):
    """A model of this package, which reads a prompt once for all of its completions and decodes with a cache.

    `apply(..., method=name)` runs `prefill`, `hidden`, `unembed` and `unembed_columns` of
    `models.transformer.Transformer`. For other models, all tokens are read again at every step.
    """

    @property
    def config(self) -> Any: ...

    @property
    def prefill(self) -> Any: ...


def is_cached(model: Model) -> TypeGuard[CachedModel]:
    """Return whether a model is a `CachedModel`; adapters and `as_argument` are if their model is."""
    return hasattr(model, "prefill")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Opaque:
    """A pytree without leaves around a model without arrays; `jit` compares it by hash and equality."""

    model: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.model, name)


MODEL_CALL = (
    "a model is called as apply({'params': params}, tokens [B, T]), without a dropout key, and returns logits"
    " [B, T, V]; grpo_jax.from_nnx(module, tokenizer) makes a policy of a flax.nnx module"
)
"""How messages describe a `Model`."""


def as_argument(model: Model) -> Any:
    """Return the model as an argument of a compiled function.

    A model that is a pytree (`LoraModel` with its frozen base) passes its arrays as arguments. In a closure they would
    be constants, with a copy in every compiled function. Any other model becomes static.

    Args:
      model: any `Model`.

    Returns:
      A pytree that has the model's methods.

    Example:
      >>> class Bias:
      ...     def apply(self, variables, tokens):
      ...         return variables["params"][tokens]
      >>> program = jax.jit(lambda model, params, tokens: model.apply({"params": params}, tokens))
      >>> program(as_argument(Bias()), jax.numpy.arange(3.0), jax.numpy.array([2])).tolist()
      [2.0]
    """
    if not hasattr(model, "apply"):
        raise ValueError(f"model is a {type(model).__name__}, which has no `apply`; {MODEL_CALL}.")
    return _Opaque(model) if jax.tree_util.all_leaves([model]) else model


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that this package calls; types are as wide as there."""

    @property
    def bos_token(self) -> str | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token(self) -> str | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def all_special_tokens(self) -> Sequence[str]: ...

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    @property
    def chat_template(self) -> Any: ...

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str: ...

    def apply_chat_template(self, conversation: Any, tools: Any = None, **keywords: Any) -> Any: ...

    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Any: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...

    def batch_decode(
        self, sequences: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> Any: ...

    def get_vocab(self) -> dict[str, int]: ...

    def save_pretrained(self, save_directory: str) -> Any: ...


Scores = Sequence[float | Sequence[float] | None]
"""One reward per completion, or the rewards of its turns or tokens; None is "not scored"."""


class RewardFn(Protocol):
    """A reward function, with TRL's contract.

    It is called once per batch with keyword arguments: `prompts`, `completions`, `completion_ids`, and every other
    column of the dataset under its own name, as far as its signature takes them. Each is a list with one entry per
    completion, in prompt-major order (the G completions of the first prompt come first). Lists, dicts, sets and arrays
    in them are copies, which the function may change; other objects are shared with the dataset.

    It returns one float or None per completion; None means "not scored" and is not a zero. Instead of a float it may
    return a list with a reward for each turn, or an array with one for each token of the completion: the reward is
    their sum, and `turn_credit` decides where in the completion they count. It may be `async`. If it cannot score every
    row, its method `check_rows(rows, argument="the dataset")` raises a ValueError, before a run samples anything.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Scores | Awaitable[Scores]: ...


EnvironmentFactory = Callable[[], object]
"""Makes an `Environment` for one completion: a class, or a function without arguments."""

Environments = EnvironmentFactory | Mapping[str, EnvironmentFactory]
"""One factory for all rows, or factories by the value of the column `environment`."""


AdvantageFn = Callable[..., jax.Array]
"""Makes advantages of the rewards of a batch: `f(rewards, mask, **context)`, compiled by `jax.jit`.

`rewards` are [B, G, K] float32; NaN = not scored, and all NaN in a group that only fills the batch
(`dynamic_sampling`). `mask` [B, G, T] bool has the tokens that count in the loss; T may be less than
`max_completion_length`. `context` has the keywords that the function names, or all of them for `**context`:

| keyword | value |
|---|---|
| `weights` | [K] float32, `reward_weights` or ones |
| `lengths` | [B, G] int32, sampled tokens, counted in the loss or not |
| `ended` | [B, G] bool, False where a completion was cut off |
| `tokens` | [B, G, T] int32, sampled and observed |
| `turns` | [B, G, T] int32, the turn of a sampled token, from 0; −1 on all others |
| `token_rewards` | [B, G, T, K] float32, each reward at the token that it was given for: `turn_advantages` takes them |
| `log_probs` | [B, G, T] float32, nats, under the policy that sampled; 0 on tokens that were not sampled |
| `ref_log_probs` | the same under the reference; None if beta is 0 |
| `step` | [] int32, optimizer steps done |
| `key` | a typed PRNG key of this iteration, the same when the run is resumed |
| `config` | the `GRPOConfig`, not an array |

It returns [B, G] or [B, G, T] floats, constant in the gradient; they are set to 0 where `mask` is False. It should give
completions without a score an advantage of 0.
"""


class Environment(Protocol):
    """Answers the policy during one completion of several turns. Each method is optional and may be `async`.

    Every other public method is a tool, which the policy calls in the format of its chat template and whose docstring
    describes the arguments. The object keeps its state from call to call.
    """

    def reset(self, **row: Any) -> str | None:
        """Begin with a copy of the dataset's row, and return text to add to the prompt, equal within a group."""
        ...

    def respond(self, text: str) -> str | tuple[str | None, float] | None:
        """Return the text that the policy sees after a turn without tool calls; None ends the completion.

        `(text, reward)` rewards the turn; then `get_reward` is required, whose number is added to the last turn.
        """
        ...

    def get_reward(self) -> float | list[float] | None:
        """Return the reward of the completion, when it is over; a list: one for each turn; None for "not scored"."""
        ...


def join_rows(prompts: Prompts, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return prompt and completion as right-padded rows [B·G, P+T], and the start of each completion [B·G]."""
    b, g, t = tokens.shape
    p = prompts.tokens.shape[1]
    position = jnp.arange(p + t)[None]
    lengths = jnp.repeat(prompts.lengths, g)[:, None]
    prompt = jnp.pad(jnp.repeat(prompts.tokens, g, axis=0), ((0, 0), (0, t)))
    at = jnp.clip(position - lengths, 0, t - 1)
    completion = jnp.take_along_axis(tokens.reshape(b * g, t), at, axis=1)
    return jnp.where(position < lengths, prompt, completion), lengths[:, 0]
