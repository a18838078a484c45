"""The commands that draw: what they print, and the files that they write."""

import pytest
from cli_files import run

from grpo_jax.watch.writer import RunWriter


@pytest.fixture
def two(tmp_path):
    for name, gain in (("a", 0.1), ("b", 0.2)):
        for step in (1, 2):
            RunWriter(tmp_path / name).metrics(step, {"reward": gain * step, "entropy": 1.0})
    return [tmp_path / "a", tmp_path / "b"]


@pytest.mark.quick
def test_compare_prints_tables_and_writes_a_page_and_a_picture(two, tmp_path):
    printed = run("compare", *two, "--out", tmp_path / "both.html")
    assert [line.split("│")[1].strip() for line in printed.splitlines() if "│" in line] == ["a", "b", "a", "b"]
    assert printed.endswith(f"{tmp_path / 'both.html'}\n{tmp_path / 'both.png'}\n")
    assert "Reward against steps" in (tmp_path / "both.html").read_text(encoding="utf-8")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    run("compare", *two, "--metric", "entropy", "--out", tmp_path / "both.html")
    assert "Entropy against steps" in (tmp_path / "both.html").read_text(encoding="utf-8")


@pytest.mark.quick
def test_compare_refuses_before_it_writes(two, tmp_path):
    for arguments, message in [
        ([two[0]], "give the directories of two runs or more"),
        ([*two, "--metric", "rewards"], "did you mean reward\\?"),
        ([*two, "--out", tmp_path / "x.png"], "--out .*x.png: the page is HTML; give a name that ends in .html"),
    ]:
        with pytest.raises(SystemExit, match=f"grpo-jax compare: .*{message}"):
            run("compare", *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
