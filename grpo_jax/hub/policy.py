"""Creation of policies with random weights or from flax.nnx modules, and serialization of tokenizers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.config.fields import NO_FLOAT16
from grpo_jax.hub.families import family_of, read_config
from grpo_jax.hub.files import TOKENIZER_FILES
from grpo_jax.hub.keys import has_vision, text_config
from grpo_jax.models.devices import platform_of
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.types import Json, Params, Tokenizer

if TYPE_CHECKING:
    from flax import nnx


def init_policy(
    config: Json,
    key: jax.Array,
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: Json | None = None,
    dtype: str = "float32",
) -> Policy:
    """Create a policy with random weights.

    Args:
      config: content of config.json, with at least `architectures`, `vocab_size`, `hidden_size`, `intermediate_size`,
        `num_hidden_layers` and `num_attention_heads`. `model_type` is set automatically.
      key: typed PRNG key; do not reuse it.
      tokenizer: transformers tokenizer. None creates a policy without a tokenizer.
      generation_config: content of generation_config.json. If None, the token ids in `config` are used.
      dtype: dtype of the computation and the parameters, "float32" or "bfloat16".

    Returns:
      A `Policy`. Matrices are drawn from N(0, `initializer_range`²), norm scales are 1 and biases are 0.

    Raises:
      ValueError: if the architecture, a config value or `dtype` is not supported.

    Example:
      >>> policy = init_policy({"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 3},
      ...     jax.random.key(0))
      >>> policy.eos_token_ids, policy.config["model_type"]
      ((3,), 'llama')
    """
    check_dtype("dtype", dtype)
    if has_vision(config):
        inner = text_config(config)["architectures"]
        raise ValueError(f"config key 'architectures' must be {inner}, the text model; got {config['architectures']}.")
    raw = {**config, "model_type": family_of(config).model_type, "dtype": dtype}
    model = Transformer(read_config(raw, dtype=dtype))
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), _random_params(model, key))
    if generation_config is None:
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        generation_config = {name: raw[name] for name in ids if raw.get(name) is not None}
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    return Policy(model, params, tokenizer, raw, dict(generation_config), files, loaded_tokenizer=state_of(tokenizer))


def check_dtype(argument: str, value: str) -> None:
    """Raise ValueError unless `value` is a supported dtype for params and computation."""
    if value not in ("float32", "bfloat16"):
        reason = f": {NO_FLOAT16}" if value == "float16" else ""
        raise ValueError(f"{argument} must be 'float32' or 'bfloat16'; got {value!r}{reason}.")


def from_nnx(module: nnx.Module, tokenizer: Tokenizer | None = None) -> Policy:
    """Create a policy from a flax.nnx module, for `train`, `sft`, `evaluate` and `generate`.

    The model has no key-value cache: each new token costs a forward pass over the whole sequence. Adapters, multi-turn
    rollouts, quantization and `save_pretrained` require a policy from `from_pretrained` or `init_policy`.

    Args:
      module: module that maps right-padded tokens [B, T] int32 to logits [B, T, V]. Logits at position t must depend
        only on tokens 0..t. `nnx.Param` variables are trained; all other variables are constants. The module is called
        in evaluation mode, and later changes to it do not affect the policy.
      tokenizer: transformers tokenizer, whose EOS token ends a completion. `generate` does not need one.

    Returns:
      A `Policy` whose params are a nested dict.

    Example:
      >>> from flax import nnx
      >>> class Bigram(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.table = nnx.Embed(8, 8, rngs=rngs)
      ...     def __call__(self, tokens):
      ...         return self.table(tokens)
      >>> policy = from_nnx(Bigram(nnx.Rngs(0)))
      >>> policy.model.apply({"params": policy.params}, jnp.zeros((2, 3), "int32")).shape
      (2, 3, 8)
    """
    from flax import nnx

    if not isinstance(module, nnx.Module):
        raise ValueError(f"module must be a flax.nnx.Module; got {type(module).__name__}.")
    parts: Any = nnx.split(nnx.clone(module), nnx.Param, ...)
    graphdef, state, rest = parts
    found, treedef = jax.tree_util.tree_flatten_with_path(state)
    paths = [tuple(str(entry.key) for entry in path if hasattr(entry, "key")) for path, _ in found]
    params = unflatten_dict({path: jnp.array(leaf) for path, (_, leaf) in zip(paths, found, strict=True)})
    return Policy(NnxModel(graphdef, treedef, paths, rest), params, tokenizer)


@dataclasses.dataclass(frozen=True, eq=False)
class NnxModel:
    """A flax.nnx module without its params, as a `types.Model`.

    `treedef` is the tree structure of the `nnx.Param` variables, `paths` are their paths in a nested dict in the order
    of that structure, and `rest` is the state of all other variables.
    """

    graphdef: nnx.GraphDef[Any]
    treedef: jax.tree_util.PyTreeDef
    paths: Sequence[tuple[str, ...]]
    rest: nnx.State

    def apply(self, variables: Mapping[str, Params], tokens: jax.Array) -> jax.Array:
        """Return the logits [B, T, V] for tokens [B, T], without dropout."""
        from flax import nnx

        rest = jax.tree.map(lambda x: x, self.rest)  # new variables, which the call may change
        module = nnx.merge(self.graphdef, self.state(variables["params"]), rest)
        module.eval()
        return module(tokens).astype(jnp.float32)

    def state(self, params: Params) -> nnx.State:
        """Convert params to an `nnx.State`, for use in `nnx.update(module, state)`."""
        leaves = flatten_dict(params)
        return self.treedef.unflatten([leaves[path] for path in self.paths])


def state_of(tokenizer: Tokenizer | None) -> object:
    """Return a tokenizer with copies of its mutable attributes, to detect changes. Returns None if there is none."""
    if tokenizer is None:
        return None
    attributes = [getattr(tokenizer, x, None) for x in ("chat_template", "special_tokens_map", "model_max_length")]
    added = tokenizer("")["input_ids"]  # add_bos_token is False for some tokenizers that add a BOS token
    return tokenizer, copy.deepcopy(attributes), added, len(tokenizer) if isinstance(tokenizer, Sized) else 0


def files_of(policy: Policy) -> dict[str, bytes]:
    """Return the files to write with a policy as bytes, keyed by name. A changed tokenizer is saved again."""
    named = isinstance(getattr(policy.tokenizer, "chat_template", None), dict)  # templates in a subdirectory
    if policy.loaded_tokenizer == state_of(policy.tokenizer) and not named:
        return dict(policy.files)
    others = {name: content for name, content in policy.files.items() if name not in TOKENIZER_FILES}
    return others | (tokenizer_files(policy.tokenizer) if hasattr(policy.tokenizer, "save_pretrained") else {})


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return a tokenizer's files as bytes, keyed by name. Named chat templates are stored in tokenizer_config.json."""
    named = isinstance(getattr(tokenizer, "chat_template", None), dict)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch, save_jinja_files=not named)
        return {path.name: path.read_bytes() for path in Path(scratch).iterdir() if path.name in TOKENIZER_FILES}


def _random_params(model: Transformer, key: jax.Array) -> Params:
    """Initialize params. Except on CPUs, shapes are compiled separately, since one program takes 71 s on an H100."""
    if platform_of()[0] == "cpu":
        return jax.jit(model.init)(key, jnp.zeros((1, 1), jnp.int32))["params"]
    return model.lazy_init(key, jax.ShapeDtypeStruct((1, 1), jnp.int32), mutable=["params"])["params"]


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Suppress transformers' warning that PyTorch was not found."""
    before = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS", "")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        yield
    finally:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = before
