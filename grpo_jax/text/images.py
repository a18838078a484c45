"""Images in dataset rows: their columns, their parts in messages, and their placeholders in rendered text.

```
{"prompt": [user("Which digit?")], "image": "5.png"}   the image is put before the text of the first user message
{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit?"}]}], "images": […]}
{"prompt": [{"role": "user", "content": [{"type": "image", "image": "5.png"}, …]}]}
{"prompt": "<image>Which digit?", "images": ["5.png"]}   a string contains the model's placeholder once per image
```
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from grpo_jax.messages import import_extra, one_line, show
from grpo_jax.types import Json, Messages, Row, Tokenizer

if TYPE_CHECKING:
    from PIL import Image

    from grpo_jax.hub.vision import ImageProcessor, Size
    from grpo_jax.policy import Policy

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Json | Image.Image"
"""A path, the bytes of an image file, a dict with `bytes` or `path` as in `datasets`, or a PIL image."""

IMAGE_COLUMNS = ("image", "images")
"""Names of the columns for a single image and for a list of images. None or an empty list means no images."""

_SOURCES = "the path or bytes of an image file, a dict with 'bytes' or 'path', or a PIL image"


def image_column_fault(row: Json) -> str:
    """Return the reason why a row's image columns are invalid, or "" if they are valid."""
    if row.get("image") is not None and row.get("images"):
        return "has images in both 'image' and 'images'; remove one of the columns"
    if not isinstance(row.get("images"), list | tuple | None):
        return f"has {show(row['images'])} in column 'images'; use a list of images, or rename the column to 'image'"
    return ""


def _column_images(row: Json) -> list[ImageSource]:
    return [*([] if row.get("image") is None else [row["image"]]), *(row.get("images") or ())]


def image_parts(messages: object) -> list[Json]:
    """Return the image parts of messages. The list is empty if the value is not a list of messages."""
    messages = messages if isinstance(messages, list | tuple) else ()
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


def has_images(row: Json) -> bool:
    """Return whether a row has images in its columns or messages."""
    return bool(_column_images(row)) or any(image_parts(row.get(name)) for name in ("prompt", "completion", "messages"))


def load_processor_if_needed(policy: Policy, rows: Sequence[Row], argument: str = "dataset") -> ImageProcessor | None:
    """Load the policy's image processor if any row has images, otherwise return None.

    Raises ValueError, naming the first such row, if the policy does not support images or lacks processor files.
    """
    first = next((i for i, row in enumerate(rows) if has_images(row)), None)
    if first is None:
        return None
    from grpo_jax.hub.vision import load_processor

    try:
        return load_processor(policy)
    except ValueError as error:
        raise ValueError(f"{argument} row {first} has images; remove them, or fix this error: {error}") from error


def images_of(row: Json, prompt: str | Messages) -> list[ImageSource]:
    """Return a row's images in the order of the prompt's image parts. Columns supply the images that parts omit."""
    from_columns, from_parts = iter(_column_images(row)), [part.get("image") for part in image_parts(prompt)]
    return [*(next(from_columns) if source is None else source for source in from_parts), *from_columns]


class PromptWithImages(NamedTuple):
    """A prompt whose image parts are `{"type": "image"}`, with its images and their sizes in the order of the parts."""

    prompt: Any
    images: list[ImageSource]
    sizes: list[Size]


def assign_images(row: Json, prompt: str | Messages, processor: ImageProcessor | None, where: str) -> PromptWithImages:
    """Assign a row's images to its prompt, and read their sizes.

    Images in columns are assigned to the parts without an image. If there are no image parts, one per image is added
    before the text of the first user message, as in TRL. Raises ValueError with a message that starts with `where` if
    the numbers of images and parts differ, an image cannot be read, or the row has images and `processor` is None.
    """
    images = column_images = _column_images(row)
    if processor is None:
        if has_images(row):
            raise ValueError(f"{where} has images, but processor is None; use load_processor_if_needed(policy, rows)")
        return PromptWithImages(_without_images(prompt), [], [])
    if not isinstance(prompt, str):
        prompt = [dict(message) for message in prompt]
        first = next((message for message in prompt if message["role"] == "user"), None)
        if column_images and first is not None and not image_parts(prompt):
            text = first["content"]
            text = [{"type": "text", "text": text}] if isinstance(text, str) else text
            first["content"] = [*({"type": "image"} for _ in column_images), *text]
        empty = [part.get("image") for part in image_parts(prompt)].count(None)
        if empty != len(column_images):
            raise ValueError(
                f"{where}: the number of images in columns ({len(column_images)}) must equal the number of image parts"
                f' without an image ({empty}); use one part {{"type": "image"}} per image in columns, in a user message'
            )
        images = images_of(row, prompt)
    sizes = []
    for index, source in enumerate(images):
        column = IMAGE_COLUMNS[row.get("image") is None] if any(source is x for x in column_images) else "prompt"
        sizes.append(_size(source, f"{where}: image {index} ({show(source)} in {column!r})"))
    return PromptWithImages(_without_images(prompt), images, sizes)


def _without_images(prompt: str | Messages) -> str | Messages:
    """Apply `_strip_image` to a prompt's parts, since templates may render any part with a key "image" as an image."""
    if isinstance(prompt, str):
        return prompt
    contents = [[*map(_strip_image, x)] if isinstance(x := message["content"], list) else x for message in prompt]
    return [{**message, "content": content} for message, content in zip(prompt, contents, strict=True)]


def _strip_image(part: object) -> object:
    """Copy a part without its None values, which Parquet adds for missing keys. An image part keeps only `type`."""
    if not isinstance(part, Mapping):
        return part
    return {name: x for name, x in part.items() if x is not None and (part.get("type") != "image" or name == "type")}


def encode_texts(
    texts: Sequence[str],
    sizes: Sequence[Sequence[Size]],
    tokenizer: Tokenizer,
    processor: ImageProcessor | None,
    where: Sequence[str],
    *,
    add_special_tokens: bool,
) -> list[list[int]]:
    """Tokenize texts after replacing the placeholder of each image with the processor's text for the image's size.

    Raises ValueError if a text does not have one placeholder per image or contains other image tokens, or if the
    processor rejects an image's size.
    """

    def encode(strings: Sequence[str]) -> list[list[int]]:
        return tokenizer(text=strings, add_special_tokens=add_special_tokens)["input_ids"] if strings else []

    if processor is None:
        return encode(texts)
    expanded = list[str]()
    for text, text_sizes, name in zip(texts, sizes, where, strict=True):
        start, *rest = text.split(processor.placeholder)
        if len(rest) != len(text_sizes):
            raise ValueError(
                f"{name}: the number of images ({len(text_sizes)}) must equal the number of placeholders"
                f" {processor.placeholder!r} in the text ({len(rest)}); write one per image if the prompt is a string."
                " In messages, use parts of type 'image', a template that renders them, and no placeholders in the text"
            )
        try:
            images = [processor.expand(height, width) for height, width in text_sizes]
        except ValueError as error:  # an aspect ratio that the processor rejects
            raise ValueError(f"{name} has an image that the processor rejects: {error}; crop or resize it") from error
        expanded.append(start + "".join(image + part for image, part in zip(images, rest, strict=True)))
    token_ids = encode(expanded)
    for ids, text_sizes, name in zip(token_ids, sizes, where, strict=True):
        count, required = list(ids).count(processor.image_token_id), sum(processor.num_tokens(*x) for x in text_sizes)
        if count != required:
            raise ValueError(
                f"the number of image tokens ({processor.image_token!r}) in {name} is {count}, but its images require"
                f" {required}; remove additional tokens from the text, or use the checkpoint's tokenizer"
            )
    return token_ids


def _size(source: ImageSource, label: str) -> Size:
    """Return an image's height and width in pixels. Raises ValueError if it cannot be read."""
    try:
        image = open_image(source)
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise ValueError(f"{label} cannot be read ({one_line(error)}); use {_SOURCES}") from error
    return image.height, image.width


def _unwrap(source: ImageSource) -> Any:
    """Return the path, bytes or PIL image in a source."""
    if isinstance(source, Mapping):
        return source["path"] if source.get("bytes") is None else source["bytes"]
    return source


def image_bytes(source: ImageSource) -> bytes:
    """Return the content of an image's file, or the size and the RGB pixels of a PIL image."""
    file = _unwrap(source)
    if isinstance(file, str | os.PathLike):
        return Path(file).read_bytes()
    return file if isinstance(file, bytes) else f"{file.size}".encode() + open_image(file).tobytes()


def open_image(source: ImageSource) -> Image.Image:
    """Decode an image as RGB. The EXIF orientation of files is applied, and transparency is blended with white."""
    pillow, image = import_extra("PIL.Image", "pillow"), _unwrap(source)
    if isinstance(image, str | bytes | os.PathLike):
        with pillow.open(io.BytesIO(image) if isinstance(image, bytes) else image) as file:
            image = import_extra("PIL.ImageOps", "pillow").exif_transpose(file)
    if image.mode == "I;16":  # Pillow would replace all values above 255 with 255
        image = image.point(lambda value: value / 256).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = pillow.new("RGBA", image.size, "white")
    return pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def thumbnail(source: ImageSource, size: int = 96) -> bytes:
    """Encode an image as JPEG with at most `size` pixels per side."""
    image, file = open_image(source), io.BytesIO()
    image.thumbnail((size, size))
    image.save(file, "JPEG")
    return file.getvalue()


def decode_images(value: object) -> object:
    """Convert dicts with `bytes` or `path`, alone or in lists, to PIL images. Other values are returned unchanged."""
    if isinstance(value, list | tuple):
        return [decode_images(item) for item in value]
    return open_image(value) if isinstance(value, Mapping) else value
