"""Fused attention: the same values and gradients as materialized scores, with memory linear in the length."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_devices import H100, T4, TPU
from tiny import tiny_model

from grpo_jax.models import attention_tiles
from grpo_jax.models.attention import group_attention, make_tile_mask, packed_attention, tiled_attention
from grpo_jax.models.attention_tiles import Kernel, attention_implementation
from grpo_jax.models.context import Prefix
from grpo_jax.models.packing import SequenceShape, pack
from grpo_jax.models.sharding import constrained_sharding, make_mesh

KINDS = ["tiles", "interpreted"] + ["triton"] * (attention_implementation("auto") in ("triton", "mosaic"))
P, LENGTHS = 7, np.array([4, 7])


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def assert_same(ours, plain, given, kinds=KINDS):
    """Assert that values and the gradients of a weighted sum with respect to all arguments agree for each kind."""
    (weights,) = arrays(jax.eval_shape(plain, *given).shape, seed=1)

    def whole(f):
        weighted = lambda *given: ((f(*given) * weights).sum(), f(*given))
        return jax.jit(jax.grad(weighted, tuple(range(len(given))), has_aux=True))(*given)

    expected = whole(plain)
    for kind in kinds:
        found = whole(functools.partial(ours, kind))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, err_msg=kind), found, expected)


@pytest.mark.parametrize(("window", "soft_cap", "group", "d", "shared", "sinks"), [
    (None, None, 3, 8, False, True),
    (5, None, 2, 12, True, True),  # a head size that is not a power of two
    (None, 2.0, 4, 160, True, False),  # the tile size for wide heads
])  # fmt: skip
def test_completions_side_by_side(window, soft_cap, group, d, shared, sinks):
    b, h, g, t = 2, 2, 3, 20  # 60 tokens with 2 or 3 queries per head: several tiles
    settings = {"scale": d**-0.5, "window": window, "soft_cap": soft_cap}
    given = arrays((b, h, g, t, group, d), (b, h, g, t, d), (b, h, g, t, d), (b, h, d, P), (b, h, P, d))
    given += arrays((h, group)) if sinks else []
    prefix = lambda pk, pv: (pk, pv, LENGTHS) if shared else None

    def plain(q, k, v, pk, pv, sinks=None):
        kernel = Kernel("einsum", 0, 0, **settings)
        return group_attention(q, k.swapaxes(-1, -2), v, prefix(pk, pv), index=0, kernel=kernel, sinks=sinks)

    def ours(kind, q, k, v, pk, pv, sinks=None):
        kernel = Kernel.of(kind, d)._replace(rows=16, columns=16, **settings)
        prompts = Prefix(((pk, pv),), LENGTHS) if shared else None
        tile_mask = make_tile_mask((b, g, t), prompts, None, kernel, windows={window}, queries_per_kv=group)
        return tiled_attention(q, k, v, prefix(pk, pv), tile_mask, kernel, sinks=sinks)

    assert_same(ours, plain, given)


def packed(segments, lengths, kernel_of):
    """Return attention over packed segments by tiles, for a kind of kernel, and by einsums; 0 in padding."""
    real = np.reshape(segments.number >= 0, (1, 1, 1, -1, 1, 1))
    assert len(set(segments.prompt[0])) == 2, "two prompts in one sequence"
    assert not real.all()

    def plain(q, k, v, pk, pv, sinks=None):
        return real * packed_attention(q, k, v, (pk, pv, lengths), segments, kernel_of("einsum"), sinks)

    def ours(kind, q, k, v, pk, pv, sinks=None):
        kernel, prompts, tokens = kernel_of(kind), Prefix(((pk, pv),), lengths), (1, *segments.number.shape)
        r = q.shape[4]
        tile_mask = make_tile_mask(tokens, prompts, segments, kernel, windows={kernel.window}, queries_per_kv=r)
        return real * tiled_attention(q, k, v, (pk, pv, lengths), tile_mask, kernel, sinks=sinks)

    return ours, plain


@pytest.mark.parametrize(("window", "least_part"), [(None, 2), (4, attention_tiles.MIN_PART)])
def test_packed_sequences(window, least_part, monkeypatch):
    """Fused attention over packed segments with several prompts and padding equals plain attention."""
    monkeypatch.setattr(attention_tiles, "MIN_PART", least_part)
    h, group, d, size = 2, 2, 8, 48
    mask = np.arange(12) < np.array([[12, 3, 0, 7], [5, 12, 1, 2]])[:, :, None]
    segments = pack(SequenceShape(size, 4, 12, whole=True), np.ones(mask.shape, int), mask)[0].segments
    given = arrays((1, h, 1, size, group, d), (1, h, 1, size, d), (1, h, 1, size, d), (2, h, d, P), (2, h, P, d))
    given += arrays((h, group)) if window else []
    assert_same(*packed(segments, LENGTHS, lambda kind: Kernel(kind, 16, 16, 0.3, window)), given)


@pytest.mark.parametrize("windows", [(None, None), (3, None), (4, 4)])
def test_tiles_without_visible_keys_are_skipped(windows):
    """Tiles without visible keys are skipped: about half for causal attention, all but a band with a window."""
    kernel, t = Kernel("tiles", 16, 16), 128
    tile_mask = make_tile_mask((1, 1, t), None, None, kernel, windows=set(windows), queries_per_kv=1)
    for window in set(windows):
        expected = [min(x + 1, 2 if window else x + 1) for x in range(t // 16)]
        assert tile_mask.tiles[str(window)].key_count.tolist() == [expected]
        assert int(tile_mask.tiles[str(window)].query_count.sum()) == sum(expected)


def test_memory_is_linear_in_the_length():
    """A gradient's temporaries, as counted by XLA, grow linearly with the length."""

    def temporaries(kind, t):
        model, params = tiny_model(layers=1, attention=kind)
        loss = lambda params, tokens: model.apply({"params": params}, tokens, method="hidden")[0].sum()
        tokens = jax.ShapeDtypeStruct((1, 1, t), jnp.int32)
        return jax.jit(jax.grad(loss)).lower(params, tokens).compile().memory_analysis().temp_size_in_bytes

    few, many = (temporaries("tiles", t) for t in (2048, 4096))
    assert many < 2.5 * few
    assert many < temporaries("einsum", 4096) / 8


def test_kernels_are_lowered_for_an_nvidia_gpu():
    """Triton lowers the forward kernel and both backward kernels without a GPU."""
    model, params = tiny_model(windows=(3, 20), attention_soft_cap=5.0, remat=True, qk_norm="head", attention="triton")
    loss = lambda params, tokens: model.apply({"params": params}, tokens, method="hidden")[0].sum()
    with contextlib.ExitStack() as stack:
        if jax.__version_info__ >= (0, 11):  # Pallas takes the GPU's name from the mesh
            h100 = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
            stack.enter_context(jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=h100)))
        traced = jax.jit(jax.grad(loss)).trace(params, np.zeros((1, 2, 70), np.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert all(name in text for name in ("forward_kernel", "query_kernel", "key_kernel"))
    assert "__gpu$xla.gpu.triton" in text


@pytest.mark.quick
def test_default_implementation_depends_on_the_devices():
    """By default an H100 uses the Mosaic GPU kernels, a T4 tiles, and a TPU the splash attention kernels."""
    hopper = "mosaic" if jax.__version_info__ >= (0, 10, 2) else "triton"
    assert attention_implementation("auto") == attention_implementation("auto", jax.devices("cpu")[:1]) == "einsum"
    assert [attention_implementation("auto", [device]) for device in (H100, T4, TPU)] == [hopper, "tiles", "splash"]
    assert attention_implementation("auto", [H100, H100]) == hopper
    assert attention_implementation("auto", jax.devices("cpu")) == "einsum"
    assert attention_implementation("tiles", [H100]) == "tiles"


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 4}])
def test_each_device_in_a_mesh_computes_its_own_rows_and_heads(axes):
    """Each device in a mesh computes its own rows and heads without an all-gather."""
    b, h, group, t, d = 8, 2, 2, 12, 8
    mesh = make_mesh(axes)
    kernel = Kernel.of("tiles", d)._replace(rows=16, columns=16, scale=0.3)
    q, k, v, pk, pv = arrays((b, h, 1, t, group, d), (b, h, 1, t, d), (b, h, 1, t, d), (b, h, d, P), (b, h, P, d))
    (sinks,), lengths = arrays((h, group)), np.arange(b) % P + 1

    def loss(q, k, v, pk, pv, sinks, mesh=None):
        tile_mask = make_tile_mask(
            (b, 1, t), Prefix(((pk, pv),), lengths), None, kernel, windows={None}, queries_per_kv=group
        )
        return (tiled_attention(q, k, v, (pk, pv, lengths), tile_mask, kernel, mesh, sinks) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, argnums=range(6)), static_argnames="mesh")
    heads = "tensor" if h % axes.get("tensor", 1) == 0 else None
    given = [jax.device_put(x, constrained_sharding(x.shape, mesh, heads)) for x in (q, k, v, pk, pv)]
    given.append(sinks)
    for x, y in zip(gradient(*given, mesh=mesh), gradient(q, k, v, pk, pv, sinks), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    text = gradient.lower(*given, mesh=mesh).compile().as_text()
    assert "all-gather" not in text
