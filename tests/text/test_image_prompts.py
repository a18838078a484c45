"""Images in prompts: ids and pixels of transformers' processors, TRL's columns, and rows that are refused."""

import io
import json
import math

import chex
import numpy as np
import pytest
from PIL import Image
from test_prompts import make_tokenizer
from tiny import tiny_policy
from tiny_vision import FAMILIES, PREPROCESSOR, PROCESSOR, write_vision_model

from grpo_jax.config.sft import SFTConfig
from grpo_jax.hub.huggingface import from_pretrained
from grpo_jax.hub.vision import load_processor
from grpo_jax.models.towers import window_inputs
from grpo_jax.text.completions import reward_inputs
from grpo_jax.text.examples import encode_examples, load_examples
from grpo_jax.text.images import assign_images, image_bytes, load_processor_if_needed, open_image
from grpo_jax.text.prompts import encode_prompts, join_prompts
from grpo_jax.text.rows import load_rows

pytestmark = pytest.mark.quick
PART = {"type": "image"}
text = lambda text: {"type": "text", "text": text}


def user(*parts):
    """Return a conversation of one message whose content is a string, or a list of parts."""
    return [{"role": "user", "content": parts[0] if isinstance(parts[0], str) else list(parts)}]


def noise(height, width, seed=0):
    """Return a random image."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image, kind="PNG", **keywords):
    file = io.BytesIO()
    image.save(file, kind, **keywords)
    return file.getvalue()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function that writes a tiny checkpoint of a family, and loads it with its image processor."""
    found = {}

    def policy_of(family):
        if family not in found:
            directory = write_vision_model(tmp_path_factory.mktemp(family), family)
            policy = from_pretrained(directory)
            found[family] = directory, policy, load_processor(policy)
        return found[family]

    return policy_of


def their_processor(directory, family, monkeypatch):
    """Return transformers' processor without its video processor, which requires torchvision and num2words."""
    import transformers

    if not hasattr(transformers, "Gemma3ImageProcessorPil"):
        pytest.skip("processors of transformers before 5.4 need PyTorch and torchvision")
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    kind = getattr(transformers, PREPROCESSOR[family]["processor_class"])

    class Processor(kind):
        def get_attributes(self):
            return ["image_processor", "tokenizer"]

        def check_argument_for_proper_class(self, *arguments):
            return None

    settings = {name: x for name, x in (PROCESSOR[family] or {}).items() if name != "processor_class"}
    images = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    video = {} if family in ("gemma3", "idefics3") else {"video_processor": None}
    return Processor(images, transformers.AutoTokenizer.from_pretrained(directory), **video, **settings)


def test_ids_and_pixels_equal_those_of_transformers(family, load, monkeypatch):
    directory, policy, processor = load(family)
    theirs = their_processor(directory, family, monkeypatch)
    sizes = [(40, 61), (28, 28), (100, 30), (15, 90), (57, 56)]
    images = [noise(*size, seed) for seed, size in enumerate(sizes)]
    contents = [(text("What? "), PART, PART, text("\nWhy?")), (PART, text("Hi")), (text("1"), PART, text(" "), PART)]
    given = [images[:2], images[2:3], images[3:]]
    rows = [{"prompt": user(*x), "images": found} for x, found in zip(contents, given, strict=True)]
    rows.append({"prompt": user("No image"), "images": []})
    data = encode_prompts(rows, policy.tokenizer, processor=processor)
    assert data.images == [*map(tuple, given), ()]
    for row, ids, found in zip(rows, data.token_ids, data.images, strict=True):
        shown = theirs.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        wanted = theirs(images=list(found) or None, text=shown, add_special_tokens=False)
        assert ids == wanted["input_ids"][0]
        counts = [processor.num_tokens(*image.size[::-1]) for image in found]
        assert ids.count(processor.image_token_id) == sum(counts)
        inputs = [processor.inputs(open_image(image)) for image in found]
        if family == "qwen2_5_vl":
            grids = [tuple(map(int, grid[1:])) for grid in wanted.get("image_grid_thw", ())]
            ends = np.cumsum([math.prod(grid) for grid in grids], dtype=int)
            for x, grid, end in zip(inputs, grids, ends, strict=True):
                pixels = np.asarray(wanted["pixel_values"])[end - math.prod(grid) : end]
                chex.assert_trees_all_equal(x, window_inputs(pixels, grid, processor.tower_config))
        elif found:
            ours = np.concatenate([x["pixels"] for x in inputs])
            assert [len(x["pixels"]) * processor.tower_config.num_features for x in inputs] == counts
            pixels = np.reshape(np.asarray(wanted["pixel_values"]), (-1, 3, *ours.shape[1:3]))
            np.testing.assert_array_equal(np.moveaxis(ours, -1, 1), pixels)


def test_images_are_placed_as_in_trl(load):
    _, _, processor = load("gemma3")
    first, second = noise(3, 4), noise(5, 6)
    dialog = [{"role": "system", "content": "be brief"}, *user("a"), *user("b")]

    def place(prompt, *images):
        return assign_images({"images": list(images)}, prompt, processor, "row")

    placed = place(dialog, first, second)
    assert [message["content"] for message in placed.prompt] == ["be brief", [PART, PART, text("a")], "b"]
    assert placed.images == [first, second]
    assert placed.sizes == [(3, 4), (5, 6)]
    assert dialog[1]["content"] == "a", "the row is unchanged"
    assert place(user(text("a")), first).prompt == user(PART, text("a"))
    # Parts with their own image keep it. Parquet adds None for keys that occur only in other parts.
    parts = user({**PART, "image": second, "text": None}, {**text("a"), "image": None}, {**PART, "image": None})
    assert place(parts, first)[:2] == (user(PART, text("a"), PART), [second, first])
    assert place(user("a"))[:2] == (user("a"), [])
    only_text = user({**text("a"), "image": None})
    assert assign_images({}, only_text, None, "row").prompt == user(text("a")), "without a processor"


def test_every_kind_of_source_gives_the_same_prompt(load, tmp_path):
    """A path, bytes, dicts of `datasets`, a PIL image, and a message's own image give the same ids and pixels."""
    _, policy, processor = load("idefics3")
    image = noise(40, 61)
    path = tmp_path / "a.png"
    image.save(path)
    sources = [str(path), path, path.read_bytes(), {"bytes": path.read_bytes(), "path": "gone.png"}, image]
    sources.append({"bytes": None, "path": str(path)})
    rows = [{"prompt": user("Hi"), "image": source, "images": None} for source in sources]
    rows.append({"prompt": user({**PART, "image": str(path)}, text("Hi")), "image": None, "images": []})
    rows.append({"prompt": user("Hi"), "image": None, "images": [str(path)]})
    data = encode_prompts(load_rows(rows), policy.tokenizer, processor=processor)
    assert [ids == data.token_ids[0] for ids in data.token_ids] == [True] * len(rows)
    assert all(np.array_equal(open_image(*found), image) for found in data.images)
    string = [{"prompt": "<image>Hi", "image": path}, {"prompt": "Hi", "image": None}]
    string = encode_prompts(load_rows(string), policy.tokenizer, processor=processor)
    assert string.token_ids[0].count(processor.image_token_id) == processor.num_tokens(40, 61)
    plain = encode_prompts([{"prompt": "x"}], policy.tokenizer)
    assert join_prompts({"a": plain}).images is plain.images is None
    joined = join_prompts({"a": string, "b": plain})
    assert joined.images == [(path,), (), ()]
    assert [part.images for part in joined.by_part().values()] == [[(path,), ()], [()]]


def test_images_are_decoded_as_upright_rgb_with_white_for_transparent_pixels(load):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    photo = encoded(noise(20, 48), "JPEG", exif=exif)
    assert open_image(photo).size[::-1] == (48, 20)
    assert assign_images({"image": photo}, "<start_of_image>", load("gemma3")[2], "row").sizes == [(48, 20)]
    clear = Image.new("RGBA", (2, 2), (200, 0, 0, 0))
    assert open_image(clear).getpixel((0, 0)) == open_image(encoded(clear)).getpixel((0, 0)) == (255, 255, 255)
    gray = Image.new("L", (2, 2), 7)
    assert open_image(gray).getpixel((0, 0)) == (7, 7, 7)
    deep = Image.fromarray(np.array([[0, 300], [20000, 65535]], np.uint16))
    assert np.asarray(open_image(encoded(deep)))[..., 1].tolist() == [[0, 1], [78, 255]]
    of_palette = gray.convert("P")
    of_palette.putpalette([8] * 768)
    assert image_bytes(of_palette) != image_bytes(gray.convert("P")), "a resumed run compares the visible pixels"


def test_files_and_datasets_with_images(load, tmp_path):
    """JSONL with paths, Parquet, and the Image feature of `datasets` (also as a stream) give the same prompts."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    _, policy, processor = load("gemma3")
    paths = [str(tmp_path / f"{i}.png") for i in range(2)]
    for i, path in enumerate(paths):
        noise(20 + i, 30, i).save(path)
    columns = {"prompt": [user("Hi")] * 2, "image": paths, "answer": ["1", "2"]}
    records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    plain = datasets.Dataset.from_dict(columns)
    stored = plain.cast_column("image", datasets.Image())
    listed = plain.map(lambda row: {"images": [row["image"]]}, remove_columns="image")
    listed = listed.cast_column("images", datasets.Sequence(datasets.Image()))
    stored.to_parquet(tmp_path / "rows.parquet")
    sources = [tmp_path / "rows.jsonl", tmp_path / "rows.parquet", plain, stored, stored.to_iterable_dataset(), listed]
    sources += [
        stored.with_transform(lambda rows: rows | {"width": [x.width for x in rows["image"]]}),
        stored.select([0, 1]).select_columns(["prompt", "image"]),
    ]
    for source in sources:
        data = encode_prompts(load_rows(source), policy.tokenizer, processor=processor)
        found = [np.asarray(open_image(*images)) for images in data.images]
        assert all(np.array_equal(x, Image.open(path)) for x, path in zip(found, paths, strict=True))
    # Rows contain files. A reward function receives PIL images, one object per prompt.
    assert set(load_rows(stored)[0]["image"]) == {"bytes", "path"}
    alone = load_rows(stored.select_columns(["image"]), prompt=user("Hi"))
    for rows in (load_rows(stored), load_rows(listed), alone):
        given = reward_inputs(policy.tokenizer, rows, np.ones((2, 3, 4), int), np.ones((2, 3, 4), bool)).columns
        values = [x[0] if isinstance(x, list) else x for x in given.get("image") or given["images"]]
        assert [values.index(x) for x in values] == [0, 0, 0, 3, 3, 3]
        assert all(np.array_equal(values[3 * i], Image.open(path)) for i, path in enumerate(paths))


BROKEN = b"\x89PNG\r\n\x1a\n" + bytes(30)
FAULTS = [
    ({"image": 3}, r"row 1: image 0 \(3 in 'image'\) cannot be read .*; use the path or bytes of an image"),
    ({"images": "a.png"}, r"dataset row 1 has 'a.png' in column 'images'; use a list of images"),
    ({"images": [{"path": None}]}, r"row 1: image 0 \({'path': None} in 'images'\) cannot be read .*; use the path"),
    ({"image": b"a", "images": [b"b"]}, r"dataset row 1 has images in both 'image' and 'images'; remove one"),
    ({"prompt": user({**PART, "image": 3})}, r"row 1: image 0 \(3 in 'prompt'\) cannot be read .*; use the path"),
    ({"image": "gone.png"}, r"row 1: image 0 \('gone.png' in 'image'\) cannot be read \(FileNotFoundError.*; use"),
    ({"images": [BROKEN]}, r"row 1: image 0 \(.* in 'images'\) cannot be read \(UnidentifiedImageError"),
    ({"image": encoded(noise(90, 90), "JPEG")[:900]}, r"row 1: image 0 .* cannot be read \(OSError: .*truncated"),
    ({"prompt": user(PART, PART, text("a")), "image": noise(9, 9)}, r"row 1: .*columns \(1\) .* an image \(2\)"),
    ({"prompt": user(PART, text("a"))}, r"images in columns \(0\) must .* image parts without an image \(1\)"),
    ({"prompt": [{"role": "system", "content": "a"}], "image": noise(9, 9)}, r"\(1\) must .* \(0\).* user message"),
    ({"prompt": user("<start_of_image>?"), "image": noise(9, 9)}, r"images \(1\).*'<start_of_image>' in the .* \(2\)"),
    ({"prompt": user({"type": "video"}, text("a"))}, "row 1 has .* part of type 'video'; use parts of type 'text' and"),
    ({"prompt": user("<image_soft_token>")}, r"image tokens \(.*\) in dataset row 1 is 1, but its images require 0"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), FAULTS)
def test_invalid_images_are_refused_with_their_row(load, row, message):
    _, policy, processor = load("gemma3")
    rows = [{"prompt": user("Hi"), "image": noise(9, 9), "images": None}, {"prompt": user("Hi"), **row}]
    rows[1] = {"image": None, "images": None, **rows[1]}
    with pytest.raises(ValueError, match=message):
        encode_prompts(load_rows(rows), policy.tokenizer, processor=processor)


def test_strings_and_templates_need_a_placeholder_per_image(load):
    _, policy, processor = load("gemma3")
    for prompt, count in (("Hi", 0), ("<start_of_image>" * 2, 2)):
        with pytest.raises(ValueError, match=rf"row 0: .* \(1\) .* '<start_of_image>' in .* \({count}\); write one"):
            encode_prompts([{"prompt": prompt, "image": noise(9, 9)}], policy.tokenizer, processor=processor)
    tokenizer = make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match=r"row 0: .* \(1\) .* '<start_of_image>' in the text \(0\).*template that"):
        encode_prompts([{"prompt": user("Hi"), "image": noise(9, 9)}], tokenizer, processor=processor)


def test_models_and_checkpoints_without_images_are_refused(load, monkeypatch):
    _, policy, _ = load("gemma3")
    rows = [{"prompt": "a", "image": None}, {"prompt": "a", "image": noise(9, 9)}]
    other = {"input_ids": [1, 2], "prompt": [1, 2], "completion": 3.5, "messages": [{}]}  # unused columns of SFT rows
    assert load_processor_if_needed(tiny_policy(), [rows[0], other]) is None
    with pytest.raises(ValueError, match=r"eval row 1 has images; remove them, .*: Qwen3ForCausalLM.* Gemma3For"):
        load_processor_if_needed(tiny_policy(), rows, "eval")
    settings = json.loads(policy.files["preprocessor_config.json"])
    split = load("idefics3")[1]
    odd = json.loads(split.files["preprocessor_config.json"]) | {"size": {"longest_edge": 60}}
    with pytest.raises(ValueError, match=r"preprocessor_config.json: size.longest_edge=60 must be a multiple of .*=28"):
        load_processor_if_needed(split.replace(files={"preprocessor_config.json": json.dumps(odd).encode()}), rows)
    cropped = {"preprocessor_config.json": json.dumps({**settings, "do_pan_and_scan": True}).encode()}
    with pytest.raises(ValueError, match=r"preprocessor_config.json: do_pan_and_scan=true .* is not supported"):
        load_processor_if_needed(policy.replace(files=cropped), rows)
    with pytest.raises(ValueError, match=r"row 1 has images; .* error: policy.files has no preprocessor_config.json"):
        load_processor_if_needed(policy.replace(files={}), rows)
    with pytest.raises(ValueError, match=r"dataset row 1 has images, but processor is None"):
        encode_prompts(rows, policy.tokenizer)
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(ValueError, match=r"row 1 has images; .* error: pillow is required .*; run pip install pillow"):
        load_processor_if_needed(policy, rows)
    nested = {"image_processor": settings}
    monkeypatch.undo()
    files = {"processor_config.json": json.dumps(nested).encode()}  # as transformers 5 saves it
    assert load_processor_if_needed(policy.replace(files=files), rows).image_processor.size["height"] == 28


def test_examples_learn_only_after_their_images(load):
    """The loss of SFT examples covers the completion or the assistant's turns, which come after all images."""
    _, policy, processor = load("idefics3")
    image, answer = noise(40, 61), [{"role": "assistant", "content": "Seven"}]
    chat = {"messages": user("Hi") + answer, "image": image}
    pair = {"prompt": user("Hi"), "completion": answer, "image": image}
    string = {"prompt": "<image>Hi", "completion": "Seven", "image": image}

    def encode(row, **fields):
        rows = load_examples([row])
        return encode_examples(rows, policy.tokenizer, SFTConfig(**fields), eos_token_ids=(2,), processor=processor)

    tags = "{% generation %}{{ m['content'] }}{% endgeneration %}"
    tagged = policy.tokenizer.chat_template.replace("{{ m['content'] }}", tags)
    cases = [(chat, {"assistant_only_loss": True}), (pair, {}), (string, {})]
    cases.append((chat, {"assistant_only_loss": True, "chat_template_kwargs": {"chat_template": tagged}}))
    for row, fields in cases:
        (ids,), (mask,), ((found,),) = (lambda x: (x.token_ids, x.masks, x.images))(encode(row, **fields))
        learned = policy.tokenizer.decode([i for i, x in zip(ids, mask, strict=True) if x], skip_special_tokens=True)
        assert learned.strip().removeprefix("Assistant:") == "Seven"
        assert found is image
        assert ids.count(processor.image_token_id) == processor.num_tokens(40, 61)
    prompt = encode_prompts([{"prompt": user("Hi"), "image": image}], policy.tokenizer, processor=processor)
    (ids,) = encode(pair).token_ids
    assert ids[: len(prompt.token_ids[0])] == prompt.token_ids[0]
    later = {"messages": [*user("Hi"), *answer, *user(PART, text("?")), *answer], "image": image}
    for row, fields in ((chat, {}), (pair, {"completion_only_loss": False}), (later, {"assistant_only_loss": True})):
        with pytest.raises(ValueError, match=r"row 0: the loss must start after the last image \(token \d+\), but"):
            encode(row, **fields)
    with pytest.raises(ValueError, match="row 0 has images together with 'input_ids'"):
        load_examples([{"input_ids": [1, 2], "image": image}])
