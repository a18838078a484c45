"""Rows from every kind of source, for Python and the command line alike."""

import gzip
import json

import pytest

from grpo_jax.text.rows import load_rows
from grpo_jax.text.sources import is_hub_name

pytestmark = pytest.mark.quick

ROWS = [{"question": "1+1", "solution": "2"}, {"question": "2+2", "solution": "4"}]
WANTED = [
    {"question": "1+1", "answer": "2", "prompt": "Q: 1+1 {A}:"},
    {"question": "2+2", "answer": "4", "prompt": "Q: 2+2 {A}:"},
]
SHAPE = {"columns": {"answer": "solution"}, "prompt": "Q: {question} {{A}}:"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rows.csv").write_text("question,solution\n1+1,2\n2+2,4\n")
    return tmp_path


@pytest.mark.parametrize("source", ["rows.jsonl", "rows.csv", "./rows.csv", ROWS, {"path": ROWS}])
def test_all_sources_give_the_same_rows(folder, source):
    assert load_rows(source, **SHAPE) == WANTED
    described = source if isinstance(source, dict) else {"path": source}
    assert load_rows({**described, "rows": 1}, **SHAPE) == WANTED[:1]


def test_a_dataset_of_the_hub_is_asked_for_by_name_config_and_split(folder, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: asked.append((*names, split)) or ROWS)
    assert load_rows("openai/gsm8k", **SHAPE) == WANTED
    described = {"name": "openai/gsm8k", "config": "main", "split": "test", "rows": 1}
    assert load_rows(described, **SHAPE) == WANTED[:1]
    assert asked == [("openai/gsm8k", None, "train"), ("openai/gsm8k", "main", "test")]
    (folder / "openai").mkdir()
    (folder / "openai" / "gsm8k").write_text((folder / "rows.jsonl").read_text())
    assert load_rows("openai/gsm8k", **SHAPE) == WANTED
    assert len(asked) == 2, "a file of that name is read"


def test_names_of_the_hub_are_not_like_files():
    names = ["a/b", "squad", "rows.json", "a/b.csv", "/a", "../a", "a/b/c", "~/a", "C:/a", ""]
    assert [name for name in names if is_hub_name(name)] == ["a/b", "squad"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"path": "rows.jsonl", "splt": "test"}, "data.splt: no such key; data has config, name, path, rows, split"),
        ({"split": "test"}, "give it a path, or the name of a dataset on the hub, and not both"),
        ({"name": "a/b", "path": "rows.jsonl"}, "give it a path, or the name of a dataset on the hub, and not both"),
        ({}, r"data is a dict with the keys \[\]: give a list of rows"),
        ({"path": "rows.jsonl", "split": "test"}, "data.split: only a dataset on the hub has one, which is given by"),
        ({"path": "rows.jsonl", "rows": 0}, "data.rows = 0: use a whole number from 1 up"),
        (7, "data is 7: give a list of dicts, .* or the name of a dataset on the hub"),
    ],
)
def test_what_is_wrong_with_a_source_is_said(folder, source, said):
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        load_rows(source, argument="data")


# As verl's preprocessing writes its Parquet files.
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{n}+{n}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        "extra_info": {"index": n, "split": "train"},
        "images": [],
    }
    for n in (1, 2)
]


@pytest.mark.parametrize("kind", ["rows.parquet", "rows.jsonl", "me/verl", "frame"])
def test_rows_of_verl_are_read_as_they_are(folder, monkeypatch, kind):
    """Rows of verl are read as they are."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(VERL), folder / "rows.parquet")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in VERL))
    source = kind
    if kind == "me/verl":
        datasets = pytest.importorskip("datasets", reason="datasets is not installed")
        found = datasets.Dataset.from_list(VERL)
        monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: found)
    if kind == "frame":
        pandas = pytest.importorskip("pandas", reason="pandas is not installed")
        source = pandas.read_parquet(folder / "rows.parquet")
    rows = load_rows(source, columns={"answer": "reward_model.ground_truth"})
    assert rows == [{**row, "answer": row["reward_model"]["ground_truth"]} for row in VERL]
    (row, _) = load_rows(source, prompt="{extra_info.index} of {reward_model.style}")
    assert row["prompt"] == "1 of rule"
    with pytest.raises(ValueError, match=r"columns: there is no column 'reward_model.truth' in dataset row 0"):
        load_rows(source, columns={"answer": "reward_model.truth"})


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_file_in_another_encoding_is_named_with_its_line(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes().replace(b"2+2", "né".encode("latin-1")))
    line = 3 if name == "rows.csv" else 2
    with pytest.raises(ValueError, match=rf"dataset: line {line} of '{name}' is no text in UTF-8 \(byte .* 0xe9\)"):
        load_rows(name, **SHAPE)
    utf16 = "question,solution".encode("utf-16")
    for content, message in ((utf16, "text in UTF-16.*iconv -f utf-16"), (gzip.compress(b"a"), "gunzip")):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"dataset: '{name}' .*{message}"):
            load_rows(name, **SHAPE)


def test_a_row_of_a_csv_file_with_too_many_fields_is_named(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer\na,1\nb, or c,2\n")
    with pytest.raises(ValueError, match=r"line 3 of '.*' is no CSV \(3 fields where the first line names 2\)"):
        load_rows(tmp_path / "rows.csv")
