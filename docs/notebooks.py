"""Execute notebooks and store their outputs: `python docs/notebooks.py NAME ...`.

Pictures are stored with a palette of 128 colors. A translation (NAME_zh, such as `quickstart_zh`) keeps its text and
receives the code and outputs from the original, cell by cell.
"""

import argparse
import base64
import io
import json
from pathlib import Path

NOTEBOOKS = Path(__file__).parent.parent / "experiments" / "notebooks"


def in_few_colors(picture):
    """Re-encode a base64 PNG with a palette of 128 colors, which takes a third of the bytes."""
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        out = io.BytesIO()
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def in_one_text(outputs, directory):
    """Join the lines that rich prints, each an output with HTML, to plain text with paths relative to `directory`."""
    from nbformat.v4 import new_output

    joined = []
    for output in outputs:
        if "<pre" in output.get("data", {}).get("text/html", ""):
            text = output["data"]["text/plain"].replace(f"{directory}/", "").replace(str(Path.home()), "~")
            output = new_output("stream", text=text)
        if joined and output["output_type"] == joined[-1]["output_type"] == "stream":
            joined[-1]["text"] += output["text"]
        else:
            joined.append(output)
    return joined


def executed(notebook, directory):
    """Run a notebook in a directory and return it with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    made = nbformat.reads(json.dumps(notebook), as_version=4)
    NotebookClient(made, timeout=None, resources={"metadata": {"path": str(directory)}}).execute()
    made.metadata = notebook["metadata"]  # nbclient adds this machine's Python version
    for cell in made.cells:
        cell.metadata = {}
        if cell.cell_type == "code":  # drop warnings, which depend on the installed packages
            cell.outputs = in_one_text((one for one in cell.outputs if one.get("name") != "stderr"), directory)
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = in_few_colors(output["data"]["image/png"])
    return json.loads(nbformat.writes(made))


def with_code_of(translation, original):
    """Return a translation with the original's code and outputs."""
    pairs = zip(translation["cells"], original["cells"], strict=True)
    cells = [theirs if theirs["cell_type"] == "code" else own for own, theirs in pairs]
    return original | {"cells": cells}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="notebooks to run, in the working directory")
    for name in parser.parse_args().names:
        path = NOTEBOOKS / f"{name}.ipynb"
        notebooks = {path: executed(json.loads(path.read_text(encoding="utf-8")), Path.cwd())}
        translation = NOTEBOOKS / f"{name}_zh.ipynb"
        if translation.exists():
            old = json.loads(translation.read_text(encoding="utf-8"))
            notebooks[translation] = with_code_of(old, notebooks[path])
        for where, notebook in notebooks.items():
            text = json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True)
            where.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
