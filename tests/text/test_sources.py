"""Rows: every kind of source, pandas tables, renamed columns, and prompts from templates."""

import gzip
import itertools
import json
from pathlib import Path

import pytest

from grpo_jax.text import sources
from grpo_jax.text.rows import load_rows

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
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")
    (tmp_path / "rows.csv").write_text("question,solution\n1+1,2\n2+2,4\n")
    return tmp_path


class ByNumber:
    """A source with a length and rows by index, like grain's sources, that cannot be iterated over."""

    __iter__ = None
    __len__ = lambda self: len(ROWS)
    __getitem__ = lambda self, index: ROWS[index]


SOURCES = ["rows.jsonl", "rows.csv", Path("rows.csv"), ROWS, tuple(ROWS), ByNumber(), {"path": ROWS}]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_all_sources_give_the_same_rows(folder, source):
    assert load_rows(source, **SHAPE) == WANTED
    described = source if isinstance(source, dict) else {"path": source}
    assert load_rows({**described, "rows": 1}, **SHAPE) == WANTED[:1]


def test_dict_of_datasets_is_split_whatever_their_types():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    stream, several = datasets.Dataset.from_list(ROWS).to_iterable_dataset(), {"easy": ROWS, "empty": []}
    for named in ({"easy": source} for source in (*SOURCES, stream, iter(ROWS))):
        assert sources.named_datasets(named) == named
    assert sources.named_datasets(several) == several
    for single in ({"path": "rows.csv"}, {"name": "me/sums", "split": "test"}, {"prompt": ["a"], "answer": ["b"]}, {}):
        assert sources.named_datasets(single) == {"": single}


def test_hugging_face_datasets_give_the_same_rows():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    stored = datasets.Dataset.from_list(ROWS)
    assert load_rows(stored, **SHAPE) == load_rows(stored.to_iterable_dataset(), **SHAPE) == WANTED


def test_grain_sources_give_the_same_rows():
    grain = pytest.importorskip("grain", reason="grain is not installed")
    source = grain.MapDataset.source(ROWS)
    assert load_rows(source, **SHAPE) == load_rows(source.to_iter_dataset(), **SHAPE) == WANTED
    assert load_rows(source.filter(lambda row: row["solution"] != "2"), **SHAPE) == WANTED[1:]
    with pytest.raises(ValueError, match=r"has more than .* rows; if it is infinite"):
        load_rows(source.repeat())


def test_infinite_stream_is_refused(monkeypatch):
    monkeypatch.setattr(sources, "_MAX_ROWS", 100)
    with pytest.raises(ValueError, match="dataset has more than 100 rows; if it is infinite"):
        load_rows({"prompt": str(n)} for n in itertools.count())
    assert len(load_rows({"prompt": "p"} for _ in range(100))) == 100


def test_hub_dataset_is_loaded_by_name_config_and_split(folder, monkeypatch):
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
    assert len(asked) == 2, "a file with that name must be read instead"


@pytest.mark.parametrize(("source", "said"), [
    ({"path": "rows.jsonl", "splt": "test"}, "data.splt is not supported; supported keys are path, rows"),
    ({"name": "me/sums", "splt": "test"}, "data.splt is not supported; supported keys are name, config, split, rows"),
    ({"path": "rows.jsonl", "rows": 0}, "data.rows must be a positive integer, .* got 0"),
    ({"path": "rows.jsonl", "rows": True}, "data.rows must be a positive integer, .* got True"),
])  # fmt: skip
def test_invalid_sources_are_named(folder, source, said):
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        load_rows(source, argument="data")


# Rows of a Parquet file written by verl's preprocessing.
VERL = [
    {"prompt": [{"role": "user", "content": f"{n}+{n}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        "extra_info": {"index": n, "split": "train"}, "images": []}
    for n in (1, 2)
]  # fmt: skip


@pytest.mark.parametrize("source", ["rows.parquet", "rows.jsonl"])
def test_verl_rows_are_read_unchanged(folder, source):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(VERL), folder / "rows.parquet")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in VERL))
    rows = load_rows(source, columns={"answer": "reward_model.ground_truth"})
    assert rows == [{**row, "answer": row["reward_model"]["ground_truth"]} for row in VERL]
    (row, _) = load_rows(source, prompt="{extra_info.index} of {reward_model.style}")
    assert row["prompt"] == "1 of rule"
    with pytest.raises(ValueError, match=r"columns: dataset row 0 has no column 'reward_model.truth'"):
        load_rows(source, columns={"answer": "reward_model.truth"})


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_file_that_is_not_utf8_is_named(folder, name):
    latin = (folder / name).read_bytes().replace(b"2+2", "né".encode("latin-1"))
    message = rf"dataset='{name}' is not UTF-8 \(.* byte 0x.*\); decompress or convert it"
    for content in (latin, gzip.compress(b"a")):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_rows(name, **SHAPE)


@pytest.mark.parametrize(("name", "text", "message"), [
    ("rows.csv", "prompt,answer\na,1\nb, or c,2\n", r"line 3 .* CSV \(3 fields, but the header has 2\)"),
    ("rows.csv", 'prompt,answer\n"a,1\nb,2\n', r"line 3 .* CSV \(unexpected end of data\)"),
    ("rows.csv", "prompt,x,x\na,1,2\n", r"line 1 .* CSV \(duplicate column names in prompt, x, x\)"),
    ("rows.jsonl", '{"prompt": ' + "[" * 10**5, r"line 1 .* JSON \(.*recursion"),
    ("rows.jsonl", '{"prompt": ' + "1" * 5000, r"line 1 .* JSON \(Exceeds the limit"),
    ("rows.jsonl", "{", r"line 1 .* JSON \(.* at column 2\); write one object per line"),
    ("rows.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"\n', r"line 3 .* JSON \(Expecting ',' delimiter at column 15\)"),
    ("rows.jsonl", json.dumps(ROWS), "line 1 of '.*' is a JSON list; write one object per line, or pass the"),
    ("rows.jsonl", '"a"\n', "line 1 of '.*' must be a JSON object; got 'a'"),
], ids=["fields", "quote", "duplicate", "nested", "digits", "syntax", "blank line", "list", "text"])  # fmt: skip
def test_invalid_file_is_named_with_its_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"dataset: {message}".replace(" .* ", f" of '.*{name}' is not valid ", 1)):
        load_rows(tmp_path / name)


def test_long_csv_field_is_read_and_invalid_parquet_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in ROWS))
    assert load_rows(tmp_path / "rows.jsonl", **SHAPE) == WANTED, "with a byte order mark and CRLF"
    (tmp_path / "rows.csv").write_text(f"prompt,answer\n{'a' * 140_000},1\n")
    assert [len(row["prompt"]) for row in load_rows(tmp_path / "rows.csv")] == [140_000]
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"dataset='.*rows\.parquet' cannot be read as Parquet \("):
        load_rows(tmp_path / "rows.parquet")


CHATS = [
    {"prompt": [{"role": "user", "content": "1+1"}], "tests": ["a", "b"], "score": 0.5, "images": []},
    {"prompt": [{"role": "user", "content": "2+2"}], "tests": [], "score": 1.5, "images": None},
]


def test_pandas_rows_have_lists_for_arrays_and_none_for_nan(tmp_path):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pandas.DataFrame(CHATS).to_parquet(tmp_path / "rows.parquet")
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    assert type(frame["tests"][0]).__name__ == "ndarray"
    assert load_rows(frame) == load_rows(frame.to_dict("records")) == CHATS
    rows = [{"prompt": "1+1", "n": 2, "answer": "2", "x": 0.5}, {"prompt": "2+2", "n": None, "answer": None, "x": None}]
    for frame in (pandas.DataFrame(rows), pandas.DataFrame(rows).convert_dtypes()):
        assert load_rows(frame) == rows, "reward functions do not treat NaN or NA as 'no score'"


def test_prompt_template_may_be_messages():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{question}"}]
    (row, _) = load_rows(ROWS, prompt=prompt)
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    assert load_rows(ROWS, columns={"prompt": "question"})[1] == {"prompt": "2+2", "solution": "4"}
    assert ROWS[0] == {"question": "1+1", "solution": "2"}, "the given rows must not change"


@pytest.mark.parametrize(("shape", "said"), [
    ({"columns": {"answer": "soluton"}}, r"columns: data row 0 has no column 'soluton'; its"),
    ({"columns": ["answer"]}, r"columns must map new to old names, .*; got \['answer'\]"),
    ({"prompt": "{quetsion}"}, r"prompt: \{quetsion\} must be a column name .*; data row 0 has the columns"),
    ({"prompt": "{question.x}"}, r"prompt: \{question.x\} must be a column name"),
    ({"prompt": "{question!r}"}, r"prompt: \{question\} must be a column name"),
    *(({"prompt": template}, "^prompt must be a string or messages") for template in (7, ["a"], [{"content": 7}])),
    *(({"prompt": template}, f"^prompt='{template}'") for template in ("{question", "a } b")),
])  # fmt: skip
def test_invalid_columns_and_templates_are_named(shape, said):
    with pytest.raises(ValueError, match=said):
        load_rows(ROWS, argument="data", **shape)
