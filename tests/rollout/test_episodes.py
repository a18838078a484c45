"""Episodes: responses of tools and environments between the turns of a completion, including their failures."""

import asyncio
import dataclasses
import itertools
import json

import numpy as np
import pytest
from chat_families import FAMILIES, PLAIN, family, tokenizer_of
from test_completions import sentencepiece
from tiny import tiny_tokenizer

from grpo_jax import GRPOConfig
from grpo_jax.rollout.episode_setup import EpisodeRecord, make_episode_setup, metrics_of, turn_ids, with_environments
from grpo_jax.rollout.episodes import EnvironmentFailure, Episode, Episodes, appended_text, with_appended_text
from grpo_jax.rollout.turns import TRUNCATED
from grpo_jax.text.calls import Parsed, ToolCall, assistant_message
from grpo_jax.text.completions import preceding_text
from grpo_jax.text.prompts import encode_prompts, make_prompts

pytestmark = pytest.mark.quick

ROW = {"prompt": "find it: ", "target": 7}
CHAT = {"prompt": [{"role": "user", "content": "What is 1 + 2?"}], "target": 7}
ids = lambda tokenizer, text: np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


class Guess:
    """An environment that responds with text."""

    def reset(self, target, **row):
        self.target, self.heard = target, []
        return f"(1 to {target * 2}) "

    async def respond(self, text):
        self.heard.append(text)
        return None if len(self.heard) == 3 else f"no {len(self.heard)}. "

    def get_reward(self):
        return float(len(self.heard))


class Sums:
    """An environment with tools."""

    def reset(self, **row):
        self.total = 0

    def add(self, n: int) -> int:
        """Add to the sum.

        Args:
            n: how much
        """
        self.total += n
        return self.total

    async def fail(self, why: str) -> str:
        """Fail.

        Args:
            why: the reason
        """
        raise RuntimeError(why)

    def get_reward(self):
        return float(self.total)


def setup_of(factory=None, rows=(ROW,), tokenizer=None, eos=(1,), tools=None, **settings):
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    config = GRPOConfig(**settings)
    return make_episode_setup(tokenizer, eos, rows, config, tools=tools, environment_factory=factory)


def chat_episode_setup(factory=Sums, name="hermes", **settings):
    tokenizer, ends = family(name)
    return setup_of(factory, rows=(CHAT,), tokenizer=tokenizer, eos=ends, **settings)


def shown_with(episode_setup, rows):
    """Render the prompts of rows, with their tools, as text."""
    data = encode_prompts(rows, episode_setup.tokenizer, tools=[episode_setup.schemas(row) for row in rows])
    return [episode_setup.tokenizer.decode(x) for x in data.token_ids]


def begun(episode_setup, row=ROW):
    episode = Episode(episode_setup, row, "row 3 of the dataset, completion 1")
    episode.reset(row)
    return episode


def test_turns_reach_the_environment_and_a_cut_last_turn_is_recorded():
    episode_setup = setup_of(Guess)
    tokenizer = episode_setup.tokenizer
    with Episodes(episode_setup, [ROW], 1, [0]) as episodes:
        episodes.reset([ROW])
        tokens, sampled = [], []
        for text in ("5", "6"):
            turn = np.append(ids(tokenizer, text), 1)
            said = episodes(0, turn, 100).result()
            tokens, sampled = [*tokens, *turn, *said], [*sampled, *[True] * len(turn), *[False] * len(said)]
        rest = ids(tokenizer, "12")
        tokens, sampled = np.array([[*tokens, *rest]]), np.array([[*sampled, *[True] * len(rest)]])
        (played,) = episodes.end(tokens, sampled)
        assert episodes.episodes[0].environment.heard == ["5", "6"]
    assert played.reward == 2.0
    assert played.turns == [(True, "5"), (False, "no 1. "), (True, "6"), (False, "no 2. "), (True, "12")]
    assert EpisodeRecord.from_json(json.loads(json.dumps(dataclasses.asdict(played)))) == played
    assert metrics_of([played])["turns/mean"] == metrics_of([played])["turns/max"] == 3.0


def test_turn_is_decoded_in_context():
    tokenizer = sentencepiece()
    rows = [{"prompt": "Once upon", "target": 7}]
    one, two, three = (ids(tokenizer, text) for text in ("a", "time", "there was"))

    with Episodes(setup_of(Guess, rows=rows, tokenizer=tokenizer), rows, 1, [0]) as episodes:
        episodes.reset(rows)
        episodes.set_prompts(rows, make_prompts(encode_prompts(rows, tokenizer).token_ids))
        for turn in (one, two, three):
            episodes.episodes[0].answer(turn, 100)
        assert episodes.episodes[0].environment.heard == [" a", " time", " there was"]


def test_first_turn_includes_the_prefill():
    """The first turn includes the prefill, so that a tool call opened there is complete."""
    episode_setup = chat_episode_setup()
    tokenizer = episode_setup.tokenizer
    prompt = [*CHAT["prompt"], {"role": "assistant", "content": "<tool_call>"}]
    row = {**CHAT, "prompt": prompt}
    episode = begun(episode_setup, row)
    episode.preceding = preceding_text(tokenizer, prompt, encode_prompts([row], tokenizer).token_ids[0])
    call = '{"name": "add", "arguments": {"n": 4}}</tool_call>'
    episode.answer(np.append(ids(tokenizer, call), episode_setup.eos_token_ids[0]), 400)
    episode.record_turn(ids(tokenizer, "4"))
    assert episode.environment.total == 4
    assert [text for own, text in episode.record.turns if own] == ["<tool_call>" + call, "4"]


@pytest.mark.parametrize(("last", "end"), [(0.5, 2.5), (None, 2.0), (-1, 1.0)])
def test_respond_may_return_a_turn_reward(last, end):
    class Scored:
        def __init__(self):
            self.answers = iter([("go", 1), "go", [None, np.float32(2.0)]])  # a list is accepted too

        def respond(self, text):
            return next(self.answers)

        def get_reward(self):
            return last

    episode = begun(setup_of(Scored))
    said = [episode.answer(np.array([5, 1]), 50) for _ in range(3)]
    assert [None if tokens is None else len(tokens) for tokens in said] == [2, 2, None]
    assert episode.reward() == [1.0, 0.0, end]
    cut = begun(setup_of(Scored))
    cut.answer(np.array([5, 1]), 50)
    cut.record_turn(np.array([5]))  # a last turn cut by the length limit
    assert cut.reward() == [1.0, last or 0.0]


@pytest.mark.parametrize(("answer", "message"), [
    (b"bytes", "Odd: respond must return a string, or None to end the episode; got b'bytes'.*, for row 3"),
    ((3, 1.0), "respond must return a string, or None to end the episode; got 3 .int."),
    (("a", 1.0, 2), r"respond must return a string, or None to end the episode; got \('a', 1.0, 2\) \(tuple\)"),
    (("go", None), "respond must return a finite reward; got None, for row 3"),
    (("go", float("nan")), "respond must return a finite reward; got nan"),
])  # fmt: skip
def test_invalid_responses_and_turn_rewards_are_refused(answer, message):
    class Odd(Guess):
        def respond(self, text):
            return answer

    with pytest.raises(EnvironmentFailure, match=message):
        begun(setup_of(Odd)).answer(np.array([5, 1]), 50)
    episode = begun(setup_of(Odd, on_environment_error="end"))
    assert episode.answer(np.array([5, 1]), 50) is None
    assert episode.record.errors == 1


@pytest.mark.parametrize("kind", [LookupError, asyncio.CancelledError])
@pytest.mark.parametrize("where", ["the call", "reset", "respond", "get_reward"])
def test_environment_error_ends_the_run_or_its_episode(where, kind):
    def at(place, result=None):
        if place == where:
            raise kind("gone")
        return result

    class Bad:
        reset = lambda self, **row: at("reset")
        respond = lambda self, text: at("respond", ("x", 1.0) if where == "get_reward" else "x")
        get_reward = lambda self: at("get_reward", 0.5)

    raising, ending = (setup_of(Bad, on_environment_error=on_error) for on_error in ("raise", "end"))
    Bad.__init__ = lambda self: at("the call")

    def played(episode_setup):
        episode = begun(episode_setup)
        return episode.answer(np.array([5, 1]), 50), episode.reward(), episode.record.errors

    message = f"{where} raised {kind.__name__}: gone, for row 3 .*on_environment_error"
    with pytest.raises(EnvironmentFailure, match=message):
        played(raising)
    said, reward, errors = played(ending)
    assert (said is None) == (where != "get_reward"), "an error before the end must end the episode"
    assert reward == (None if where in ("the call", "get_reward") else 0.5), "a reward must be kept if there is one"
    assert errors == 1


def turn(tokenizer, *calls, text=""):
    """Encode a turn with tool calls as the chat template would render it."""
    message = assistant_message(Parsed(text, tuple(ToolCall(*call) for call in calls)))
    rendered = tokenizer.apply_chat_template([*CHAT["prompt"], message], tokenize=False)
    opening = tokenizer.apply_chat_template(CHAT["prompt"], tokenize=False, add_generation_prompt=True)
    opening = opening.removesuffix("<think>\n")
    return ids(tokenizer, rendered.removeprefix(opening).rstrip("\n"))


@pytest.mark.parametrize("name", FAMILIES)
def test_tool_calls_are_parsed_in_the_template_format(name):
    episode_setup = chat_episode_setup(name=name)
    episode, tokenizer = begun(episode_setup, CHAT), episode_setup.tokenizer
    said = episode.answer(turn(tokenizer, ("add", {"n": 4})), 400)
    assert "4" in tokenizer.decode(said)
    episode.answer(turn(tokenizer, ("add", {"n": 3})), 400)
    assert episode.environment.total == 7
    roles = [message["role"] for message in episode.record.messages]
    assert roles == ["assistant", "tool", "assistant", "tool"]
    assert [message["content"] for message in episode.record.messages[1::2]] == ["4", "7"]
    call = episode.record.messages[0]["tool_calls"][0]["function"]
    assert (call["name"], call["arguments"]) == ("add", {"n": 4})
    assert (len(episode.record.lengths), episode.record.calls, episode.record.failures) == (2, 2, 0)
    assert episode.reward() == 7.0


def test_call_errors_become_tool_results():
    episode_setup = chat_episode_setup()
    episode, tokenizer = begun(episode_setup, CHAT), episode_setup.tokenizer
    for call, told in (
        (("sub", {"n": 1}), "unknown tool 'sub'"),
        (("add", {"m": 1}), "m"),
        (("fail", {"why": "no luck"}), "RuntimeError: no luck"),
    ):
        episode.answer(turn(tokenizer, call), 400)
        assert episode.record.messages[-1]["content"].startswith("Error: ")
        assert told in episode.record.messages[-1]["content"]
    broken = '<tool_call>\n{"name": "add", "argum'
    assert episode.answer(np.append(ids(tokenizer, broken), episode_setup.eos_token_ids[0]), 400) is not None
    assert (episode.record.calls, episode.record.failures, episode.record.errors) == (4, 4, 0)


def test_turn_without_a_call_is_the_last_and_calls_are_limited():
    episode_setup = chat_episode_setup(max_tool_calling_iterations=2)
    tokenizer = episode_setup.tokenizer
    episode = begun(episode_setup, CHAT)
    said = [episode.answer(turn(tokenizer, ("add", {"n": 1})), 400) for _ in range(3)]
    assert [x is None for x in said] == [False, False, True]
    assert episode.environment.total == 2
    assert episode.record.clipped == 1
    played = [episode.record, *[EpisodeRecord()] * 3]
    assert metrics_of(played)["turns/clipped_ratio"] == 0.25
    episode = begun(episode_setup, CHAT)
    for _ in range(2):
        episode.answer(turn(tokenizer, ("add", {"n": 1})), 400)
    assert episode.answer(turn(tokenizer, text="It is 3."), 400) is None
    assert episode.record.clipped == 0, "a final answer must not count as clipped"

    class Talks(Sums):
        respond = lambda self, text: "go on"

    episode = begun(chat_episode_setup(Talks, max_tool_calling_iterations=1), CHAT)
    said = [episode.answer(turn(tokenizer, text="Hello."), 400)]
    said += [episode.answer(turn(tokenizer, ("add", {"n": 1})), 400) for _ in range(2)]
    assert [x is None for x in said] == [False, False, True], "turns without calls must not count"


def test_turn_cut_at_the_maximum_length_truncates_a_completion_without_an_answer():
    for factory, said in ((Sums, TRUNCATED), (type("Ends", (Sums,), {"respond": lambda self, text: None}), None)):
        episode_setup = chat_episode_setup(factory, max_turn_length=5)
        episode = begun(episode_setup, CHAT)
        answer = episode.answer(ids(episode_setup.tokenizer, "abcdefghijkl")[:5], 400)
        assert (answer, episode.record.cut_short) == (said, 1)
    short = np.append(ids(episode_setup.tokenizer, "abc")[:1], episode_setup.eos_token_ids[0])
    assert begun(chat_episode_setup(max_turn_length=5), CHAT).answer(short, 400) is None


def double(n: int) -> int:
    """Double a number.

    Args:
        n: the number
    """
    return 2 * n


def test_tools_are_functions_and_environment_methods():
    for factory in (None, Sums):
        episode_setup = chat_episode_setup(factory, tools=[double])
        episode = begun(episode_setup, CHAT)
        episode.answer(turn(episode_setup.tokenizer, ("double", {"n": 21})), 400)
        assert episode.record.messages[-1]["content"] == "42"
        (shown,) = shown_with(episode_setup, [CHAT])
        assert '"double"' in shown
        assert ('"add"' in shown) == (factory is not None)


def test_reset_text_ends_the_prompt_and_is_the_same_within_a_group():
    rows = [ROW, {"prompt": "again: ", "target": 2}]
    with Episodes(setup_of(Guess, rows=rows), rows, 3, [0, 1]) as episodes:
        assert [row["prompt"] for row in episodes.reset(rows)] == ["find it: (1 to 14) ", "again: (1 to 4) "]

    numbers = itertools.count()

    class Moody(Guess):
        def reset(self, **row):
            return f"{next(numbers)} "

    with (
        Episodes(setup_of(Moody), [ROW], 2, [5]) as episodes,
        pytest.raises(ValueError, match=r"row 5 .*same text for all completions of a prompt; got '\d ' and '\d '"),
    ):
        episodes.reset([ROW])


@pytest.mark.parametrize(
    "content", ["", "look", [{"type": "image", "image": object()}, {"type": "text", "text": "look"}]]
)
def test_reset_text_is_separated_from_a_prompt_with_images(content):
    """Checkpoints store the text, because images are not JSON."""
    messages = [{"role": "system", "content": "play"}, {"role": "user", "content": content}]
    for prompt in [messages] + [content] * isinstance(content, str):
        extended = with_appended_text(prompt, " here")
        assert extended != prompt
        assert appended_text(prompt, extended) == " here"


def test_episodes_that_share_an_environment_are_rejected():
    shared = Guess()
    with (
        Episodes(setup_of(lambda: shared), [ROW], 2, [0]) as episodes,
        pytest.raises(ValueError, match="environment_factory must return a new object on each call"),
    ):
        episodes.reset([ROW])


def test_each_episode_has_its_own_copy_of_the_row():
    class Deck:
        def reset(self, cards, **row):
            cards.pop()
            return f"{cards} "

        def respond(self, text):
            return None

    rows = [{"prompt": "play: ", "cards": ["a", "b", "c"]}]
    with Episodes(setup_of(Deck, rows=rows), rows, 3, [0]) as episodes:
        assert episodes.reset(rows)[0]["prompt"] == "play: ['a', 'b'] "
    assert rows[0]["cards"] == ["a", "b", "c"]


def test_a_column_selects_the_environment_and_its_reward():
    rows = [{**CHAT, "environment": "sums"}, {**CHAT, "environment": "guess"}]
    tokenizer, ends = family("hermes")
    episode_setup = setup_of({"sums": Sums, "guess": Guess}, rows=rows, tokenizer=tokenizer, eos=ends)
    shown = shown_with(episode_setup, rows)
    assert ["add" in text for text in shown] == [True, False]
    fns = with_environments([], episode_setup)
    assert [fn.__name__ for fn in fns] == ["Sums", "Guess"]
    with Episodes(episode_setup, rows, 1, [0, 1]) as episodes:
        episodes.reset(rows)
        episodes(1, ids(tokenizer, "5"), 100).result()
        played = episodes.end(np.zeros((2, 1), np.int32), np.ones((2, 1), bool))
    rewards = [one.reward for one in played]
    given = {"environment_rewards": rewards, "environment": [row["environment"] for row in rows]}
    assert [fn(**given) for fn in fns] == [[0.0, None], [None, 1.0]]
    rows = [{**ROW, "environment": name} for name in ("guess", "harder")]
    fns = with_environments([], setup_of({"guess": Guess, "harder": type("Harder", (Guess,), {})}, rows=rows))
    given = {"environment_rewards": [1.0, 2.0], "environment": ["guess", "harder"]}
    assert [fn(**given) for fn in fns] == [[1.0, None], [None, 2.0]], "each reward must count once"


class Wants(Guess):
    """An environment with a reset argument that no row contains."""

    def reset(self, target, level):
        pass


class Untold(Sums):
    """An environment with a tool that has no docstring."""

    def sub(self, n: int):
        return n


@pytest.mark.parametrize(("given", "message"), [
    ({"factory": {"a": 3}}, r"environment_factory\['a'\] must be a class .*; got 3"),
    ({"factory": object}, "object must have respond.text. or a public method"),
    ({"factory": Wants}, r"Wants.reset must accept the dataset.s columns.*\(target\).*level"),
    ({"factory": lambda: 1 / 0}, "environment_factory raised ZeroDivisionError.*called without arguments"),
    ({"factory": Sums}, "the dataset's prompts are strings. Convert the prompts"),
    ({"factory": Untold, "rows": (CHAT,)}, "Untold.sub"),
    ({"factory": Guess, "rows": ({**ROW, "environments": 1},)}, "column 'environments', a reserved argument of"),
    ({"factory": {"a": Guess}}, "the dataset must have a column 'environment'"),
    ({"factory": {"a": Guess}, "rows": ({**ROW, "environment": "b"},)},
        "must contain keys of environment_factory .'a'.; got 'b'"),
    ({"factory": Sums, "rows": (CHAT,), "tokenizer": tokenizer_of(PLAIN)},
        "must write tool calls in a supported format|with tool support"),
])  # fmt: skip
def test_invalid_environments_are_refused_at_once(given, message):
    with pytest.raises(ValueError, match=message):
        setup_of(**given)


def test_turn_ids_of_adjacent_empty_and_unrecorded_turns():
    drawn = np.array([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]], bool)
    lengths = [(1, 2), (1, 1), (), (), (0, 2, 1)]
    ids = turn_ids(drawn, [EpisodeRecord(lengths=each) for each in lengths])
    assert ids.tolist() == [[0, 1, 1, -1], [0, -1, 1, 1], [0, 0, -1, -1], [-1, -1, -1, -1], [-1, 1, 1, 2]]
