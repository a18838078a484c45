"""Products with custom gradients, and products of bfloat16 matrices with float32 sums."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_devices import H100

from grpo_jax import GRPOConfig
from grpo_jax.hub.tensors import abstract_params
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.devices import has_fast_float32_sums
from grpo_jax.models.matmul import dot_float32, dot_rounded, matmul, matmul_by_columns, scale_columns
from grpo_jax.models.transformer import Transformer
from grpo_jax.run.placement import with_settings

matmul_transposed = functools.partial(matmul, transposed=True)
CASES = [
    (matmul, lambda x, w: x @ w, lambda i, o: (i, o)),
    (matmul_transposed, lambda x, w: x @ w.T, lambda i, o: (o, i)),
    (scale_columns, lambda x, w: x * w[None], lambda i, o: (i,)),
]


@pytest.mark.quick
def test_scale_gradient_is_a_product_only_on_cpus():
    """A GPU would keep the operands of such products of all norms at once."""
    x, scale = jnp.ones((5, 4)), jnp.ones(4)
    traced = jax.jit(jax.grad(lambda scale: scale_columns(x, scale).sum())).trace(scale)
    products = {name: "dot_general" in traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")}
    assert products == {"cpu": True, "cuda": False}


@pytest.mark.quick
def test_gradient_of_a_wider_matrix_is_not_rounded():
    """The product rounds the matrix to the inputs' dtype; its gradient has the matrix's dtype and float32 digits."""
    x, w = jax.random.normal(jax.random.key(0), (64, 6), jnp.bfloat16), jax.random.normal(jax.random.key(1), (6, 4))
    y, pullback = jax.vjp(lambda x, w: matmul(x, w, jnp.float32), x, w)
    exact = lambda a, b: np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(y, exact(x, w.astype(jnp.bfloat16)), rtol=1e-5, atol=1e-5)
    dx, dw = pullback(jnp.ones_like(y))
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(dw, exact(x.T, jnp.ones_like(y)), rtol=1e-5, atol=1e-4)
    text = jax.jit(pullback).trace(y).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"dot_general.*: \((.*)\) -> ", text) == [
        "tensor<64x6xbf16>, tensor<64x4xbf16>",
        "tensor<64x4xbf16>, tensor<6x4xbf16>",
    ]


@pytest.mark.parametrize(("product", "plain", "shape"), CASES, ids=["matmul", "transposed", "scale_columns"])
@pytest.mark.parametrize(("i", "o"), [(6, 4), (1, 1)])
def test_products_have_the_values_and_derivatives_of_plain_expressions(product, plain, shape, i, o):
    """Values and first and second derivatives equal the plain expression's, in both modes and under `vmap`."""
    rng = np.random.default_rng(0)
    at, along = ((rng.standard_normal((5, i), np.float32), rng.standard_normal(shape(i, o), np.float32)) for _ in "ab")

    def derivatives(product, at, along):
        of = lambda x, w: jnp.sin(jax.checkpoint(product)(x, w)).sum()
        forwards = lambda along: jax.jvp(of, at, along)[1]
        twice = lambda along: jax.jvp(jax.grad(of, (0, 1)), at, along)[1]
        linear = jax.linearize(of, *at)[1]
        many = jax.tree.map(lambda x: jnp.stack([x, -2 * x, 0 * x]), (at, along))
        return (
            (product(*at), *jax.grad(of, (0, 1))(*at)),
            (forwards(along), linear(*along), twice(along), jax.grad(lambda x: linear(x, along[1]))(at[0])),
            (jax.vmap(forwards)(many[1]), jax.vmap(twice)(many[1]), jax.vmap(jax.grad(of, (0, 1)))(*many[0])),
            (jax.jvp(lambda x: of(x, at[1]), at[:1], along[:1])[1], jax.jacfwd(of, 1)(*at), jax.hessian(of, 1)(*at)),
        )

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    ours, expected = (jax.jit(functools.partial(derivatives, of))(at, along) for of in (product, plain))
    jax.tree.map(close, ours, expected)


@pytest.mark.parametrize("product", [matmul, matmul_transposed])
def test_frozen_operands_add_no_products(product):
    """Frozen operands add no products to the computation of tangents and gradients."""
    x = w = jnp.ones((8, 8))
    for of, frozen in ((lambda x: product(x, w), x), (lambda w: product(x, w), w)):
        for program in (lambda at, of=of: jax.jvp(of, (at,), (at,)), lambda at, of=of: jax.vjp(of, at)[1](at)):
            text = jax.jit(program).lower(frozen).compile().as_text()
            assert len(re.findall(r" dot\(", text)) <= 2, text


@pytest.mark.parametrize("product", [matmul, matmul_transposed, matmul_by_columns])
def test_float32_results_are_not_rounded_to_the_dtype_of_the_operands(product):
    """With a float32 result, sums of bfloat16 products are not rounded, and gradients have the operands' dtype."""
    x, w = np.ones((2, 257), jnp.bfloat16), np.ones((257, 257), jnp.bfloat16)
    y, pullback = jax.vjp(lambda x, w: product(x, w, jnp.float32), x, w)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, 257.0)
    assert {g.dtype for g in pullback(y)} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(product(x, w).astype(jnp.float32), 256.0)


def test_product_by_columns_is_not_transposed():
    """The product by columns equals `matmul`, and XLA does not transpose it."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 5), np.float32), rng.standard_normal((5, 7), np.float32)
    compiled = jax.jit(matmul_by_columns).lower(x, w.T).compile()
    np.testing.assert_allclose(compiled(x, w.T), x @ w, rtol=1e-5, atol=1e-6)
    text = compiled.as_text()
    made = [line.split(" = ")[1].split("{")[0] for line in text.splitlines() if " dot(" in line]
    assert made == ["f32[7,3]"], text


BF16 = jnp.bfloat16
SHAPE = TransformerConfig(
    96, 64, 128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, dtype="bfloat16", initializer_range=0.3
)
CONTRACTS = {(1, 0): ((5, 6), (6, 4)), (1, 1): ((5, 6), (4, 6)), (0, 0): ((6, 5), (6, 4))}


def pair(contract, dtype=BF16):
    """Return two matrices of small integers, whose products and sums are exact in every dtype used here."""
    rng = np.random.default_rng(0)
    return tuple(rng.integers(-3, 4, shape).astype(dtype) for shape in CONTRACTS[contract])


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_dot_rounded_has_the_values_and_derivatives_of_the_plain_product(contract):
    """Values and derivatives of `dot_rounded` equal the plain product's, in both modes and under `vmap`."""
    sums, narrow = pair(contract), pair(contract, jnp.float32)

    def derivatives(product, at):
        of = lambda x, y: (product(x, y).astype(jnp.float32) * weights).sum()
        many = lambda x: jnp.stack([x, 2 * x, 0 * x])
        weights = jnp.arange(20.0).reshape(5, 4) % 3 - 1
        square = lambda x, y: (product(x, y).astype(jnp.float32) ** 2).sum() / 2
        grad = jax.grad(of, (0, 1))
        return (
            product(*at),
            grad(*at),
            jax.jvp(of, at, at)[1],
            jax.jvp(jax.grad(square, (0, 1)), at, jax.tree.map(jnp.ones_like, at))[1],
            [
                jax.vmap(grad, axes)(*(many(x) if axis == 0 else x for x, axis in zip(at, axes, strict=True)))
                for axes in ((0, None), (None, 0), (0, 0))
            ],
        )

    got = jax.jit(lambda *at: derivatives(lambda x, y: dot_rounded(x, y, contract), at))(*sums)
    plain = lambda x, y: jnp.tensordot(x, y, axes=([contract[0]], [contract[1]]))
    want = jax.jit(lambda *at: derivatives(plain, at))(*narrow)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.float32(ours), np.float32(np.asarray(theirs, ours.dtype)))


FORMS = {"matmul": (matmul, (48, 80)), "transposed": (matmul_transposed, (80, 48))}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [None, jnp.float32], ids=["rounded", "sums"])
def test_matmul_with_float32_sums_equals_matmul(name, dtype):
    product, shape = FORMS[name]
    rng = np.random.default_rng(1)
    x, w, g = (rng.standard_normal(size, np.float32).astype(BF16) for size in ((32, 48), shape, (32, 80)))

    @functools.partial(jax.jit, static_argnames=("dtype", "sums"))
    def value_and_gradients(x, w, dtype, sums=False):
        y, pullback = jax.vjp(lambda x, w: product(x, w, dtype, sums), x, w)
        return y, *pullback(g.astype(y.dtype))

    found = value_and_gradients(x, w, dtype, sums=True)
    assert found[0].dtype == (dtype or BF16)
    for ours, theirs in zip(found, value_and_gradients(*map(np.float32, (x, w)), jnp.float32), strict=True):
        np.testing.assert_allclose(np.float32(ours), theirs, rtol=1e-2, atol=1e-2)  # bfloat16 has 8 bits of precision


def operands(text):
    """Return the operands' dtypes for each product in an optimized program, including products inside fusions."""
    types = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text)) | dict(re.findall(r"(%?[\w.]+): (\w+)\[", text))
    found = []
    for left, right in re.findall(r" dot\((%[\w.-]+), (%[\w.-]+)\)", text):
        found.append({types.get(name) or types[name.removeprefix("%")] for name in (left, right)})
    return found


def test_bfloat16_model_does_not_convert_weights_to_float32():
    """A bfloat16 model's gradient multiplies by bfloat16 weights without converting them to float32."""
    x = jnp.ones((64, 64), BF16)
    text = jax.jit(lambda x, y: dot_float32(x, y, (1, 0))).lower(x, x).compile().as_text()
    if not has_fast_float32_sums() or operands(text) != [{"bf16"}]:
        pytest.skip("XLA converts bfloat16 operands to float32 on this machine")
    tokens, params = np.zeros((2, 16), np.int32), abstract_params(SHAPE)
    counts = []
    for sums in (True, False):
        model = Transformer(dataclasses.replace(SHAPE, float32_sums=sums))
        loss = lambda params, model=model: model.apply({"params": params}, tokens).sum()
        text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
        counts.append(sum(types == {"bf16"} for types in operands(text)))
    weights = 7 * SHAPE.num_layers + 1
    assert counts[0] >= 3 * weights - 1 > counts[1], counts


@pytest.mark.quick
def test_float32_sums_are_used_on_cpus():
    assert has_fast_float32_sums(jax.devices("cpu")[:1]) == (jax.__version_info__ >= (0, 10))
    assert not dataclasses.replace(SHAPE, dtype="float32").uses_float32_sums
    assert not dataclasses.replace(SHAPE, float32_sums=False).uses_float32_sums
    assert SHAPE.uses_float32_sums == has_fast_float32_sums()
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("fsdp",))
    assert not dataclasses.replace(SHAPE, float32_sums=True, mesh=mesh).uses_float32_sums
    assert not has_fast_float32_sums([H100])


@pytest.mark.quick
def test_float32_sums_follow_the_devices_unless_the_model_sets_them(monkeypatch):
    config = GRPOConfig(compute_dtype="bfloat16")
    for named, here, asked in ((None, True, True), (None, False, False), (False, True, False), (True, False, True)):
        monkeypatch.setattr("grpo_jax.run.placement.has_fast_float32_sums", lambda devices, here=here: here)
        model = with_settings(Transformer(dataclasses.replace(SHAPE, float32_sums=named)), config, jax.devices()[:1])
        assert model.config.float32_sums == asked
