"""What docs/readmes.py makes for the site of texts that stand elsewhere; the whole site is built by `.ci/run`."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

import grpo_jax

pytest.importorskip("mkdocs", reason="the extra docs is not installed")
ROOT = Path(__file__).parent.parent
SITE = runpy.run_path(str(ROOT / "docs" / "readmes.py"), run_name="readmes")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("source", "page", "link", "made"),
    [
        ("README.md", "index.md", "[a](docs/speed.md#x)", "[a](speed.md#x)"),
        ("README.md", "index.md", "![a](docs/sort_digits.png)", "![a](sort_digits.png)"),
        ("README.zh-CN.md", "zh/index.md", "[a](docs/runs.md)", "[a](../runs.md)"),
        ("README.zh-CN.md", "zh/index.md", "[a](README.md) [b](#c)", "[a](../index.md) [b](#c)"),
        ("docs/zh/design.md", "zh/design.md", "[a](../design.md)", "[a](../design.md)"),
        ("docs/recipes.md", "recipes.md", "[a](../README.md#several-turns)", "[a](index.md#several-turns)"),
        ("experiments/notebooks/gsm8k.ipynb", "notebooks/gsm8k.md", "[a](quickstart.ipynb)", "[a](quickstart.md)"),
        ("experiments/notebooks/gsm8k.ipynb", "notebooks/gsm8k.md", "[a](../../docs/speed.md)", "[a](../speed.md)"),
        ("README.md", "index.md", "[a](https://a.org/docs/b.md)", "[a](https://a.org/docs/b.md)"),
        ("README.md", "index.md", "```\nrun[a](docs/speed.md)\n```", "```\nrun[a](docs/speed.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(source, page, link, made):
    assert SITE["relink"](link, ROOT / source, page) == made


@pytest.mark.quick
def test_what_is_not_on_the_site_is_linked_in_the_repository_or_is_text(monkeypatch):
    relink = SITE["relink"]
    for address, made in (("", "the licence"), ("https://a.org/b", "[the licence](https://a.org/b/blob/main/LICENSE)")):
        monkeypatch.setitem(relink.__globals__, "REPOSITORY", address)
        assert relink("[the licence](LICENSE)", ROOT / "README.md", "index.md") == made


@pytest.mark.quick
@pytest.mark.parametrize(("source", "page"), [("README.md", "index.md"), ("README.zh-CN.md", "zh/index.md")])
def test_the_landing_page_begins_with_the_picture_and_says_its_version(source, page):
    text = (ROOT / source).read_text(encoding="utf-8")
    made = SITE["landing"](text, page)
    hero, _, rest = made.partition("\n</div>\n\n## ")
    up = "../" if page.startswith("zh/") else "./"
    shown = re.findall(r'(?:srcset|src)="([^"]+)"', hero)  # narrow and wide, for bright pages and for dark ones
    assert shown == [
        f"{up}sort_digits-narrow.png",
        f"{up}sort_digits.png#only-light",
        f"{up}sort_digits-narrow-dark.png",
        f"{up}sort_digits-dark.png#only-dark",
    ]
    assert all((ROOT / "docs" / name.removeprefix(up).partition("#")[0]).is_file() for name in shown)
    assert f" {VERSION}." in hero
    assert hero.count("<div") == hero.count("</div>") + 1
    assert rest == text.split("\n## ", 1)[1]


@pytest.mark.quick
def test_the_page_of_the_config_has_its_fields_by_group():
    made = SITE["settings"]()
    groups = re.findall(r"^## (.*)", made, flags=re.M)
    assert groups[:2] == ["Sampling", "Batches"]
    assert len(set(groups)) == len(groups) >= 9
    fields = re.findall(r"^### (\w+) \{ #\1 \}\n\n\*default (.*)\*: \w", made, flags=re.M)
    assert [name for name, _ in fields] == list(grpo_jax.GRPOConfig.__dataclass_fields__)
    assert ("beta", "0.0") in fields


@pytest.mark.quick
def test_every_public_name_has_a_page_of_its_own():
    made = [entry for room in sorted((ROOT / "docs" / "reference").glob("*.md")) for entry in SITE["named_in"](room)]
    pages = [page for page, _ in made]
    assert len(set(pages)) == len(pages) > len(grpo_jax.__all__)
    assert {name.rpartition(".")[2] for _, name in made} >= set(grpo_jax.__all__)
    for _, name in made:
        assert re.search(r"\w", SITE["first_line"](name)), name
