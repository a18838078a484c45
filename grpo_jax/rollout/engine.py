"""Sampling from an inference server. Before each batch, the server loads the weights if they have changed.

```
weights ─► written ─► loaded ─► probe ─► completions, one request per turn ─► probe ─► Completions
                        ▲                            │ connection lost
                        └── server available again ◄─┘
```

Before and after each batch, the server's log-probs for a probe of 65 tokens are compared with the local
model's. A batch is used for training only if the server used the run's weights throughout.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import shutil
import tempfile
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.hub.peft import write_policy
from grpo_jax.hub.tensors import layout_of, tensor_plan
from grpo_jax.maths.log_probs import token_log_probs
from grpo_jax.maths.sampling import Sampling
from grpo_jax.messages import one_line
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import fetch, gather_objects, mesh_of, shard_count
from grpo_jax.policy import Policy
from grpo_jax.rewards.calls import run_on_event_loop
from grpo_jax.rollout.draw import DecodeSettings, completion_keys
from grpo_jax.rollout.ends import decode_settings
from grpo_jax.rollout.engine_client import MAX_RECOVERIES, NOT_TRAINED, ConnectionLost, EngineError, Requests
from grpo_jax.rollout.engine_server import VLLM
from grpo_jax.rollout.table import TokenTable
from grpo_jax.rollout.turns import NextObservation, wait_for
from grpo_jax.types import Completions, Model, Params, Prompts, Tokenizer, as_jit_argument, is_builtin

PROBE = 65
"""Number of tokens in the probe. The first token has no log-prob."""
PROBE_TEXT = "Once upon a time there was a town by the sea, where 12 boats left every morning and 7 came back at noon."
SEED_STEP = 0x9E3779B97F4A7C15
"""Amount added to a completion's seed for each token before a turn. It is odd, so all turns have different seeds."""


class _Version(NamedTuple):
    """Weights written for the server under a unique name, and the local model's log-probs for the probe `ids`."""

    name: str
    directory: Path
    adapters: bool  # whether only adapters were written
    ids: list[int]
    log_probs: np.ndarray
    tolerance: float


class _Request(NamedTuple):
    """Prompts, seeds and settings for B·G completions. `next_observation` is None for single-turn completions."""

    prompts: list[list[int]]
    seeds: list[int]
    settings: DecodeSettings
    max_completion_length: int
    max_turn_length: int
    next_observation: NextObservation | None


class Engine:
    """A `run.sampler.Sampler` backed by a server. Build it with `engines.vllm`, which documents the arguments.

    `last_metrics` contains metrics for the last batch: seconds per phase, log-prob differences on the probe, and the
    number of times that the connection to the server was lost.
    """

    def __init__(self, server: VLLM, *, directory: str | None = None, tolerance: float | None = None):
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance must be None or a positive number of nats per token; got {tolerance!r}.")
        self._server, self._tolerance, self._parent = server, tolerance, directory
        self._counter, self._token = itertools.count(1), uuid.uuid4().hex[:8]
        self._version: _Version | None = None  # the version that the server should be using
        self._loaded: _Version | None = None  # the version last loaded and verified
        self._params: list[weakref.ref[jax.Array]] = []  # arrays from which the version was written
        self.last_metrics: dict[str, float] = {}

    def set_params(self, policy: Policy, params: Params) -> None:
        """Write the params to files for later calls, and score the probe. The params may be donated afterwards.

        Does nothing if `params` has the arrays that were written last. All processes of a run must call this together.
        """
        leaves = jax.tree.leaves(params)
        if self._version is not None and self._is_current(leaves):
            return
        begin, older = time.monotonic(), self._version
        name, ids = f"grpo-{self._token}-{next(self._counter)}", probe_ids(policy)
        directory = self._directory / name
        adapters = write_weights(directory, policy, params)
        log_probs = score_probe(policy.model, params, ids)
        dtype = jnp.dtype(getattr(getattr(policy.model, "config", None), "dtype", "float32"))
        tolerance = (1e-4 if dtype == jnp.float32 else 0.05) if self._tolerance is None else self._tolerance
        self._version = _Version(name, directory, adapters, ids, log_probs, tolerance)
        self._params = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]
        if older is not None:
            shutil.rmtree(older.directory, ignore_errors=True)
        self.last_metrics = {"sampler/seconds/write": time.monotonic() - begin}

    def __call__(
        self,
        policy: Policy,
        params: Params,
        prompts: Prompts,
        key: jax.Array,
        *,
        num_generations: int,
        max_completion_length: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float | None,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        prompt_indices: np.ndarray,
        check_interrupt: Callable[[], None],
        next_observation: NextObservation | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: int | Sequence[int] | None = None,
        max_turn_length: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Completions:
        """Return completions [B, G, T] with T = `max_completion_length`; see `run.sampler.Sampler`.

        If `params` is abstract, the params from the last call to `set_params` are used. Raises EngineError if the
        server rejects a request or remains unavailable.
        """
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            self.set_params(policy, params)
        settings = decode_settings(
            Sampling(temperature, top_k, top_p, min_p), eos_token_ids, pad_token_id, stop=stop,
            stop_token_ids=stop_token_ids, tokenizer=tokenizer or policy.tokenizer,
        )  # fmt: skip
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        data = jax.random.key_data(completion_keys(key, jnp.asarray(prompt_indices), num_generations))
        words = np.asarray(data).reshape(len(lengths) * num_generations, -1).tolist()
        batch = _Request(
            prompts=[tokens[b, :n].tolist() for b, n in enumerate(lengths) for _ in range(num_generations)],
            seeds=[row[0] << 32 | row[-1] for row in words],
            settings=settings,
            max_completion_length=max_completion_length,
            max_turn_length=min(max_completion_length, max_turn_length or max_completion_length),
            next_observation=next_observation,
        )
        table, problem = TokenTable(len(words), max_completion_length, pad_token_id), None
        if jax.process_index() == 0:
            try:
                table = run_on_event_loop(self._sample(batch), lambda future: wait_for(future, check_interrupt))
            except Exception as error:
                if jax.process_count() == 1:
                    raise
                problem = one_line(error, None)
        if (problem := gather_objects(problem)[0]) is not None:  # all processes raise the first process's error
            raise EngineError(problem)
        return table.to_completions(len(lengths), multi_turn=bool((table.mask.sum(-1) < table.lengths).any()))

    async def _sample(self, batch: _Request) -> TokenTable:
        """Sample all completions with one version of the weights."""
        begin, longest = time.monotonic(), max(map(len, batch.prompts)) + batch.max_completion_length
        prepare = functools.partial(self._check_and_load, batch.settings.sampling, longest)

        async def restore() -> None:
            self._loaded = None
            await prepare()

        requests = Requests(self._server.client, restore)
        for _ in range(MAX_RECOVERIES):
            await requests.send(prepare)
            loaded = time.monotonic()
            table = TokenTable(len(batch.prompts), batch.max_completion_length, batch.settings.pad_token_id)
            complete = functools.partial(self._complete, batch, table, requests)
            await requests.run([functools.partial(complete, row) for row in range(len(table.lengths))])
            self.last_metrics |= {
                "sampler/seconds/hand_over": loaded - begin,
                "sampler/seconds/sample": time.monotonic() - loaded,
                "sampler/lost": float(requests.num_lost),
            }
            with contextlib.suppress(ConnectionLost):
                if await self._has_loaded():
                    return table
            message = f"{self._server.url} no longer has the run's weights; the server may have been restarted"
            if batch.next_observation is not None:  # environments cannot process the same turns twice
                break
            warnings.warn(f"{message}. Sampling the batch again", stacklevel=2)
        raise EngineError(f"{message}. {NOT_TRAINED}")

    async def _complete(self, batch: _Request, table: TokenTable, requests: Requests, row: int) -> None:
        """Sample all turns of one completion, with the observations between them."""
        while True:
            begin = int(table.lengths[row])
            remaining = batch.max_completion_length - begin
            draw = functools.partial(
                self._server.draw,
                batch.prompts[row] + table.tokens[row, :begin].tolist(),
                max_tokens=min(remaining, batch.max_turn_length),
                seed=(batch.seeds[row] + begin * SEED_STEP) % 2**63,
                settings=batch.settings,
            )
            turn = await requests.send(draw)
            table.append_sampled(row, turn.tokens, turn.log_probs)
            table.ended[row] = turn.ended and batch.next_observation is None
            remaining -= len(turn.tokens)
            if batch.next_observation is None or (not turn.ended and remaining == 0):
                return
            future = batch.next_observation(row, np.array(turn.tokens, np.int32), remaining - 1)
            assert future is not None, "a single process must compute all observations"
            observation = await asyncio.wrap_future(future)
            if observation is None:
                table.ended[row] = True
            if observation is None or len(observation) >= remaining:
                return
            table.append_observation(row, observation)

    async def _check_and_load(self, sampling: Sampling, longest: int) -> None:
        """Check the server, which may have been restarted with different flags, and load the weights if necessary."""
        await self._server.look_up(longest)
        if self._loaded is not self._version or not await self._has_loaded():
            await self._load()
        await self._server.check(sampling)

    async def _load(self) -> None:
        """Load the weights. Raises EngineError if the server's log-probs for the probe are not within the tolerance."""
        version = self._version
        assert version is not None, "call `set_params` first"
        await self._server.load(version.name, version.directory, version.adapters)
        gaps = await self._gaps(version)
        self.last_metrics |= {"sampler/probe_gap_mean": float(gaps.mean()), "sampler/probe_gap_max": float(gaps.max())}
        if not gaps.mean() <= version.tolerance:
            self._loaded = None
            raise EngineError(
                f"{self._server.url} does not sample with the run's weights. After loading, its log-probs for the probe"
                f" differ from the trainer's by {gaps.mean():.2g} nats per token on average (maximum {gaps.max():.2g});"
                f" the tolerance is {version.tolerance:g}. Check that the server has the policy's base model. If its"
                f" dtype differs from the trainer's, use the same --dtype or pass a larger tolerance. {NOT_TRAINED}"
            )
        self._loaded = version

    async def _gaps(self, version: _Version) -> np.ndarray:
        """Return the absolute differences [64] between the server's and the local log-probs for the probe."""
        log_probs = await self._server.log_probs(version.ids)
        remote = [position[token] for token, position in zip(version.ids[1:], log_probs, strict=True)]
        return np.abs(np.array(remote) - version.log_probs)

    async def _has_loaded(self) -> bool:
        """Return whether the server still has the loaded weights, according to its version name and the probe."""
        version = self._loaded
        if version is None or not await self._server.has_loaded(version.name):
            return False
        return bool((await self._gaps(version)).mean() <= version.tolerance)

    def _is_current(self, leaves: list[jax.Array]) -> bool:
        """Return whether `leaves` are the arrays from the last call to `set_params`."""
        return len(leaves) == len(self._params) and all(
            ref() is leaf and not leaf.is_deleted() for ref, leaf in zip(self._params, leaves, strict=True)
        )

    @functools.cached_property
    def _directory(self) -> Path:
        """Temporary directory for this process's weights. It is deleted when the engine is garbage-collected."""
        parent = Path(self._parent or tempfile.gettempdir())
        parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="grpo_jax-", dir=parent))
        directory.chmod(0o755)  # the server may run as another user
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        return directory


def write_weights(directory: Path, policy: Policy, params: Params) -> bool:
    """Write adapters in PEFT's format, or all weights as safetensors. Return True if adapters were written.

    A tied head is written as both embedding and head, because vLLM may store these as two tensors and reloads only the
    tensors in the files. All processes of a run must call this function together; only the first process writes.
    """
    adapters = isinstance(policy.model, LoraModel)
    if not adapters and not policy.config:
        raise ValueError("sampler needs policy.config for the tensor names; load the policy with from_pretrained.")
    written = policy.replace(params=params, tokenizer=None, loaded_tokenizer=None)  # the server has a tokenizer
    try:
        write_policy(directory, written.replace(files={}) if adapters else _with_head(written))
    except Exception as error:  # for example, the disk is full
        problem = f"the weights for the server could not be written to {directory}: {one_line(error)}"
        raise EngineError(f"{problem}. Check the free disk space, or pass another directory to engines.vllm") from error
    return adapters


def _with_head(policy: Policy) -> Policy:
    """Add a copy of a tied head under the name that an untied head would have."""
    config, layout = policy.model.config, layout_of(policy.extra_tensors)
    if not config.tie_word_embeddings:
        return policy
    tied, untied = (
        {tensor.name for tensor in tensor_plan(policy.config, model_config, layout, stacked=policy.stacked_experts)}
        for model_config in (config, dataclasses.replace(config, tie_word_embeddings=False))
    )
    (head,) = untied - tied
    return policy.replace(
        extra_tensors={**policy.extra_tensors, head: fetch(policy.params["embed_tokens"]["embedding"])}
    )


def probe_ids(policy: Policy) -> list[int]:
    """Return the probe's 65 token ids, which repeat the ids of `PROBE_TEXT`.

    Without a tokenizer, or if the text has at most 8 distinct ids, they are 1, 2, …
    """
    size = int(policy.model.config.vocab_size) if is_builtin(policy.model) else PROBE + 1
    ids = [] if policy.tokenizer is None else policy.tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    ids = [i for i in ids if i < size]
    probe = ids if len(set(ids)) > 8 else [1 + i % (size - 1) for i in range(PROBE)]
    return list(itertools.islice(itertools.cycle(probe), PROBE))


@jax.jit
def _log_probs(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
    return token_log_probs(model.apply({"params": params}, tokens)[:, :-1], tokens[:, 1:])


def score_probe(model: Model, params: Params, ids: list[int]) -> np.ndarray:
    """Return the local model's log-probs [64] for ids[1:] at temperature 1."""
    tokens = jnp.broadcast_to(jnp.array(ids, jnp.int32), (shard_count(mesh_of(params)), len(ids)))
    return np.asarray(fetch(_log_probs(as_jit_argument(model), params, tokens)))[0]
