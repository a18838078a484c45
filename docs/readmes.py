"""MkDocs hook that adds pages from files outside docs/, and the list of claims.

READMEs, CONTRIBUTING, SECURITY, CHANGELOG and the notebooks become pages, and their links are rewritten to the site's
pages. The claims that docs/claims.py collects are appended to the page "How we know it is right".
"""

import json
import os
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
DOCS, NOTEBOOKS = ROOT / "docs", ROOT / "experiments" / "notebooks"
sys.path.append(str(DOCS))

from claims import as_markdown  # noqa: E402

PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
} | {f"experiments/notebooks/{path.stem}.ipynb": f"notebooks/{path.stem}.md" for path in NOTEBOOKS.glob("*.ipynb")}
"""Files outside docs/ → the pages generated from them."""


def relink(text, source, page):
    """Rewrite the links in `source` for its `page` on the site. Links to files without a page become plain text."""

    def link(found):
        mark, label, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target:
            return found[0]
        file = os.path.relpath((source.parent / path).resolve(), ROOT).replace(os.sep, "/")
        there = PAGES.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
        if there is None:
            return label
        there = os.path.relpath(there, os.path.dirname(page) or ".").replace(os.sep, "/")
        return f"{mark}[{label}]({there}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```)", text, flags=re.M | re.S)
    links = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
    return "".join(part if part.startswith("```") else links.sub(link, part) for part in parts)


def page_of(notebook):
    """Convert a notebook to Markdown: text, code and outputs."""
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
    return "\n\n".join(parts)


def on_files(files, config):
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = page_of(json.loads(text)) if source.endswith(".ipynb") else text
        files.append(File.generated(config, page, content=relink(text, ROOT / source, page)))
    return files


def on_page_markdown(markdown, page, config, files):
    source = DOCS / page.file.src_uri
    if not source.is_file():
        return markdown
    if page.file.src_uri == "how_we_know.md":
        markdown += "\n" + as_markdown()
    return relink(markdown, source, page.file.src_uri)
