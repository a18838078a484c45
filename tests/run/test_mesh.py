"""Training on a mesh of eight devices is training on one: the same completions, losses and params."""

import functools
from contextlib import nullcontext

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_model, tiny_policy, tiny_tokenizer

from grpo_jax import Batch, GRPOConfig, Prompts, generate, init_policy, make_prompts, train
from grpo_jax.devices.sharding import make_mesh, place, shard_count
from grpo_jax.rollout import decode as decode_module
from grpo_jax.rollout import rollout as rollout_module
from grpo_jax.types import as_argument
from grpo_jax.update import packed
from grpo_jax.update.optimizer import make_optimizer
from grpo_jax.update.packed import PackedUpdater, choose_updater
from grpo_jax.update.state import create_state
from grpo_jax.update.step import PaddedUpdater

ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh", "i", "jkl", "m", "no"]]
MESHES = [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2}]


def lower_case(completions):
    return [float(np.mean([char.islower() for char in text] or [0])) for text in completions]


def run(policy, mesh, run_dir=None, **settings):
    """Three iterations of eight prompts × 4 completions: the final state, and what was logged."""
    per_device = 32 // int(np.prod([size for axis, size in (mesh or {}).items() if axis != "tensor"] or [1]))
    config = GRPOConfig(
        **{
            "num_generations": 4,
            "per_device_train_batch_size": per_device,
            "max_completion_length": 70,  # the cache grows once
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "max_steps": 3,
            "beta": 0.1,
            "seed": 0,
            "mesh": mesh,
            **settings,
        }
    )
    lines = []
    keep = lambda step, metrics: lines.append(metrics)
    state = train(policy, ROWS, lower_case, config, run_dir=run_dir, callbacks=[keep])
    return state, lines


def assert_same_run(one, other, grad_norm=0.0):
    state, lines = one
    others, other_lines = other
    for line, like in zip(lines, other_lines, strict=True):
        assert line["num_tokens"] == like["num_tokens"]
        assert line.get("reward") == like.get("reward"), "other completions"
        for name in ("loss", "kl", "grad_norm", "entropy"):
            rel = grad_norm if name == "grad_norm" else 0.0
            assert line[name] == pytest.approx(like[name], abs=1e-6, rel=rel), name
    chex.assert_trees_all_close(state.params, jax.tree.map(np.asarray, others.params), atol=1e-6)


def test_one_run_over_four_meshes_is_the_run_on_one_device(tmp_path):
    """A run that is resumed on another mesh at every step has the losses, params and moments of one on one device."""
    lines = []
    for step, mesh in enumerate(MESHES, 1):
        changed = pytest.warns(UserWarning, match="mesh") if step > 1 else nullcontext()
        with changed:
            state, line = run(tiny_policy(), mesh, tmp_path, max_steps=step)
        kernel = state.params["layers_0"]["mlp"]["up_proj"]["kernel"]
        cut = (16 // mesh.get("fsdp", 1), 32 // mesh.get("tensor", 1))
        for tree in (state.params, state.opt_state, state.ref_params):
            found = [x for x in jax.tree.leaves(tree) if x.shape == kernel.shape]
            assert {x.addressable_shards[0].data.shape for x in found} == {cut}
        lines += line
    expected = run(tiny_policy(), None, max_steps=len(MESHES))
    assert_same_run(expected, (state, lines))
    chex.assert_trees_all_close(state.opt_state, jax.tree.map(np.asarray, expected[0].opt_state), atol=1e-6)


def test_a_mesh_of_the_users_own_is_that_of_the_policy():
    policy = tiny_policy()
    mesh = make_mesh({"data": 2, "fsdp": 2})
    placed = policy.replace(params=place(policy.params, mesh))
    state, _ = run(placed, None, max_steps=1, per_device_train_batch_size=8)
    assert state.params["layers_0"]["mlp"]["up_proj"]["kernel"].sharding.mesh == mesh


MIXED = {
    "gated delta nets": {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention",
        "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "rms_norm_eps": 1e-2},
    "short convolutions": {"architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [1], "block_multiple_of": 8},
    "shared keys": {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5,
        "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": len(tiny_tokenizer()), "rms_norm_eps": 1e-2},
}  # fmt: skip


@functools.cache
def mixed_policy(name):
    tiny = tiny_policy()
    config = tiny.config | {"num_hidden_layers": 2} | MIXED[name]
    return init_policy(config, jax.random.key(0), tokenizer=tiny.tokenizer)


@pytest.mark.parametrize("name", MIXED)
def test_layers_of_several_kinds_on_a_mesh(name):
    """Rollout, reference and packed update of layers that keep a state or share keys are those of one device."""
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    # Adam divides by the gradient's size: without this epsilon, rounding of a tiny gradient would become a whole step.
    settings = {"max_steps": 1, "max_completion_length": 8, "adam_epsilon": 1e-2}
    on_mesh = run(mixed_policy(name), mesh, **settings)
    assert_same_run(run(mixed_policy(name), None, **settings), on_mesh, grad_norm=1e-5)
    layer = on_mesh[0].params["layers_0"]
    path = {"gated delta nets": ("linear_attn", "out_proj"), "short convolutions": ("conv", "out_proj")}
    module, projection = path.get(name, ("self_attn", "o_proj"))
    kernel = layer[module][projection]["kernel"]
    heads = mesh["tensor"] if module == "self_attn" else 1  # heads are divided, a state's channels are not
    assert kernel.addressable_shards[0].data.shape == (kernel.shape[0] // heads, 16 // mesh["fsdp"])


def test_a_device_holds_an_eighth_of_params_and_optimizer():
    """By XLA's account of what a program is given on each device."""
    _, params = tiny_model(vocab=64)
    config = GRPOConfig()

    def held(mesh, dtype):
        halved = jax.tree.map(lambda x: x.astype(dtype), params)
        state = place(create_state(halved, make_optimizer(config, 10), jax.random.key(0)), mesh)
        program = jax.jit(lambda *trees: jax.tree.map(lambda x: x + 1, trees))
        compiled = program.lower(state.params, state.master_params, state.opt_state).compile()
        return compiled.memory_analysis().argument_size_in_bytes

    size = sum(x.size for x in jax.tree.leaves(params))
    for dtype, each in ((jnp.float32, 4 + 8), (jnp.bfloat16, 2 + 4 + 8)):
        assert held(None, dtype) == pytest.approx(each * size, abs=64)
        assert held(make_mesh({"fsdp": 8}), dtype) <= held(None, dtype) / 7


def test_prompts_that_do_not_divide_are_sampled_all_the_same(monkeypatch):
    """And so are groups whose rows end early: the others move together, each group on its device."""
    widths, plain = [], decode_module.move

    def moved(streams, groups, order, start, *, mesh, **how):
        widths.extend([] if mesh is None else [order.shape])
        return plain(streams, groups, order, start, mesh=mesh, **how)

    monkeypatch.setattr(rollout_module, "move", moved)
    model, params = tiny_model()
    prompts = make_prompts([[3, 4, 5], [6], [7, 8]])
    settings = {"num_generations": 8, "max_completion_length": 40, "eos_token_ids": (5, 7, 9)}
    one = generate(model, params, prompts, jax.random.key(0), **settings)
    assert not widths
    placed = place(params, make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    other = generate(model, placed, prompts, jax.random.key(0), **settings)
    assert widths
    assert all(groups == 4 and width <= 4 for groups, width in widths), widths
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.ended, other.ended)
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "batch_size", "groups"),
    [
        ({"data": 2, "fsdp": 2}, 10 * 3 + 2, [8, 8, 8]),  # of ten groups, two on each of four devices
        ({"data": 2, "fsdp": 2, "tensor": 2}, 4 * 3, [4] * 5),
    ],
)
def test_so_many_completions_are_decoded_at_a_time(axes, batch_size, groups, monkeypatch):
    """The groups of every program that reads prompts or decodes; the samples are those of one device, all at once."""
    read, decoded, prefill, decode = [], set(), decode_module.prefill, decode_module.decode
    model, params = tiny_model()
    prompts = make_prompts([[3 + (i * 5 + j) % 20 for j in range(1 + i % 3)] for i in range(18)])
    settings = {"num_generations": 3, "max_completion_length": 20, "eos_token_ids": (5, 7, 9)}
    one = generate(model, params, prompts, jax.random.key(0), **settings)
    monkeypatch.setattr(rollout_module, "prefill", lambda *x, **how: read.append(x[3].shape) or prefill(*x, **how))
    monkeypatch.setattr(
        rollout_module, "decode", lambda *x, **how: decoded.add(x[3].token.shape[0]) or decode(*x, **how)
    )
    placed = place(params, make_mesh(axes))
    other = generate(model, placed, prompts, jax.random.key(0), batch_size=batch_size, **settings)
    assert read == [(n, 3) for n in groups]
    assert decoded == set(groups), "and no more of them while they are decoded"
    for name in ("tokens", "mask", "ended"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)


@pytest.mark.quick
def test_fewer_completions_than_a_group_on_each_device_are_refused():
    message = (
        r"rollout_batch_size = 28: does not hold a group of num_generations = 4 on each of the 8 devices that"
        r" prompts are cut over; use 32 or more, or None"
    )
    with pytest.raises(ValueError, match=message):
        run(tiny_policy(), {"data": 8}, rollout_batch_size=28)
    model, params = tiny_model()
    placed = place(params, make_mesh({"data": 4}))
    with pytest.raises(ValueError, match=r"a group of 4 completions on each of the 4 devices .* cut over; got 15"):
        generate(model, placed, make_prompts([[3]]), jax.random.key(0), num_generations=4, max_completion_length=2,
                 batch_size=15)  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"model": 2}, "mesh has the axis 'model': the axes are data, fsdp, tensor"),
        ({"data": 4, "tensor": 4}, r"4 × 1 × 4 devices are needed, and there are 8"),
    ],
)
def test_meshes_that_cannot_be(axes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(axes)


@pytest.mark.quick
def test_several_processes_share_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"2 × 1 × 1 devices are needed, and there are 8; make .* exactly 8, since"):
        make_mesh({"data": 2})


def test_an_update_on_a_mesh_is_packed_and_has_the_numbers_of_one_device():
    """16 × 8 completions that end after 65 of 256 tokens on average."""
    b, g, t, p = 16, 8, 256, 32
    model, params = tiny_model()
    config = GRPOConfig(max_completion_length=t, beta=0.1, max_grad_norm=0)
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 65, (b, g)), t)
    random = lambda seed: jax.random.normal(jax.random.key(seed), (b, g, t)) * 0.3 - 3
    batch = Batch(
        prompts=Prompts(jax.random.randint(jax.random.key(1), (b, p), 0, 24), jnp.arange(b) % p + 1),
        tokens=jax.random.randint(jax.random.key(2), (b, g, t), 0, 24),
        mask=jnp.asarray(np.arange(t) < lengths[..., None]),
        advantages=jax.random.normal(jax.random.key(3), (b, g)),
        sampling_log_probs=random(4),
        ref_log_probs=random(5),
    )
    optimizer = optax.sgd(1.0)

    def updated(mesh):
        state = place(create_state(jax.tree.map(jnp.copy, params), optimizer, jax.random.key(0)), mesh)
        updater = choose_updater(model, config, micro=(b, g), optimizer=optimizer, mesh=mesh)
        assert isinstance(updater, PackedUpdater)
        scores = updater.score(state.params, batch.prompts, batch.tokens, batch.mask)
        state, metrics = updater.update(state, batch)
        return jax.device_get((scores, state.params, metrics))

    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    (scores, ours, metrics), (expected, of_one, alone) = updated(mesh), updated(None)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    moved = max(np.abs(np.asarray(x) - y).max() for x, y in zip(*map(jax.tree.leaves, (params, of_one)), strict=True))
    assert moved > 1e-3
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ours, of_one)
    shares = metrics.pop("padding_share"), alone.pop("padding_share")
    assert shares[1] < shares[0] < 0.4, "each device has as many sequences as the one that needs most"
    chex.assert_trees_all_close(metrics, alone, rtol=1e-4, atol=1e-5)


def test_groups_without_advantages_are_only_measured_on_a_mesh_too(monkeypatch):
    """On each device they come last; the numbers are those of one device and of whole micro-batches."""
    axes, learnt = {"data": 2, "fsdp": 2, "tensor": 2}, (1, 2, 6, 11)
    monkeypatch.setattr(packed, "CPU_TOKENS", 64)
    b, g, t = 16, 4, 16
    model, params = tiny_model()
    config = GRPOConfig(max_completion_length=t, max_grad_norm=0)
    lengths = np.random.default_rng(0).integers(1, t + 1, (b, g))
    has = jnp.isin(jnp.arange(b), jnp.array(learnt, int))[:, None]
    batch = Batch(
        prompts=Prompts(jax.random.randint(jax.random.key(1), (b, 32), 0, 24), jnp.arange(b) + 1),
        tokens=jax.random.randint(jax.random.key(2), (b, g, t), 0, 24),
        mask=jnp.asarray(np.arange(t) < lengths[..., None]),
        advantages=jnp.where(has, jax.random.normal(jax.random.key(3), (b, g)), 0.0),
        sampling_log_probs=jax.random.normal(jax.random.key(4), (b, g, t)) * 0.3 - 3,
    )
    optimizer, results = optax.sgd(1.0), []
    for mesh, kind in ((make_mesh(axes), PackedUpdater), (None, PackedUpdater), (None, PaddedUpdater)):
        state = place(create_state(jax.tree.map(jnp.copy, params), optimizer, jax.random.key(0)), mesh)
        updater = kind(as_argument(model), config, (b, g), optimizer=optimizer, mesh=mesh)
        if mesh is not None:
            laid, packing = updater.lay_out(params, batch)
            learns = np.asarray(laid.advantages).any(axis=1).reshape(shard_count(mesh), -1)
            assert (np.diff(learns.astype(int)) <= 0).all(), "first those with advantages, on each device"
            assert (len(packing.sequences) > 0) == (len(learnt) > 0)
            assert packing.measured
        state, metrics = updater.update(state, batch)
        results.append(jax.device_get((state.params, {k: v for k, v in metrics.items() if k != "padding_share"})))
    (ours, measured), *others = results
    for expected, metrics in others:
        chex.assert_trees_all_close(ours, expected, atol=1e-6)
        chex.assert_trees_all_close(measured, metrics, rtol=1e-4, atol=1e-5)
