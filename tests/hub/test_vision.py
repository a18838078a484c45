"""Image encoders compared with transformers and PyTorch on tiny random checkpoints."""

import jax
import numpy as np
import pytest
from tiny_vision import FAMILIES, write_vision_model

from grpo_jax.hub.huggingface import from_pretrained
from grpo_jax.hub.vision import load_tower
from grpo_jax.models.qwen_vision import window_inputs

SIZES = [(28, 14), (42, 56), (70, 28), (41, 33)]  # heights and widths; the window is 28 x 28 pixels


def images(sizes=SIZES):
    from PIL import Image

    rng = np.random.default_rng(3)
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def processed(directory):
    """Return what transformers' image processor returns for each image."""
    transformers = pytest.importorskip("transformers")
    processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    return [dict(processor(image, return_tensors="np")) for image in images()]


def tower_inputs(config, outputs):
    """Convert the outputs of transformers' image processor for some images to inputs of the tower."""
    if hasattr(config, "window"):
        each = [window_inputs(o["pixel_values"], tuple(o["image_grid_thw"][0, 1:]), config) for o in outputs]
        windows = max(one["patches"].shape[1] for one in each)
        squares = windows * config.window**2

        def padded(x, name):
            rest = squares - x.shape[1] if name == "order" else windows - x.shape[1]
            return np.pad(x, [(0, 0), (0, rest), *[(0, 0)] * (x.ndim - 2)])

        return {name: np.concatenate([padded(one[name], name) for one in each]) for name in each[0]}
    pixels = [o["pixel_values"].reshape(-1, 3, 28, 28).transpose(0, 2, 3, 1) for o in outputs]
    return {"pixels": np.concatenate(pixels)}


@pytest.mark.parametrize("family", FAMILIES)
def test_features_equal_pytorch(tmp_path, family):
    """Features equal transformers', for one tile per image, split images, and images with one or several windows."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    directory = write_vision_model(tmp_path / family, family)
    policy = from_pretrained(directory)
    tower, params = load_tower(policy)
    outputs = processed(directory)
    features = jax.jit(tower.apply)({"params": params}, tower_inputs(tower.config, outputs))
    model = getattr(transformers, policy.config["architectures"][0]).from_pretrained(directory).eval()
    with torch.no_grad():
        theirs = []
        for output in outputs:
            named = {k: torch.tensor(v) for k, v in output.items() if k in ("pixel_values", "image_grid_thw")}
            found = model.model.get_image_features(**named).pooler_output
            theirs += [found] if family == "gemma3" else found
    theirs = [x.numpy().reshape(-1, x.shape[-1]) for x in theirs]
    if family == "qwen2_5_vl":
        assert len({len(x) for x in theirs}) == 4
        pairs = list(zip([x[: len(y)] for x, y in zip(features, theirs, strict=True)], theirs, strict=True))
    else:
        pairs = [(np.asarray(features).reshape(-1, features.shape[-1]), np.concatenate(theirs))]
    print(family, max(np.abs(a - b).max() for a, b in pairs), np.abs(theirs[0]).max(), features.shape)
    for ours, other in pairs:
        np.testing.assert_allclose(ours, other, atol=1e-5)
