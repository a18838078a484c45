"""The notebooks, kept in step: `python docs/notebooks.py [--execute NAME ...]`.

From pyproject.toml's address of the repository it makes the badge that opens a notebook in Colab, and what the first
cell clones. With --execute it runs notebooks of that name and keeps their outputs, pictures in few colours. A notebook
in Chinese (`NAME_zh`) gets code and outputs of `NAME`, cell by cell: its text is its own.
"""

import argparse
import base64
import io
import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "experiments" / "notebooks"
COLAB = "https://colab.research.google.com/github"


def repository():
    """The address, from the one place where it is set."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return project["tool"]["grpo_jax"]["repository"].rstrip("/")


def addressed(notebook, name, address):
    """A notebook with the address in its code, and if that is on GitHub, with the badge that opens it in Colab."""
    _, github, owner_and_name = address.partition("https://github.com/")
    first, *lines = "".join(notebook["cells"][0]["source"]).splitlines()
    if lines and lines[1:] and lines[1].startswith("[![Colab]"):
        del lines[:2]
    if github:
        target = f"{COLAB}/{owner_and_name}/blob/main/experiments/notebooks/{name}.ipynb"
        lines[:0] = ["", f"[![Colab](https://colab.research.google.com/assets/colab-badge.svg)]({target})"]
    notebook["cells"][0]["source"] = "\n".join([first, *lines]).splitlines(keepends=True)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            code = re.sub(r'^REPOSITORY = ".*?"', f'REPOSITORY = "{address}"', "".join(cell["source"]), flags=re.M)
            cell["source"] = code.splitlines(keepends=True)
    return notebook


def in_few_colours(picture):
    """A PNG in base64, with a palette of 128 colours: a third of the bytes."""
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        out = io.BytesIO()
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def executed(notebook, directory):
    """A notebook with the outputs of running it in a directory."""
    import nbformat
    from nbclient import NotebookClient

    made = nbformat.reads(json.dumps(notebook), as_version=4)
    NotebookClient(made, timeout=None, resources={"metadata": {"path": str(directory)}}).execute()
    made.metadata = notebook["metadata"]  # without the version of Python here
    for cell in made.cells:
        cell.metadata = {}
        if cell.cell_type == "code":  # what the packages of one machine complain of is not kept
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = in_few_colours(output["data"]["image/png"])
    return json.loads(nbformat.writes(made))


def with_code_of(translation, original):
    """A translation with the code and the outputs of the original; its cells of text stay."""
    kinds = [[cell["cell_type"] for cell in notebook["cells"]] for notebook in (translation, original)]
    if kinds[0] != kinds[1]:
        raise ValueError("the translation has other cells than the original: give it one cell of text for each")
    pairs = zip(translation["cells"], original["cells"], strict=True)
    cells = [theirs if theirs["cell_type"] == "code" else own for own, theirs in pairs]
    return original | {"cells": cells}


def write(path, notebook):
    """One form, whoever wrote it last."""
    path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--execute", nargs="*", default=[], metavar="NAME", help="run these, in the working directory")
    arguments = parser.parse_args()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):  # NAME is before NAME_zh
        notebook = json.loads(path.read_text(encoding="utf-8"))
        original = NOTEBOOKS / f"{path.stem.removesuffix('_zh')}.ipynb"
        if original != path:
            notebook = with_code_of(notebook, json.loads(original.read_text(encoding="utf-8")))
        elif path.stem in arguments.execute:
            notebook = executed(notebook, Path.cwd())
        write(path, addressed(notebook, path.stem, repository()))


if __name__ == "__main__":
    main()
