"""A server of somebody else's as the sampler of a run: all completions in flight at once, weights that follow.

```
weights ─► written ─► loaded ─► probe ─► completions, each by a request for each of its turns ─► probe ─► Completions
                        ▲                            │ the server is lost
                        └──────── it is back ◄───────┘
```

A batch is learned from only if the server had the run's weights before it and after it.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
import threading
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

from grpo_jax.maths.sampling import Sampling
from grpo_jax.maths.stops import Stops
from grpo_jax.messages import one_line
from grpo_jax.models.sharding import gather_objects
from grpo_jax.policy import Policy
from grpo_jax.rollout.draw import completion_keys
from grpo_jax.rollout.ends import TurnEnds, stops_of
from grpo_jax.rollout.engine_client import EngineError, Lost, run_together
from grpo_jax.rollout.engine_server import VLLM, Drawn
from grpo_jax.rollout.engine_weights import probe_ids, score_probe, stale_tensors, write_weights
from grpo_jax.rollout.table import Table
from grpo_jax.rollout.turns import Answers, wait_for
from grpo_jax.types import Completions, Params, Prompts, Tokenizer

TOLERANCES = {"float32": 1e-4}
OTHERWISE = 0.05
"""Nats per token, the mean by which log-probs of the probe may differ: by the dtype of the params."""
RECOVERIES = 3
"""How often in one batch the server may be lost."""
MOST = 1024
"""Requests in flight, at most."""
STEP = 0x9E3779B97F4A7C15
"""By what the seeds of the turns of one completion differ: odd, so that no two are equal."""


class _Version(NamedTuple):
    """Weights that were written for the server under a unique name, and our `scores` of the probe's `ids`."""

    name: str
    directory: Path
    adapters: bool
    ids: list[int]
    scores: np.ndarray
    policy: Policy


class Asked(NamedTuple):
    """How a batch is requested: `longest` and `turn` bound the tokens of a completion and of a turn.

    Ids in `stop` and texts in `stops` end a turn; `answers` of None means that there is only one.
    """

    sampling: Sampling
    stop: tuple[int, ...]
    longest: int
    answers: Answers | None
    stops: Stops | None
    turn: int


class Engine:
    """A `run.sampler.Sampler` by a server: `engines.vllm` makes one.

    Args:
      server: a client of the server.
      directory: where weights are written for it; None: /dev/shm, or where there is none the directory for temporary
        files.
      tolerance: nats per token, the mean by which the probe's log-probs may differ; None: 1e-4 for float32 params, else
        0.05.
      patience: seconds for which a lost server is waited for.

    Attributes:
      measured: of the last batch: seconds of writing, handing over and sampling, the probe's mean and
        largest gap, and how often the server was lost.
    """

    def __init__(
        self, server: VLLM, *, directory: str | None = None, tolerance: float | None = None, patience: float = 300.0
    ):
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance = {tolerance!r}: give nats per token > 0, or None")
        self._server, self._tolerance, self._patience = server, tolerance, patience
        self._directory, self._own_directory = directory, Path()
        self._numbers, self._token = itertools.count(1), uuid.uuid4().hex[:8]
        self._version: _Version | None = None  # what the server is to have
        self._loaded: _Version | None = None  # what it has
        self._params: list[weakref.ref[jax.Array]] = []  # whose weights the version is
        self._checked: tuple[Sampling, int] | None = None
        self._lock, self._epoch, self._lost = threading.Lock(), 0, 0
        self._stop = threading.Event()
        self.measured: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"Engine({self._server!r})"

    def follow(self, policy: Policy, params: Params) -> None:
        """Take the params that later calls sample from: written down and scored, so that they may change afterwards.

        All processes of a run call it together.
        """
        leaves = jax.tree.leaves(params)
        if self._version is not None and self._params and self._same(leaves):
            return
        begin = time.monotonic()
        name = f"grpo-{self._token}-{next(self._numbers)}"
        directory = self._made() / name
        adapters = write_weights(directory, policy, params)
        ids = probe_ids(policy)
        scores = score_probe(policy.model, params, ids)
        older = self._version
        self._version = _Version(name, directory, adapters, ids, scores, policy)
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
        """Completions [B, G, T], T = `max_completion_length`, as `run.sampler.Sampler` says.

        `params` that are only shapes stand for those that `follow` was given last.

        Raises:
          EngineError: the server cannot do it, or is lost for longer than it is waited for.
        """
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            self.follow(policy, params)
        ends = TurnEnds.read(stop, stop_token_ids, max_turn_length)
        asked = Asked(
            Sampling(temperature, top_k, top_p, min_p),
            (*map(int, eos_token_ids), *(id for id in ends.stop_token_ids if id not in eos_token_ids)),
            max_completion_length,
            answers,
            stops_of(tokenizer or policy.tokenizer, ends.stop) if ends.stop else None,
            min(max_completion_length, max_turn_length or max_completion_length),
        )
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        ids = [tokens[b, :n].tolist() for b, n in enumerate(lengths) for _ in range(num_generations)]
        data = jax.random.key_data(completion_keys(key, jnp.asarray(prompt_indices), num_generations))
        words = np.asarray(data).reshape(len(ids), -1).astype(np.uint64)
        seeds = [int(words[i, 0]) << 32 | int(words[i, -1]) for i in range(len(ids))]
        table, fault = Table(len(ids), max_completion_length, pad_token_id), None
        if jax.process_index() == 0:
            try:
                table = self._sampled(ids, seeds, asked, pad_token_id, interrupt)
            except Exception as error:
                if jax.process_count() == 1:
                    raise
                fault = one_line(error, None)
        if (fault := gather_objects(fault)[0]) is not None:  # where one fails, all do
            raise EngineError(fault)
        several = bool((table.mask.sum(-1) < table.lengths).any())
        return table.completions(len(lengths), turns=several)

    def _sampled(
        self, ids: list[list[int]], seeds: list[int], asked: Asked, pad_token_id: int, interrupt: Callable[[], None]
    ) -> Table:
        """All completions, by weights that the server had all along."""
        begin, self._lost, played = time.monotonic(), 0, False
        while True:
            self._stop.clear()
            try:
                self._hand_over(asked, max(map(len, ids)) + asked.longest)
                sampled, played = time.monotonic(), asked.answers is not None
                table = Table(len(ids), asked.longest, pad_token_id)
                tasks = [functools.partial(self._one, table, i, ids[i], seeds[i], asked) for i in range(len(ids))]
                run_together(tasks, MOST, self._stop, self._server.close, interrupt)
                if self._still():
                    break
                lost = Lost(f"{self._server.base_url} was started again, with other weights")
            except Lost as error:
                lost = error
            if played:  # environments would hear it all again
                raise EngineError(f"{lost}, while environments answered. {NOTHING}") from lost
            self._stop.clear()
            self._recover(self._epoch, lost, interrupt)
        self.measured |= {
            "sampler/seconds/hand_over": sampled - begin,
            "sampler/seconds/sample": time.monotonic() - sampled,
            "sampler/lost": float(self._lost),
        }
        return table

    def _one(self, table: Table, number: int, ids: list[int], seed: int, asked: Asked) -> None:
        """One completion: its turns, and what is said between them."""

        def stopped() -> None:
            if self._stop.is_set():
                raise EngineError("the batch was given up")

        while True:
            begins = int(table.lengths[number])
            room = asked.longest - begins
            at = (seed + begins * STEP) % 2**63
            drawn = self._turn(ids + table.tokens[number, :begins].tolist(), min(room, asked.turn), at, asked)
            table.append(number, drawn.tokens, drawn.log_probs)
            table.ended[number] = drawn.ended and asked.answers is None
            room -= len(drawn.tokens)
            if asked.answers is None or (not drawn.ended and room == 0):
                return
            promise = asked.answers(number, np.array(drawn.tokens, np.int32), room - 1)
            assert promise is not None, "one process plays all of them"
            said = wait_for(promise, stopped)
            if said is None:
                table.ended[number] = True
            if said is None or len(said) >= room:
                return
            table.observe(number, said)

    def _turn(self, ids: list[int], most: int, seed: int, asked: Asked) -> Drawn:
        """One turn; asked for again if the server was lost meanwhile and is back."""
        while True:
            epoch = self._epoch
            try:
                drawn = self._server.draw(
                    ids,
                    most=most,
                    seed=seed,
                    sampling=asked.sampling,
                    stop=asked.stop,
                    stops=asked.stops,
                    stopped=self._stop.is_set,
                )
            except Lost as lost:
                self._recover(epoch, lost)
                continue
            if epoch == self._epoch:
                return drawn

    def _recover(self, epoch: int, lost: Lost, interrupt: Callable[[], None] = lambda: None) -> None:
        """Wait for the server and hand it the weights again; of several threads the first one does it."""
        with self._lock:
            if self._stop.is_set():
                raise lost
            if epoch != self._epoch:
                return
            if self._lost == RECOVERIES:  # each thread that lost it says so, and counts no loss of its own
                raise EngineError(f"{lost}; this was the {RECOVERIES + 1}th time in one batch. {NOTHING}") from lost
            self._lost += 1
            warnings.warn(f"{lost}. It is waited for, {self._patience:g} s at most", stacklevel=2)
            self._loaded, end = None, time.monotonic() + self._patience
            while not self._server.alive():
                interrupt()
                if self._stop.wait(min(1.0, max(0.0, self._patience / 10))) or time.monotonic() > end:
                    raise EngineError(f"{lost}. It was waited for {self._patience:g} s. {NOTHING}") from lost
            if self._checked is not None:  # else all of it is still to come
                self._load()
            self._epoch += 1

    def _hand_over(self, asked: Asked, longest: int) -> None:
        """Have the server checked and the weights loaded, if they are not."""
        if self._checked is None or self._checked[0] != asked.sampling or self._checked[1] < longest:
            self._server.check(asked.sampling, longest)
            self._checked = asked.sampling, longest
        if self._loaded is not self._version or not self._still():
            self._load()

    def _load(self) -> None:
        """Load the weights, and compare the probe's scores."""
        version, before = self._version, self._loaded
        assert version is not None, "followed before"
        self._server.load(version.name, version.directory, version.adapters)
        theirs = np.array(self._server.score(version.ids))
        gaps = np.abs(theirs - version.scores)
        self.measured |= {"sampler/probe_gap_mean": float(gaps.mean()), "sampler/probe_gap_max": float(gaps.max())}
        tolerance = self._tolerance_of(version)
        if not gaps.mean() <= tolerance:
            self._loaded = None
            raise EngineError(self._explained(version, before, theirs, gaps, tolerance))
        self._loaded = version
        if before is not None and before is not version:
            shutil.rmtree(before.directory, ignore_errors=True)

    def _explained(
        self, version: _Version, before: _Version | None, theirs: np.ndarray, gaps: np.ndarray, tolerance: float
    ) -> str:
        """The message of a gap: with the tensors that differ, where they can be found."""
        named = ""
        if before is not None:
            found = stale_tensors(version.policy, version.directory, before.directory, version.ids, theirs)
            named = f" It still has the weights of the version before: {', '.join(found)}." if found else ""
        return (
            f"{self._server.base_url} does not sample from the run's weights: after they were handed over, the"
            f" log-probs of a text differ by {gaps.mean():.2g} nats per token (at most {gaps.max():.2g}), and rounding"
            f" explains {tolerance:g}.{named} Is it serving the policy's own base model? If it computes in another"
            f" dtype than the trainer, start it with the same --dtype, or give tolerance. {NOTHING}"
        )

    def _still(self) -> bool:
        """Whether the server has the weights that were loaded: by its own word, and by the probe."""
        version = self._loaded
        if version is None or not self._server.holds(version.name):
            return False
        gaps = np.abs(np.array(self._server.score(version.ids)) - version.scores)
        return bool(gaps.mean() <= self._tolerance_of(version))

    def _tolerance_of(self, version: _Version) -> float:
        """Return the mean gap that rounding explains."""
        if self._tolerance is not None:
            return self._tolerance
        config = getattr(version.policy.model, "config", None)
        return TOLERANCES.get(jnp.dtype(getattr(config, "dtype", "float32")).name, OTHERWISE)

    def _same(self, leaves: list[jax.Array]) -> bool:
        """Whether these are the very arrays that were followed last."""
        return len(leaves) == len(self._params) and all(
            ref() is leaf and not leaf.is_deleted() for ref, leaf in zip(self._params, leaves, strict=True)
        )

    def _made(self) -> Path:
        """The directory for weights, of this process; it goes with the engine."""
        if self._own_directory == Path():
            shared = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
            parent = Path(shared if self._directory is None else self._directory)
            parent.mkdir(parents=True, exist_ok=True)
            self._own_directory = Path(tempfile.mkdtemp(prefix="grpo_jax-", dir=parent))
            self._own_directory.chmod(0o755)  # the server may be another user
            weakref.finalize(self, shutil.rmtree, self._own_directory, ignore_errors=True)
        return self._own_directory


NOTHING = "Nothing was learned from it; run it again, and it goes on from its last checkpoint."
