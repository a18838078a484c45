"""Checkpoints: everything comes back as it was, the newest whole one, and nothing is written where nothing shall be."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from grpo_jax import Batch, GRPOConfig, Prompts
from grpo_jax.checkpoint import Checkpoints
from grpo_jax.progress import Progress
from grpo_jax.state import create_state

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def state_at(step, **keep):
    params = {"a": {"w": jnp.arange(6.0).reshape(2, 3) + step}, "b": jnp.full(4, step, jnp.bfloat16)}
    state = create_state(params, OPTIMIZER, jax.random.key(step), **keep)
    return state.replace(step=jnp.int32(step))


def batch(**optional):
    shape = (2, 2, 3)
    return Batch(
        prompts=Prompts(jnp.ones((2, 4), jnp.int32), jnp.array([4, 1])),
        tokens=jnp.arange(12).reshape(shape),
        mask=jnp.arange(12).reshape(shape) % 2 == 0,
        advantages=jnp.array([[0.1, -0.1], [1 / 3, -1 / 3]]),
        sampling_log_probs=-jnp.ones(shape) / 7,
        **optional,
    )


def as_data(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


@pytest.mark.parametrize("keep", [{}, {"keep_old": True, "keep_reference": True, "keep_initial": True}])
@pytest.mark.parametrize(
    "pending", [None, batch(), batch(ref_log_probs=jnp.zeros((2, 2, 3)), counted=jnp.array([True, False]))]
)
def test_state_progress_and_batch_come_back_as_they_were(tmp_path, keep, pending):
    progress = Progress(step=3, cursor=24, updates_done=1, evaluated=0, tokens=99, window={"kl": [0.1, 3]})
    with Checkpoints(tmp_path, GRPOConfig()) as checkpoints:
        checkpoints.save(state_at(3, **keep), progress, pending)
    with Checkpoints(tmp_path, GRPOConfig()) as checkpoints:
        state, found, resumed = checkpoints.restore(state_at(0, **keep))
    chex.assert_trees_all_equal(as_data(state), as_data(state_at(3, **keep)))
    chex.assert_trees_all_equal_dtypes(as_data(state), as_data(state_at(3, **keep)))
    assert found == progress
    if pending is None:
        assert resumed is None
    else:
        chex.assert_trees_all_equal(resumed, pending)


def test_the_newest_is_found_and_old_ones_go(tmp_path):
    with Checkpoints(tmp_path, GRPOConfig(save_total_limit=2)) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(state_at(step), Progress(step=step), None)
        assert checkpoints.latest() == 6
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit())
    assert names == ["4", "6"]


def test_what_a_kill_leaves_behind_is_ignored(tmp_path):
    with Checkpoints(tmp_path, GRPOConfig()) as checkpoints:
        checkpoints.save(state_at(2), Progress(step=2), None)
    torn = tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp"
    torn.mkdir()
    (torn / "half").write_bytes(b"x")
    with Checkpoints(tmp_path, GRPOConfig()) as checkpoints:
        assert checkpoints.latest() == 2
        assert checkpoints.restore(state_at(0))[1].step == 2


def test_without_a_run_directory_nothing_is_written_or_found():
    with Checkpoints(None, GRPOConfig()) as checkpoints:
        checkpoints.save(state_at(2), Progress(step=2), None)
        assert checkpoints.latest() is None
        assert checkpoints.restore(state_at(0))[1] is None
