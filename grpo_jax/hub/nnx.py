"""Modules of flax.nnx as policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.policy import Policy
from grpo_jax.types import Params, Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class NnxModel:
    """A module of flax.nnx as a `types.Model`.

    Attributes:
      graphdef: structure of the module, from `nnx.split`.
      treedef: of the state of its `nnx.Param` variables.
      paths: of the params, as a nested dict has them, in the order of the state.
      rest: state of all other variables, which is not trained.
    """

    graphdef: Any
    treedef: Any
    paths: Sequence[tuple[str, ...]]
    rest: Any

    def apply(self, variables: Any, tokens: jax.Array) -> jax.Array:
        """Return the logits [B, T, V] of tokens [B, T], with the module in evaluation mode: without dropout."""
        from flax import nnx

        module = nnx.merge(self.graphdef, self.state(variables["params"]), self.rest)
        module.eval()
        return module(tokens).astype(jnp.float32)

    def state(self, params: Params) -> Any:
        """Return params as the `nnx.State` that `nnx.update(module, state)` takes."""
        leaves = flatten_dict(params)
        return self.treedef.unflatten([leaves[path] for path in self.paths])


def from_nnx(module: Any, tokenizer: Tokenizer | None = None) -> Policy:
    """Return the policy of a flax.nnx module, to `train`, `sft`, `evaluate` and `generate` with.

    Such a model has no key-value cache: each new token costs a forward pass over the whole sequence. Adapters, several
    turns, quantization and `save_pretrained` need a model that `from_pretrained` or `init_policy` made.

    Args:
      module: `module(tokens)` takes [B, T] int32 right-padded tokens and returns logits [B, T, V], in which position t
        depends on tokens 0..t only. Its `nnx.Param` variables are trained; all others, such as running statistics, are
        constants. It is called in evaluation mode. Later changes of the module do not reach the policy.
      tokenizer: of transformers; its EOS token ends a completion. None for a policy that only generates.

    Returns:
      A `Policy`, whose params are a nested dict.

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
        raise ValueError(f"module is a {type(module).__name__}: give a flax.nnx.Module.")
    parts: Any = nnx.split(module, nnx.Param, ...)
    graphdef, state, rest = parts
    found, treedef = jax.tree_util.tree_flatten_with_path(state)
    paths = [tuple(str(entry.key) for entry in path if hasattr(entry, "key")) for path, _ in found]
    params = unflatten_dict({path: jnp.array(leaf) for path, (_, leaf) in zip(paths, found, strict=True)})
    return Policy(NnxModel(graphdef, treedef, paths, rest), params, tokenizer)
