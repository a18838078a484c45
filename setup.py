"""What of the metadata depends on the address of the repository, which stands in pyproject.toml: links."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PICTURE = re.compile(r'<picture>.*?<img alt="([^"]*)" src="([^"]+)"></picture>', flags=re.S)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)\s]+)\)")


def description(text: str, repository: str) -> str:
    """A README for another place than the repository: links lead into it, pictures are those of its main branch.

    Without an address there is nowhere to lead: links become their text, and pictures are left out. Of a picture in
    several forms, for phones and dark pages, it has the plain one.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, label, target = link.groups()
        if target.startswith("#"):
            return link[0]
        if not repository:
            return "" if picture else label
        return f"{picture}[{label}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/main/{target})"

    return LINK.sub(absolute, PICTURE.sub(r"![\1](\2)", text))


def urls(repository: str) -> dict[str, str]:
    """The links beside the description."""
    places = {"Repository": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
    return {name: repository.rstrip("/") + place for name, place in places.items()} if repository else {}


if __name__ == "__main__":
    REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["grpo_jax"]["repository"]
    setup(
        long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), REPOSITORY),
        long_description_content_type="text/markdown",
        project_urls=urls(REPOSITORY),
    )
