"""A custom advantage_fn or surrogate equals the built-in one for the same formula; its result is shape-checked."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting import collected
from test_collect import POLICY, ROWS, SMALL
from test_collect import length_reward as length
from test_generate import Bare
from test_packed import OPTIMIZER, G, T, batch
from tiny import scored, tiny_model

from grpo_jax import Completions, GRPOConfig, SFTConfig, compute_advantages, sft, train
from grpo_jax.maths.surrogates import ppo
from grpo_jax.run.evaluate import EVALUATION
from grpo_jax.run.prepare import prepare
from grpo_jax.update.packed import choose_updater
from grpo_jax.update.state import create_state

CONFIG = GRPOConfig(**SMALL | {"max_steps": 2}, learning_rate=1e-2, gradient_checkpointing=False, shuffle_dataset=False)
learn = lambda **keywords: train(POLICY, ROWS, length, CONFIG, **keywords).params


def test_custom_functions_with_builtin_formulas_give_the_same_params():
    """Custom functions with the built-in formulas give identical params, up to rounding for per-token advantages."""
    of_groups = lambda rewards, mask, weights, config: compute_advantages(
        rewards, weights=weights, scale_rewards=config.scale_rewards
    )
    of_tokens = lambda rewards, mask: jnp.broadcast_to(compute_advantages(rewards)[..., None], mask.shape)
    reinforce = lambda tokens, settings: -tokens.advantages * tokens.log_probs
    plain = learn()
    chex.assert_trees_all_equal(plain, learn(advantage_fn=of_groups, surrogate=ppo))
    # On-policy, nothing is clipped and the ratio's gradient equals the log-prob's.
    chex.assert_trees_all_close(plain, learn(advantage_fn=of_tokens, surrogate=reinforce), atol=2e-5)


def test_model_with_only_apply_is_trained_like_the_builtin_model():
    bare = POLICY.replace(model=Bare(POLICY.model))
    chex.assert_trees_all_close(train(bare, ROWS, length, CONFIG).params, learn(), atol=2e-5)
    config = SFTConfig(max_steps=2, per_device_train_batch_size=1, learning_rate=1e-2)
    ours, wanted = (sft(policy, [{"text": "abc"}], config).params for policy in (bare, POLICY))
    chex.assert_trees_all_close(ours, wanted, atol=2e-5)


def test_gradient_weights_each_token_by_its_advantage():
    """The padded gradient in micro-batches is −Σ m A ∇l / Σ m. The packed gradient equals it (test_sequences.py)."""
    model, params = tiny_model(layers=1)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(4, G, T)).astype(np.float32))
    b = batch().replace(advantages=weights, ref_log_probs=None)
    completions = Completions(b.tokens, b.mask, b.sampling_log_probs, b.mask[..., 0])
    loss = lambda params: -jnp.sum(weights * scored(model, params, b.prompts, completions), where=b.mask) / b.mask.sum()
    expected = jax.grad(loss)(params)
    updater = choose_updater(Bare(model), CONFIG, micro_shape=(2, 2), optimizer=OPTIMIZER)
    updater = dataclasses.replace(updater, config=dataclasses.replace(CONFIG, max_completion_length=T))
    state = create_state(jax.tree.map(np.array, params), OPTIMIZER, jax.random.key(0))
    grads, _ = updater.gradients(state, b)
    chex.assert_trees_all_close(jax.device_get(grads), jax.device_get(expected), atol=2e-5)


class Says:
    """An environment that returns "" after the first turn, a word after the second, and then ends."""

    def __init__(self):
        self.turns = 0

    def respond(self, text):
        self.turns += 1
        return [None, "", "ok"][self.turns] if self.turns < 3 else None

    def get_reward(self):
        return float(self.turns)


def test_advantage_fn_receives_the_batch_arrays():
    """An advantage_fn receives the batch's arrays; turns are told apart even with an empty observation between.

    Its key is not the key of an evaluation prompt.
    """
    got = {}

    def note(rewards, mask, turns, lengths, step, log_probs, key):
        arrays = {"turns": turns, "mask": mask, "lengths": lengths, "step": step, "l": log_probs}
        jax.debug.callback(lambda **x: got.update(x), **arrays, key=jax.random.key_data(key))
        return jnp.where(turns == 1, 1.0, 5.0)

    config = dataclasses.replace(CONFIG, max_completion_length=16)
    run = prepare(POLICY, ROWS, length, config, environment_factory=Says, advantage_fn=note)
    state = create_state(POLICY.params, run.optimizer, jax.random.key(0)).replace(step=jnp.int32(7))
    experience = collected(run, state)
    batch, turns = experience.batch, np.asarray(got["turns"])
    assert got["step"] == 7
    np.testing.assert_array_equal(turns >= 0, got["mask"])
    assert turns.max() >= 1
    np.testing.assert_array_equal(got["lengths"], batch.mask.sum(-1))
    evaluation = jax.random.fold_in(jax.random.fold_in(state.key, EVALUATION), 7)
    assert (got["key"] != jax.random.key_data(evaluation)).any()
    np.testing.assert_array_equal(got["l"], batch.sampling_log_probs)
    np.testing.assert_array_equal(batch.advantages, np.where(batch.mask, np.where(turns == 1, 1.0, 5.0), 0.0))


@dataclasses.dataclass
class Unhashable:
    scale: float = 1.0

    def __call__(self, tokens, settings):
        return self.scale * tokens.ratio


UNFIT = [
    ({"advantage_fn": "grpo"}, "advantage_fn must be a function of rewards and mask, or None; got 'grpo'"),
    ({"advantage_fn": lambda rewards, mask: rewards},
        r"advantage_fn 'lambda' must return a float array of shape \[B, G\] = \(5, 4\) or \[B, G, T\] = \(5, 4, 8\)"
        r" for rewards \[B, G, K\] = \(5, 4, 1\) and mask \[B, G, T\] = \(5, 4, 8\); got float32 \(5, 4, 1\)"),
    ({"advantage_fn": lambda rewards, mask, lenghts: 0},
        "failed on rewards .*missing 1 required .* 'lenghts'. The function can take the keywords weights, lengths, "),
    ({"advantage_fn": lambda rewards, mask: rewards[..., 0] * mask},
        r"advantage_fn 'lambda' failed on rewards .* \(5, 4, 8\) with \w+Error: "),
    ({"advantage_fn": lambda rewards, mask: None}, r"must return a float array of shape \[B, G\] .*; got None"),
    ({"surrogate": "cispo"}, "surrogate must be a function .*; got 'cispo'. Set loss_type"),
    ({"surrogate": lambda tokens, settings: tokens.ratio.sum()}, r"array of shape \[..., T\] .*; got float32 \(\)"),
    ({"surrogate": lambda tokens: tokens.ratio}, "surrogate 'lambda' failed on inputs .* with TypeError"),
    ({"surrogate": Unhashable()}, "surrogate 'Unhashable' failed on inputs .*unhashable type: 'Unhashable'"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("keywords", "message"), UNFIT)
def test_invalid_custom_functions_are_rejected_before_sampling(keywords, message):
    with pytest.raises(ValueError, match=message):
        prepare(POLICY, ROWS, length, CONFIG, **keywords)
