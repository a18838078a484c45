"""Training on a mesh of eight devices gives the same completions, losses and params as on one device."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_train import lower_case
from tiny import logged, tiny_model, tiny_policy

from grpo_jax import Batch, GRPOConfig, Prompts, generate, make_prompts, train
from grpo_jax.models.config import DeltaShape
from grpo_jax.models.sharding import make_mesh, place, shard_count
from grpo_jax.types import as_jit_argument
from grpo_jax.update import packed
from grpo_jax.update.packed import PackedUpdater
from grpo_jax.update.state import create_state

ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh", "i", "jkl", "m", "no"]]
MESHES = [{"data": 2, "fsdp": 2, "tensor": 2}, None]


SMALL = {
    "num_generations": 4, "max_completion_length": 20, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
    "logging_steps": 1, "max_steps": 1, "beta": 0.1, "seed": 0,
    "gradient_checkpointing": False,
}  # fmt: skip


def run(policy, mesh, run_dir=None, **settings):
    """Train on eight prompts × 4 completions per iteration; return the final state and the logged lines."""
    per_device = 32 // int(np.prod([size for axis, size in (mesh or {}).items() if axis != "tensor"] or [1]))
    config = GRPOConfig(**SMALL | {"per_device_train_batch_size": per_device, "mesh": mesh} | settings)
    return logged(train, policy, ROWS, lower_case, config, run_dir=run_dir)


def assert_same_run(one, other):
    state, lines = one
    others, other_lines = other
    for line, like in zip(lines, other_lines, strict=True):
        assert line["num_tokens"] == like["num_tokens"]
        assert line.get("reward") == like.get("reward"), "the completions differ"
        for name in {"loss", "kl", "grad_norm", "entropy"} & line.keys():
            assert line[name] == pytest.approx(like[name], abs=1e-6), name
    chex.assert_trees_all_close(state.params, jax.tree.map(np.asarray, others.params), atol=1e-6)


def test_run_resumed_on_other_devices_equals_a_one_device_run(tmp_path):
    """A run resumed on different devices at every step has the losses, params and moments of a one-device run."""
    lines = []
    for step, mesh in enumerate(MESHES, 1):
        state, line = run(tiny_policy(), mesh, tmp_path, max_steps=step)
        kernel = state.params["layers_0"]["mlp"]["up_proj"]["kernel"]
        cut = (16, 32) if mesh is None else (16 // mesh["fsdp"], 32 // mesh["tensor"])
        for tree in (state.params, state.opt_state, state.ref_params):
            found = [x for x in jax.tree.leaves(tree) if x.shape == kernel.shape]
            assert {x.addressable_shards[0].data.shape for x in found} == {cut}
        lines += line
    expected = run(tiny_policy(), None, max_steps=len(MESHES))
    assert_same_run(expected, (state, lines))
    chex.assert_trees_all_close(state.opt_state, jax.tree.map(np.asarray, expected[0].opt_state), atol=1e-6)


@pytest.mark.quick
def test_invalid_meshes_and_batches_are_rejected(monkeypatch):
    model, params = tiny_model()
    placed, prompts = place(params, make_mesh({"data": 4})), make_prompts([[3]])
    few = {"num_generations": 4, "max_completion_length": 2, "batch_size": 15}
    for made, message in (
        (lambda: make_mesh({"model": 2}), "mesh axes must be data, fsdp or tensor; got 'model'"),
        (lambda: make_mesh({"data": -1, "fsdp": -2}), r"mesh = {'data': -1, 'fsdp': -2} .* Set positive sizes"),
        (lambda: make_mesh({"data": 4, "tensor": 4}), r"has 4 × 1 × 4 devices \(available: 8\)"),
        (
            lambda: run(tiny_policy(), {"data": 8}, rollout_batch_size=28),
            r"rollout_batch_size = 28: must be at least 32, .* \(4 × 8\); increase it, or use None",
        ),
        (
            lambda: generate(model, placed, prompts, jax.random.key(0), **few),
            r"batch_size must be at least 16, .* on each data-parallel device; got 15",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            made()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"has 2 × 1 × 1 devices \(available: 8\). .* exactly 8, since"):
        make_mesh({"data": 2})


def test_packed_update_on_a_mesh_equals_one_device(monkeypatch):
    """A packed update on a mesh equals one on one device; zero-advantage groups come last on each device."""
    monkeypatch.setattr(packed, "CPU_TOKENS", 64)
    b, g, t = 16, 4, 32
    delta = DeltaShape(2, 4, key_dim=6, value_dim=5)
    # The norm after a recurrent memory amplifies the rounding of tiny values; a large eps reduces this.
    model, params = tiny_model(layers=2, mixers=("delta", "attention"), delta=delta, rms_norm_eps=1e-2)
    config, optimizer, results = GRPOConfig(max_completion_length=t, max_grad_norm=0), optax.sgd(1.0), []
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 9, (b, g)), t)
    has = jnp.isin(jnp.arange(b), jnp.array([1, 2, 6, 11]))[:, None]
    batch = Batch(
        prompts=Prompts(jax.random.randint(jax.random.key(1), (b, 32), 0, 24), jnp.arange(b) + 1),
        tokens=jax.random.randint(jax.random.key(2), (b, g, t), 0, 24),
        mask=jnp.asarray(np.arange(t) < lengths[..., None]),
        advantages=jnp.where(has, jax.random.normal(jax.random.key(3), (b, g)), 0.0),
        sampling_log_probs=jax.random.normal(jax.random.key(4), (b, g, t)) * 0.3 - 3,
    )
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    for axes in (mesh, None):
        state = place(create_state(jax.tree.map(jnp.copy, params), optimizer, jax.random.key(0)), axes)
        updater = PackedUpdater(as_jit_argument(model), config, (b, g), optimizer=optimizer, mesh=axes)
        if axes is not None:  # with a reference, zero-advantage groups would be trained by the KL
            (part,), numbers = updater.pack(state.params, batch)
            learns = np.asarray(batch.advantages).any(axis=1)[numbers].reshape(shard_count(axes), -1)
            assert learns.any(axis=1).all(), "each device has groups to train on"
            assert 0 < part.num_with_grad < part.num_used
        scores = updater.log_probs(state.params, batch.prompts, batch.tokens, batch.mask)
        state, metrics = updater.update(state, batch)
        results.append(jax.device_get((scores, state.params, metrics)))
    (scores, ours, metrics), (expected, of_one, alone) = results
    np.testing.assert_allclose(np.where(batch.mask, scores, 0), np.where(batch.mask, expected, 0), atol=1e-5)
    moved = jax.tree.map(lambda x, y: np.abs(np.asarray(x) - y).max(), params, of_one)
    assert max(jax.tree.leaves(moved)) > 1e-3
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ours, of_one)
    assert alone.pop("padding_share") < metrics.pop("padding_share"), "each device is padded to the fullest one"
    chex.assert_trees_all_close(metrics, alone, rtol=1e-4, atol=1e-5)
