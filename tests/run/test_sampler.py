"""A custom sampler instead of `generate`: its arguments, the checks of its result, and training on it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collecting import collected
from test_collect import POLICY, ROWS
from test_teacher import Pairs
from tiny import logged, scored, tiny_policy

from grpo_jax import Completions, GRPOConfig, evaluate, generate, make_prompts, train
from grpo_jax.maths.surrogates import sampler_weights
from grpo_jax.run.prepare import prepare
from grpo_jax.run.rollout_result import RolloutResult
from grpo_jax.run.run import new_state
from grpo_jax.run.sampler import ARGUMENTS, check_sampler, mismatch_metrics, read_completions, with_old_log_probs
from grpo_jax.update.packed import choose_updater

G, T = 4, 8
SMALL = {
    "num_generations": G, "per_device_train_batch_size": 2 * G, "max_completion_length": T,
    "gradient_checkpointing": False, "logging_steps": 1, "max_steps": 4, "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
}  # fmt: skip


def rewards(completion_ids):
    return [float(sum(ids) % 7) for ids in completion_ids]


def run(sampler=None, optimizer=None, **settings):
    """Train; return the final state and the logged metrics."""
    config = GRPOConfig(**SMALL | settings)
    return logged(train, POLICY, ROWS, rewards, config, sampler=sampler, optimizer=optimizer)


def test_sampler_receives_the_arguments_in_its_signature():
    seen = []

    def few(prompts, *, num_generations, max_completion_length, eos_token_ids):
        seen.append({"prompts", "num_generations", "max_completion_length", "eos_token_ids"})
        return canned(num_generations, len(prompts.lengths))

    def all_of_them(**arguments):
        seen.append(set(arguments))
        return canned(arguments["num_generations"], len(arguments["prompts"].lengths))

    for sampler in (few, all_of_them):
        check_sampler(sampler)
        run(sampler, max_steps=1)
    assert seen[1] == set(ARGUMENTS)
    assert set(ARGUMENTS) >= {"model", "params", "prompts", "key", "prompt_indices", "check_interrupt", "min_p"}


@pytest.mark.quick
def test_uncallable_sampler_is_rejected_before_the_run():
    for sampler, message in (
        (3, "sampler must be a function; got 3. Pass a function of any of model, params, prompts, key"),
        (lambda prompts, engine: None, "requires arguments that are not passed: engine"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(POLICY, ROWS, rewards, GRPOConfig(**SMALL), sampler=sampler)


def test_evaluation_with_a_sampler():
    """Evaluation with a sampler passes it params and settings, checks it, and equals `generate` if it is exact."""
    seen = []

    def engine(params, batch_size, temperature, **others):
        seen.append((temperature, others["num_generations"], np.shape(others["prompts"].tokens)[0], batch_size))
        return generate(params=params, temperature=temperature, **others)

    other = jax.tree.map(lambda x: 1.5 * x, POLICY.params)
    how = {"params": other, "num_generations": 2, "max_completion_length": T, "temperature": 0.7, "batch_size": 4}
    expected = evaluate(POLICY, ROWS, rewards, **how)
    assert evaluate(POLICY, ROWS, rewards, sampler=engine, **how) == expected
    assert seen == [(0.7, 2, 3, None)] * 2
    assert evaluate(POLICY, ROWS, rewards, sampler=engine, **how | {"params": None}) != expected
    for sampler, message in ((3, "sampler must be a function"), (lambda key: None, "Completions, .* got None")):
        with pytest.raises(ValueError, match=message):
            evaluate(POLICY, ROWS, rewards, sampler=sampler, **how)
    speaks = type("Speaks", (), {"respond": lambda self, text: None})
    with pytest.raises(ValueError, match="need a sampler with an argument `next_observation`"):
        evaluate(POLICY, ROWS, rewards, sampler=engine, environment_factory=speaks, **how)


def canned(g=G, b=2, t=3):
    """Return made-up completions: g for each of b prompts, with t tokens each."""
    mask = np.ones((b, g, t), bool)
    mask[0, 0, 2:] = False
    tokens = np.arange(b * g * t).reshape(b, g, t) + 66
    return Completions(tokens, mask, np.where(mask, -1.5, np.nan), ended=np.zeros((b, g), bool))


def put(x, value, at=(1, 2, 1)):
    x = np.array(x)
    x[at] = value
    return x


UNFIT = [
    ({"tokens": canned().tokens[:1]},
        r"tokens of shape \(2, 4, T\) with 1 ≤ T ≤ max_completion_length = 8; got \(1, 4, 3\)"),
    ({"tokens": np.zeros((2, 4, 9), int)}, r"tokens of shape .* max_completion_length = 8; got \(2, 4, 9\)"),
    ({"tokens": np.zeros((2, 4))}, "tokens as integers; got dtype float64"),
    ({"mask": np.ones((2, 4, 2), bool)}, r"mask of shape \(2, 4, 3\); got \(2, 4, 2\)"),
    ({"ended": np.ones((2, 3), bool)}, r"ended of shape \(2, 4\); got \(2, 3\)"),
    ({"log_probs": None}, "log_probs as floats; got dtype object"),
    ({"mask": put(canned().mask, False)},
        "not contiguous from the first token: False at prompt 1, completion 2, token 1"),
    ({"mask": put(canned().mask, False, (1, 3))},
        "a mask that is empty or .*: False at prompt 1, completion 3, token 0"),
    ({"tokens": put(canned().tokens, 258)},
        "a token id outside the vocabulary of size 258: 258 at prompt 1, completion 2, token 1"),
    ({"log_probs": put(canned().log_probs, np.nan)},
        "a log-prob that is > 0 or not finite.*: nan at prompt 1, completion 2, token 1"),
    ({"log_probs": put(canned().log_probs, 0.3)},
        "natural logarithms.*: 0.3 at prompt 1, completion 2, token 1"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("changes", "message"), UNFIT, ids=lambda x: x if isinstance(x, str) else "")
def test_invalid_sampler_result_is_rejected_by_name(changes, message):
    with pytest.raises(ValueError, match=f"^sampler (must return|returned) .*{message}"):
        read_completions(canned().replace(**changes), (2, G, T), vocab_size=258, pad_token_id=0)


@pytest.mark.quick
def test_completions_are_padded_and_cleared_outside_the_mask():
    found = read_completions(canned(), (2, G, T), vocab_size=258, pad_token_id=7)
    assert [x.dtype for x in (found.tokens, found.mask, found.log_probs)] == [np.int32, bool, np.float32]
    assert found.tokens.shape == found.mask.shape == found.log_probs.shape == (2, G, T)
    assert (found.tokens[~found.mask] == 7).all()
    assert (found.log_probs[~found.mask] == 0).all()
    np.testing.assert_array_equal(found.tokens[:, :, :3][canned().mask], canned().tokens[canned().mask])
    assert found.log_probs[0, 0, 1] == np.float32(-1.5)
    half = canned().replace(log_probs=jnp.asarray(canned().log_probs, jnp.bfloat16))
    assert read_completions(half, (2, G, T), vocab_size=258, pad_token_id=0).log_probs[1, 1, 1] == -1.5


def test_exact_sampler_trains_like_the_built_in_one():
    settings = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.1, "sampler_correction": "sequence_mask"}
    optimizer = optax.sgd(0.1)  # Adam amplifies rounding
    (ours, lines), (theirs, others) = (
        run(one, optimizer=optimizer, **settings) for one in (None, lambda **arguments: generate(**arguments))
    )
    chex.assert_trees_all_close(ours.params, theirs.params, atol=1e-6)
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), POLICY.params, ours.params)
    assert max(jax.tree.leaves(moved)) > 1e-3
    assert not any(key.startswith("sampler/") for line in lines for key in line)
    at_first = [line for line in others if "sampler/log_prob_difference_max" in line]
    assert len(at_first) == len([line for line in others if "reward" in line])
    for line in at_first:
        assert line["sampler/log_prob_difference_mean"] <= line["sampler/log_prob_difference_max"] < 1e-4
        weights = [line[f"sampler/importance_weight_{kind}"] for kind in ("min", "mean", "max")]
        assert weights == sorted(weights)
        assert weights == pytest.approx([1, 1, 1], abs=1e-4)


def test_old_log_probs_use_the_params_that_sampled():
    hot = lambda temperature, **arguments: generate(temperature=1.6 * temperature, **arguments)
    other, settings = tiny_policy(seed=3).params, SMALL | {"num_iterations": 2, "temperature": 0.8}
    made = prepare(POLICY, ROWS, rewards, GRPOConfig(**settings), sampler=hot)
    experience = collected(made, new_state(made).replace(old_params=other))
    batch = experience.batch
    completions = Completions(batch.tokens, batch.mask, batch.sampling_log_probs, batch.mask[..., 0])
    score = lambda temperature: scored(POLICY.model, other, batch.prompts, completions, temperature=temperature)
    np.testing.assert_allclose(batch.old_log_probs, score(0.8), atol=1e-5)
    np.testing.assert_allclose(batch.sampling_log_probs, score(1.28), atol=1e-5)
    metrics = mismatch_metrics(batch, made.config)
    gaps = np.abs(batch.old_log_probs - batch.sampling_log_probs)[np.asarray(batch.mask)]
    assert metrics["sampler/log_prob_difference_mean"] == pytest.approx(gaps.mean(), rel=1e-5)
    assert metrics["sampler/log_prob_difference_max"] == pytest.approx(gaps.max(), rel=1e-5)
    weights = sampler_weights(batch.old_log_probs, batch.sampling_log_probs, batch.mask)
    assert metrics["sampler/importance_weight_max"] == pytest.approx(float(weights.max()), rel=1e-5)
    assert metrics.items() <= experience.metrics.items()


def test_old_log_probs_are_padded_to_full_length():
    """Old log-probs are padded to full length; the padded updater scores only up to the longest completion."""
    params = {"logits": jax.random.normal(jax.random.key(0), (4, 4))}
    config = GRPOConfig(**SMALL | {"max_completion_length": 32})
    updater = choose_updater(Pairs(), config, micro_shape=(1, G))
    short = canned(b=1).replace(tokens=np.ones((1, G, 3), int))
    whole = read_completions(short, (1, G, 32), vocab_size=4, pad_token_id=0)
    rollout = RolloutResult([{}], make_prompts([[1, 2]], as_numpy=True), whole)
    found = with_old_log_probs(rollout, updater, params).completions
    assert updater.padded_length(3) < 32
    assert found.old_log_probs.shape == (1, G, 32)
    l = jax.nn.log_softmax(params["logits"])
    np.testing.assert_allclose(found.old_log_probs[0, 1, :4], [l[2, 1], l[1, 1], l[1, 1], 0], atol=1e-6)
