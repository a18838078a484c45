"""Images of dataset rows: their columns, their parts in messages, and the placeholders in rendered text.

```
{"prompt": [user("Which digit?")], "image": "5.png"}   the image goes before the text of the first user message
{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit?"}]}], "images": […]}
{"prompt": [{"role": "user", "content": [{"type": "image", "image": "5.png"}, …]}]}
{"prompt": "<image>Which digit?", "images": ["5.png"]}  a string has the model's placeholder once per image
```

Only the files and their sizes are read before a run. `open_image` decodes pixels whenever they are needed.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from grpo_jax.messages import import_extra, one_line, show
from grpo_jax.types import Json, Messages, Row, Tokenizer

if TYPE_CHECKING:
    from PIL import Image

    from grpo_jax.hub.processor import ImageProcessor, Size
    from grpo_jax.policy import Policy

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Json | Image.Image"
"""A path, an encoded image, a dict with `bytes` or `path` as in `datasets`, or an image from Pillow."""

IMAGE_COLUMNS = ("image", "images")
"""Columns that contain one image, and a list of images. None and empty lists stand for no images."""

_SOURCES = "use a path, bytes, a dict with 'bytes' or 'path', or a PIL image"
_ORIENTATION, _TRANSPOSED = 0x0112, (5, 6, 7, 8)  # EXIF tag, and its values that exchange height and width


def image_fault(value: object) -> str:
    """Describe why a value is not an `ImageSource`. Returns "" if it is one."""
    if isinstance(value, Mapping):
        valid = value.get("bytes") is not None or value.get("path") is not None
    else:
        valid = isinstance(value, str | bytes | os.PathLike) or _is_pillow(value)
    return "" if valid else f"{show(value)} is not an image; {_SOURCES}"


def column_fault(row: Json) -> str:
    """Describe why a row's image columns are invalid. Returns "" if they are valid."""
    if row.get("image") is not None and row.get("images"):
        return "has images in both 'image' and 'images'; remove one of the columns"
    if not isinstance(row.get("images"), list | tuple | None):
        return f"has {show(row['images'])} in column 'images'; use a list of images, or rename the column to 'image'"
    for name in IMAGE_COLUMNS:
        if fault := next(filter(None, map(image_fault, _in_column(row, name))), ""):
            return f"has an invalid image in column {name!r}: {fault}"
    return ""


def part_fault(part: object) -> str:
    """Describe why a part of a message's content is not supported. Returns "" if it is."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
    if kind not in ("text", "image"):
        return f"it has a part of type {kind!r}, which is not supported; use parts of type 'text' and 'image'"
    image = part.get("image") if kind == "image" and isinstance(part, Mapping) else None
    return f"it has an invalid image: {fault}" if image is not None and (fault := image_fault(image)) else ""


def _is_pillow(value: object) -> bool:
    return any(kind.__module__.startswith("PIL.") for kind in type(value).__mro__)


def _in_column(row: Json, name: str) -> Sequence[ImageSource]:
    value = row.get(name)
    return ((value,) if name == "image" else value) if value is not None else ()


def image_parts(messages: str | Messages | None) -> list[Json]:
    """Return the image parts of messages."""
    contents = () if isinstance(messages, str) else (message["content"] for message in messages or ())
    lists = (content for content in contents if isinstance(content, list))
    return [part for content in lists for part in content if isinstance(part, Mapping) and part.get("type") == "image"]


def has_images(row: Json) -> bool:
    """Return whether a row has images in its columns or messages."""
    columns = any(len(_in_column(row, name)) for name in IMAGE_COLUMNS)
    return columns or any(image_parts(row.get(name)) for name in ("prompt", "completion", "messages"))


def find_processor(policy: Policy, rows: Sequence[Row], argument: str = "dataset") -> ImageProcessor | None:
    """Load the policy's image processor if any row has images, otherwise return None.

    Raises ValueError with the first such row if the policy does not take images or lacks processor files.
    """
    first = next((i for i, row in enumerate(rows) if has_images(row)), None)
    if first is None:
        return None
    from grpo_jax.hub.processor import load_processor

    try:
        return load_processor(policy)
    except ValueError as error:
        raise ValueError(f"{argument} row {first} has images, but {error}") from error


def row_images(row: Json, processor: ImageProcessor | None, where: str) -> list[ImageSource]:
    """Return the images in a row's columns. Raises ValueError for a row with images if there is no processor."""
    if processor is None and has_images(row):
        raise ValueError(f"{where} has images, but no image processor was passed; use find_processor")
    return [source for name in IMAGE_COLUMNS for source in _in_column(row, name)]


def place_images(messages: Messages, given: Sequence[ImageSource], where: str) -> tuple[Messages, list[ImageSource]]:
    """Return messages whose image parts are `{"type": "image"}`, and the images in the order of these parts.

    The images in `given` fill the parts without an image. If there are no image parts, they are put before the text of
    the first user message, as in TRL. Keys with the value None, which Parquet adds to parts, are removed.
    """
    placed = [dict(message) for message in messages]
    if given and not image_parts(placed):
        first = next((message for message in placed if message["role"] == "user"), None)
        if first is None:
            raise ValueError(f"{where} has images, but no user message that they could be put into; add one")
        text = first["content"]
        text = [{"type": "text", "text": text}] if isinstance(text, str) else text
        first["content"] = [*({"type": "image"} for _ in given), *text]
    own = [part.get("image") for part in image_parts(placed)]
    if own.count(None) != len(given):
        raise ValueError(
            f"{where} has {len(given)} images in its columns, but {own.count(None)} image parts without an image; use"
            ' one part {"type": "image"} per image in the columns'
        )
    for message in placed:
        if isinstance(message["content"], list):
            message["content"] = [_bare(part) for part in message["content"]]
    free = iter(given)
    return placed, [next(free) if source is None else source for source in own]


def _bare(part: object) -> object:
    if not isinstance(part, Mapping):
        return part
    return {name: x for name, x in part.items() if x is not None and (part.get("type") != "image" or name == "type")}


def encode_texts(
    texts: Sequence[str],
    sizes: Sequence[Sequence[Size]],
    tokenizer: Tokenizer,
    processor: ImageProcessor,
    where: Sequence[str],
    *,
    add_special_tokens: bool,
) -> list[list[int]]:
    """Tokenize texts after replacing each placeholder with the text for an image of the given size.

    Raises ValueError if a text does not have one placeholder per image, or contains other image tokens.
    """
    expanded = []
    for text, found, name in zip(texts, sizes, where, strict=True):
        first, *rest = text.split(processor.placeholder)
        if len(rest) != len(found):
            raise ValueError(
                f"{name} has {len(found)} images, but its text contains the placeholder {processor.placeholder!r}"
                f" {len(rest)} times; write it once per image in a string. In messages, use parts of type 'image', a"
                " chat template that renders them, and no placeholders in the text"
            )
        expanded.append(first + "".join(processor.expand(*size) + part for size, part in zip(found, rest, strict=True)))
    token_ids: list[list[int]] = tokenizer(text=expanded, add_special_tokens=add_special_tokens)["input_ids"]
    for ids, found, name in zip(token_ids, sizes, where, strict=True):
        count, wanted = list(ids).count(processor.image_token_id), sum(processor.num_tokens(*size) for size in found)
        if count != wanted:
            raise ValueError(
                f"{name} has {count} image tokens ({processor.image_token!r}) for images with {wanted} features; remove"
                " this token from the text, and use the tokenizer of the checkpoint"
            )
    return token_ids


def image_sizes(sources: Sequence[ImageSource], row: Json, where: str) -> list[Size]:
    """Return each image's height and width in pixels. Raises ValueError if an image is too large or damaged."""
    sizes = []
    for index, source in enumerate(sources):
        columns = (name for name in IMAGE_COLUMNS if any(source is x for x in _in_column(row, name)))
        what = f"{where}: image {index} ({show(source)}, column {next(columns, 'prompt')!r})"
        sizes.append(_size(source, what))
    return sizes


def _size(source: ImageSource, what: str) -> Size:
    pillow = import_extra("PIL.Image", "pillow")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with _opened(source) as image:
                width, height = image.size
                if not _is_pillow(source):
                    image.draft(None, (1, 1))  # decode JPEG files at an eighth of their size
                image.load()
                turned = not _is_pillow(source) and image.getexif().get(_ORIENTATION) in _TRANSPOSED
    except (pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
        raise ValueError(
            f"{what} has more pixels than Pillow's limit ({pillow.MAX_IMAGE_PIXELS:,}, against decompression bombs);"
            " resize it, or increase PIL.Image.MAX_IMAGE_PIXELS"
        ) from error
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise ValueError(f"{what} cannot be read ({one_line(error)}); check the path, or replace the file") from error
    return (width, height) if turned else (height, width)


@contextlib.contextmanager
def _opened(source: ImageSource) -> Iterator[Image.Image]:
    """Open an image without decoding it. Files are closed on exit; images from Pillow are not."""
    file: Any = source
    if isinstance(source, Mapping):
        file = source["path"] if source.get("bytes") is None else source["bytes"]
    if isinstance(file, str | os.PathLike | bytes):
        with import_extra("PIL.Image", "pillow").open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            yield image
    else:
        yield file


def open_image(source: ImageSource) -> Image.Image:
    """Decode an image and convert it to RGB. Files are turned upright (EXIF), and transparent pixels become white."""
    pillow, operations = import_extra("PIL.Image", "pillow"), import_extra("PIL.ImageOps", "pillow")
    with _opened(source) as image:
        upright = image if image is source else operations.exif_transpose(image)
        if not upright.has_transparency_data:
            return upright.convert("RGB")
        white = pillow.new("RGBA", upright.size, "white")
        return pillow.alpha_composite(white, upright.convert("RGBA")).convert("RGB")


def opened_images(value: object) -> object:
    """Open the images in a column that are dicts with `bytes` or `path`, which are PIL images in `datasets`.

    Their pixels are decoded when they are first used, unless the image has to be turned upright.
    """
    if isinstance(value, list | tuple):
        return [opened_images(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    encoded = Path(value["path"]).read_bytes() if value.get("bytes") is None else value["bytes"]
    image = import_extra("PIL.Image", "pillow").open(io.BytesIO(encoded))
    return import_extra("PIL.ImageOps", "pillow").exif_transpose(image) if image.info.get("exif") else image
