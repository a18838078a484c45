"""Targets without hardware: their names, and programs compiled for them if their compilers are installed."""

import functools
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter

import jax
import pytest

from grpo_jax.models.devices import Target, compile_program

MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {**MODEL, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 64, "num_experts_per_tok": 4}
EXPERTS |= {"moe_intermediate_size": 128, "head_dim": 64}
PYTHON = os.environ.get("GRPO_JAX_TARGETS_PYTHON", sys.executable)
"""With the compilers of TPUs and GPUs beside jax; an environment of their own, because they are large."""


@functools.cache
def has(module):
    found = subprocess.run([PYTHON, "-c", f"import importlib.util as u; print(u.find_spec('{module}'))"], **CAPTURED)
    return found.returncode == 0 and found.stdout.strip() != "None"


CAPTURED = {"capture_output": True, "text": True, "check": False}
PROGRAM = """
import json, os, sys
request = json.load(sys.stdin)
from grpo_jax.models.devices import ENVIRONMENT, Target
os.environ.update(ENVIRONMENT)
from grpo_jax import GRPOConfig
from grpo_jax.planning import programs
devices, found = Target.read(request["device"]).devices(), []
for length in request["lengths"]:
    config = GRPOConfig(max_completion_length=length, **request["config"])
    lowered = programs(request["model"], config, prompt_length=256, devices=devices)[request["phase"]]
    program = lowered.compile()
    found.append([program.memory_analysis().temp_size_in_bytes, program.as_text()])
print(json.dumps(found))
"""


def compiled(device, lengths, phase="update", model=MODEL, lines=None, **config):
    """Compile a phase for each T. Return (bytes of temporaries, collectives, kernels, matches of the regex `lines`)."""
    module = "libtpu" if device.startswith("v") else "jax_cuda12_plugin"
    if not has(module):
        pytest.skip(f"{module} is not installed for {PYTHON}")
    request = {"model": model, "config": config, "device": device, "lengths": lengths, "phase": phase}
    # Less effort halves a TPU's compile time. It changes schedules, but not what these tests count.
    environment = os.environ | {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-0.5"} if module == "libtpu" else None
    done = subprocess.run([PYTHON, "-c", PROGRAM], input=json.dumps(request), env=environment, **CAPTURED)
    assert done.returncode == 0, done.stderr[-3000:]
    found = []
    for temporaries, text in json.loads(done.stdout.splitlines()[-1]):
        kernels = Counter(re.findall(r'custom_call_target="([^"]*)"', text))
        found.append((temporaries, collectives(text), kernels, lines and re.findall(lines, text)))
    return found


def collectives(text):
    """Return the total size in bytes of the results for each kind of collective. Loops count as one iteration."""
    total = Counter()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for shapes, kind in re.findall(rf"= (\(?[^=]*?\)?) ({kinds})(?:-start)?\(", text):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            total[kind] += {"bf16": 2, "pred": 1}.get(dtype, 4) * math.prod(int(n or 1) for n in dims.split(","))
    return total


@pytest.mark.parametrize(("device", "lengths"), [("v5e", [1024, 2048]), ("H100", [2048, 4096])])
def test_update_memory_is_linear_in_the_completion_length_because_attention_is_fused(device, lengths):
    """An update's memory doubles with twice the tokens; materialized attention scores would be four times as large.

    On a TPU, packed sequences use a forward and two backward splash attention kernels. Only prompts loop over tiles.
    """
    group = {"num_generations": 4, "per_device_train_batch_size": 4}
    lines = r'%(splash_mha_[a-z]+)\S* =|( while\(.*op_name="(?:(?!prefill).)*_attend/.*)'
    (short, _, kernels, found), *longer = compiled(device, lengths, lines=lines, **group)
    assert all(1.5 * short < long < 2.3 * short for long, *_ in longer)
    if device == "H100":
        fused = sum(count for kernel, count in kernels.items() if kernel.startswith("mosaic_gpu"))
        assert fused > 2 * MODEL["num_hidden_layers"], "attention must use the fused kernel"
    else:
        assert kernels["tpu_custom_call"] == 4, "the forward kernel is also recomputed"
        assert {kernel for kernel, _ in found if kernel} == {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}
        assert not any(loop for _, loop in found)


def test_experts_on_a_gpu_are_kernels_over_their_own_rows():
    """With 4 of 64 experts per row, kernels compute only those 4; XLA's own program would hold 16 times the rows."""
    group = {"num_generations": 4, "per_device_train_batch_size": 4}
    ((temporaries, _, kernels, _),) = compiled("H100", [1024], model=EXPERTS, **group)
    ((of_dense, _, attention, _),) = compiled("H100", [1024], **group)
    of_each = 3 + 3 + 6  # forward, recomputed, and two gradients for each product
    triton = "__gpu$xla.gpu.triton"
    assert kernels[triton] - attention.get(triton, 0) >= of_each * MODEL["num_hidden_layers"]
    rows_of_all = 2 * 64 * 4 * (4 * 1024 + 256) * 256  # bytes
    assert temporaries - of_dense < rows_of_all / 4


def test_float32_kernels_fit_a_gpu():
    """For float32 and heads of 128, the tiles of the attention and expert kernels fit into a GPU's shared memory."""
    ((_, _, kernels, _),) = compiled(
        "A100", [512], model={**EXPERTS, "head_dim": 128, "num_hidden_layers": 1}, compute_dtype="float32"
    )
    assert kernels["__gpu$xla.gpu.triton"] > 0


@pytest.mark.parametrize(("device", "mesh"), [("v5e-4", {"fsdp": 4}), ("H100-4", {"data": 2, "fsdp": 2})])
def test_update_on_a_mesh_gathers_weights_but_no_activations(device, mesh):
    """More tokens do not increase what an update on a mesh gathers, except the embedding, which a TPU may gather."""
    (_, short, _, _), (_, long, _, _) = compiled(device, [512, 1024], mesh=mesh)
    assert short["all-gather"] > 0
    embedding, activations = 4 * 4096 * 256, 2 * 8 * 1024 * 256  # bytes: float32; bfloat16, from each other device
    assert long["all-gather"] < short["all-gather"] + 2 * embedding < short["all-gather"] + 4 * activations


@pytest.mark.parametrize(("phase", "length", "width"), [("reference", 256, 8192), ("update", 2048, 4096)])
def test_memory_on_a_mesh_holds_one_layer_at_a_time(phase, length, width):
    """More layers need no more memory for gathered weights, or for activations that weights' gradients wait for."""
    group = {"num_generations": 4, "per_device_train_batch_size": 4, "beta": 0.1, "gradient_checkpointing": True}
    model = {**MODEL, "hidden_size": 1024, "intermediate_size": width}
    few, many = (
        compiled("H100-4", [length], phase, {**model, "num_hidden_layers": layers}, mesh={"fsdp": 4}, **group)[0][0]
        for layers in (2, 8)
    )
    weights, activations = 3 * 2 * 1024 * width, 4 * 2 * 4 * length * width  # bytes per layer, in bfloat16
    assert many - few < (2 * weights if phase == "reference" else activations)


def test_experts_on_a_mesh_are_gathered_in_the_compute_dtype():
    """Float32 expert weights are rounded before they are gathered: half the bytes to send and to hold."""
    gathers = r"(\w+)\[256,64,128\]\S* all-gather"  # of gate and up kernels: [64, 256, 128], sharded over 4 devices
    ((_, _, _, dtypes),) = compiled("H100-4", [64], model=EXPERTS, lines=gathers, mesh={"fsdp": 4})
    assert dtypes
    assert set(dtypes) == {"bf16"}


@pytest.mark.parametrize("completions", [8, 64], ids=["materialized", "kernel"])
def test_decode_on_a_gpu_does_not_copy_its_cache(completions):
    """A decode writes its cache in place: the copies in a burst do not depend on the size of the cache."""
    lengths = [1024, 4096]
    (short, _, _, few), (long, _, _, many) = compiled(
        "H100", lengths, phase="rollout", lines=r" copy\(", per_device_train_batch_size=completions
    )
    assert len(few) == len(many)
    of_a_layer = 2 * completions * 2 * 64 * 3072  # additional bytes in the longer cache, for keys or values
    assert long - short < of_a_layer / 2


@pytest.mark.parametrize(("device", "mesh"), [("H100", None), ("H100-2", {"fsdp": 2}), ("H100-2", {"tensor": 2})])
def test_decode_step_with_many_completions_on_a_gpu_is_a_kernel_in_each_layer(device, mesh):
    """With 128 completions per device, each layer's decode step is a kernel, and devices do not exchange the cache."""
    completions = 128 if mesh is None else 256
    config = {"per_device_train_batch_size": completions // (1 if mesh is None else mesh.get("fsdp", 1)), "mesh": mesh}
    ((_, exchanged, kernels, _),) = compiled("H100" if mesh is None else device, [256], phase="rollout", **config)
    assert kernels["__gpu$xla.gpu.triton"] == MODEL["num_hidden_layers"]
    of_a_layer = 2 * completions // 2 * 64 * 256  # bytes of keys
    assert max(exchanged.values(), default=0) < of_a_layer


@pytest.mark.quick
def test_targets_are_parsed_from_names():
    assert [Target.read(name) for name in ("H100-8", "v6e-4")] == [Target("H100", 8), Target("v6e", 4)]
    assert Target.read("v5e-16").memory == 16e9
    for name in ("H101", "v5e-3", "H100-9", "v5p-16", "", "v5e-"):
        with pytest.raises(ValueError, match=f"one of H100, A100, T4, v4, v5e, v5p, v6e, .*; got '{name}'"):
            Target.read(name)


@pytest.mark.quick
@pytest.mark.parametrize(("message", "arguments", "temporaries"), [
    ("RESOURCE_EXHAUSTED: Used 33.50G of 15.75G hbm. Exceeded hbm capacity by 17.75G.", 0, 33.5),
    ("RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (29.25G) exceeds", 2.25, 27.0),
    ("INTERNAL: HLO temporaries (29.25G)", None, None),
])  # fmt: skip
def test_memory_needed_by_a_refused_program_is_parsed(message, arguments, temporaries):
    class Lowered:
        def as_text(self):
            return message

        def compile(self):
            raise jax.errors.JaxRuntimeError(message)

    if arguments is None:
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
            compile_program(Lowered())
        return
    found = compile_program(Lowered(), int(2.25 * 2**30))
    assert (found.arguments, found.temporaries) == (arguments * 2**30, temporaries * 2**30)
