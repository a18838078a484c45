"""The READMEs and the notebooks as pages of the documentation, each text in one place. A hook of MkDocs."""

import json
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "README.zh-CN.md": "zh-CN.md"}


def page_of(notebook):
    """A notebook as a page: its text, its code, and what its cells have put out."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                parts.append(f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">')
            else:
                parts.append(f"```text\n{''.join(data['text/plain'])}\n```")
    # On the site the other documents are beside the folder of the notebooks.
    return re.sub(r"\]\(\.\./\.\./docs/", "](../", "\n\n".join(parts).replace(".ipynb)", ".md)"))


def on_files(files, config):
    for path in sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb")):
        page = page_of(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
    for readme, page in PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / readme).read_text(encoding="utf-8"))
        text = re.sub(r"\]\(experiments/notebooks/(\w+)\.ipynb\)", r"](notebooks/\1.md)", text)
        for name, target in PAGES.items():
            text = text.replace(f"]({name})", f"]({target})")
        files.append(File.generated(config, page, content=text))
    return files
