"""Rows from files, functions and the hub's datasets; columns under other names, and prompts from templates."""

import csv
import json

import pytest

from grpo_jax.cli.data import rows_of, template_fault

ROWS = [{"question": "1+1", "solution": "2"}, {"question": "2+2", "solution": "4"}]
WANTED = [
    {"question": "1+1", "answer": "2", "prompt": "Q: 1+1 {A}:"},
    {"question": "2+2", "answer": "4", "prompt": "Q: 2+2 {A}:"},
]
HOW = {"columns": {"answer": "solution"}, "prompt": "Q: {question} {{A}}:"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rows.csv").write_text("question,solution\n1+1,2\n2+2,4\n")
    (tmp_path / "rows_of_my_own.py").write_text(f"ROWS = {ROWS!r}\ndef make():\n    yield from ROWS\n")
    return tmp_path


@pytest.mark.quick
@pytest.mark.parametrize(
    "source", ["rows.jsonl", "rows.csv", "rows_of_my_own.py:ROWS", "rows_of_my_own.py:make", {"path": "rows.jsonl"}]
)
def test_all_sources_give_the_same_rows(folder, source):
    assert rows_of(source, folder, **HOW) == WANTED
    asked = source if isinstance(source, dict) else {"path": source}
    assert rows_of({**asked, "rows": 1}, folder, **HOW) == WANTED[:1]


@pytest.mark.quick
def test_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    assert rows_of("rows.parquet", folder, **HOW) == WANTED


@pytest.mark.quick
def test_a_dataset_of_the_hub_is_asked_for_by_name_config_and_split(folder, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: asked.append((*names, split)) or ROWS)
    assert rows_of("openai/gsm8k", folder, **HOW) == WANTED
    assert rows_of({"name": "openai/gsm8k", "config": "main", "split": "test", "rows": 1}, folder, **HOW) == WANTED[:1]
    assert asked == [("openai/gsm8k", None, "train"), ("openai/gsm8k", "main", "test")]


@pytest.mark.quick
def test_a_template_of_messages(folder):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{question}"}]
    (row,) = rows_of({"path": "rows.jsonl", "rows": 1}, folder, prompt=prompt)
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    assert rows_of("rows.jsonl", folder, columns={"prompt": "question"})[1] == {"prompt": "2+2", "solution": "4"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("source", "how", "said"),
    [
        ("none.jsonl", {}, "data is '.*none.jsonl', which is no file"),
        (
            {"path": "rows.jsonl", "splt": "test"},
            {},
            "data.splt: no such key; data has config, name, path, rows, split",
        ),
        ({"split": "test"}, {}, "give it a path, or the name of a dataset on the hub, and not both"),
        ({"path": "rows.jsonl", "rows": 0}, {}, "data.rows = 0: use a whole number from 1 up"),
        (7, {}, r"data = 7: give a file \(.jsonl"),
        ("rows_of_my_own.py:mke", {}, r"data = 'rows_of_my_own.py:mke': .* has no mke; did you mean make\?"),
        ("rows.jsonl", {}, "data row 0 has no 'prompt'; its columns are"),
        ("rows.jsonl", {"columns": {"answer": "soluton"}}, "columns: there is no column 'soluton' in data row 0; its"),
        ("rows.jsonl", {"prompt": "{quetsion}"}, r"prompt: \{quetsion\} is no column of data, which has \['question'"),
        ("rows.jsonl", {"prompt": "{question.x}"}, r"prompt: \{question.x\} is no column"),
    ],
)
def test_what_is_wrong_with_data_is_said(folder, source, how, said):
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        rows_of(source, folder, **how)


@pytest.mark.quick
def test_a_dataset_that_the_hub_does_not_give_is_an_error_in_one_line(folder, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")

    def refuse(*names, split):
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        ValueError, match=r"'me/rows': is no file, and the hub did not give it .ConnectionError: no net"
    ):
        rows_of("me/rows", folder)


@pytest.mark.quick
@pytest.mark.parametrize(
    "template", [7, [], [{"role": "user"}], [{"role": "user", "content": 7}], "{question", "a } b"]
)
def test_templates_that_are_none(template):
    assert template_fault(template)


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


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["rows.parquet", "rows.jsonl", "hub", "frame"])
def test_rows_of_verl_are_read_as_they_are(folder, monkeypatch, kind):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(VERL), folder / "rows.parquet")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in VERL))
    source = kind
    if kind == "hub":
        datasets = pytest.importorskip("datasets", reason="datasets is not installed")
        found = datasets.Dataset.from_list(VERL)
        monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: found)
        source = "me/verl"
    if kind == "frame":
        pytest.importorskip("pandas", reason="pandas is not installed")
        (folder / "frames.py").write_text(
            f"import pandas\nFRAME = pandas.read_parquet({str(folder / 'rows.parquet')!r})\n"
        )
        source = "frames.py:FRAME"
    rows = rows_of(source, folder, columns={"answer": "reward_model.ground_truth"})
    assert rows == [{**row, "answer": row["reward_model"]["ground_truth"]} for row in VERL]
    (row, _) = rows_of(source, folder, prompt="{extra_info.index} of {reward_model.style}")
    assert row["prompt"] == "1 of rule"
    with pytest.raises(ValueError, match=r"columns: there is no column 'reward_model.truth' in data row 0"):
        rows_of(source, folder, columns={"answer": "reward_model.truth"})


@pytest.mark.quick
def test_a_field_of_a_csv_file_may_be_long(folder):
    long = "x" * 200_000
    (folder / "rows.csv").write_text(f'question,solution\n"{long}\nand more",2\n')
    limit = csv.field_size_limit()
    (row,) = rows_of("rows.csv", folder, prompt="{question}")
    assert row["prompt"] == f"{long}\nand more"
    assert csv.field_size_limit() == limit, "that of the process is as it was"


@pytest.mark.quick
@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_file_in_another_encoding_is_named_with_its_line(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes().replace(b"2+2", "né".encode("latin-1")))
    line = 3 if name == "rows.csv" else 2
    with pytest.raises(ValueError, match=rf"data: line {line} of '.*{name}' is no text in UTF-8 \(byte .* 0xe9\)"):
        rows_of(name, folder, **HOW)


@pytest.mark.quick
def test_none_in_a_template_is_no_word(folder):
    (folder / "rows.jsonl").write_text('{"question": "1+1"}\n{"question": null}\n')
    with pytest.raises(ValueError, match=r"prompt: \{question\} is None in data row 1: give a value"):
        rows_of("rows.jsonl", folder, prompt="Q: {question}")
