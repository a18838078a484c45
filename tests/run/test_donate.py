"""A run takes over a donated policy's buffers without copying them; using the emptied policy raises."""

import gc
import shutil

import chex
import jax
import jax.numpy as jnp
import pytest
from test_train import SMALL
from tiny import lengths, tiny_policy, tiny_tokenizer

from grpo_jax import GRPOConfig, add_lora, generate, make_prompts, save_pretrained, train
from grpo_jax.rewards.contract import RewardError
from grpo_jax.run.checkpoint import Checkpoints

ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh"]]
EMPTY = r"policy has no params because they were donated to a run \(donate=True\)"
config_of = lambda **settings: GRPOConfig(**SMALL | {"max_steps": 2, "compute_dtype": "float32"} | settings)


def fresh():
    """Return a policy with its own buffers, which a test may donate."""
    return tiny_policy().replace(params=jax.tree.map(jnp.copy, tiny_policy().params))


def live_bytes():
    """Return the bytes in all buffers of this process's live arrays, counting shared buffers once."""
    gc.collect()
    arrays = [x for x in jax.live_arrays() if not x.is_deleted() and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    shards = [shard.data for x in arrays for shard in x.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


def run(policy, run_dir=None, **how):
    """Return the final state, and the peak memory during rewards in multiples of the policy's size, policy included."""
    one, before, held = sum(x.nbytes for x in jax.tree.leaves(policy.params)), live_bytes(), []

    def reward(completions):
        held.append((live_bytes() - before) / one + 1)  # the policy itself is part of `before`
        return lengths(completions)

    reward.__name__ = "reward"
    return train(policy, ROWS, reward, config_of(**how), run_dir=run_dir, donate=run_dir is not None), max(held)


def test_donation_saves_one_policy_and_does_not_change_a_resumed_run(tmp_path, monkeypatch):
    """A run with donation, resumed after its first step, holds one policy less than a run without donation and has the
    same result. It never holds two states. If no checkpoint can be read, the donated policy is not consumed.
    """
    kept, held = run(fresh())
    assert 3.9 < held < 4.2, "the caller's params, the run's params and two moments"
    assert 2.9 < run(fresh(), tmp_path, max_steps=1)[1] < 3.2
    shutil.copytree(tmp_path, tmp_path / "torn")
    (tmp_path / "torn" / "checkpoints" / "1" / "_CHECKPOINT_METADATA").write_text("{}")
    load, loaded, policy = Checkpoints._load, [], fresh()
    with pytest.raises(ValueError, match=r"none of its checkpoints can be read \(step 1: "):
        run(policy, tmp_path / "torn")
    one, before = sum(x.nbytes for x in jax.tree.leaves(policy.params)), live_bytes()

    def measured(*arguments):
        loaded.append((live_bytes() - before) / one)
        return load(*arguments)

    monkeypatch.setattr(Checkpoints, "_load", measured)
    chex.assert_trees_all_equal(run(policy, tmp_path)[0], kept)
    assert loaded[0] < 0.1, "the state at step 0 is still held while the checkpoint is read"


def test_using_a_donated_policy_raises(tmp_path):
    policy = fresh()
    state = train(policy, ROWS, lengths, config_of(max_steps=1), donate=True)
    tokens = jnp.ones((1, 2), jnp.int32)
    sampling = {"num_generations": 2, "max_completion_length": 2}
    for use in (
        lambda: train(policy, ROWS, lengths, config_of()),
        lambda: policy.model.apply({"params": policy.params}, tokens),
        lambda: generate(policy.model, policy.params, make_prompts([[5]]), jax.random.key(0), **sampling),
        lambda: save_pretrained(tmp_path, policy),
        lambda: policy.params["embed_tokens"],
    ):
        with pytest.raises(ValueError, match=EMPTY):
            use()
    trained = policy.replace(params=state.params)
    assert trained.model.apply({"params": trained.params}, tokens).shape == (1, 2, len(tiny_tokenizer()))


@pytest.mark.quick
def test_rejected_run_does_not_consume_the_policy(tmp_path):
    policy = fresh()
    (tmp_path / "metrics.jsonl").touch()
    for refused, message in (
        ({"resume": "never", "run_dir": tmp_path}, "contains a run"),
        ({"resume": "must"}, "needs a run directory; pass run_dir"),
        ({"resume": "yes"}, "resume must be one of .*; got 'yes'"),
    ):
        with pytest.raises(ValueError, match=message):
            train(policy, ROWS, lengths, config_of(), donate=True, **refused)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(policy.params))


def test_neither_the_base_of_adapters_nor_the_teacher_is_donated():
    policy = add_lora(fresh(), jax.random.key(0), rank=2)
    with pytest.raises(RewardError):
        train(policy, ROWS, lambda completions: 1 / 0, config_of(), donate=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(policy.model.base))
    with pytest.raises(ValueError, match=EMPTY):
        jax.tree.leaves(policy.params)
    policy = fresh()
    config = config_of(max_steps=1, distillation_coef=1.0)
    for teacher in (policy.replace(), add_lora(policy, jax.random.key(0), rank=2)):  # shares the base model
        train(policy, ROWS, [], config, teacher=teacher, donate=True)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(policy.params))
