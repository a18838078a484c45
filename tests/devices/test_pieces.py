"""A program in pieces does what it does as a whole, and a layer is compiled once for all of its kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.devices import pieces
from grpo_jax.devices.pieces import in_pieces, is_large_on_cpu
from grpo_jax.models import block

RNG = np.random.default_rng(0)


@jax.jit
def apply_layer(weights, x, scale):
    """Three products of one input, as attention has them."""
    y = jnp.tanh(x)
    q, k, v = ((y.reshape(6, 8) @ w).reshape(x.shape) for w in weights)
    return x + scale * jnp.sin(q) * k * v


def loss_of(params, x):
    scale, x = jnp.cos(params["scale"]), x @ params["embed"]
    for weights in params["layers"]:
        x = apply_layer(weights, x, scale)
    return jnp.mean((x @ params["head"]) ** 2), x


def made(layers, function=loss_of):
    """A function that adds a gradient to a sum, and its arguments."""

    @functools.partial(in_pieces, weights=lambda total, params, x: params, static=("factor",), donate=1)
    def add(total, params, x, *, factor):
        grads, hidden = jax.grad(lambda params: function(params, x), has_aux=True)(params)
        return jax.tree.map(lambda total, g: total + factor * g, total, grads), hidden

    weights = lambda *shape: jnp.asarray(RNG.normal(size=shape) / 4, jnp.float32)
    params = {
        "layers": [[weights(8, 8) for _ in range(3)] for _ in range(layers)],
        "head": weights(8, 5),
        "embed": weights(8, 8),
    }
    params["scale"] = jax.jit(lambda: 0.3)()  # with a weak type
    return add, jax.tree.map(jnp.ones_like, params), params, weights(2, 3, 8)


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr(pieces, "CACHED", -1)


@pytest.mark.quick
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_program_in_pieces_does_what_it_does_as_a_whole(large, layers):
    add, total, params, x = made(layers)
    kept = jax.tree.map(np.asarray, params)
    whole = add._jitted(jax.tree.map(jnp.copy, total), params, x, factor=2.0)
    found = add(total, params, x, factor=2.0)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), found, whole)
    assert jax.tree.structure(found) == jax.tree.structure(whole)
    # Weights are kept for the way back: they are the caller's, and stay. The sum is consumed.
    jax.tree.map(np.testing.assert_array_equal, params, kept)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(total))
    again = add(found[0], params, x, factor=2.0)[0]
    jax.tree.map(
        lambda one, first: np.testing.assert_allclose(one, 2 * np.asarray(first) - 1, rtol=1e-5), again, whole[0]
    )


@pytest.mark.quick
def test_a_layer_is_compiled_once_for_all_of_its_kind(large):
    counts = []
    for layers in (4, 12):
        add, *arguments = made(layers)
        found = add._cut(tuple(arguments), {"factor": 2.0})[0].pieces
        assert sum(piece.called for piece in found) == 2 * layers, "forth and back"
        assert len({piece.function for piece in found if piece.called}) == 2
        counts.append(len({piece.function for piece in found}))
    assert counts[0] == counts[1] <= 7


@pytest.mark.quick
def test_what_is_compiled_ahead_is_what_a_call_runs(large):
    add, *arguments = made(3)
    add.compile(*jax.eval_shape(lambda: tuple(arguments)), factor=2.0)
    names = []

    def listen(event, seconds, **about):
        if event.endswith("backend_compile_duration"):
            names.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        add(*arguments, factor=2.0)
        assert not names
        add(*made(3)[1:3], jnp.ones((3, 2, 8)), factor=2.0)  # of another shape
        assert any("layer_piece" in name for name in names)
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.quick
def test_projections_of_one_input_keep_it_once(large):
    add, *arguments = made(2)
    program = add._cut(tuple(arguments), {"factor": 2.0})[0]
    forth = next(piece for piece in program.pieces if piece.called)
    assert [program.shapes[i].shape for i in forth.results].count((6, 8)) == 1
    traced = add.trace(*arguments, factor=2.0).jaxpr.jaxpr
    call = next(step for step in traced.eqns if step.params.get("name") == pieces.CALLED)
    assert [x.aval.shape for x in call.outvars].count((6, 8)) == 3, "each keeps its own, without `merged`"


@pytest.mark.quick
def test_a_sum_is_let_go_when_its_gradient_is_added(large):
    """What comes back of a layer is added at once: of gradients, those of one layer exist at a time."""
    add, *arguments = made(6)
    program = add._cut(tuple(arguments), {"factor": 2.0})[0]
    alive, most, sums = set(), 0, set(program.results)
    for piece in program.pieces:
        alive |= {i for i in piece.results if program.shapes[i].shape == (8, 8) and i not in sums}
        most = max(most, len(alive))
        alive -= piece.last
    assert most == 3


@pytest.mark.quick
def test_the_layers_of_models_are_what_is_called():
    """By their name: another one would leave the whole program one piece, with the same numbers."""
    assert block.apply_layer.__name__ == pieces.CALLED


@pytest.mark.quick
def test_only_large_arrays_on_one_cpu_are_in_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "CACHED", 100)
    small, large = jnp.zeros(25), jnp.zeros(26)
    assert not is_large_on_cpu({"a": small, "b": 3})
    assert is_large_on_cpu({"a": large, "b": 3})
    assert is_large_on_cpu([small, small])
    assert is_large_on_cpu(jax.ShapeDtypeStruct((26,), "float32"))
    assert not is_large_on_cpu([large, jax.device_put(small, jax.devices()[1])])
    mesh = jax.make_mesh((2,), ("data",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert not is_large_on_cpu(jax.device_put(large, spread))
    jax.jit(lambda x: pytest.fail("in pieces while it is traced") if is_large_on_cpu(x) else x)(large)
