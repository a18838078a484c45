"""The plan of a run: exact where bytes can be counted by hand, near what a process really takes, and light."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from grpo_jax import GRPOConfig, SFTConfig, plan
from grpo_jax.hub.families import read_config
from grpo_jax.models.bounds import count_weights
from grpo_jax.planning import programs
from grpo_jax.planning.account import Account
from grpo_jax.planning.estimate import PlanRequest, plan_here, plan_sizes
from grpo_jax.planning.loaded import Loaded, Taught

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def config_of(**settings):
    return GRPOConfig(**{"compute_dtype": "float32"} | settings)


@pytest.mark.parametrize("memory", [1e9, 1.2e6])
def test_activations_are_kept_where_they_fit_and_the_most_that_fits_is_with_them_recomputed(memory):
    request = PlanRequest({**MODEL, "num_hidden_layers": 8}, config_of(max_completion_length=64), 8, Loaded(), memory)
    found = plan_here(request)
    assert found.recomputes == (memory < 1e9)
    assert f"activations {'recomputed' if found.recomputes else 'kept'}:" in str(found)
    told = dataclasses.replace(request, config=config_of(max_completion_length=64, gradient_checkpointing=True))
    least = plan_here(told)
    assert (found.largest_batch, found.longest_completion) == (least.largest_batch, least.longest_completion)
    assert (found.peak > least.peak) == (not found.recomputes)
    assert plan_sizes(dataclasses.replace(request, memory=None)).recomputes, "the least, where memory is not known"


def test_what_is_held_is_what_was_counted_by_hand():
    config = config_of(max_completion_length=8, beta=0.1, mesh={"fsdp": 2})
    found = plan(MODEL, config, prompt_length=8)
    cut = 64 * 16 + 4 * 16 * 16 + 3 * 16 * 32  # embedding, attention, MLP; every matrix is cut in two
    whole = 3 * 16 + 3 * 16  # norms and biases
    params = 4 * (cut // 2 + whole)
    assert found.held["params"] == found.held["reference"] == params
    assert found.held["optimizer"] == pytest.approx(2 * params, abs=64)
    assert "master params" not in found.held
    taken = plan(MODEL, config, prompt_length=8, donate=True, largest=False)
    assert {**taken.held, "policy": params} == found.held
    assert taken.peak == found.peak - params
    half = plan(MODEL, config, prompt_length=8, param_dtype="bfloat16", memory=1e9, largest=False)
    assert (half.fits, half.largest_batch, half.longest_completion) == (True, None, None), "not looked for"
    assert half.held["params"] == half.held["reference"] == params // 2
    assert half.held["master params"] == params
    assert half.held["optimizer"] == found.held["optimizer"]
    assert found.devices == 2
    assert found.sizes == {"prompts": 2, "group": 8, "tokens": 2 * 8 * 8}
    # Each device has one prompt: its keys and values and those of 8 rows with room for 7 tokens.
    assert found.parts["KV cache"] >= 4 * 2 * 16 * (8 + 8 * 7)
    assert found.peak == found.peaks["update"] > sum(found.held.values())
    assert found.operations["update"] == pytest.approx(3 * found.operations["rollout"])


def test_sft_is_planned_as_it_runs():
    config = SFTConfig(max_length=32, gradient_accumulation_steps=4, compute_dtype="float32", mesh={"fsdp": 2})
    found = plan(MODEL, config, memory=1e9)
    twin = plan(MODEL, config_of(max_completion_length=8, mesh={"fsdp": 2}), prompt_length=8, largest=False)
    assert found.held == twin.held, "params, optimizer and the caller's params, as in GRPO"
    assert (list(found.peaks), found.sizes) == (["update"], {"prompts": 64, "group": 1, "tokens": 64 * 31})
    # Forward and backward pass: 6 operations a weight and token, and what attention adds.
    weights = count_weights(read_config(MODEL))
    assert found.operations["update"] == pytest.approx(6 * weights * 64 * 32, rel=0.2)
    assert {name.split()[0] for name in found.programs} == {"update"}, "nothing is sampled"
    assert "2 devices, each of an iteration's 64 examples" in str(found)
    assert f"longest max_length that fits: {found.longest_completion}\n" in str(found)
    with pytest.raises(ValueError, match="max_length = None: give the tokens of the longest example"):
        plan(MODEL, SFTConfig(max_length=None))
    with pytest.raises(ValueError, match="prompt_length is missing"):
        plan(MODEL, config_of())


def test_a_base_is_held_in_the_bits_it_is_quantized_to():
    config = config_of(max_completion_length=8, beta=0.1)
    given = {**MODEL, "hidden_size": 64, "num_key_value_heads": 1, "intermediate_size": 128}
    held = {
        q: plan(given, config, prompt_length=8, lora=2, quantize=q, largest=False).held for q in ("nf4", "int8", None)
    }
    weights = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128  # attention, MLP
    rows = 2 * 64 + 2 * 32 + 2 * 128 + 64
    rest = 4 * (64 * 64 + 3 * 64 + 64 + 2 * 32)  # embedding, norms, biases
    assert held[None]["base"] == 4 * weights + rest
    assert held["int8"]["base"] == weights + 4 * rows + rest
    matrices = 7 * 4 * (256 + 1) + 4 * (1 + 1 + 1 + 1 + 1 + 1 + 1)  # levels and offset; outer scales, one each
    assert held["nf4"]["base"] == weights // 2 + weights // 64 + matrices + rest
    adapters = 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    for each in held.values():
        assert each["params"] == each["reference"] == each["policy"] == adapters
        assert each["optimizer"] == pytest.approx(2 * adapters, abs=64)


def test_a_base_of_seven_billion_weights_is_held_in_four_gigabytes():
    """Qwen2.5-7B, of which embedding and head are a seventh each: plain they weigh 2.2 GB."""
    raw = {**MODEL, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
    raw |= {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}

    def held(embeddings):
        loaded = Loaded("bfloat16", 16, "nf4", embeddings)
        loaded.check(raw, GRPOConfig())
        _, base = loaded.params(read_config(raw), raw)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(base)) / 1e9

    assert held(False) == pytest.approx(5.55, abs=0.01)
    assert held(True) <= 4.3


@pytest.mark.quick
def test_a_quantized_base_is_planned_for_adapters_only(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ValueError, match="quantize is 'nf4': quantized params cannot be trained; give lora"):
        plan(MODEL, config_of(), prompt_length=8, quantize="nf4")
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    with pytest.raises(ValueError, match="quantize is 'nf4'"):
        plan({**MODEL, "quantization_config": stored}, config_of(), prompt_length=8)
    with pytest.raises(ValueError, match="quantize is 'int3'"):
        plan(MODEL, config_of(), prompt_length=8, lora=2, quantize="int3")
    with pytest.raises(ValueError, match="quantize_embeddings is True, and quantize is None"):
        plan(MODEL, config_of(), prompt_length=8, lora=2, quantize_embeddings=True)
    for lora in (0, {"rank": 0}):
        with pytest.raises(ValueError, match=f"lora is {lora}; it is the rank of adapters"):
            plan(MODEL, config_of(), prompt_length=8, lora=lora)


@pytest.mark.quick
def test_a_process_that_was_ended_from_outside_is_told_from_one_that_failed(monkeypatch):
    for status, said in ((-9, r"could not be planned, ended by signal 9: I0000"), (1, r"could not be planned: I0000")):
        ended = subprocess.CompletedProcess([], status, "", "I0000 a line of a log")
        monkeypatch.setattr(subprocess, "run", lambda *_, ended=ended, **__: ended)
        with pytest.raises(ValueError, match=said):
            plan(MODEL, config_of(), prompt_length=8)


def test_one_device_holds_the_gradient_so_far_beside_that_of_a_piece():
    model = {**MODEL, "vocab_size": 16384, "hidden_size": 128}
    found = plan_sizes(PlanRequest(model, config_of(max_completion_length=8), 8, Loaded()))
    assert 2 < found.parts["gradients, activations and batch"] / found.held["params"] < 3


def test_a_device_keeps_the_activations_of_so_many_prompts_and_no_more(monkeypatch):
    """They grow with the prompts of a step up to a bound, and by nothing of the weights' size."""
    name, kept = "activations of prompts", []
    for accumulate, hidden, least in ((1, 16, 64), (4, 16, 64), (4, 64, 64), (16, 16, 64), (16, 16, 128)):
        monkeypatch.setattr("grpo_jax.update.prompts.LEAST_KEPT", least)
        monkeypatch.setattr("grpo_jax.update.packed.CPU_TOKENS", 64)
        config = config_of(max_completion_length=8, gradient_accumulation_steps=accumulate)
        found = plan_here(PlanRequest({**MODEL, "hidden_size": hidden}, config, 8, Loaded()))
        assert found.sizes["prompts"] == accumulate
        beside = found.parts["gradients, activations and batch"] + found.parts[name]
        assert found.peaks["update"] == sum(found.held.values()) + beside
        kept.append(found.parts[name])
    assert kept[1] == 4 * kept[0]
    # Of one recomputed layer: a few arrays of [tokens, width], float32.
    assert 4 * 8 * 4 * 64 < kept[2] < 8 * (4 * 8 * 4 * 64)
    assert kept[3] == 8 * kept[0], "64 tokens are eight prompts"
    assert kept[4] == 16 * kept[0]


def test_of_prompts_on_two_devices_each_keeps_its_own():
    name, one = "activations of prompts", plan(MODEL, config_of(max_completion_length=8), prompt_length=8)
    on_two = plan(MODEL, config_of(max_completion_length=8, mesh={"fsdp": 2}), prompt_length=8)
    assert (on_two.sizes["prompts"], on_two.parts[name]) == (2, one.parts[name])


@pytest.mark.parametrize("mesh", [None, {"fsdp": 2}], ids=str)
def test_a_rollout_holds_the_completions_that_are_decoded_at_a_time(mesh):
    """Of eight groups on a device, two at a time take a quarter of the keys and values that all take."""
    devices = 1 if mesh is None else 2
    settings = {"max_completion_length": 64, "gradient_accumulation_steps": 8, "mesh": mesh}
    at_once = (None, 2 * 8 * devices, 100 * 8 * devices)
    plans = [plan_sizes(PlanRequest(MODEL, config_of(rollout_batch_size=n, **settings), 8, Loaded())) for n in at_once]
    assert plans[0].sizes["prompts"] == 8 * devices
    whole, quarter, most = (found.parts["KV cache"] for found in plans)
    assert whole == most
    assert quarter == pytest.approx(whole / 4, rel=0.01)


def test_what_fits_is_said_by_the_phase_that_grows():
    """A rollout of so many completions at a time is the larger phase at first, and the same for every batch."""
    settings = {"max_completion_length": 64, "gradient_accumulation_steps": 64, "rollout_batch_size": 512}
    of = lambda batch: config_of(per_device_train_batch_size=batch, **settings)
    peaks = {batch: plan_sizes(PlanRequest(MODEL, of(batch), 8, Loaded())).peaks for batch in (8, 32, 40)}
    assert peaks[8]["update"] < peaks[8]["rollout"] == peaks[40]["rollout"] < peaks[32]["update"]
    memory = 1.01 * peaks[32]["update"]
    found = plan_here(PlanRequest(MODEL, of(8), 8, Loaded(), memory))
    assert found.largest_batch == 32
    assert peaks[40]["update"] > memory
    assert plan_here(PlanRequest(MODEL, of(8), 8, Loaded(), peaks[8]["rollout"] - 1)).largest_batch == 0


def test_weights_are_read_as_often_as_completions_follow_one_another():
    """Bounds of a v5e: four groups one by one read the weights four times, and the keys and values no oftener."""
    settings = {"max_completion_length": 64, "gradient_accumulation_steps": 4, "compute_dtype": "bfloat16"}
    run = lambda at_once: Account.of(MODEL, config_of(rollout_batch_size=at_once, **settings), 8, Loaded())
    once, twice, four = (run(n).decode_bytes for n in (None, 16, 8))
    weights = 64 * 2 * count_weights(run(None).work.shape)
    assert (twice - once, four - once) == (weights, 3 * weights)


LARGER = {**MODEL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["full_logits", "sampled_token"])
def test_a_teacher_is_held_and_its_passes_are_counted(mode):
    """By hand: the bytes of its params, and the operations of its forward passes, in an update or before it."""
    settings = {"max_completion_length": 8, "distillation_coef": 1.0, "distillation_mode": mode, "num_iterations": 2}
    found = {
        name: plan_sizes(PlanRequest(MODEL, config_of(**settings), 8, Loaded(), taught=taught))
        for name, taught in (("none", None), ("larger", Taught(LARGER)), ("int8", Taught(LARGER, "int8")))
    }
    none, larger, int8 = found.values()
    shape = read_config(LARGER)
    embedding, norms = 64 * 32, 3 * (2 * 32 + 3 * 32) + 32  # of norms and biases
    matrices = 3 * (4 * 32 * 32 + 3 * 32 * 64)
    assert larger.held["teacher"] == 4 * (embedding + matrices + norms)
    assert 4 * (embedding + norms) + matrices < int8.held["teacher"] < larger.held["teacher"] / 2
    assert {name: size for name, size in larger.held.items() if name != "teacher"} == none.held
    work = dataclasses.replace(Account.of(MODEL, config_of(**settings), 8, Loaded()).work, shape=shape)
    more = {phase: x - none.operations.get(phase, 0) for phase, x in larger.operations.items()}
    passes = {"update": 2, "teacher": 0} if mode == "full_logits" else {"update": 0, "teacher": 1}
    assert more["update"] == pytest.approx(passes["update"] * work.update_operations / 3)
    assert more.get("teacher", 0) == pytest.approx(passes["teacher"] * work.update_operations / 3)
    assert ("teacher" in larger.peaks) == (mode == "sampled_token")
    name = "gradients, activations and batch"
    if mode == "full_logits":  # its states and activations, and not its params once more
        assert none.parts[name] < larger.parts[name] < none.parts[name] + larger.held["teacher"]


def test_a_plan_says_whether_a_teacher_is_counted():
    taught = config_of(max_completion_length=8, distillation_coef=0.5)
    without, counted = (plan(MODEL, taught, prompt_length=8, teacher=teacher) for teacher in (None, LARGER))
    assert str(without).startswith("distillation_coef = 0.5: no teacher is counted; unless a server has it")
    assert counted.note == ""
    assert "teacher" in counted.held
    for config, said in (
        (config_of(), "nothing would be learned from it; set distillation_coef"),
        (dataclasses.replace(taught, distillation_mode="topk_logits", distillation_topk=3), "is for a server"),
    ):
        with pytest.raises(ValueError, match=said):
            plan(MODEL, config, prompt_length=8, teacher=LARGER)


def test_a_layer_of_an_update_costs_a_device_its_own_rows():
    """Of each layer a device keeps what its own prompt needs, as one device does that has no other."""
    model = {**MODEL, "hidden_size": 64, "intermediate_size": 128}
    name = "gradients, activations and batch"

    def parts(mesh):
        # With activations kept: on one CPU they are recomputed in another way than on a mesh of CPUs.
        settings = {"per_device_train_batch_size": 8, "gradient_checkpointing": False}
        config = config_of(max_completion_length=64, mesh=mesh, **settings)
        return [plan_sizes(PlanRequest({**model, "num_hidden_layers": n}, config, 64, Loaded())).parts for n in (2, 4)]

    at = parts({"fsdp": 8})
    of_each, of_one = (two[1][name] - two[0][name] for two in (at, parts(None)))
    assert of_each < 1.2 * of_one
    for layers, parts in zip((2, 4), at, strict=True):  # keys and values of its own prompt, and of 8 rows with 64 slots
        assert parts["KV cache"] == pytest.approx(2 * layers * 64 * 4 * (64 + 8 * 64), rel=1e-3)


def test_the_largest_batch_is_the_last_that_fits():
    config = config_of(max_completion_length=8)
    found = plan(MODEL, config, prompt_length=8, memory=1e6)
    lines = str(found).splitlines()
    assert lines[0].startswith("1 device, each of an iteration's 1 prompts × 8 completions")
    assert lines[-1] == f"largest per_device_train_batch_size that fits: {found.largest_batch}"
    assert found.largest_batch % 8 == 0
    peaks = []
    for size in (found.largest_batch, found.largest_batch + 8):
        larger = config_of(max_completion_length=8, per_device_train_batch_size=size)
        peaks.append(plan(MODEL, larger, prompt_length=8).peak)
    assert peaks[0] <= 1e6 < peaks[1]


@pytest.mark.quick
def test_what_cannot_be_is_refused_before_a_process_starts(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started"))
    few = config_of(mesh={"fsdp": 2}, rollout_batch_size=8)
    for call in (plan, functools.partial(programs, devices=jax.devices())):
        with pytest.raises(ValueError, match=r"(?s)this plan has 1 error:.*rollout_batch_size = 8: does not hold a gr"):
            call(MODEL, few, prompt_length=8)
    with pytest.raises(ValueError, match="NoSuchForCausalLM"):
        plan({**MODEL, "architectures": ["NoSuchForCausalLM"]}, config_of(), prompt_length=8)


MEASURED = """
import ctypes, gc, json, sys
import jax, jax.numpy as jnp
from grpo_jax import Batch, GRPOConfig, Prompts
from grpo_jax.update.packed import choose_updater
from grpo_jax.hub.families import read_config
from grpo_jax.models.transformer import Transformer
from grpo_jax.update.optimizer import make_optimizer
from grpo_jax.hub.policy import with_settings
from grpo_jax.devices.sharding import make_mesh, split_sharding, tree_sharding
from grpo_jax.update.state import create_state

request = json.load(sys.stdin)
config = GRPOConfig.from_dict(request["config"])
mesh, optimizer, sizes = make_mesh(config.mesh), make_optimizer(config, 1000), config.sizes()
model = with_settings(Transformer(read_config(request["model"])), config, list(mesh.devices.flat), mesh)
b, g, t, p = request["batch"]


def resident(field):
    return int(open("/proc/self/status").read().split(field)[1].split()[0]) * 1024


def make_params():
    return model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def make_state(params):
    return create_state(params, optimizer, jax.random.key(0))


def make_batch():
    return Batch(
        prompts=Prompts(jnp.ones((b, p), jnp.int32), jnp.full(b, p)),
        tokens=jnp.ones((b, g, t), jnp.int32),
        mask=jnp.ones((b, g, t), bool),
        advantages=jnp.ones((b, g)),
        sampling_log_probs=-jnp.ones((b, g, t)),
    )


def compiled(function, *like):
    cut = lambda x: split_sharding(x, mesh) if isinstance(x, Batch) else tree_sharding(x, mesh)
    at = lambda x: jax.tree.map(lambda y, where: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=where), x, cut(x))
    like = [at(x) for x in like]
    out = jax.eval_shape(function, *like)
    return jax.jit(function, out_shardings=cut(out)).lower(*like).compile()


params = jax.eval_shape(make_params)
state = jax.eval_shape(make_state, params)
programs = compiled(make_params), compiled(make_state, params), compiled(make_batch)
how = {"micro": (sizes.micro_prompts, g), "optimizer": optimizer, "mesh": mesh}
updater = choose_updater(model, config, **how)


def begin():
    params = programs[0]()
    return programs[1](params), programs[2]()


jax.block_until_ready(updater.update(*begin()))  # compiled
gc.collect()
ctypes.CDLL("libc.so.6").malloc_trim(0)  # what compiling took
before = resident("VmRSS:")
given = begin()  # its params are the state's own; jax 0.7 copies what is donated while somebody else holds it
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
after = jax.block_until_ready(updater.update(*given))
print(json.dumps(resident("VmHWM:") - before))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is Linux's to tell")
def test_the_peak_is_near_what_a_process_takes(tmp_path):
    """On two pretended devices, whose memory is the process's; the model is large beside what else a process takes."""
    model = {**MODEL, "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    model |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = config_of(max_completion_length=32, mesh={"fsdp": 2}, gradient_checkpointing=False)
    found = plan(model, config, prompt_length=32)
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"  # the last of a flag counts
    done = subprocess.run(
        [sys.executable, "-c", MEASURED],
        input=json.dumps({"model": model, "config": config.to_dict(), "batch": [2, 8, 32, 32]}),
        env=os.environ | {"XLA_FLAGS": flags, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured == pytest.approx(2 * found.peaks["update"], rel=0.1)
