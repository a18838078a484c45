"""Axis names, pytrees and protocols that all modules share.

The docstrings in this package use these axis letters:

| letter | meaning |
|---|---|
| B | prompts in a batch |
| G | completions per prompt (`num_generations`) |
| P | prompt tokens, right-padded |
| T | completion tokens, right-padded |
| K | reward functions |
| V | vocabulary |
| D | model width |

Groups are an array axis: prompts have shape `[B, P]`, and per-completion arrays have shape `[B, G, ...]`. A reduction
over axis 1 reduces each group and cannot mix prompts. Tokens are right-padded, so a token's index is its position,
except for the rotary positions of images in Qwen2.5-VL (`PromptImages.positions`).
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
"""A pytree of arrays. This package's models use nested dicts."""

Json = Mapping[str, Any]
"""A JSON object, such as the content of a config.json."""

Foreign = Any
"""Type of modules and objects from optional packages."""

Row = dict[str, Any]
"""A dataset row: a dict from column names to values, with a `prompt` column."""

Message = dict[str, Any]
"""A message in a conversation, with `role` and `content`. Assistant messages may have `tool_calls`."""

Messages = list[Message]
"""A conversation."""


class ImageTiles(flax.struct.PyTreeNode):
    """Inputs to a vision tower for the images in a batch of prompts, with up to `num_tiles` tiles per prompt.

    Attributes:
      inputs: dict of arrays [B, num_tiles, ...]; unused tiles are zeros.
      feature_index: [B, N] int32, index of each image token's feature in the flattened features of the prompt's tiles.
    """

    inputs: dict[str, jax.Array]
    feature_index: jax.Array


class PromptImages(flax.struct.PyTreeNode):
    """The images in a batch of prompts. Their features replace the embeddings of image tokens.

    Attributes:
      features: [B, N, D] float outputs of the vision tower, in prompt order, for up to N image tokens per prompt; or,
        if the tower is trained, the `ImageTiles` from which the model computes the features.
      feature_index: [B, P] int32, the index of the feature that replaces a token's embedding; −1 for text and padding.
      positions: [B, 3, P] int32 positions in time, height and width (Qwen2.5-VL). The completion's tokens continue at
        `Prompts.lengths` in all three dimensions. None means that a token's position is its index.
    """

    features: jax.Array | ImageTiles
    feature_index: jax.Array
    positions: jax.Array | None = None


class Prompts(flax.struct.PyTreeNode):
    """Token ids for a batch of prompts.

    Attributes:
      tokens: [B, P] int32, right-padded. Values at and after `lengths` are ignored.
      lengths: [B] int32, in 1..P.
      images: the images in the prompts, or None if all prompts are text.
    """

    tokens: jax.Array
    lengths: jax.Array
    images: PromptImages | None = None


class Completions(flax.struct.PyTreeNode):
    """Sampled completions for a batch of prompts.

    ```
    t              0     1     2     3     4
    tokens       "the" "cat"  EOS    0     0
    mask           1     1     1     0     0
    log_probs    -1.2  -0.7  -0.1    0     0     log-prob of tokens[t], given the prompt and tokens[:t]
    ended = True, since the policy ended the completion. If it had been truncated at T, ended would be False.
    ```

    Attributes:
      tokens: [B, G, T] int32 sampled tokens, followed by the pad id. Multi-turn completions also contain observations.
      mask: [B, G, T] bool; True for sampled tokens up to and including the first EOS. In multi-turn completions, it is
        True for the sampled tokens in all turns and False for observations.
      log_probs: [B, G, T] float32 log-probs under the distribution that was sampled from; 0 where `mask` is False.
      ended: [B, G] bool, as recorded by the sampler; False if the completion was truncated, for example at T.
      present: [B, G, T] bool; True for sampled and observed tokens. None (single-turn) means `mask`.
      old_log_probs: [B, G, T] float32 log-probs under the sampling policy, recomputed by the trainer; 0 where `mask` is
        False. None for the built-in sampler: its `log_probs` are the old log-probs.
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
      log_probs: [B, G, T] log-probs of the sampled tokens, floats ≤ 0 in nats; ignored where the mask is False.
      top_ids: [B, G, T, k] ids of k distinct tokens, usually the most probable; None to score only sampled tokens.
      top_log_probs: [B, G, T, k] log-probs of `top_ids`, floats ≤ 0 in nats.
    """

    log_probs: np.ndarray
    top_ids: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None


class Batch(flax.struct.PyTreeNode):
    """All completions in an iteration, or a minibatch of them: the inputs to the gradient except the params.

    Attributes:
      prompts: prompts with tokens [B, P].
      tokens: [B, G, T] int32 completion tokens.
      mask: [B, G, T] bool; True for tokens that are included in the loss.
      advantages: [B, G] float32, or [B, G, T] for per-token advantages.
      sampling_log_probs: [B, G, T] float32 `Completions.log_probs`, computed during sampling (`rollout.draw`). The
        ratio uses them as old log-probs unless `old_log_probs` is given. If `GRPOConfig.on_policy` (a single update,
        with samples from the current policy), the ratio uses neither: it is 1, and has the gradient of the log-probs.
      ref_log_probs: [B, G, T] float32 log-probs under the reference policy, computed by `run.collect` before the first
        update (`Updater.log_probs`), or None if beta is 0.
      initial_log_probs: [B, G, T] float32 log-probs under the initial policy. None unless the reference is synced.
      counted: [B] bool; False for padding groups, whose mask is also False. If None, there are no padding groups.
      old_log_probs: [B, G, T] float32 log-probs under the sampling policy if an engine samples, otherwise None.
      teacher_log_probs: [B, G, T] float32 teacher log-probs for the sampled tokens, or None if not used.
      teacher_top_ids: [B, G, T, k] int32 ids of the tokens that the teacher scored, or None if not used.
      teacher_top_log_probs: [B, G, T, k] float32 teacher log-probs for `teacher_top_ids`, in nats.
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
    """The minimal interface of a model: a Flax module, or any object with the same `apply` method.

    `apply({"params": params}, tokens)` takes right-padded int32 tokens [B, T] and returns float32 logits [B, T, V]. The
    logits at position t must depend only on tokens 0..t.
    """

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any: ...


class BuiltinModel(Model, Protocol):
    """One of this package's models, which process a prompt once for all of its completions and decode with a cache.

    `apply(..., method=name)` calls the methods `prefill`, `hidden`, `unembed` and `unembed_columns` of
    `models.transformer.Transformer`. Other models reprocess the whole sequence at every step.
    """

    @property
    def config(self) -> Any: ...

    @property
    def prefill(self) -> Any: ...


def is_builtin(model: Model) -> TypeGuard[BuiltinModel]:
    """Return whether a model is a `BuiltinModel`, possibly wrapped by `LoraModel` or `as_jit_argument`."""
    return hasattr(model, "prefill")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Opaque:
    """A static pytree that wraps a model that is not a pytree. `jit` compares it by hash and equality."""

    model: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.model, name)


MODEL_CALL = (
    "A model is called as apply({'params': params}, tokens [B, T]) without a dropout key and must return logits"
    " [B, T, V]"
)
"""Description of the `Model` interface for error messages."""


def as_jit_argument(model: Model) -> Any:
    """Convert a model to a pytree that can be passed to a compiled function.

    If the model is a pytree (such as `LoraModel` with its frozen base), its arrays are passed as arguments. In a
    closure, they would be constants and every compiled function would contain a copy. Other models are static.

    Args:
      model: model to convert.

    Returns:
      A pytree with the model's methods.

    Example:
      >>> class Bias:
      ...     def apply(self, variables, tokens):
      ...         return variables["params"][tokens]
      >>> program = jax.jit(lambda model, params, tokens: model.apply({"params": params}, tokens))
      >>> program(as_jit_argument(Bias()), jax.numpy.arange(3.0), jax.numpy.array([2])).tolist()
      [2.0]
    """
    if not hasattr(model, "apply"):
        raise ValueError(f"model must have an `apply` method; got {type(model).__name__}. {MODEL_CALL}.")
    return _Opaque(model) if jax.tree_util.all_leaves([model]) else model


class Tokenizer(Protocol):
    """The part of the transformers tokenizer interface that this package uses."""

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

    def save_pretrained(self, save_directory: str, **options: Any) -> Any: ...


RewardValues = Sequence[float | Sequence[float] | None]
"""One entry per completion: a reward, a list of rewards per turn or token, or None for "not scored"."""


class RewardFn(Protocol):
    """A reward function with the same interface as in TRL.

    It is called once per batch with the keyword arguments in its signature: `prompts`, `completions`, `completion_ids`,
    and the other dataset columns. Each is a list with one entry per completion, in prompt-major order (the G
    completions for the first prompt come first). Lists, dicts, sets and arrays in them are copies that may be modified.
    Other objects are shared with the dataset.

    It returns one float or None per completion. None means "not scored", which differs from a reward of 0. Instead of a
    float, it may return a list of rewards per turn or an array of rewards per token. The reward is then their sum, and
    `turn_credit` determines which tokens they are credited to. The function may be `async`. If it has a method
    `check_rows(rows, argument="the dataset")`, the method runs before sampling and must raise ValueError for bad rows.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> RewardValues | Awaitable[RewardValues]: ...


EnvironmentFactory = Callable[[], object]
"""A class or a function without arguments that returns the `Environment` for one completion."""

Environments = EnvironmentFactory | Mapping[str, EnvironmentFactory]
"""One factory for all rows, or a dict from values in the `environment` column to factories."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Tasks from an external package. `rows` is the dataset for `train`: a dict with a `prompt` for each task.

    `reward_weights` is a config field; the other fields are arguments to `train`. Environments may also return rewards.
    """

    rows: list[Row]
    reward_fns: list[RewardFn] = dataclasses.field(default_factory=list)
    reward_weights: list[float] | None = None
    tools: list[Callable[..., object]] | None = None
    environment_factory: Environments | None = None


AdvantageFn = Callable[..., jax.Array]
"""A function `f(rewards, mask, **context)` that computes advantages and is compiled with `jax.jit`.

`rewards` is [B, G, K] float32. NaN means "not scored". In padding groups (`dynamic_sampling`), all rewards are NaN.
`mask` is [B, G, T] bool, True for tokens that are included in the loss. T may be less than `max_completion_length`.
`context` contains these keywords, limited to the parameters in the signature unless it has `**context`:

| keyword | value |
|---|---|
| `weights` | [K] float32, `reward_weights` or ones |
| `lengths` | [B, G] int32, number of sampled tokens, whether or not they are included in the loss |
| `ended` | [B, G] bool, False for truncated completions |
| `tokens` | [B, G, T] int32, sampled and observed tokens |
| `turns` | [B, G, T] int32, turn index of each sampled token, starting at 0; −1 for other tokens |
| `token_rewards` | [B, G, T, K] float32, rewards placed at tokens, as `turn_advantages` expects |
| `log_probs` | [B, G, T] float32 log-probs under the sampling policy, in nats; 0 for tokens that were not sampled |
| `ref_log_probs` | [B, G, T] float32 log-probs under the reference policy, or None if beta is 0 |
| `step` | [] int32, number of completed optimizer steps |
| `key` | typed PRNG key for the iteration, the same in a resumed run |
| `config` | the `GRPOConfig` (not an array) |

It returns [B, G] or [B, G, T] floats, which are constants in the gradient. They are set to 0 in padding groups and, if
[B, G, T], where `mask` is False. Completions that were not scored should have an advantage of 0.
"""


class Environment(Protocol):
    """The environment for one multi-turn completion. Each of these methods is optional and may be `async`.

    All other public methods are tools that the policy calls in its chat template's format. Their docstrings describe
    the arguments. The object keeps its state between calls.
    """

    def reset(self, **row: Any) -> str | None:
        """Start from a copy of the row. Return text to append to the prompt; it must be the same for a whole group."""
        ...

    def respond(self, text: str) -> str | tuple[str | None, float] | None:
        """Return the observation that follows a turn without tool calls, or None to end the completion.

        Return `(text, reward)` to reward the turn. This requires a `get_reward`; its number is added to the last turn.
        """
        ...

    def get_reward(self) -> float | list[float] | None:
        """Return the finished completion's reward, a list with one reward per turn, or None for "not scored"."""
        ...


def join_rows(prompts: Prompts, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Join prompts and completions into right-padded rows [B·G, P+T]. Returns the rows and completion starts [B·G]."""
    b, g, t = tokens.shape
    p = prompts.tokens.shape[1]
    position = jnp.arange(p + t)[None]
    lengths = jnp.repeat(prompts.lengths, g)[:, None]
    prompt = jnp.pad(jnp.repeat(prompts.tokens, g, axis=0), ((0, 0), (0, t)))
    index = jnp.clip(position - lengths, 0, t - 1)
    completion = jnp.take_along_axis(tokens.reshape(b * g, t), index, axis=1)
    return jnp.where(position < lengths, prompt, completion), lengths[:, 0]
