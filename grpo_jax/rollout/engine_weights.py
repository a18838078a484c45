"""The weights of a policy on their way to a server: written for it, and scored on both sides.

```
params ─► files in a directory that both see ─► the server loads them
   └────► log-probs of a text of 65 tokens ═══ compared with the server's ═══► the run goes on, or stops
```
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.hub.files import stored_tensors
from grpo_jax.hub.huggingface import from_pretrained
from grpo_jax.hub.peft import load_lora, write_policy
from grpo_jax.hub.tensors import layout_of, tensor_plan
from grpo_jax.maths.log_probs import token_log_probs
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import fetch, mesh_of, shard_count
from grpo_jax.policy import Policy
from grpo_jax.types import Model, Params, as_argument, is_cached

PROBE = 65
"""Tokens of the text that both sides score; the first one is given."""
TEXT = (
    "Once upon a time there was a small town by the sea, where 12 boats left every morning and 7 came back at noon."
    " What became of the other 5? Think step by step: 12 - 7 = 5, so five boats were still out when the bells rang."
)


def write_weights(directory: Path, policy: Policy, params: Params) -> bool:
    """Write params for a server: adapters in PEFT's format, else all weights as safetensors; return whether adapters.

    A head that is the embedding is written under both names: vLLM may hold it as two tensors, of which it would reload
    the one that it finds. All processes of a run call it together, and the first one writes.
    """
    adapters = isinstance(policy.model, LoraModel)
    if not adapters and not policy.config:
        raise ValueError("sampler: an engine needs the policy's config.json, by which it names tensors; it has none")
    whole = policy.replace(params=params, tokenizer=None, loaded_tokenizer=None)  # the server keeps its tokenizer
    write_policy(directory, whole.replace(files={}) if adapters else with_head(whole))
    return adapters


def with_head(policy: Policy) -> Policy:
    """A policy whose tied head is also among the tensors of its checkpoint, by the name of one that is not tied."""
    config, layout = policy.model.config, layout_of(policy.beside)
    if not config.tie_word_embeddings:
        return policy
    tied, apart = (
        {tensor.name for tensor in tensor_plan(policy.config, one, layout, stacked=policy.stacked_experts)}
        for one in (config, dataclasses.replace(config, tie_word_embeddings=False))
    )
    (head,) = apart - tied
    return policy.replace(beside={**policy.beside, head: fetch(policy.params["embed_tokens"]["embedding"])})


def probe_ids(policy: Policy) -> list[int]:
    """The tokens of the text that both sides score; of a policy without a tokenizer, or with a strange one, 1, 2, …"""
    size = int(policy.model.config.vocab_size) if is_cached(policy.model) else PROBE + 1
    found = [] if policy.tokenizer is None else policy.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    found = [i for i in found if i < size]
    known = found if len(set(found)) > 8 else [1 + i % (size - 1) for i in range(PROBE)]
    return list(itertools.islice(itertools.cycle(known), PROBE))


@jax.jit
def _log_probs(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
    return token_log_probs(model.apply({"params": params}, tokens)[:, :-1], tokens[:, 1:])


@jax.jit
def _log_probs_by_head(model: Model, params: Params, head: Params, tokens: jax.Array) -> jax.Array:
    """As if the head's params were not those of the layers."""
    hidden, _ = model.apply({"params": params}, tokens[:, None], method="hidden")
    return token_log_probs(model.apply({"params": head}, hidden[:, 0, :-1], method="unembed"), tokens[:, 1:])


def score_probe(model: Model, params: Params, ids: list[int]) -> np.ndarray:
    """Our log-probs [64] of ids[1:] at temperature 1."""
    tokens = jnp.broadcast_to(jnp.array(ids, jnp.int32), (shard_count(mesh_of(params)), len(ids)))
    return np.asarray(fetch(_log_probs(as_argument(model), params, tokens)))[0]


def stale_tensors(policy: Policy, new: Path, old: Path, ids: list[int], theirs: np.ndarray) -> list[str]:
    """Return the names of tensors of which a server still has the old version: with these, our log-probs are `theirs`.

    One name, if one tensor explains most of the gap; "all of them", if all old ones do; nothing, if neither.
    `new` and `old` are directories of `write_weights`, `ids` the probe's, and `theirs` the server's 64 log-probs of it.
    """
    adapted = isinstance(policy.model, LoraModel)
    base = policy.replace(model=policy.model.model, params=policy.model.base) if adapted else policy
    now, before = (
        load_lora(path, base).params
        if adapted
        else from_pretrained(path, dtype=next(iter(stored_tensors(path).values())).dtype.name).params
        for path in (new, old)
    )
    tokens, model = jnp.array([ids], jnp.int32), as_argument(policy.model)

    def gap(log_probs: jax.Array) -> float:
        return float(np.abs(np.asarray(log_probs)[0] - theirs).mean())

    at_once = gap(_log_probs(model, now, tokens))
    gaps = {"all of them": gap(_log_probs(model, before, tokens))}
    if is_cached(policy.model) and policy.model.config.tie_word_embeddings:
        gaps["lm_head (tied to embed_tokens)"] = gap(_log_probs_by_head(model, now, before, tokens))
        gaps["embed_tokens (tied to lm_head)"] = gap(_log_probs_by_head(model, before, now, tokens))
    leaves, paths = jax.tree_util.tree_flatten_with_path(now)[0], jax.tree.structure(now)
    olds = jax.tree.leaves(before)
    for i, (path, _) in enumerate(leaves):
        mixed = [olds[j] if i == j else leaf for j, (_, leaf) in enumerate(leaves)]
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        gaps[name] = gap(_log_probs(model, jax.tree.unflatten(paths, mixed), tokens))
    best = min(gaps, key=gaps.__getitem__)
    return [best] if gaps[best] < 0.2 * at_once else []
