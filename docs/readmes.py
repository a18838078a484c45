"""The READMEs as pages of the documentation, so that their text stands in one place. A hook of MkDocs."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "README.zh-CN.md": "zh-CN.md"}


def on_files(files, config):
    for readme, page in PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / readme).read_text(encoding="utf-8"))
        for name, target in PAGES.items():
            text = text.replace(f"]({name})", f"]({target})")
        files.append(File.generated(config, page, content=text))
    return files
