"""The gated delta rule in chunks equals the rule token by token, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.recurrent import delta_rule, delta_step

ROWS, KEY, VALUE = (2, 3), 6, 5


def make(n, *, forgets=1.0, seed=0):
    """Return queries, keys, values, decays and betas for n tokens, and a memory."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal((*ROWS, *shape)).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    decay, beta = -forgets * np.logaddexp(0, 2 * draw(n)), 1 / (1 + np.exp(-2 * draw(n)))
    return unit(draw(n, KEY)), unit(draw(n, KEY)), draw(n, VALUE), decay, beta, draw(KEY, VALUE)


def one_by_one(q, k, v, decay, beta, memory):
    def step(memory, token):
        read, memory = delta_step(*token, memory)
        return memory, read

    tokens = tuple(jnp.moveaxis(jnp.asarray(x), len(ROWS), 0) for x in (q, k, v, decay, beta))
    memory, reads = jax.lax.scan(step, memory, tokens)
    return jnp.moveaxis(reads, 0, len(ROWS)), memory


def value_and_gradients(rule, given, weights):
    def total(*given):
        reads, memory = rule(*given)
        return jnp.vdot(reads, weights) / reads.shape[-2] + jnp.sum(jnp.sin(memory)), (reads, memory)

    gradients, values = jax.jit(jax.grad(total, argnums=tuple(range(6)), has_aux=True))(*given)
    return values, gradients


@pytest.mark.quick
def test_delta_step_by_hand():
    """A step computes S = α (I − β k kᵀ) S + β k vᵀ and o = Sᵀ q."""
    q, k, v, decay, beta, memory = (x[0, 0] for x in make(1))
    q, k, v, alpha, beta = q[0], k[0], v[0], np.exp(decay[0]), beta[0]
    wanted = alpha * (np.eye(KEY) - beta * np.outer(k, k)) @ memory + beta * np.outer(k, v)
    read, after = delta_step(*map(jnp.asarray, (q, k, v, decay[0], beta, memory)))
    np.testing.assert_allclose(after, wanted, atol=1e-6)
    np.testing.assert_allclose(read, wanted.T @ q, atol=1e-6)


@pytest.mark.parametrize(
    ("n", "forgets"), [(1, 1.0), (11, 1.0), (70, 20.0)], ids=["one token", "odd", "two chunks, forgetting all at once"]
)
def test_chunks_equal_single_tokens(n, forgets):
    """A recurrent layer gives the same values and gradients in chunks as token by token."""
    given = make(n, forgets=forgets)
    weights = np.random.default_rng(1).standard_normal((*ROWS, n, VALUE)).astype(np.float32)
    slow, fast = (value_and_gradients(rule, given, weights) for rule in (one_by_one, delta_rule))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), slow, fast)


def test_segments_start_with_their_own_memory():
    """Packed segments start from their own memories, including segments that span chunks or share one."""
    lengths, chunk = (3, 6, 1, 4), 4
    n, starts = 16, np.cumsum([0, *lengths])
    *tokens, _ = make(n)
    position = np.concatenate([*map(np.arange, lengths), np.zeros(2, int)])[None, None]
    begins = np.random.default_rng(2).standard_normal((*ROWS, n // chunk, KEY, VALUE)).astype(np.float32)
    nothing = np.full((*ROWS, KEY, VALUE), 7.0, np.float32)  # must not be used
    reads, _ = jax.jit(delta_rule, static_argnames="chunk")(
        *tokens, nothing, position=position, begins=begins, chunk=chunk
    )
    for start, length in zip(starts, lengths, strict=False):
        own = [x[:, :, start : start + length] for x in tokens]
        wanted, _ = jax.jit(one_by_one)(*own, begins[:, :, start // chunk])
        np.testing.assert_allclose(reads[:, :, start : start + length], wanted, atol=1e-5)


def test_equal_keys_keep_full_precision():
    """Equal keys with β = 1 keep full precision; inverting by powers would grow like binomials and cancel."""
    n = 64
    k = np.eye(1, KEY, dtype=np.float32).repeat(n, axis=0)
    v = make(n)[2][0, 0]
    zeros = lambda *shape: np.zeros(shape, np.float32)
    reads, _ = jax.jit(delta_rule)(k, k, v, zeros(n), zeros(n) + 1, zeros(KEY, VALUE))
    np.testing.assert_allclose(reads, v, atol=1e-5)
