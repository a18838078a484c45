"""Rows of tables of other packages, and what no tokenizer could encode."""

import pytest

from grpo_jax.text.rows import load_rows

pytestmark = pytest.mark.quick

ROWS = [
    {"prompt": [{"role": "user", "content": "1+1"}], "tests": ["a", "b"], "score": 0.5, "images": []},
    {"prompt": [{"role": "user", "content": "2+2"}], "tests": [], "score": 1.5, "images": None},
]


def test_a_pandas_frame_is_its_rows_with_lists_for_arrays_and_none_for_nan(tmp_path):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pandas.DataFrame(ROWS).to_parquet(tmp_path / "rows.parquet")
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    assert type(frame["tests"][0]).__name__ == "ndarray"
    assert load_rows(frame) == load_rows(frame.to_dict("records")) == ROWS
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    rows = [{"prompt": "1+1", "n": 2, "answer": "2", "x": 0.5}, {"prompt": "2+2", "n": None, "answer": None, "x": None}]
    for frame in (pandas.DataFrame(rows), pandas.DataFrame(rows).convert_dtypes()):
        assert load_rows(frame) == rows, "and not NaN or NA, which no reward function takes for 'no score'"


@pytest.mark.parametrize("column", ["prompt", "tests"])
def test_half_of_a_character_is_refused_with_its_row_and_column(column):
    half = "\ud83d"
    value = [{"role": "user", "content": half}] if column == "prompt" else ["a", {"b": half}]
    with pytest.raises(ValueError, match=rf"rows row 1 has half of a character .* in its column '{column}'"):
        load_rows([ROWS[0], {**ROWS[1], column: value}], argument="rows")
    assert load_rows([{"prompt": "😀"}]) == [{"prompt": "😀"}], "a whole one is text"
