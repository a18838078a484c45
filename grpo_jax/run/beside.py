"""The next completions, which an engine samples while the trainer is at its rewards and updates.

```
engine:   sample 1 from θ0 │ sample 2 from θ0 ────────────────────┤ sample 3 from θ1 ────────────────────┤ …
trainer:                   │ rewards of 1 │ update 1: θ0 becomes θ1 │ rewards of 2 │ update 2: θ1 becomes θ2 │ …
```

What an iteration learns from is sampled by the policy of the iteration before, whichever of the two takes longer. The
engine has been given that policy beforehand (`follow`), and `old_params` of the state keeps it, so that the trainer can
score the completions by it when they are there, and a run that is resumed can ask for them again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future

import jax
import numpy as np

from grpo_jax.models.streams import beside
from grpo_jax.run.run import Run
from grpo_jax.run.sample import Sampled, sample
from grpo_jax.run.sampler import Request, follows, with_old_log_probs
from grpo_jax.run.signals import Interrupted
from grpo_jax.types import Params


class Beside:
    """The thread in which an engine samples, one batch at a time; leaving the context abandons an unfinished batch."""

    def __init__(self, run: Run):
        self._run, self._given_up = run, threading.Event()
        self._thread = contextlib.ExitStack()
        self._coming: Future[Sampled] | None = None

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *error: object) -> None:
        self._given_up.set()
        self._thread.close()

    @property
    def busy(self) -> bool:
        """Whether a batch was begun whose `result` has not been asked for."""
        return self._coming is not None

    def begin(
        self,
        params: Params,
        key: jax.Array,
        cursor: int,
        rows: list[int],
        request: Request,
        interrupt: Callable[[], None],
    ) -> None:
        """Give the engine `params`, which may change after this returns, and let it begin with the prompts from
        `cursor` on.
        """
        run = self._run
        assert not self.busy, "one batch at a time"
        assert follows(run.sampler), "as samples_beside says"
        run.sampler.follow(run.policy, params)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        # On one device: the programs of a mesh are the trainer's, and have to reach its devices in one order.
        key = jax.device_put(key, jax.local_devices()[0])
        indices = cursor + np.arange(len(rows))

        def interrupted() -> None:
            if self._given_up.is_set():
                raise Interrupted
            interrupt()

        def sample_them() -> Sampled:
            return sample(
                run.policy.model, shapes, run.data, rows, key, request, prompt_indices=indices, interrupt=interrupted
            )

        self._coming = self._thread.enter_context(beside(sample_them))

    def result(self, params: Params) -> Sampled:
        """Wait for the completions, with old log-probs by `params`, those of `begin`; raises what has ended the
        sampling.
        """
        assert self._coming is not None, "begun before"
        coming, self._coming = self._coming, None
        with self._thread.pop_all():
            sampled = coming.result()
        completions = with_old_log_probs(sampled.completions, self._run.updater, params, sampled.prompts)
        return sampled._replace(completions=completions)
