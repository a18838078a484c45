"""Generation: tokens do not depend on array shapes, log-probs equal those of scoring, and completions end at an EOS."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import scored, tiny_model

from grpo_jax import Completions, Prompts, generate, make_prompts
from grpo_jax.models.lora import LoraModel, init_adapters
from grpo_jax.rollout.decode_weights import convert_weights

generate_module = importlib.import_module("grpo_jax.rollout.generate")

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [4, 4], [12, 3, 12, 3]]
EOS = (7, 13)


@functools.cache
def model_and_params():
    return tiny_model(layers=1, seed=2)


def sample(prompts=PROMPTS, *, num_generations=8, max_completion_length=70, key=7, **settings):
    model, params = model_and_params()
    settings = {"eos_token_ids": EOS, **settings}
    return generate(
        model, params, make_prompts(prompts) if isinstance(prompts, list) else prompts, jax.random.key(key),
        num_generations=num_generations, max_completion_length=max_completion_length, **settings,
    )  # fmt: skip


@functools.cache
def sampled() -> Completions:
    return sample()


class Bare:
    """A model with only `apply`, which is sampled without a cache."""

    def __init__(self, model):
        self.apply = lambda variables, tokens: model.apply(variables, tokens)


def test_mask_ends_with_the_first_eos_and_padding_follows():
    c = jax.device_get(sampled())
    for tokens, mask, log_probs, ended in zip(
        c.tokens.reshape(-1, 70), c.mask.reshape(-1, 70), c.log_probs.reshape(-1, 70), c.ended.ravel(), strict=True
    ):
        at = np.flatnonzero(np.isin(tokens, EOS) & mask)
        length = at[0] + 1 if len(at) else 70
        assert ended == bool(len(at))
        np.testing.assert_array_equal(mask, np.arange(70) < length)
        np.testing.assert_array_equal(tokens[length:], 0)
        np.testing.assert_array_equal(log_probs[length:], 0)
        assert (log_probs[:length] < 0).all()
    first = np.isin(c.tokens[..., 0], EOS)
    assert first.any(), "no completion starts with an EOS"
    np.testing.assert_array_equal(c.mask.sum(-1)[first], 1)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 4}, {"top_p": 0.7, "min_p": 0.1}])
def test_log_probs_equal_those_of_scoring_the_same_tokens(settings):
    model, params = model_and_params()
    completions = sample(max_completion_length=12, **settings) if settings else sampled()
    found = scored(model, params, make_prompts(PROMPTS), completions, **settings)
    np.testing.assert_allclose(found, completions.log_probs, atol=1e-5)
    if settings:  # an ignored setting would give the log-probs of the plain distribution
        plain = scored(model, params, make_prompts(PROMPTS), completions)
        assert np.abs(plain - completions.log_probs).max() > 0.05


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: Bare(model)])
def test_no_gradient_flows_through_the_log_probs(wrap):
    model, params = model_and_params()
    how = {"num_generations": 2, "max_completion_length": 3, "temperature": 0.0}

    def loss(params):
        return generate(wrap(model), params, make_prompts(PROMPTS), jax.random.key(0), **how).log_probs.sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert value < 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))


def test_kernels_by_columns_are_used_and_decode_the_same(monkeypatch):
    """With adapters, biases, a head, and one layer of experts."""
    sparse = {"num_experts": 4, "num_experts_per_token": 2, "expert_size": 16, "expert_layers": (True, False)}
    model, params = tiny_model(layers=2, qkv_bias=True, mlp_bias=True, tie_word_embeddings=False, **sparse)
    adapters, rng = init_adapters(jax.random.key(1), params, rank=2), np.random.default_rng(2)
    adapters = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.1, x.shape), jnp.float32), adapters)
    model, params = LoraModel(params, model), adapters
    variables = convert_weights(model, params)
    how = {"num_generations": 2, "max_completion_length": 12}

    def sampled_with(variables):
        monkeypatch.setattr(generate_module, "convert_weights", lambda *_: variables)
        return generate(model, params, make_prompts(PROMPTS), jax.random.key(3), **how)

    by_rows, by_columns = sampled_with({"params": params}), sampled_with(variables)
    np.testing.assert_array_equal(by_rows.tokens, by_columns.tokens)
    np.testing.assert_allclose(by_rows.log_probs, by_columns.log_probs, atol=1e-5)
    # The columns are used: with zeros, the log-probs change.
    without = jax.tree.map(jnp.zeros_like, variables["columns"])
    changed = sampled_with({"params": params, "columns": without})
    assert np.abs(changed.log_probs[..., 1:] - by_columns.log_probs[..., 1:]).max() > 1e-3


def test_batches_of_prompts_get_the_same_completions(monkeypatch):
    """Five prompts decoded two at a time, with an empty position in the last batch, get the same completions."""
    groups, plain = [], generate_module.prefill
    monkeypatch.setattr(generate_module, "prefill", lambda *x, **how: groups.append(len(x[3])) or plain(*x, **how))
    assert_same(sample(batch_size=23), sampled())
    assert sum(groups) == 6
    assert max(groups) <= 2


def test_samples_depend_on_the_key_and_the_prompt_index_only():
    """A prompt with the same index has the same samples, whatever its position, its padding and the other prompts.
    Samples differ between keys and within a group.
    """
    mixed = make_prompts([[9, 9, 9], PROMPTS[2], [3]], length=9)
    found = sample(mixed, prompt_indices=jnp.array([17, 2, 0]), max_completion_length=12)
    np.testing.assert_array_equal(found.tokens[1], sampled().tokens[2, :, :12])
    np.testing.assert_allclose(found.log_probs[1], sampled().log_probs[2, :, :12], atol=1e-5)
    assert (np.asarray(sample(key=8).tokens) != np.asarray(sampled().tokens)).any()
    first = np.asarray(sampled().tokens)[:, :, :3]
    assert len({row.tobytes() for row in first.reshape(-1, 3)}) > 20


def test_greedy_rows_agree_and_follow_the_argmax():
    model, params = model_and_params()
    completions = sample(num_generations=2, max_completion_length=9, temperature=0, eos_token_ids=())
    np.testing.assert_array_equal(completions.tokens[:, 0], completions.tokens[:, 1])
    whole = np.zeros((len(PROMPTS), 14), np.int32)
    for row, prompt, own in zip(whole, PROMPTS, np.asarray(completions.tokens[:, 0]), strict=True):
        row[: len(prompt) + 9] = [*prompt, *own]
    following = np.asarray(jax.jit(model.apply)({"params": params}, whole)).argmax(-1)
    for row, found, prompt in zip(whole, following, PROMPTS, strict=True):
        at = slice(len(prompt), len(prompt) + 9)
        np.testing.assert_array_equal(row[at], found[len(prompt) - 1 : len(prompt) + 8])


@pytest.mark.quick
@pytest.mark.parametrize(("change", "message"), [
    ({"num_generations": 0}, "num_generations must be an integer ≥ 1; got 0"),
    ({"max_completion_length": 0}, "max_completion_length must be an integer ≥ 1; got 0"),
    ({"batch_size": 7}, "batch_size must be at least 8, one group of completions on each data-parallel device; got 7"),
    ({"temperature": -1}, "temperature must be a finite number"),
    ({"prompts": Prompts(jnp.zeros((3, 2)), jnp.ones(2))}, r"prompts must have tokens \[B, P\] and lengths \[B\]"),
])  # fmt: skip
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        sample(**change)


def assert_same(one: Completions, other: Completions):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.mask, other.mask)
    np.testing.assert_array_equal(one.ended, other.ended)
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
