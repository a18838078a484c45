"""Rows: pandas tables, renamed columns, prompts from templates, and lone surrogates."""

import pytest

from grpo_jax.text.rows import load_rows

pytestmark = pytest.mark.quick

ROWS = [
    {"prompt": [{"role": "user", "content": "1+1"}], "tests": ["a", "b"], "score": 0.5, "images": []},
    {"prompt": [{"role": "user", "content": "2+2"}], "tests": [], "score": 1.5, "images": None},
]
SUMS = [{"question": "1+1", "solution": "2"}, {"question": "2+2", "solution": "4"}]


def test_pandas_rows_have_lists_for_arrays_and_none_for_nan(tmp_path):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pandas.DataFrame(ROWS).to_parquet(tmp_path / "rows.parquet")
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    assert type(frame["tests"][0]).__name__ == "ndarray"
    assert load_rows(frame) == load_rows(frame.to_dict("records")) == ROWS
    rows = [{"prompt": "1+1", "n": 2, "answer": "2", "x": 0.5}, {"prompt": "2+2", "n": None, "answer": None, "x": None}]
    for frame in (pandas.DataFrame(rows), pandas.DataFrame(rows).convert_dtypes()):
        assert load_rows(frame) == rows, "reward functions do not treat NaN or NA as 'no score'"


@pytest.mark.parametrize("column", ["prompt", "tests"])
def test_lone_surrogate_is_refused_with_its_row_and_column(column):
    half = "\ud83d"
    value = [{"role": "user", "content": half}] if column == "prompt" else ["a", {"b": half}]
    with pytest.raises(ValueError, match=rf"rows row 1 has a lone surrogate in column '{column}'"):
        load_rows([ROWS[0], {**ROWS[1], column: value}], argument="rows")
    assert load_rows([{"prompt": "😀"}]) == [{"prompt": "😀"}], "a complete character is accepted"


def test_prompt_template_may_be_messages():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{question}"}]
    (row, _) = load_rows(SUMS, prompt=prompt)
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    assert load_rows(SUMS, columns={"prompt": "question"})[1] == {"prompt": "2+2", "solution": "4"}
    assert SUMS[0] == {"question": "1+1", "solution": "2"}, "the given rows must not change"


@pytest.mark.parametrize(("shape", "said"), [
    ({"columns": {"answer": "soluton"}}, r"columns: data row 0 has no column 'soluton'; its"),
    ({"columns": ["answer"]}, r"columns=\['answer'\] must map new names to old names"),
    ({"prompt": "{quetsion}"}, r"prompt: \{quetsion\} must be a column name .*; data row 0 has the columns"),
    ({"prompt": "{question.x}"}, r"prompt: \{question.x\} must be a column name"),
    ({"prompt": "{question!r}"}, r"prompt: \{question\} must be a column name"),
    *(({"prompt": template}, "^prompt must be a string or messages") for template in (7, [], [{"role": "user"}])),
    ({"prompt": [{"role": "user", "content": 7}]}, "^prompt must be a string or messages"),
    *(({"prompt": template}, f"^prompt='{template}'") for template in ("{question", "a } b")),
])  # fmt: skip
def test_invalid_columns_and_templates_are_named(shape, said):
    with pytest.raises(ValueError, match=said):
        load_rows(SUMS, argument="data", **shape)
