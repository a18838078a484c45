"""Plans: exact where bytes can be counted by hand, and based on the programs that a run compiles."""

import dataclasses
import subprocess

import jax
import pytest
from tiny_vision import vision_config

from grpo_jax import GRPOConfig, SFTConfig, plan
from grpo_jax.hub.weights import Loading
from grpo_jax.models.devices import Target
from grpo_jax.planning import AbstractRun, ProgramCost, answer
from grpo_jax.run.memory import compiled_peak_bytes

MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
GPT_OSS = {**MODEL, "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
config_of = lambda **settings: GRPOConfig(**{"compute_dtype": "float32", "max_completion_length": 8} | settings)


def abstract_run(config, loading=None, *, model=MODEL, memory=None):
    return AbstractRun.of(jax.devices(), model, config, 8, loading or Loading(), memory)


def test_plan_equals_a_count_by_hand():
    config = config_of(beta=0.1, mesh={"fsdp": 2})
    found = plan(MODEL, config, prompt_length=8)
    cut = 64 * 16 + 4 * 16 * 16 + 3 * 16 * 32  # embedding, attention, MLP; every matrix is sharded over two devices
    whole = 3 * 16 + 3 * 16  # norms and biases
    params = 4 * (cut // 2 + whole)
    assert found.held.keys() == {"params", "optimizer", "reference", "policy"}
    assert found.held["params"] == found.held["reference"] == found.held["policy"] == params
    assert found.held["optimizer"] == pytest.approx(2 * params, abs=64)
    assert (found.devices, found.device, found.recomputes) == (2, jax.devices()[0].device_kind, False)
    assert found.programs.keys() == {"rollout", "update", "reference"}
    update, rollout = found.programs["update"], found.programs["rollout"]
    # Each device holds the keys and values of one prompt and of 8 completions with room for 7 tokens each.
    assert rollout.peak - sum(found.held.values()) >= 4 * 2 * 16 * (8 + 8 * 7)
    assert found.peak == update.peak > sum(found.held.values()) + update.temporaries
    decides = compiled_peak_bytes(abstract_run(config, memory=1e9).run)
    assert update.peak == pytest.approx(decides, abs=64), "this peak decides whether activations are kept"
    assert found.fits
    assert not dataclasses.replace(found, memory=found.peak - 1).fits
    # Forward and backward pass: 6 operations per weight and token, plus attention, loss and norms.
    tokens = 8 * 8
    assert 6 * cut * tokens < update.flops < 3 * 6 * cut * tokens
    assert found.programs["reference"].flops < update.flops / 2
    lines = str(found).splitlines()
    assert lines[0] == f"2 × {found.device}, activations kept"
    assert [line.split()[0] for line in lines[2:6]] == ["program", *found.programs]
    assert lines[-1].startswith("fits in ")


def test_held_arrays_depend_on_the_settings():
    config = config_of(beta=0.1)
    plain = abstract_run(config).held(donate=False)
    assert {**abstract_run(config).held(donate=True), "policy": plain["params"]} == plain
    half = abstract_run(config, Loading("bfloat16")).held(donate=False)
    assert half["params"] == half["reference"] == plain["params"] // 2
    assert half["master params"] == plain["params"]
    assert half["optimizer"] == plain["optimizer"]
    sft = abstract_run(SFTConfig(max_length=32, compute_dtype="float32"))
    assert sft.held(donate=False) == {name: x for name, x in plain.items() if name != "reference"}
    assert sft.lowered().keys() == {"update"}, "SFT does not sample"
    assert not abstract_run(config).run.config.gradient_checkpointing, "activations are kept on CPUs"


@pytest.mark.quick
def test_quantized_base_is_counted_in_its_bits():
    given = {**MODEL, "hidden_size": 64, "num_key_value_heads": 1, "intermediate_size": 128}
    held = {
        q: abstract_run(config_of(beta=0.1), Loading(lora=2, quantize=q), model=given).held(donate=False)
        for q in ("nf4", "int8", None)
    }
    weights = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128  # attention, MLP
    rows = 2 * 64 + 2 * 32 + 2 * 128 + 64
    rest = 4 * (64 * 64 + 3 * 64 + 64 + 2 * 32)  # embedding, norms, biases
    assert held[None]["base"] == 4 * weights + rest
    assert held["int8"]["base"] == weights + 4 * rows + rest
    matrices = 7 * 4 * (256 + 1) + 4 * (1 + 1 + 1 + 1 + 1 + 1 + 1)  # levels and offset; outer scales, one per matrix
    assert held["nf4"]["base"] == weights // 2 + weights // 64 + matrices + rest
    adapters = 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    for each in held.values():
        assert each["params"] == each["reference"] == each["policy"] == adapters
        assert each["optimizer"] == pytest.approx(2 * adapters, abs=64)


def test_rollout_memory_depends_on_rollout_batch_size():
    """Decoding two of eight groups at a time takes a quarter of the memory for keys and values."""
    found = []
    for at_once in (None, 2 * 8):
        config = config_of(max_completion_length=64, gradient_accumulation_steps=8, rollout_batch_size=at_once)
        run = abstract_run(config)
        size = run.lowered()["rollout"].compile().memory_analysis().argument_size_in_bytes
        found.append(run.added("rollout", ProgramCost(size, 0, 0, 0.0, 0.0)))
    assert found[1] < 0.3 * found[0]


@pytest.mark.quick
@pytest.mark.parametrize(("fields", "settings", "said"), [
    ({"quantize": "nf4"}, {}, "quantize='nf4' requires adapters; set lora to a rank"),
    ({"lora": 0}, {}, "rank must be at least 1; got 0"),
    ({"lora": 2, "quantize": "nf4"}, {}, "requires rows with a multiple of 64 weights, but .* have 32"),
    ({"model": GPT_OSS, "lora": 2, "quantize": "int8"}, {}, "not supported for layers_0/mlp/experts/gate_proj"),
    ({"prompt_length": None}, {}, "prompt_length must be a positive integer, .*; got None"),
])  # fmt: skip
def test_invalid_plans_are_refused_before_compilation(monkeypatch, fields, settings, said):
    monkeypatch.setattr("grpo_jax.planning.compile_program", lambda *_: pytest.fail("compiled"))
    fields = {"model": MODEL, "prompt_length": 8} | fields
    with pytest.raises(ValueError, match=said):
        plan(config=config_of(**settings), **fields)


@pytest.mark.quick
def test_unavailable_devices_are_refused(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ValueError, match=r"needs 16 devices, but this machine has 8; set device to plan for"):
        plan(MODEL, config_of(mesh={"fsdp": 16}, per_device_train_batch_size=8), prompt_length=8)
    with pytest.raises(ValueError, match=r"config.mesh = .* needs 8 devices; got device = 'v5e-4'"):
        plan(MODEL, config_of(mesh={"fsdp": 8}), prompt_length=8, device="v5e-4")
    monkeypatch.setattr(Target, "missing", "libtpu")
    with pytest.raises(ValueError, match="device = 'v5e': the compiler is not installed; run pip install libtpu"):
        plan(MODEL, config_of(), prompt_length=8, device="v5e")


def test_separate_process_returns_the_same_plan(monkeypatch):
    """A plan computed in a separate process, as for a target device, equals the plan computed in this process."""
    monkeypatch.setattr(Target, "missing", None)
    monkeypatch.setattr(Target, "devices", lambda self: jax.devices()[:1])
    answered = lambda *_, input, **__: subprocess.CompletedProcess([], 0, "a log\n" + answer(input), "")
    monkeypatch.setattr(subprocess, "run", answered)
    config, model = config_of(distillation_coef=0.5), vision_config("gemma3")
    found = plan(model, config, prompt_length=8, device="H100", donate=True)
    assert (found.device, found.memory) == ("H100", 80e9)
    notes = "the teacher's params and forward passes; for prompts with images, the vision tower and the image features"
    assert str(found).startswith(f"not included: {notes}\n")
    here = plan(model, config, prompt_length=8, memory=80e9, donate=True)
    timeless = lambda plan: {phase: cost._replace(seconds=0.0) for phase, cost in plan.programs.items()}
    assert timeless(found) == timeless(here)
    assert dataclasses.replace(found, device=here.device, programs=here.programs) == here
