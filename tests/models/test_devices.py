"""What is derived from the devices: the dtype of matrix products, memory, and the cost of programs."""

import os

import jax
import pytest

from grpo_jax.models import devices
from grpo_jax.models.devices import compile_program, compute_dtype, memory_of, platform_of

pytestmark = pytest.mark.quick


class Device:
    def __init__(self, platform, capability=None, memory=None):
        self.platform, self.memory = platform, memory
        if capability is not None:
            self.compute_capability = capability

    def memory_stats(self):
        return self.memory


H100, T4, TPU = Device("gpu", "9.0"), Device("gpu", "7.5"), Device("tpu")


def test_default_dtype_depends_on_the_given_or_default_devices():
    """The default dtype is bfloat16 on an H100 and a TPU, which have units for it, and float32 on a T4."""
    assert [compute_dtype("auto", [device]) for device in (H100, T4, TPU)] == ["bfloat16", "float32", "bfloat16"]
    assert [platform_of([device]) for device in (H100, TPU)] == [("gpu", 9.0), ("tpu", 0.0)]
    assert compute_dtype("float32", [H100]) == "float32"
    assert platform_of() == platform_of(jax.devices()) == ("cpu", 0.0)
    with jax.default_device(jax.devices()[1]):
        assert platform_of() == ("cpu", 0.0)
    with jax.default_device(TPU):
        assert compute_dtype("auto") == "bfloat16"


def test_memory_of_a_device_and_of_a_cpu(monkeypatch, tmp_path):
    assert memory_of(Device("gpu", memory={"bytes_limit": 7, "bytes_in_use": 3})) == 7
    assert memory_of(Device("tpu")) is None
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory_of(jax.devices()[0]) <= machine
    monkeypatch.setattr(devices, "MEMORY_LIMIT", tmp_path / "memory.max")
    for text, limit in (("1000\n", 1000), ("max\n", machine)):
        devices.MEMORY_LIMIT.write_text(text)
        assert memory_of(jax.devices()[0]) == limit


def test_cost_of_a_program_takes_one_compilation(monkeypatch):
    compiled, compile_ = [], jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: compiled.append(self) or compile_(self))
    costs = [compile_program(jax.jit(lambda x: x + 7.25).lower(1.0), arguments) for arguments in (3, 3, 4)]
    assert costs[0] is costs[1]
    assert len(compiled) == 2
