"""Policies: models with their params, tokenizers and checkpoint files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from grpo_jax.messages import one_line, show
from grpo_jax.types import MODEL_CALL, Json, Params, as_jit_argument, is_builtin


class Donated(dict[str, Any]):
    """Placeholder for a policy's params after they were donated to `train`. Any use raises ValueError."""

    def refuse(self, *_: Any) -> Any:
        """Raise ValueError with instructions to restore the params."""
        raise ValueError(
            "policy has no params because they were donated to a run (donate=True), which updates them in place. Use"
            " policy.replace(params=state.params) with the state that train or sft returned, or load the policy again."
        )

    __getitem__ = __iter__ = __len__ = __contains__ = __or__ = keys = values = items = get = copy = refuse


jax.tree_util.register_pytree_node(Donated, Donated().refuse, Donated().refuse)


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """A language model and the other contents of its checkpoint.

    Attributes:
      model: a `Transformer` or any other `types.Model`.
      params: parameters of the model, a nested dict of arrays; `Donated` after `train(..., donate=True)`.
      tokenizer: tokenizer from transformers, or None if the checkpoint has none.
      config: content of config.json.
      generation_config: content of generation_config.json, empty if the file does not exist.
      files: tokenizer files as bytes, keyed by name; saved unchanged unless `tokenizer` was replaced or modified.
      extra_tensors: checkpoint tensors that are not part of the language model, such as a vision tower, keyed by
        name. They are memory-mapped and saved unchanged.
      stacked_experts: whether the checkpoint stores each projection as a single tensor for all experts in a layer.
      loaded_tokenizer: result of `hub.policy.state_of` at load time, used to detect changes, or None without `files`.
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
        """Token ids that end a completion, from generation_config.json, config.json or the tokenizer, in this order."""
        for ids in self._values_of("eos_token_id"):
            if ids is not None and ids != []:
                return (ids,) if isinstance(ids, int) else tuple(ids)
        return ()

    @property
    def pad_token_id(self) -> int:
        """Token id used for padding, from the same sources as `eos_token_ids`, else the first EOS id, else 0."""
        for token in self._values_of("pad_token_id"):
            if token is not None and token >= 0:
                return token
        return (*self.eos_token_ids, 0)[0]

    def _values_of(self, name: str) -> list[Any]:
        """Return a setting's value, or None, from each config file and the tokenizer, in order of precedence."""
        files = (self.generation_config, self.config, self.config.get("text_config") or {})
        return [*(file.get(name) for file in files), getattr(self.tokenizer, name, None)]

    def release_params(self) -> None:
        """Replace the params with `Donated`, after they have been moved to a training state."""
        object.__setattr__(self, "params", Donated())

    def check_tokenizer(self) -> None:
        """Raise ValueError if there is no tokenizer."""
        if self.tokenizer is None:
            raise ValueError(
                "policy has no tokenizer: its checkpoint may lack tokenizer files. Use policy.replace(tokenizer=...)."
            )

    def check_model(self) -> None:
        """Raise ValueError unless the model implements `types.Model`. Custom models are checked by tracing `apply`."""
        model, tokens = as_jit_argument(self.model), np.zeros((2, 3), np.int32)
        if is_builtin(model):
            return
        try:
            logits = jax.eval_shape(lambda params: model.apply({"params": params}, tokens), self.params)
        except Exception as error:
            raise ValueError(f"policy.model.apply raised {one_line(error)}. {MODEL_CALL}.") from error
        if getattr(logits, "ndim", None) != 3 or logits.shape[:2] != tokens.shape:
            raise ValueError(f"policy.model.apply returned {show(logits)} for tokens of shape [2, 3]. {MODEL_CALL}.")

    def check_held(self) -> None:
        """Raise ValueError if the params were donated to a run, directly or via another policy with the same arrays."""
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.params)):
            Donated().refuse()

    def replace(self, **changes: Any) -> Policy:
        """Return a copy with the given fields replaced, as in `policy.replace(params=state.params)`."""
        return dataclasses.replace(self, **changes)
