"""A server as the sampler of a run: all completions are requested at once, and weights are sent before each batch.

```
weights ─► written ─► loaded ─► probe ─► completions, one request for each turn ─► probe ─► Completions
                        ▲                            │ the server is lost
                        └──────── it is back ◄───────┘
```

Both sides score a probe, a text of 65 tokens, before and after a batch: a batch is learned from only if the server had
the run's weights all the time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shutil
import tempfile
import threading
import time
import uuid
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
from grpo_jax.maths.stops import Stops
from grpo_jax.messages import one_line
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import fetch, gather_objects, mesh_of, shard_count
from grpo_jax.policy import Policy
from grpo_jax.rollout import engine_client
from grpo_jax.rollout.draw import completion_keys
from grpo_jax.rollout.ends import TurnEnds, stops_of
from grpo_jax.rollout.engine_client import NOTHING_LEARNED, RECOVERIES, EngineError, Lost
from grpo_jax.rollout.engine_server import VLLM, ServerTurn
from grpo_jax.rollout.table import Table
from grpo_jax.rollout.turns import Answers, wait_for
from grpo_jax.types import Completions, Model, Params, Prompts, Tokenizer, as_argument, is_cached

PROBE = 65
"""Tokens of the probe; the first one is given."""
PROBE_TEXT = (
    "Once upon a time there was a small town by the sea, where 12 boats left every morning and 7 came back at noon."
    " What became of the other 5? Think step by step: 12 - 7 = 5, so five boats were still out when the bells rang."
)
TOLERANCES = {"float32": 1e-4}
OTHER_TOLERANCE = 0.05
"""Nats per token by which the mean log-prob of the probe may differ, by the dtype of the params."""
MAX_REQUESTS = 1024
"""Requests in flight, at most."""
SEED_STEP = 0x9E3779B97F4A7C15
"""Difference between the seeds of tokens of one completion: odd, so that no two are equal."""


class _Version(NamedTuple):
    """Weights that were written for the server under a unique name, and our `scores` of the probe's `ids`."""

    name: str
    directory: Path
    adapters: bool
    ids: list[int]
    scores: np.ndarray
    tolerance: float


class _Batch(NamedTuple):
    """Settings of a batch; ids in `stop` and texts in `stops` end a turn, and `answers` None means a single turn."""

    sampling: Sampling
    stop: tuple[int, ...]
    stops: Stops | None
    max_completion_length: int
    max_turn_length: int
    answers: Answers | None


class Engine:
    """A `run.sampler.Sampler` by a server; `engines.vllm` makes one and describes the arguments.

    Attributes:
      measured: metrics of the last batch: seconds of writing, loading and sampling, the probe's mean and largest gap,
        and how often the server was lost.
    """

    def __init__(self, server: VLLM, *, directory: str | None, tolerance: float | None, patience: float):
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance = {tolerance!r}: give nats per token > 0, or None")
        self._server, self._tolerance, self._patience = server, tolerance, patience
        self._parent, self._directory = directory, Path()
        self._numbers, self._token = itertools.count(1), uuid.uuid4().hex[:8]
        self._version: _Version | None = None  # for the server to load
        self._loaded: _Version | None = None  # loaded by the server
        self._params: list[weakref.ref[jax.Array]] = []  # of the version
        self._checked: tuple[Sampling, int] | None = None
        self._lock, self._epoch, self._lost = threading.Lock(), 0, 0
        self._stop = threading.Event()
        self.measured: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"Engine({self._server!r})"

    def follow(self, policy: Policy, params: Params) -> None:
        """Write and score the params that later calls sample from; they may change afterwards.

        All processes of a run call it together.
        """
        leaves = jax.tree.leaves(params)
        if self._version is not None and self._params and self._same(leaves):
            return
        begin, older = time.monotonic(), self._version
        name, ids = f"grpo-{self._token}-{next(self._numbers)}", probe_ids(policy)
        directory = self._made() / name
        adapters = write_weights(directory, policy, params)
        scores = score_probe(policy.model, params, ids)
        dtype = jnp.dtype(getattr(getattr(policy.model, "config", None), "dtype", "float32")).name
        tolerance = TOLERANCES.get(dtype, OTHER_TOLERANCE) if self._tolerance is None else self._tolerance
        self._version = _Version(name, directory, adapters, ids, scores, tolerance)
        self._params = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]
        if older is not None and older is not self._loaded:
            shutil.rmtree(older.directory, ignore_errors=True)
        self.measured = {"sampler/seconds/write": time.monotonic() - begin}

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
        interrupt: Callable[[], None],
        answers: Answers | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: int | Sequence[int] | None = None,
        max_turn_length: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Completions:
        """Completions [B, G, T], T = `max_completion_length`, as described by `run.sampler.Sampler`.

        `params` that are only shapes stand for the params of the last `follow`.

        Raises:
          EngineError: the server refuses, or does not come back in time.
        """
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            self.follow(policy, params)
        ends = TurnEnds.read(stop, stop_token_ids, max_turn_length)
        batch = _Batch(
            Sampling(temperature, top_k, top_p, min_p),
            (*map(int, eos_token_ids), *(id for id in ends.stop_token_ids if id not in eos_token_ids)),
            stops_of(tokenizer or policy.tokenizer, ends.stop) if ends.stop else None,
            max_completion_length,
            min(max_completion_length, max_turn_length or max_completion_length),
            answers,
        )
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        ids = [tokens[b, :n].tolist() for b, n in enumerate(lengths) for _ in range(num_generations)]
        data = jax.random.key_data(completion_keys(key, jnp.asarray(prompt_indices), num_generations))
        words = np.asarray(data).reshape(len(ids), -1).astype(np.uint64)
        seeds = [int(words[i, 0]) << 32 | int(words[i, -1]) for i in range(len(ids))]
        table, fault = Table(len(ids), max_completion_length, pad_token_id), None
        if jax.process_index() == 0:
            try:
                table = self._sampled(ids, seeds, batch, pad_token_id, interrupt)
            except Exception as error:
                if jax.process_count() == 1:
                    raise
                fault = one_line(error, None)
        if (fault := gather_objects(fault)[0]) is not None:  # where one fails, all do
            raise EngineError(fault)
        several = bool((table.mask.sum(-1) < table.lengths).any())
        return table.completions(len(lengths), turns=several)

    def _sampled(
        self, ids: list[list[int]], seeds: list[int], batch: _Batch, pad_token_id: int, interrupt: Callable[[], None]
    ) -> Table:
        """All completions, drawn from one version of the weights."""
        begin, self._lost, played = time.monotonic(), 0, False
        while True:
            self._stop.clear()
            try:
                self._check_and_load(batch.sampling, max(map(len, ids)) + batch.max_completion_length)
                sampled, played = time.monotonic(), batch.answers is not None
                table = Table(len(ids), batch.max_completion_length, pad_token_id)
                tasks = [functools.partial(self._complete, table, i, ids[i], seeds[i], batch) for i in range(len(ids))]
                engine_client.run_together(tasks, MAX_REQUESTS, self._stop, self._server.close, interrupt)
                if self._has_loaded():
                    break
                lost = Lost(f"{self._server.base_url} was started again, with other weights")
            except Lost as error:
                lost = error
            if played:  # environments cannot answer the same turns twice
                raise EngineError(f"{lost}, while environments answered. {NOTHING_LEARNED}") from lost
            self._stop.clear()
            self._recover(self._epoch, lost, interrupt)
        self.measured |= {
            "sampler/seconds/hand_over": sampled - begin,
            "sampler/seconds/sample": time.monotonic() - sampled,
            "sampler/lost": float(self._lost),
        }
        return table

    def _complete(self, table: Table, row: int, prompt: list[int], seed: int, batch: _Batch) -> None:
        """Draw one completion: its turns, and the observations between them."""

        def stopped() -> None:
            if self._stop.is_set():
                raise EngineError("the batch was stopped")

        while True:
            begin = int(table.lengths[row])
            left = batch.max_completion_length - begin
            at = (seed + begin * SEED_STEP) % 2**63
            ids = prompt + table.tokens[row, :begin].tolist()
            turn = self._turn(ids, min(left, batch.max_turn_length), at, batch)
            table.append(row, turn.tokens, turn.log_probs)
            table.ended[row] = turn.ended and batch.answers is None
            left -= len(turn.tokens)
            if batch.answers is None or (not turn.ended and left == 0):
                return
            promise = batch.answers(row, np.array(turn.tokens, np.int32), left - 1)
            assert promise is not None, "one process answers all completions"
            observation = wait_for(promise, stopped)
            if observation is None:
                table.ended[row] = True
            if observation is None or len(observation) >= left:
                return
            table.observe(row, observation)

    def _turn(self, ids: list[int], most: int, seed: int, batch: _Batch) -> ServerTurn:
        """Draw one turn; if the server is lost and comes back meanwhile, draw it again."""
        while True:
            epoch = self._epoch
            try:
                turn = self._server.draw(
                    ids,
                    most=most,
                    seed=seed,
                    sampling=batch.sampling,
                    stop=batch.stop,
                    stops=batch.stops,
                    stopped=self._stop.is_set,
                )
            except Lost as lost:
                self._recover(epoch, lost)
                continue
            with self._lock:  # waits for a recovery: the restarted server may have drawn with other weights
                if epoch == self._epoch:
                    return turn

    def _recover(self, epoch: int, lost: Lost, interrupt: Callable[[], None] = lambda: None) -> None:
        """Wait for the server and load the weights again; of several threads the first one does it."""
        with self._lock:
            if self._stop.is_set():
                raise lost
            if epoch != self._epoch:
                return
            if self._lost == RECOVERIES:
                message = f"{lost}; this was the {RECOVERIES + 1}th time in one batch. {NOTHING_LEARNED}"
                raise EngineError(message) from lost
            self._lost, self._loaded = self._lost + 1, None
            engine_client.wait_until_alive(self._server.alive, lost, self._patience, self._stop, interrupt)
            if self._checked is not None:  # else the caller checks and loads next
                self._load()
            self._epoch += 1

    def _check_and_load(self, sampling: Sampling, longest: int) -> None:
        """Check the server and load the weights, unless that is done."""
        if self._checked is None or self._checked[0] != sampling or self._checked[1] < longest:
            self._server.check(sampling, longest)
            self._checked = sampling, longest
        if self._loaded is not self._version or not self._has_loaded():
            self._load()

    def _load(self) -> None:
        """Load the weights, and compare the probe's scores."""
        version, before = self._version, self._loaded
        assert version is not None, "`follow` is called first"
        self._server.load(version.name, version.directory, version.adapters)
        gaps = self._gaps(version)
        self.measured |= {"sampler/probe_gap_mean": float(gaps.mean()), "sampler/probe_gap_max": float(gaps.max())}
        if not gaps.mean() <= version.tolerance:
            self._loaded = None
            raise EngineError(
                f"{self._server.base_url} does not sample from the run's weights: after they were loaded, the log-probs"
                f" of a text differ by {gaps.mean():.2g} nats per token (at most {gaps.max():.2g}), and rounding"
                f" explains {version.tolerance:g}. Does it serve the policy's own base model? If it computes in another"
                f" dtype than the trainer, start it with the same --dtype, or pass tolerance. {NOTHING_LEARNED}"
            )
        self._loaded = version
        if before is not None and before is not version:
            shutil.rmtree(before.directory, ignore_errors=True)

    def _gaps(self, version: _Version) -> np.ndarray:
        """[64] differences between the server's log-probs of the probe and ours."""
        return np.abs(np.array(self._server.score(version.ids)) - version.scores)

    def _has_loaded(self) -> bool:
        """Whether the server still has the loaded weights: by the version that it reports, and by the probe."""
        version = self._loaded
        if version is None or not self._server.holds(version.name):
            return False
        return bool(self._gaps(version).mean() <= version.tolerance)

    def _same(self, leaves: list[jax.Array]) -> bool:
        """Whether these are the very arrays of the last `follow`."""
        return len(leaves) == len(self._params) and all(
            ref() is leaf and not leaf.is_deleted() for ref, leaf in zip(self._params, leaves, strict=True)
        )

    def _made(self) -> Path:
        """This process's directory for weights, which is removed with the engine."""
        if self._directory == Path():
            shared = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
            parent = Path(shared if self._parent is None else self._parent)
            parent.mkdir(parents=True, exist_ok=True)
            self._directory = Path(tempfile.mkdtemp(prefix="grpo_jax-", dir=parent))
            self._directory.chmod(0o755)  # the server may run as another user
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        return self._directory


def write_weights(directory: Path, policy: Policy, params: Params) -> bool:
    """Write params for a server; return whether they are adapters, in PEFT's format, or all weights as safetensors.

    A tied head is written under both names: vLLM may hold it as two tensors, and would reload only the one that it
    finds. All processes of a run call it together, and the first one writes.
    """
    adapters = isinstance(policy.model, LoraModel)
    if not adapters and not policy.config:
        raise ValueError("sampler: an engine needs the policy's config.json to name tensors; the policy has none")
    whole = policy.replace(params=params, tokenizer=None, loaded_tokenizer=None)  # the server keeps its tokenizer
    write_policy(directory, whole.replace(files={}) if adapters else _with_head(whole))
    return adapters


def _with_head(policy: Policy) -> Policy:
    """A policy whose tied head is also stored under the name of an untied one."""
    config, layout = policy.model.config, layout_of(policy.extra_tensors)
    if not config.tie_word_embeddings:
        return policy
    tied, untied = (
        {tensor.name for tensor in tensor_plan(policy.config, one, layout, stacked=policy.stacked_experts)}
        for one in (config, dataclasses.replace(config, tie_word_embeddings=False))
    )
    (head,) = untied - tied
    return policy.replace(
        extra_tensors={**policy.extra_tensors, head: fetch(policy.params["embed_tokens"]["embedding"])}
    )


def probe_ids(policy: Policy) -> list[int]:
    """Token ids of the probe; 1, 2, … if the policy's tokenizer has too few of them, or the policy has none."""
    size = int(policy.model.config.vocab_size) if is_cached(policy.model) else PROBE + 1
    found = [] if policy.tokenizer is None else policy.tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    found = [i for i in found if i < size]
    known = found if len(set(found)) > 8 else [1 + i % (size - 1) for i in range(PROBE)]
    return list(itertools.islice(itertools.cycle(known), PROBE))


@jax.jit
def _log_probs(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
    return token_log_probs(model.apply({"params": params}, tokens)[:, :-1], tokens[:, 1:])


def score_probe(model: Model, params: Params, ids: list[int]) -> np.ndarray:
    """Our log-probs [64] of ids[1:] at temperature 1."""
    tokens = jnp.broadcast_to(jnp.array(ids, jnp.int32), (shard_count(mesh_of(params)), len(ids)))
    return np.asarray(fetch(_log_probs(as_argument(model), params, tokens)))[0]
