"""Log-probs equal a plain log-softmax of full logits in value and gradient, for all chunk sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_model

from grpo_jax import Completions, completion_log_probs, make_prompts, token_log_probs
from grpo_jax.maths.sampling import Sampling
from grpo_jax.models import scoring as module
from grpo_jax.models.matmul import matmul
from grpo_jax.models.scoring import score_completions

LISTS = [[3, 4, 5], [6], [7, 8]]
PROMPTS = make_prompts(LISTS)


def completions(seed=0, g=4, t=6, vocab=24):
    rng = np.random.default_rng(seed)
    tokens, lengths = rng.integers(0, vocab, (3, g, t)), rng.integers(1, t + 1, (3, g, 1))
    return Completions(tokens, np.arange(t) < lengths, np.zeros(tokens.shape), np.ones((3, g), bool))


def whole_logits(model, params, tokens, temperature=1.0, lists=LISTS):
    """Return log-probs row by row, from a log-softmax of the full logits of prompt + completion."""
    out = []
    for prompt, group in zip(map(jnp.array, lists), tokens, strict=True):

        def alone(tokens, prompt=prompt):
            logits = model.apply({"params": params}, jnp.concatenate([prompt, tokens])[None])[0] / temperature
            log_p = jax.nn.log_softmax(logits)[len(prompt) - 1 : -1]
            return log_p[jnp.arange(len(tokens)), tokens]

        out.append(jax.lax.map(alone, group))
    return jnp.stack(out)


WEIGHTS = np.random.default_rng(5).standard_normal((3, 4, 6), np.float32)


def test_log_probs_equal_full_logits_in_value_and_gradient_in_one_chunk_and_in_several(monkeypatch):
    model, params = tiny_model(layers=1)
    rows, temperature = completions(), 0.5

    def value_and_grad(log_probs):
        def weighted(params):
            l = log_probs(model, params)
            return (WEIGHTS * l).sum(), l

        (_, l), grads = jax.jit(jax.value_and_grad(weighted, has_aux=True))(params)
        return l, grads

    alone = lambda *of: jnp.where(rows.mask, whole_logits(*of, rows.tokens, temperature), 0)
    expected, expected_grads = value_and_grad(alone)
    for chunk in (1024, 7):
        monkeypatch.setattr(module, "CHUNK", chunk)
        l, grads = value_and_grad(lambda *of: completion_log_probs(*of, PROMPTS, rows, temperature=temperature))
        np.testing.assert_allclose(l, expected, atol=1e-5)
        close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
        jax.tree.map(close, grads, expected_grads)


def test_gradient_of_a_bfloat16_head_is_summed_in_float32():
    """In bfloat16, a sum of equal terms would stop growing after 256 of them."""
    chunks, hidden = 1024, jax.random.normal(jax.random.key(0), (1, 1, 16), jnp.bfloat16)
    head = jax.random.normal(jax.random.key(1), (32, 16), jnp.bfloat16)
    unembed = lambda head, x: matmul(x[0], head, jnp.float32, transposed=True)[None]

    def total(head, n):
        tokens, rows = jnp.full((1, n), 3), jnp.repeat(hidden, n, axis=1)
        return module.score_chunks(unembed, head, rows, tokens, Sampling(), with_entropy=False, chunk=1).log_probs.sum()

    # With one chunk, the gradient is the product's; the factor is a power of two.
    one, many = (jax.jit(jax.grad(total), static_argnums=1)(head, n).astype(jnp.float32) for n in (1, chunks))
    np.testing.assert_allclose(many, chunks * one, rtol=0.01, atol=0.01)
    assert (np.abs(many) > 500).any()


def test_log_probs_support_forward_mode(monkeypatch):
    """Forward and reverse mode agree for first and second derivatives, including in chunks."""
    monkeypatch.setattr(module, "CHUNK", 16)
    model, params = tiny_model(layers=1, remat=True)
    rows, rng = completions(g=2, t=4), np.random.default_rng(5)
    weights = rng.standard_normal(rows.mask.shape, np.float32)
    along = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
    dot = lambda a, b: sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    @jax.jit
    def derivatives(params):
        of = lambda params: (weights * completion_log_probs(model, params, PROMPTS, rows)).sum()
        tangent, linear = jax.linearize(of, params)[1](along), lambda params: jax.jvp(of, (params,), (along,))[1]
        gradient, curved = jax.jvp(jax.grad(of), (params,), (along,))
        forwards, twice = jax.jvp(linear, (params,), (along,))
        # The terms have both signs, so the tolerance is relative to the sum of their absolute values.
        summed = sum(jnp.abs(x * y).sum() for x, y in zip(*map(jax.tree.leaves, (gradient, along)), strict=True))
        return (tangent, forwards, twice), (dot(gradient, along), dot(gradient, along), dot(curved, along)), summed

    found, expected, summed = derivatives(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * float(summed))


def test_entropy_of_scored_tokens():
    """The entropy equals that of the full distribution, and with top_k its gradient is finite."""
    model, params = tiny_model(layers=1)
    rows = completions()
    score = functools.partial(score_completions, sampling=Sampling(temperature=0.8))
    _, entropy, *_ = jax.jit(score, static_argnums=0)(model, params, PROMPTS, rows.tokens, rows.mask)
    b, g = 1, 2
    row = np.concatenate([LISTS[b], rows.tokens[b, g]])
    p = np.exp(np.float64(jax.jit(model.apply)({"params": params}, row[None])[0, :-1]) / 0.8)
    p /= p.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(entropy[b, g], np.where(rows.mask[b, g], -(p * np.log(p)).sum(-1), 0), atol=1e-5)

    def total(params):
        l, h, *_ = score_completions(model, params, PROMPTS, rows.tokens, rows.mask, Sampling(top_k=3))
        return l.sum() + h.sum()

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(params)))


def test_logits_of_only_one_chunk_are_in_memory():
    """Only one chunk's logits are in memory at a time, by XLA's count of temporaries."""
    model, params = tiny_model(vocab=4096, layers=1)

    def temporaries(g):
        rows = completions(g=g, t=64, vocab=4096)
        loss = lambda params, tokens: completion_log_probs(model, params, PROMPTS, rows.replace(tokens=tokens)).sum()
        compiled = jax.jit(jax.grad(loss)).lower(params, rows.tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more_logits = 3 * (32 - 8) * 64 * 4096 * 4
    assert temporaries(32) - temporaries(8) < 0.5 * more_logits


def test_token_log_probs_and_their_gradient_by_hand():
    logits = np.log(np.float32([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    log_probs = jax.jit(token_log_probs, static_argnames="temperature")
    np.testing.assert_allclose(log_probs(logits, np.array([1, 2])), np.log([0.25, 0.8]), atol=1e-6)
    # Temperature 1/2 squares and normalizes the probabilities: 0.0625 / (0.25 + 2·0.0625).
    cold = log_probs(logits[:1], np.array([1]), temperature=0.5)
    np.testing.assert_allclose(cold, np.log([0.0625 / 0.375]), atol=1e-6)
    logits, tokens = np.random.default_rng(0).standard_normal((3, 7), np.float32), np.array([1, 6, 1])
    of = lambda logits: token_log_probs(logits, tokens).sum()
    grads = np.eye(7)[tokens] - np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for backwards_or_forwards in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(jax.jit(backwards_or_forwards(of))(logits), grads, atol=1e-6)
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(of))(logits))


@pytest.mark.quick
@pytest.mark.parametrize(("call", "message"), [
    (lambda: token_log_probs(jnp.zeros((2, 3)), jnp.zeros((3,), int)), r"logits must be \[\.\.\., V\] for tokens"),
    (lambda: token_log_probs(jnp.zeros((2, 3)), jnp.zeros((2,))), "tokens must be integers; got dtype float32"),
    (lambda: token_log_probs(jnp.zeros((3,)), jnp.array(0), temperature=0.0), "temperature must be > 0; got 0.0"),
    (lambda: completion_log_probs(*tiny_model(), PROMPTS, completions(), temperature=0), "temperature must be > 0"),
    (lambda: completion_log_probs(*tiny_model(), make_prompts(LISTS[:2]), completions()),
        r"tokens and mask of shape \[B, G, T\] for prompts of shape \[B, P\]; got shapes \(3, 4, 6\) for tokens"),
])  # fmt: skip
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
