"""Learning from a teacher: its tables by hand, and a reduced run of all arms."""

import pytest

from experiments import teacher


@pytest.mark.quick
def test_the_table_has_the_tokens_at_the_first_evaluation_that_reaches_a_share():
    line = {"seed": 1, "grpo": [[0, 0.1], [1000, 0.95], [2000, 0.99]], "sft": [[0, 0.1], [1500, 0.8]]}
    line["distilled"] = [[0, 0.1], [400, 0.9], [800, 0.97]]
    assert teacher.table([line, {**line, "seed": 0}]).splitlines()[2:] == [
        f"| {seed} | {row}"
        for seed in (0, 1)
        for row in (
            "grpo | 0.10 | 0.99 | 2,000 | 1,000 | 2,000 |",
            "distilled | 0.10 | 0.97 | 800 | 400 | – |",
            "sft | 0.10 | 0.80 | 1,500 | – | – |",
        )
    ]
