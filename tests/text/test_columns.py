"""Columns under other names, and prompts from templates."""

import pytest

from grpo_jax.text.rows import check_templates, load_rows

pytestmark = pytest.mark.quick

ROWS = [{"question": "1+1", "solution": "2"}, {"question": "2+2", "solution": "4"}]


def test_a_template_of_messages():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{question}"}]
    (row, _) = load_rows(ROWS, prompt=prompt)
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    assert load_rows(ROWS, columns={"prompt": "question"})[1] == {"prompt": "2+2", "solution": "4"}
    assert ROWS[0] == {"question": "1+1", "solution": "2"}, "the rows that were given stay as they are"


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"columns": {"answer": "soluton"}}, r"columns: there is no column 'soluton' in data row 0; its"),
        ({"columns": ["answer"]}, r"columns = \['answer'\]: give new names with the present ones"),
        ({"prompt": "{quetsion}"}, r"prompt: \{quetsion\} is no column of data row 0, which has \['question'"),
        ({"prompt": "{question.x}"}, r"prompt: \{question.x\} is no column"),
        ({"prompt": "{question!r}"}, r"prompt: \{question\} is no column"),
    ],
)
def test_what_is_wrong_with_columns_and_templates_is_said(shape, said):
    with pytest.raises(ValueError, match=said):
        load_rows(ROWS, argument="data", **shape)


@pytest.mark.parametrize(
    "template", [7, [], [{"role": "user"}], [{"role": "user", "content": 7}], "{question", "a } b"]
)
def test_templates_that_are_none(template):
    with pytest.raises(ValueError, match=r"^prompt = "):
        check_templates(None, template)
