"""The site, of texts that stand elsewhere: READMEs, notebooks, a page for each name, llms.txt. A hook of MkDocs."""

import importlib
import inspect
import json
import os
import re
import tomllib
from html import unescape
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
DOCS, NOTEBOOKS = ROOT / "docs", ROOT / "experiments" / "notebooks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION, REPOSITORY = PROJECT["project"]["version"], PROJECT["tool"]["grpo_jax"]["repository"].rstrip("/")

PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
} | {f"experiments/notebooks/{path.stem}.ipynb": f"notebooks/{path.stem}.md" for path in NOTEBOOKS.glob("*.ipynb")}
"""Files outside of docs/ → their pages."""
CONFIG = "grpo_jax.GRPOConfig"
LAST = "---\nsearch:\n  boost: 0.1\n---\n\n"
"""Front matter of the page that a search names last: it has every word, and explains none."""
WORDS = {
    "index.md": ("Quick start", "#quick-start", "中文", "zh/index.md", "This is version"),
    "zh/index.md": ("快速开始", "#快速开始", "English", "../index.md", "这是版本"),
}
"""Of the landing pages: two buttons and their targets, and how the version is said."""


def relink(text, source, page):
    """A text whose links lead from its page to other pages of the site, where they led from its source to files.

    What is not on the site is linked in the repository, and where that has no address yet, it is text.
    """

    def link(found):
        mark, label, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target:
            return found[0]
        file = os.path.relpath((source.parent / path).resolve(), ROOT).replace(os.sep, "/")
        there = PAGES.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
        if there is None:
            return f"[{label}]({REPOSITORY}/blob/main/{file})" if REPOSITORY else label
        there = os.path.relpath(there, os.path.dirname(page) or ".").replace(os.sep, "/")
        return f"{mark}[{label}]({there}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```)", text, flags=re.M | re.S)
    links = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
    return "".join(part if part.startswith("```") else links.sub(link, part) for part in parts)


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
    return "\n\n".join(parts)


def pictures(label, name, page):
    """A picture of docs/ on bright and on dark pages, which a reader may choose here, and a narrow one for a phone."""
    up = os.path.relpath(".", os.path.dirname(page) or ".")
    return "".join(
        f'<picture><source media="(max-width: 600px)" srcset="{up}/{name}-narrow{dark}.png">'
        f'<img alt="{label}" src="{up}/{name}{dark}.png#only-{scheme}"></picture>\n'
        for dark, scheme in (("", "light"), ("-dark", "dark"))
    )


def landing(text, page):
    """A README as a landing page: what it is beside its picture, then the rest."""
    start, start_target, other, other_target, version = WORDS[page]
    head, rest = text.split("\n## ", 1)
    title, _, *body = head.split("\n\n")
    picture = next(part for part in body if part.startswith("<picture>"))
    words = "\n\n".join(part for part in body if part is not picture)
    buttons = f"[{start}]({start_target}){{ .md-button .md-button--primary }} [{other}]({other_target}){{ .md-button }}"
    said = f"<div markdown>\n\n{words}\n\n{buttons}\n\n{version} {VERSION}.\n\n</div>"
    (shown,) = re.findall(r'<img alt="([^"]*)" src="docs/(\w+)\.png">', picture)
    hero = f'<div class="hero" markdown>\n{said}\n\n<div>\n{pictures(*shown, page)}</div>\n\n</div>'
    return f"---\nhide: [navigation]\n---\n\n{title}\n\n{hero}\n\n## {rest}"


# The reference: what a page of a room names, one page each ---------------------------------------------------------


def named_in(room):
    """The names that a page of the reference documents, as (page, name)."""
    names = re.findall(r"^::: (\S+)$", room.read_text(encoding="utf-8"), flags=re.M)
    return [(f"reference/{room.stem}/{name.removeprefix('grpo_jax.')}.md", name) for name in names]


def first_line(name):
    """The first line of a name's docstring; of a type, that stands behind it."""
    place, _, attribute = name.rpartition(".")
    module = importlib.import_module(place)
    said = inspect.getdoc(getattr(module, attribute, None) or importlib.import_module(name))
    if not said:
        said = re.search(rf'^{attribute}\b.*\n"""(.*?)(?:"""|$)', inspect.getsource(module), flags=re.M)[1]
    return said.splitlines()[0]


def settings():
    """The fields of the config by their groups, each under a heading of its own, for a table of contents."""
    from grpo_jax.cli.keys import FIELDS, GROUPS, explain

    parts, group = [], ""
    for name in FIELDS:
        if GROUPS[name] != group:
            group = GROUPS[name]
            parts.append(f"## {group}")
        head, _, said = explain(name).partition("\n")
        default = head.removeprefix(f"{name} (").removesuffix(")")
        parts.append(f"### {name} {{ #{name} }}\n\n*{default}*: {' '.join(said.split())}")
    return "\n\n".join(parts) + "\n"


def on_config(config):
    config.site_name = f"{config.site_name} {VERSION}"  # on every page, so that each says which version it is of
    config.repo_url = REPOSITORY or None
    for section in config.nav:
        rooms = section.get("Reference", [])
        for i, entry in enumerate(rooms):
            ((title, page),) = entry.items()
            names = [{name.rpartition(".")[2]: made} for made, name in named_in(DOCS / page)]
            rooms[i] = {title: [page, *names]}
    return config


def on_files(files, config):
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = relink(page_of(json.loads(text)) if source.endswith(".ipynb") else text, ROOT / source, page)
        text = landing(text, page) if page in WORDS else LAST + text if page == "changelog.md" else text
        files.append(File.generated(config, page, content=text))
    for room in sorted(DOCS.glob("reference/*.md")):
        for page, name in named_in(room):
            # Of a module the table of contents has the members; elsewhere the space is better used.
            hide = "" if "." in name.removeprefix("grpo_jax.") else "toc"
            head = f"title: {name.rpartition('.')[2]}\ndescription: {first_line(name)!r}\nhide: [{hide}]"
            text = f"---\n{head}\n---\n\n::: {name}\n    options:\n      heading_level: 1\n"
            if name == CONFIG:
                methods = "      members: [from_dict, to_dict, sizes, total_steps]\n      inherited_members: true\n"
                methods += "      show_signature: false\n"
                text = text.replace("hide: [toc]", "hide: []") + methods + "\n" + settings()
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    source = DOCS / page.file.src_uri
    if not source.is_file():
        return markdown
    if page.file.src_uri.startswith("reference/"):
        names = {name: os.path.relpath(made, "reference") for made, name in named_in(source)}

        def line(found: re.Match[str]) -> str:
            return f"- [`{found[1].rpartition('.')[2]}`]({names[found[1]]}): {first_line(found[1])}"

        markdown = re.sub(r"^::: (\S+)$", line, markdown, flags=re.M)
        return re.sub(r"^(- .*\n)\n(?=- )", r"\1", markdown, flags=re.M)
    return relink(markdown, source, page.file.src_uri)


# llms.txt -----------------------------------------------------------------------------------------------------------

LISTED: dict[str, tuple[str, str]] = {}
"""Address of each page → its title and what it begins with."""


def on_page_content(html, page, config, files):
    paragraphs = [*re.findall(r"<p>(.*?)</p>", html, flags=re.S), ""]
    said = page.meta.get("description") or next((text for text in paragraphs if len(text) > 60), "")
    said = " ".join(unescape(re.sub(r"<[^>]+>", "", said)).split())
    LISTED[page.file.src_uri] = (page.title, page.url, re.split(r"(?<=[.。])(?= |[^\x00-\x7f])", said)[0])
    return html


def on_post_build(config):
    """For readers that are programs: every page with its address and its first sentence, in the order of the menu."""
    lines = [f"# {config.site_name}", f"> {config.site_description}"]

    def write(entries, depth):
        for entry in entries:
            title, target = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
            if isinstance(target, list):
                lines.append(f"{'#' * depth} {title}")
                write(target, min(depth + 1, 3))
            else:
                name, address, said = LISTED[target]
                lines.append(f"- [{title or name}]({config.site_url or ''}{address}): {said}")

    pages = [entry for entry in config.nav if not isinstance(next(iter(entry.values())), list)]
    lines.append("## Pages")
    write(pages, 2)
    write([entry for entry in config.nav if entry not in pages], 2)
    text = "\n".join(f"\n{line}\n" if line[0] in "#>" else line for line in lines)
    Path(config.site_dir, "llms.txt").write_text(text.lstrip().replace("\n\n\n", "\n\n") + "\n", encoding="utf-8")
