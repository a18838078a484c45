"""Rows from files, functions and the hub's datasets; columns under other names, and prompts from templates."""

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
