"""How a run scores completions and makes its updates: packed or padded, chosen once, in `run.prepare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.sharding import keep_placed, split
from grpo_jax.maths.metrics import MetricSums
from grpo_jax.types import Batch, Model, Params, Prompts, as_argument, is_cached
from grpo_jax.update.objective import sampling_of
from grpo_jax.update.packed import PackedUpdater
from grpo_jax.update.state import TrainState
from grpo_jax.update.step import gradients, score_batch, train_step


def choose_updater(
    model: Model,
    config: GRPOConfig,
    *,
    micro: tuple[int, int],
    optimizer: optax.GradientTransformation | None = None,
    mesh: jax.sharding.Mesh | None = None,
    on_policy: bool | None = None,
) -> Updater:
    """Packed for the models of this package, padded for any other.

    Args:
      model: a model of this package, or any `apply` by `types.Model`.
      config: the settings.
      micro: (prompts, completions per prompt) of a micro-batch.
      optimizer: the transformation that made the state's `opt_state`; None where nothing is updated.
      mesh: where params and batches are; None for one device.
      on_policy: as in `step.train_step`; None for what the config says.
    """
    on_policy = config.on_policy if on_policy is None else on_policy
    how: dict[str, Any] = {"optimizer": optimizer, "on_policy": on_policy}
    how["mesh"] = None if mesh is None or mesh.size == 1 else mesh
    return (PackedUpdater if is_cached(model) else PaddedUpdater)(as_argument(model), config, micro, **how)


@dataclasses.dataclass(frozen=True)
class PaddedUpdater:
    """The same for any other model: `step.train_step`, compiled, one micro-batch at a time.

    Attributes as of `PackedUpdater`.
    """

    model: Any
    config: GRPOConfig
    micro: tuple[int, int]
    optimizer: optax.GradientTransformation | None = None
    on_policy: bool = True
    mesh: jax.sharding.Mesh | None = None

    def columns(self, longest: int) -> int:
        """To how many tokens the arrays of a batch are to be cut whose longest completion has so many.

        The smallest of T, T/2, T/4, … that holds `longest`: few shapes, so few compilations.
        """
        most = self.config.max_completion_length
        while most % 2 == 0 and most // 2 >= max(longest, 8):
            most //= 2
        return most

    def score(self, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """Log-probs [B, G, T] of completions, 0 where mask is 0; they may still be on their way."""
        at = split((prompts, tokens, mask), self.mesh)
        return _jit_score_batch(params, *at, model=self.model, sampling=sampling_of(self.config), micro=self.micro)

    def lower_score(self, params: Params, batch: Batch, *, tokens: int | None = None) -> Any:
        """The program of `score`, lowered; only shapes are looked at."""
        how: dict[str, Any] = {"model": self.model, "sampling": sampling_of(self.config), "micro": self.micro}
        return _jit_score_batch.lower(params, batch.prompts, batch.tokens, batch.mask, **how)

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; `state` is consumed."""
        how = self._how | {"optimizer": self.optimizer, "mesh": self.mesh}
        return _jit_train_step(state, split(batch, self.mesh), **how)

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Params, MetricSums]:
        """The first half of `update`: the gradient of a minibatch, and its metric sums."""
        return _jit_gradients(state, split(batch, self.mesh), **self._how)

    def lower(self, state: TrainState, batch: Batch, *, tokens: int | None = None) -> Any:
        """The program of `update`, lowered; only shapes are looked at."""
        return _jit_train_step.lower(state, batch, **self._how, optimizer=self.optimizer, mesh=self.mesh)

    def lower_all(self, state: TrainState, batch: Batch) -> Iterator[tuple[str, Callable[[], Any]]]:
        """None: which lengths will come is not known."""
        yield from ()

    def kept_bytes(self, state: TrainState, batch: Batch, *, tokens: int | None = None) -> int:
        """None: all is one program."""
        return 0

    @property
    def _how(self) -> dict[str, Any]:
        return {"model": self.model, "config": self.config, "on_policy": self.on_policy, "micro": self.micro}


Updater = PackedUpdater | PaddedUpdater
"""What `choose_updater` returns; both have the same methods."""

_STATIC = ("config", "on_policy", "micro")
_jit_score_batch = jax.jit(score_batch, static_argnames=("sampling", "micro"))
_jit_gradients = jax.jit(gradients, static_argnames=_STATIC)


def _train_step(state, batch, *, mesh, **settings):
    state, metrics = train_step(state, batch, **settings)
    return keep_placed(state, mesh), metrics


_jit_train_step = jax.jit(_train_step, static_argnames=(*_STATIC, "optimizer", "mesh"), donate_argnames=("state",))
