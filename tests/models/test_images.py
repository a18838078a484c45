"""Prompts with images: token ids, positions, features and logits compared with transformers and PyTorch."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vision import FAMILIES, random_images, write_vision_model

from grpo_jax.hub.huggingface import from_pretrained
from grpo_jax.hub.vision import load_processor
from grpo_jax.models.scoring import completion_hidden_states, unembed_of
from grpo_jax.run.images import with_encoder, with_tower
from grpo_jax.text.prompts import encode_prompts

SIZES = [(28, 14), (42, 56), (70, 28), (41, 33)]  # heights and widths; Qwen's windows have 28 x 28 pixels
IMAGES_OF = [[0, 1], [], [2], [3]]  # prompts with two, no, one and one images
TYPES = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
T = 5


def encoded(policy):
    """Return the policy without the image token, the encoded rows, and their prompts with features."""
    pictures, text = random_images(SIZES), {"type": "text", "text": "what?"}
    contents = [[*({"type": "image"} for _ in chosen), text] for chosen in IMAGES_OF]
    rows = [
        {"prompt": [{"role": "user", "content": content}], "images": [pictures[i] for i in chosen]}
        for content, chosen in zip(contents, IMAGES_OF, strict=True)
    ]
    data = {"": encode_prompts(rows, policy.tokenizer, processor=load_processor(policy))}
    policy = with_tower(policy, data, freeze=True)
    data = with_encoder(policy, data)[""]
    return policy, data, data.prompts(range(len(rows)), length=max(map(len, data.token_ids)) + 2)


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
    """Logits equal transformers': one tile per image, split images, and images in one or several windows."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import transformers

    directory = write_vision_model(tmp_path / family, family)
    policy, data, prompts = encoded(from_pretrained(directory))
    model = getattr(transformers, policy.config["architectures"][0]).from_pretrained(directory).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    outputs = [dict(processor(picture, return_tensors="np")) for picture in random_images(SIZES)]
    completions = np.random.default_rng(6).integers(20, 90, (len(IMAGES_OF), 2, T))
    states, _ = completion_hidden_states(policy.model, policy.params, prompts, jnp.asarray(completions))
    ours = np.asarray(unembed_of(policy.model)(policy.params, states))
    token = policy.model.config.image_token_id
    assert (ours[..., token] < -1e29).all()
    for i, (row, chosen) in enumerate(zip(data.token_ids, IMAGES_OF, strict=True)):
        for g in range(2):
            ids = torch.tensor([[*row, *completions[i, g].tolist()]])
            more = {key: torch.tensor(x) for key, x in model_inputs(family, outputs, chosen).items()}
            if chosen and family in TYPES:
                more[TYPES[family]] = (ids == token).int()
            with torch.no_grad():
                theirs = model(input_ids=ids, **more).logits[0, len(row) - 1 : -1].numpy()
            theirs[:, token] = ours[i, g, :, token]
            np.testing.assert_allclose(ours[i, g], theirs, atol=1e-4)
    half = encoded(from_pretrained(directory, dtype="bfloat16"))[2].images.features
    error = np.linalg.norm(half - prompts.images.features) / np.linalg.norm(prompts.images.features)
    assert 1e-4 < error < 0.03
