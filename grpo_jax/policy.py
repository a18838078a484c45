"""A policy: a model with its params, tokenizer and files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from grpo_jax.messages import one_line, show
from grpo_jax.types import MODEL_CALL, Json, Params, as_argument, is_cached


class Donated(dict[str, Any]):
    """The params of a policy after `train(..., donate=True)` has taken them; any use raises a `ValueError`."""

    def refuse(self, *_: Any) -> Any:
        """Raise the error."""
        raise ValueError(
            "policy is empty: train(..., donate=True) took its params, and changed them in place. Use"
            " policy.replace(params=state.params) with the state that train returned, or load the policy again."
        )

    __getitem__ = __iter__ = __len__ = __contains__ = __or__ = keys = values = items = get = copy = refuse

    def __reduce__(self) -> Any:
        return Donated, ()

    def __repr__(self) -> str:
        return "Donated()"


jax.tree_util.register_pytree_node(Donated, Donated().refuse, Donated().refuse)


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """A language model with everything that goes into its checkpoint.

    Attributes:
      model: a `Transformer`, whose `config` is the shape of the decoder; or any `types.Model`.
      params: its parameters, a nested dict of arrays; `Donated` once `train(..., donate=True)` has taken them.
      tokenizer: of transformers; None if the checkpoint has none.
      config: content of config.json, unchanged.
      generation_config: content of generation_config.json; {} if there is none.
      files: the tokenizer's files, name to bytes, unchanged; written unless `tokenizer` was replaced or changed.
      extra_tensors: tensors of the checkpoint outside the language model, such as a vision tower, by name;
        memory-mapped, and written unchanged.
      stacked_experts: whether the checkpoint stores the experts of a layer in one tensor of each kind.
      loaded_tokenizer: `hub.policy.state_of` the tokenizer that `files` belong to; None without one.
    """

    model: Any
    params: Params
    tokenizer: Any = None
    config: Json = dataclasses.field(default_factory=dict)
    generation_config: Json = dataclasses.field(default_factory=dict)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict, repr=False)
    extra_tensors: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)
    stacked_experts: bool = False
    loaded_tokenizer: Any = dataclasses.field(default=None, repr=False)

    def __repr__(self) -> str:
        names = (self.config.get("architectures") or [type(self.model).__name__])[:1]
        params = "params were donated"
        if not isinstance(self.params, Donated):
            leaves = jax.tree.leaves(self.params)
            dtypes = "/".join(sorted({str(leaf.dtype) for leaf in leaves}))
            params = f"{sum(math.prod(leaf.shape) for leaf in leaves):,} parameters {dtypes}"
        return f"Policy({names[0]}, {params}, {type(self.tokenizer).__name__})"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion, from generation_config.json, else config.json, else the tokenizer."""
        for ids in self._values_of("eos_token_id"):
            if ids is not None and ids != []:
                return (ids,) if isinstance(ids, int) else tuple(ids)
        return ()

    @property
    def pad_token_id(self) -> int:
        """The id to pad with, from the same places as `eos_token_ids`; else the first EOS, else 0."""
        for token in self._values_of("pad_token_id"):
            if token is not None and token >= 0:
                return token
        return (*self.eos_token_ids, 0)[0]

    def _values_of(self, name: str) -> list[Any]:
        """Return the values of a setting in the files and then in the tokenizer; None where it is missing."""
        files = (self.generation_config, self.config, self.config.get("text_config") or {})
        return [*(file.get(name) for file in files), getattr(self.tokenizer, name, None)]

    def empty(self) -> None:
        """Release the params, which a training state has taken."""
        object.__setattr__(self, "params", Donated())

    def check_tokenizer(self) -> None:
        """Raise a `ValueError` without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError(
                "policy has no tokenizer: its checkpoint has no tokenizer files. Set policy.replace(tokenizer=...)."
            )

    def check_model(self) -> None:
        """Raise a `ValueError` unless the model has the `apply` of `types.Model`, by tracing a user's own model."""
        model, tokens = as_argument(self.model), np.zeros((2, 3), np.int32)
        if is_cached(model):
            return
        try:
            logits = jax.eval_shape(lambda params: model.apply({"params": params}, tokens), self.params)
        except Exception as error:
            raise ValueError(f"policy.model.apply raised {one_line(error)}; {MODEL_CALL}.") from error
        if getattr(logits, "ndim", None) != 3 or logits.shape[:2] != tokens.shape:
            raise ValueError(f"policy.model.apply returned {show(logits)} for tokens [2, 3]; {MODEL_CALL}.")

    def check_held(self) -> None:
        """Raise a `ValueError` if a run has taken the params, also by another policy with the same arrays."""
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.params)):
            Donated().refuse()

    def replace(self, **changes: Any) -> Policy:
        """Return a policy with some other fields, as in `policy.replace(params=state.params)`."""
        return dataclasses.replace(self, **changes)
