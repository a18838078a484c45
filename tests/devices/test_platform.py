"""The devices choose the dtype of matrix products."""

import jax
import pytest

from grpo_jax.devices.platform import compute_dtype, platform_of


class Device:
    def __init__(self, platform, capability=None):
        self.platform = platform
        if capability is not None:
            self.compute_capability = capability


H100, T4, TPU = Device("gpu", "9.0"), Device("gpu", "7.5"), Device("tpu")


@pytest.mark.quick
def test_the_devices_choose_the_dtype():
    """An H100 and a TPU have units for bfloat16, and a T4 has not."""
    assert [compute_dtype("auto", [device]) for device in (H100, T4, TPU)] == ["bfloat16", "float32", "bfloat16"]
    assert [platform_of([device]) for device in (H100, TPU)] == [("gpu", 9.0), ("tpu", 0.0)]
    assert compute_dtype("float32", [H100]) == "float32"


@pytest.mark.quick
def test_without_devices_the_default_one_counts():
    assert platform_of() == platform_of(jax.devices()) == ("cpu", 0.0)
    with jax.default_device(jax.devices()[1]):
        assert platform_of() == ("cpu", 0.0)
    with jax.default_device(TPU):
        assert compute_dtype("auto") == "bfloat16"
