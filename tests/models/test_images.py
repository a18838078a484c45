"""Prompts with images: logits compared with transformers and PyTorch."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_vision import images, tower_inputs
from tiny_vision import FAMILIES, write_vision_model

from grpo_jax.hub.huggingface import from_pretrained
from grpo_jax.hub.vision import load_tower
from grpo_jax.models.scoring import predicting_states, unembed_of
from grpo_jax.run.images import without_image_token
from grpo_jax.types import PromptImages, Prompts

SIZES = [(28, 14), (42, 56), (56, 42)]
IMAGES_OF = [[0, 1], [], [2]]  # prompts with two, no and one images
TYPES = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
T = 5


def processed(directory, pictures):
    transformers = pytest.importorskip("transformers")
    processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    return [dict(processor(picture, return_tensors="np")) for picture in pictures]


def encoded(policy, directory):
    """Return prompts with images, the outputs of transformers' image processor, and each prompt's token ids."""
    rng, token = np.random.default_rng(5), policy.model.config.image_token_id
    tower, params = load_tower(policy)
    outputs = processed(directory, images(SIZES))
    features = []
    for output in outputs:
        found = tower.apply({"params": params}, tower_inputs(tower.config, [output]))
        grid = output.get("image_grid_thw")
        count = found.shape[0] * found.shape[1] if grid is None else grid.prod() // 4
        features.append(np.asarray(found).reshape(-1, found.shape[-1])[:count])
    rows, own = [], []
    for chosen in IMAGES_OF:
        ids = list(rng.integers(20, 90, 4))
        for i in chosen:
            ids += [token] * len(features[i]) + list(rng.integers(20, 90, 2))
        rows.append(np.array(ids))
        own.append(np.concatenate([features[i] for i in chosen]) if chosen else np.zeros((0, 32), np.float32))
    p, n = max(map(len, rows)) + 2, max(map(len, own))
    tokens = np.stack([np.pad(row, (0, p - len(row))) for row in rows])
    lengths = np.array([len(row) for row in rows])
    is_image = (tokens == token) & (np.arange(p) < lengths[:, None])
    feature_index = np.where(is_image, np.cumsum(is_image, axis=1) - 1, -1)
    stacked = np.stack([np.pad(x, ((0, n - len(x)), (0, 0))) for x in own])
    return Prompts(tokens, lengths, PromptImages(stacked, feature_index)), outputs, rows


def with_positions(prompts, model, outputs, rows):
    """Add Qwen2.5-VL's positions, from transformers, shifted so that a completion continues at the prompt's length."""
    import torch

    found = np.zeros((len(rows), 3, prompts.tokens.shape[1]), np.int32)
    for i, (row, chosen) in enumerate(zip(rows, IMAGES_OF, strict=True)):
        kinds = torch.tensor(prompts.images.feature_index[i, : len(row)] >= 0).int()[None]
        grids = torch.tensor(np.concatenate([outputs[j]["image_grid_thw"] for j in chosen])) if chosen else None
        positions, _ = model.model.get_rope_index(torch.tensor(row)[None], kinds, grids)
        found[i, :, : len(row)] = positions[:, 0].numpy() + len(row) - 1 - int(positions.max())
    return prompts.replace(images=prompts.images.replace(positions=found))


def model_inputs(family, outputs, chosen):
    """Return transformers' inputs for the images at the indices `chosen`."""
    keys = [key for key in ("pixel_values", "image_grid_thw") if key in outputs[0]] if chosen else []
    found = {key: [outputs[i][key] for i in chosen] for key in keys}
    if family in ("idefics3", "smolvlm") and chosen:  # [1, tiles, 3, H, W]
        return {"pixel_values": np.concatenate(found["pixel_values"], axis=1)}
    return {key: np.concatenate(x) for key, x in found.items()}


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.quick if family == "gemma3" else ()) for family in FAMILIES]
)
def test_logits_equal_pytorch_with_two_no_and_one_images(tmp_path, family):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    directory = write_vision_model(tmp_path / family, family)
    policy = without_image_token(from_pretrained(directory))
    model = getattr(transformers, policy.config["architectures"][0]).from_pretrained(directory).eval()
    prompts, outputs, rows = encoded(policy, directory)
    if family == "qwen2_5_vl":
        prompts = with_positions(prompts, model, outputs, rows)
    completions = np.random.default_rng(6).integers(20, 90, (len(rows), 2, T))
    states, _ = predicting_states(policy.model, policy.params, prompts, jnp.asarray(completions))
    ours = np.asarray(unembed_of(policy.model)(policy.params, states))
    token = policy.model.config.image_token_id
    assert (ours[..., token] < -1e29).all()
    for i, (row, chosen) in enumerate(zip(rows, IMAGES_OF, strict=True)):
        for g in range(2):
            ids = torch.tensor(np.concatenate([row, completions[i, g]]))[None]
            more = {key: torch.tensor(x) for key, x in model_inputs(family, outputs, chosen).items()}
            if chosen and family in TYPES:
                more[TYPES[family]] = (ids == token).int()
            with torch.no_grad():
                theirs = model(input_ids=ids, **more).logits[0, len(row) - 1 : -1].numpy()
            theirs[:, token] = ours[i, g, :, token]
            np.testing.assert_allclose(ours[i, g], theirs, atol=1e-4)
