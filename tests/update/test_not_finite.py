"""Skipped updates: the first non-finite value is named, params do not change, and too many in a row end the run."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_policy

from grpo_jax import Batch, GRPOConfig, Prompts, train
from grpo_jax.run import collect
from grpo_jax.run.session import describe_non_finite
from grpo_jax.update.packed import PackedUpdater, choose_updater
from grpo_jax.update.state import create_state
from grpo_jax.watch.writer import read_lines

B, G, T, V = 2, 2, 3, 7
NAN, INF = np.nan, np.inf
FINE = "although all advantages and log-probs in the batch are finite"


class Bigram:
    """A model whose logits depend on the last token only. At root = 0 its gradient is NaN."""

    def apply(self, variables, tokens):
        params = variables["params"]
        return params["table"][tokens] + params["bias"] + 0.0 * jnp.sqrt(params["root"])


def state_of(root=1.0, bias=0.0):
    table = jax.random.normal(jax.random.key(0), (V, V))
    params = {"bias": jnp.full((1, 1, V), bias), "root": jnp.asarray(root)[None, None, None], "table": table}
    return create_state(params, optax.sgd(0.1), jax.random.key(0))


def batch(**changes):
    tokens = jax.random.randint(jax.random.key(1), (B, G, T), 0, V)
    arrays = {
        "tokens": tokens,
        "mask": np.arange(T) < np.array([[2, 3], [3, 1]])[..., None],
        "advantages": np.array([[1.0, -1.0], [0.5, -0.5]], np.float32),
        "sampling_log_probs": np.full((B, G, T), -2.0, np.float32),
        "ref_log_probs": np.full((B, G, T), -2.0, np.float32),
    }
    for name, (at, value) in changes.items():
        arrays[name] = arrays[name].copy()
        arrays[name][at] = value
    return Batch(prompts=Prompts(tokens[:, 0], np.array([3, 2])), **{k: jnp.asarray(x) for k, x in arrays.items()})


CONFIG = GRPOConfig(num_generations=G, beta=0.1, kl_estimator="k2")
UPDATER = choose_updater(Bigram(), CONFIG, micro_shape=(B, G), optimizer=optax.sgd(0.1)).replace(on_policy=False)


@pytest.mark.quick
@pytest.mark.parametrize(("changes", "of_params", "words"), [
    ({"advantages": ((1, 0), NAN)}, {}, "the advantage is nan at prompt 1, completion 0 of the batch"),
    ({"sampling_log_probs": ((0, 1, 2), NAN), "ref_log_probs": ((0, 0, 0), NAN)},
        {"bias": NAN},
        "the sampler's log-prob is nan at prompt 0, completion 1, token 2 of the batch"),
    ({"ref_log_probs": ((1, 0, 1), INF)}, {}, "the reference's log-prob is inf at prompt 1, completion 0, token 1"),
    ({}, {"bias": NAN}, "the policy's log-prob is nan at prompt 0, completion 0, token 0 of the batch"),
    ({"ref_log_probs": ((1, 0, 2), 1e30)}, {}, f"the metric kl_in_loss is inf, {FINE}"),
    ({"advantages": ((slice(None), 1), -3e38)}, {}, f"the metric policy_loss is inf, {FINE}"),
    ({}, {"root": 0.0}, f"the metric grad_norm is nan, {FINE}"),
])  # fmt: skip
def test_first_non_finite_value_is_named(changes, of_params, words):
    given = batch(**changes)
    after, metrics = UPDATER.update(state_of(**of_params), given)
    assert metrics["update_skipped"] == 1
    assert words in describe_non_finite(UPDATER, after.params, given, jax.device_get(metrics))


@pytest.mark.quick
def test_only_advantages_that_the_loss_uses_are_named():
    """The mask hides advantages of NaN, per completion and per token; an advantage of −inf is named."""
    given = batch(advantages=((1, 1), NAN), mask=((1, 1), False))
    by_token = jnp.where(given.mask, given.advantages[..., None], NAN)
    for advantages, words in [
        (given.advantages.at[0, 1].set(-INF), "the advantage is -inf at prompt 0, completion 1 of the batch"),
        (by_token.at[0, 1, 2].set(-INF), "the advantage is -inf at prompt 0, completion 1, token 2 of the batch"),
    ]:
        wrong = given.replace(advantages=advantages)
        after, metrics = UPDATER.update(state_of(), wrong)
        assert metrics["update_skipped"] == 1
        assert words in describe_non_finite(UPDATER, after.params, wrong, jax.device_get(metrics))


@pytest.mark.quick
def test_non_finite_masked_and_bounded_values_do_not_skip_the_update():
    fine = batch(sampling_log_probs=((0, 0, 2), NAN), ref_log_probs=((0, 0, 1), -INF))
    assert UPDATER.update(state_of(), fine)[1]["update_skipped"] == 0


def test_too_many_consecutive_skipped_updates_end_the_run(tmp_path, monkeypatch):
    """A run ends after `max_skipped_updates` consecutive skips, keeps its params, and can be resumed."""
    calls, advantages, states = itertools.count(1), collect._jit_advantages, []
    update = PackedUpdater.update

    def spoilt(rewards, **settings):
        a = advantages(rewards, **settings)
        return a.at[0, 3].set(NAN) if next(calls) in (2, 3) else a

    def watched(updater, state, batch):
        state, metrics = update(updater, state, batch)
        states.append(jax.tree.map(np.array, (state.params, state.opt_state)))
        return state, metrics

    monkeypatch.setattr(collect, "_jit_advantages", spoilt)
    monkeypatch.setattr(PackedUpdater, "update", watched)
    how = {"lr_scheduler_type": "constant", "gradient_checkpointing": False, "num_iterations": 2, "max_steps": 7}
    sizes = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 4}
    config = GRPOConfig(**sizes, **how, logging_steps=1, max_skipped_updates=3)
    rows = [{"prompt": text} for text in ["ab", "c", "def", "gh"]]
    learn = functools.partial(train, dataset=rows, reward_fns=lambda completions: map(len, completions), config=config)
    cause = r"the advantage is nan at prompt 0, completion 3 of the batch \(prompt '.+', completion '.*'\)"
    words = f"step 5: the number of consecutive skipped updates reached max_skipped_updates = 3.*{cause}"
    with (
        pytest.warns(RuntimeWarning, match=f"step 3 was skipped.*{cause}") as warned,
        pytest.raises(FloatingPointError, match=words),
    ):
        learn(tiny_policy(), run_dir=tmp_path)
    assert len(warned) == 1, "consecutive skips warn once"
    assert [line["update_skipped"] for line in read_lines(tmp_path / "metrics.jsonl")] == [0, 0, 1, 1, 1]
    for after in states[2:]:
        chex.assert_trees_all_equal(after, states[1])

    # The resumed run continues with the second pass over the bad batch, then a good batch.
    del states[:]
    with pytest.warns(RuntimeWarning, match="step 6 was skipped"):
        state = learn(tiny_policy(), run_dir=tmp_path)
    assert (int(state.step), int(state.skipped), len(states)) == (7, 4, 2)
