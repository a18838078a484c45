"""reasoning-gym: rows and scores equal the package's own, and answers are read with or without tags."""

import pytest

from grpo_jax.rewards import PartialRewards, compute_rewards
from grpo_jax.suites import reasoning_gym

gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
pytestmark = pytest.mark.quick

TASKS = ["chain_sum", "fraction_simplification", "knights_knaves", "letter_jumble", "n_queens", "time_intervals"]
"""Most of their verifiers do more than compare strings, and one reads the config of its dataset."""


def answers_to(entry: dict) -> list[str | None]:
    """Return answers that are correct, in a sentence, in a different form, wrong or empty."""
    answer = str(entry["answer"])
    return [answer, f"It is {answer}.", f" {answer}.0\n", answer[::-1], "7", "[[1, 2], [3]]", "", "{"]


def compute(suite, completions):
    """Compute the rewards for one completion per row."""
    columns = {name: [row[name] for row in suite.rows] for name in suite.rows[0] if name != "prompt"}
    return compute_rewards(
        suite.reward_fns, prompts=[row["prompt"] for row in suite.rows], completions=completions,
        completion_ids=[[1]] * len(completions), num_generations=1, columns=columns,
    )  # fmt: skip


def scored(suite, completions) -> list[float | None]:
    return compute(suite, completions).values[:, 0, 0].tolist()


@pytest.mark.parametrize("task", TASKS)
def test_rows_and_scores_equal_those_from_reasoning_gym(task):
    suite, own = reasoning_gym(task, size=24, seed=3), gym.create_dataset(task, size=24, seed=3)
    entries = [own[i] for i in range(24)]
    assert [{name: row[name] for name in entries[0]} for row in suite.rows] == entries
    assert [row["prompt"][-1]["content"] for row in suite.rows] == [entry["question"] for entry in entries]
    given = [answers_to(entry)[i % 8] for i, entry in enumerate(entries)]
    wanted = [own.score_answer(text.strip(), entry) for text, entry in zip(given, entries, strict=True)]
    assert scored(suite, given) == pytest.approx(wanted, abs=1e-7)  # float32 here
    assert 1.0 in wanted
    assert min(wanted) < 1.0


def test_tasks_share_a_reward_function_and_have_separate_metrics():
    suite, other = (reasoning_gym(task, size=4, seed=5) for task in ("chain_sum", "time_intervals"))
    suite.rows.extend(other.rows)
    rewards = compute(suite, [row["answer"] for row in suite.rows])
    assert rewards.values.ravel().tolist() == [1.0] * 8
    assert rewards.logged_metrics == {f"reasoning_gym/{task}": [1.0] * 4 for task in ("chain_sum", "time_intervals")}


def test_answer_is_the_whole_completion_or_tagged():
    plain, tagged = reasoning_gym("chain_sum", size=4), reasoning_gym("chain_sum", size=4, system_prompt="default")
    said = {"role": "system", "content": gym.utils.SYSTEM_PROMPTS["default"]}
    assert [row["prompt"] for row in tagged.rows] == [[said, *row["prompt"]] for row in plain.rows]
    answers = [row["answer"] for row in plain.rows]
    of = [[{"role": "assistant", "content": f"Let me see. <answer> {answer}\n</answer>"}] for answer in answers]
    assert scored(tagged, of) == [1.0] * 4
    assert scored(tagged, answers) == [0.0] * 4
    assert scored(plain, [f"\n {answer} " for answer in answers]) == [1.0] * 4
    own = reasoning_gym("chain_sum", size=4, system_prompt="Put it in <x>.", answer_tag="x")
    assert scored(own, [f"<x>{answer}</x>" for answer in answers]) == [1.0] * 4


@pytest.mark.parametrize(("arguments", "message"), [
    ({"task": "chain_sums"}, "task 'chain_sums' cannot be .*Dataset 'chain_sums' not registered"),
    ({"task": "chain_sum", "max_term": 3}, "with settings {'max_term': 3} .*keyword argument 'max_term'"),
    ({"task": "chain_sum", "min_terms": 9}, "with settings {'min_terms': 9} .AssertionError: max_terms"),
    ({"task": "chain_sum", "size": 0}, "task 'chain_sum' cannot be .*AssertionError"),
    ({"task": "chain_sum", "timeout": -1}, "timeout must be positive and finite; got -1"),
])  # fmt: skip
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        reasoning_gym(**arguments)


def test_failing_verifier_affects_one_completion():
    """A verifier that raises or hangs leaves only its completion without a score."""
    suite = reasoning_gym("letter_jumble", size=3, seed=1)
    columns = {name: [row[name] for row in suite.rows] for name in suite.rows[0] if name != "prompt"}
    columns["settings"][1] = {"no_such": 1}
    with pytest.raises(PartialRewards, match=r"1 of 3 .*: for completion 1, .* ValueError: .*letter_jumble") as caught:
        suite.reward_fns[0](completions=columns["answer"], **columns)
    assert caught.value.values == [1.0, None, 1.0]
