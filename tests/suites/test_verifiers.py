"""verifiers: a game with several turns and a single-turn taskset, scored with their own rewards and weights."""

import functools

import pytest

from grpo_jax.rollout.tools import call_within
from grpo_jax.suites import verifiers

pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
SECONDS = 60.0


def played(suite, index, *turns):
    """Send these turns to a new environment; return it and its answers."""
    environment = suite.environment_factory()
    call_within(SECONDS, functools.partial(environment.reset, index=index))
    return environment, [call_within(SECONDS, environment.respond, turn) for turn in turns]


@pytest.fixture(scope="module")
def hangman(tmp_path_factory):
    """TextArena's Hangman from the taskset in verifiers; its words come from an nltk corpus, which is created here."""
    pytest.importorskip("textarena", reason="textarena is not installed")
    import nltk

    words = tmp_path_factory.mktemp("nltk") / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("apple\nbread\nchair\nhouse\nplant\nwater\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nltk.data, "path", [str(words.parents[1])])
        patched.setattr(nltk, "download", lambda *_, **__: False)
        yield verifiers("textarena", game="Hangman-v0", size=6)


@pytest.mark.quick
def test_single_turn_rewards_are_weighted():
    suite = verifiers("sums_of_verifiers", count=3)
    said = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1 ="}]
    assert [len(suite.rows), suite.rows[1]["prompt"]] == [3, said]
    right, answers = played(suite, 1, " 2 ")
    wrong, _ = played(suite, 1, "four")
    silent, _ = played(suite, 1)
    assert answers == [None]
    rewards = [call_within(SECONDS, one.get_reward) for one in (right, wrong, silent)]
    assert rewards == [2.0 * 1 + 0.25 / 1, 2.0 * 0 + 0.25 / 4, 0.25]
    assert {name: reward.score for name, reward in wrong.trace.rewards.items()} == {"right": 0.0, "short": 0.25}
    assert right.trace.metrics == {"turns": 1.0}
    for environment in (right, wrong, silent):  # verifiers gives a copy of the record the same reward
        again = environment.trace.model_copy(deep=True, update={"rewards": {}, "metrics": {}})
        call_within(SECONDS, environment._tasks[environment.trace.task.data.idx].score, again)
        assert again.reward == environment.trace.reward
    assert call_within(SECONDS, suite.environment_factory().get_reward) is None


@pytest.mark.quick
def test_episodes_have_separate_stop_conditions():
    suite = verifiers("sums_of_verifiers", kind="Stopping")
    environments = [played(suite, 1, turn)[0] for turn in ("2", "I give up")]
    rewards = [call_within(SECONDS, one.get_reward) for one in environments]
    assert rewards == [2.0 + 0.25, 0.25 / len("I give up")]
    assert [one.trace.stop_condition for one in environments] == ["agent_completed", "gives_up"]


@pytest.mark.quick
def test_thoughts_are_not_answers():
    environment, answers = played(verifiers("sums_of_verifiers"), 1, "<think>\nThree? No.\n</think>\n\n2")
    assert answers == [None]
    message = environment.trace.nodes[-1].message
    assert (message.content, message.reasoning_content, environment.trace.last_reply) == ("2", "Three? No.", "2")


@pytest.mark.quick
@pytest.mark.parametrize(("arguments", "message"), [
    ({"taskset": "no_such_tasks"}, "verifiers cannot load 'no_such_tasks' .ModuleNotFoundError"),
    ({"taskset": "sums_of_verifiers", "cuont": 3}, "verifiers cannot load 'sums_of_verifiers' .ValidationError"),
    ({"taskset": "sums_of_verifiers", "count": 0}, "'sums_of_verifiers' has no tasks"),
    ({"taskset": "sums_of_verifiers", "kind": "Contained"}, "tasks that need a container are not supported"),
    ({"taskset": "sums_of_verifiers", "kind": "Rewriting"}, "@intercept hooks .polite. are not supported"),
    ({"taskset": "sums_of_verifiers", "env": "user-sim"}, "must have one agent; got .*"),
    ({"taskset": "sums_of_verifiers", "kind": "Calling"}, "tasks with tools .sum. are not supported. .*as methods"),
    ({"taskset": "sums_of_verifiers", "has_tools": True}, "tasks with tools .sum. are not supported"),
])  # fmt: skip
def test_unsupported_tasks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        verifiers(**arguments)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "turns", "message"),
    [({"kind": "Failing"}, 1, "no score"), ({"env": "best-of-n"}, 0, "several conversations per episode")],
)
def test_error_in_an_episode_is_raised_by_the_next_call(arguments, turns, message):
    environment = verifiers("sums_of_verifiers", **arguments).environment_factory()
    asked = [(environment.reset, {"index": 0}), (environment.respond, {"text": "1"})]
    for function, keywords in asked[:turns]:
        call_within(SECONDS, functools.partial(function, **keywords))
    with pytest.raises((RuntimeError, ValueError), match=message):
        call_within(SECONDS, functools.partial(asked[turns][0], **asked[turns][1]))
    with pytest.raises((RuntimeError, ValueError), match=message):
        call_within(SECONDS, environment.get_reward)


def test_hangman_is_played_and_scored(hangman):
    """Hangman reveals a guessed letter, rejects wrong words, and gives a reward of 1 for the right word."""
    environment, answers = played(hangman, 0, "[e]", "[apple]", "[bread]", "[chair]", "[plant]", "[house]")
    assert answers[0].splitlines()[1].split()[-1] in "_E"
    assert sum(answer is not None and "is not the target word" in answer for answer in answers) == 4
    assert answers[-1] is None
    reward = call_within(SECONDS, environment.get_reward)
    assert reward == environment.trace.rewards["game_reward"].score == 1.0
    roles = [node.message.role for node in environment.trace.nodes]
    assert roles[:3] == ["system", "user", "assistant"]
