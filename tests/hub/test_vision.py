"""Image encoders: conversion of their tensors, windows, and messages (test_images compares features with PyTorch)."""

import jax
import numpy as np
import pytest
from tiny_vision import FAMILIES, QWEN, tower_shapes, vision_config, write_vision_model

from grpo_jax.hub.families import read_config
from grpo_jax.hub.huggingface import from_pretrained, save_pretrained
from grpo_jax.hub.vision import image_token_id, load_tower, tower_config, tower_tensors
from grpo_jax.models.towers import window_inputs

pytestmark = pytest.mark.quick
BAD_VALUES = [
    ("gemma3", {"image_token_index": None}, "'image_token_id' or 'image_token_index' must be a token id; got None"),
    ("qwen2_5_vl", {"rope_scaling": {"mrope_section": [1, 2]}}, "must be three integers whose sum is 4; got"),
]
PREFIXES = {
    "gemma3": ({}, {"vision_tower.vision_model.": "vision_tower."}, {"multi_modal": "model.multi_modal",
        "vision_tower.vision_model.": "model.vision_tower.", "language_model.model.": "model.language_model."}),
    "qwen2_5_vl": ({}, {"visual.": "model.visual.", "model.": "model.language_model."}),
}  # fmt: skip
"""Published prefixes of tensor names, and the names in files that transformers writes instead."""


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_keep_names_shapes_and_dtypes(tmp_path, family):
    """A tower converts back to the bytes of its tensors, with published names and with those of other versions."""
    from safetensors.numpy import load_file, save_file

    published, loaded = load_file(write_vision_model(tmp_path, family) / "model.safetensors"), []
    for prefixes in PREFIXES.get(family, ({},)):
        tensors = {}
        for name, x in published.items():
            old = next((old for old in prefixes if name.startswith(old)), "")
            stored = x.astype(np.float16) if x.shape == (16,) else x
            tensors[prefixes.get(old, "") + name.removeprefix(old)] = stored
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        policy = from_pretrained(tmp_path)
        loaded.append(load_tower(policy)[1])
        found = tower_tensors(policy, loaded[-1])
        assert found.keys() == policy.extra_tensors.keys()
        assert len(found) == len(tower_shapes(family))
        for name, x in found.items():
            stored = tensors[name]
            assert (x.dtype, x.shape, x.tobytes()) == (stored.dtype, stored.shape, stored.tobytes())
        trained = jax.tree.map(lambda x: x + 1, loaded[-1])
        changed = policy.replace(extra_tensors={**policy.extra_tensors, **tower_tensors(policy, trained)})
        save_pretrained(tmp_path / "trained", changed)
        again = load_tower(from_pretrained(tmp_path / "trained"))[1]
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3), again, trained)
    jax.tree.map(lambda first, *rest: [np.testing.assert_array_equal(first, x) for x in rest], *loaded)


def test_windows_of_an_image_are_padded():
    """5 x 3 squares of 2 x 2 patches in windows of 2 x 2 squares: patches by window, and features in raster order."""
    raw = {
        **vision_config("qwen2_5_vl"),
        "vision_config": {**QWEN, "temporal_patch_size": 1, "in_chans": 1, "patch_size": 1, "window_size": 4},
    }
    config = tower_config(raw)
    assert (config.patch_dim, config.window_size, config.merge_size) == (1, 2, 2)
    rows, columns = np.indices((10, 6))
    squares = (rows // 2 * 3 + columns // 2) * 4 + rows % 2 * 2 + columns % 2  # position in the processor's order
    values = np.zeros((60, 1))
    values[squares.ravel(), 0] = 100 * rows.ravel() + columns.ravel()
    inputs = window_inputs(values, (10, 6), config)
    assert inputs["patches"].shape == (1, 6, 16, 1)
    assert inputs["patches"][0, 3, :, 0].tolist() == [404, 405, 504, 505, 0, 0, 0, 0, 604, 605, 704, 705, 0, 0, 0, 0]
    assert inputs["valid"].sum(axis=-1).tolist() == [[16, 8, 16, 8, 8, 4]]
    at = inputs["positions"] @ [100, 1]
    np.testing.assert_array_equal(at[inputs["valid"]], inputs["patches"][..., 0][inputs["valid"]])
    firsts = inputs["patches"].reshape(-1, 4)[inputs["raster_index"][0, :15], 0]
    assert firsts.tolist() == [200 * row + 2 * column for row in range(5) for column in range(3)]
    assert inputs["raster_index"][0, 15:].tolist() == [0] * 9


def test_errors_name_the_key_or_the_tensor(tmp_path):
    with pytest.raises(ValueError, match=r"^Qwen3ForCausalLM does not support images .* Gemma3ForCond"):
        image_token_id({"architectures": ["Qwen3ForCausalLM"], "image_token_id": 3})
    for family, changes, message in BAD_VALUES:
        raw = {**vision_config(family), **changes}
        with pytest.raises(ValueError, match=message):
            image_token_id(raw), tower_config(raw), read_config(raw)
    policy = from_pretrained(write_vision_model(tmp_path, "gemma3"))
    name = "multi_modal_projector.mm_soft_emb_norm.weight"
    for tensors, message in (
        ({}, rf"{name} is missing"),
        ({name: np.ones(15, np.float32)}, rf"{name} must have shape \[16\] and .*; got \[15\] and float32"),
        ({name: np.ones(16, np.int8)}, r".* and one of the dtypes F32, F16, BF16; got \[16\] and int8"),
    ):
        others = {key: x for key, x in policy.extra_tensors.items() if key != name}
        with pytest.raises(ValueError, match=f"extra_tensors does not match policy.config: {message}"):
            load_tower(policy.replace(extra_tensors=others | tensors))
    tower, params = load_tower(policy)
    with pytest.raises(AssertionError, match=r"has shape \(1, 56, 56, 3\) but expected \(1, 28, 28, 3\)"):
        tower.apply({"params": params}, {"pixels": np.zeros((1, 56, 56, 3), np.float32)})
