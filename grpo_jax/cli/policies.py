"""The policy and the teacher that a RUN.yaml names, loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax

from grpo_jax.cli.named import find, is_reference, scorer_of, teacher_model
from grpo_jax.cli.runfile import RunFile, config_of, in_folder
from grpo_jax.hub.files import read_json
from grpo_jax.hub.huggingface import from_pretrained, load_tokenizer
from grpo_jax.hub.peft import add_lora
from grpo_jax.hub.policy import init_policy, place_policy
from grpo_jax.models.platform import compute_dtype
from grpo_jax.models.sharding import make_mesh
from grpo_jax.policy import Policy
from grpo_jax.run.kept_programs import keep_programs
from grpo_jax.run.teacher import Scorer
from grpo_jax.types import Json


def load_policy(run: RunFile) -> Policy:
    """Load the policy that a run begins with."""
    config = run.config
    keep_programs()
    if run.model is None:
        raise ValueError("model: is missing; give a RUN.yaml that has one, or --model")
    if isinstance(run.model, Mapping):
        policy = _new_policy(run.model, run.folder, run.param_dtype)
    else:
        found = _named(run.model, run.folder)
        if isinstance(found, Policy) and run.quantize is not None:
            raise ValueError(f"quantize = {run.quantize!r}: {run.model} returns a Policy; quantize it there")
        policy = found if isinstance(found, Policy) else _read(str(found), run, run.quantize, run.quantize_embeddings)
    if run.lora is not None:
        policy = add_lora(
            policy,
            jax.random.key(config.seed),
            rank=run.lora.rank,
            alpha=run.lora.alpha,
            targets=run.lora.targets,
            dropout=run.lora.dropout,
        )
    return place_policy(policy, make_mesh(config.mesh) if config.mesh else None)


def load_teacher(run: RunFile) -> Policy | Scorer | None:
    """Load the teacher of a run: a policy, a scorer, or None."""
    if run.teacher is None:
        return None
    if (server := scorer_of(run.teacher)) is not None:
        return server
    model, quantize = teacher_model(run.teacher)
    found = _named(model, run.folder)
    return _read(found, run, quantize) if isinstance(found, str) else found


def _named(model: object, folder: Path) -> Policy | Scorer | str:
    """Return what an entry names: a directory or a name on the hub, or the object that a reference leads to.

    A function or class is called, and an object that scores is not, though it may be callable too.
    """
    if not is_reference(model):
        return in_folder(str(model), folder)
    found = find(model, folder)
    called = callable(found) and (isinstance(found, type) or not hasattr(found, "score"))
    named: Policy | Scorer | str = found() if called else found
    return named


def _read(name: str, run: RunFile, quantize: str | None, quantize_embeddings: bool = False) -> Policy:
    """Read a checkpoint as a run holds it."""
    return from_pretrained(
        name,
        dtype=compute_dtype(run.config.compute_dtype),
        param_dtype=run.param_dtype,
        mesh=make_mesh(run.config.mesh) if run.config.mesh else None,
        quantize=quantize,
        quantize_embeddings=quantize_embeddings,
    )


def _new_policy(model: Json, folder: Path, dtype: str) -> Policy:
    """Make a policy with fresh weights."""
    key = jax.random.key(model.get("seed") or 0)
    tokenizer, stated = load_tokenizer(in_folder(model["tokenizer"], folder)), model["config"]
    beside = read_json((folder / stated).with_name("generation_config.json")) if isinstance(stated, str) else None
    return init_policy(config_of(model, folder), key, tokenizer=tokenizer, generation_config=beside, dtype=dtype)
