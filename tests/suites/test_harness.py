"""verifiers tasks with tools: the policy's turns call verifiers' own servers, and verifiers records and scores them."""

import contextlib
import functools
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from chat_families import family

from grpo_jax import GRPOConfig
from grpo_jax.rollout.episodes import Episode
from grpo_jax.rollout.interaction import make_interaction
from grpo_jax.rollout.tools import call_within
from grpo_jax.suites import verifiers
from grpo_jax.text.calls import Parsed, ToolCall, assistant_message

pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
SECONDS = 120.0
pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning")  # raised by tenacity
message = lambda *calls, text="": assistant_message(Parsed(text, tuple(ToolCall(*call) for call in calls)))
within = lambda function, *args, **keywords: call_within(SECONDS, functools.partial(function, *args, **keywords))


def ids(tokenizer, *calls, text=""):
    """Encode a turn as the chat template renders it."""
    opening = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    turns = [{"role": "user", "content": ""}, message(*calls, text=text)]
    said = tokenizer.apply_chat_template(turns, tokenize=False).removeprefix(opening)
    said = said.removeprefix("<|im_start|>assistant\n").removesuffix("\n")
    return np.array(tokenizer(said, add_special_tokens=False)["input_ids"], np.int32)


def servers_of(module):
    """Return the child processes that serve the tools of a module."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = re.search(r"PPid:\s*(\d+)", (place / "status").read_text())[1]
            if int(parent) == os.getpid() and f"-m\0{module}" in (place / "cmdline").read_text():
                found.append(place.name)
    return found


@pytest.fixture(scope="module", autouse=True)
def found():
    """Put the folder of the taskset on PYTHONPATH, so that its server processes can import it like an installed one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        yield


@pytest.fixture(scope="module")
def adding():
    """A taskset with one tool server for all episodes."""
    return verifiers("tools_of_verifiers")


@pytest.fixture(scope="module")
def own():
    """The same taskset with a server for each task."""
    return verifiers("tools_of_verifiers", task={"own": True})


def test_tools_are_called_and_scored(own):
    assert not servers_of("tools_of_verifiers"), "the servers that supplied the schemas must have ended"
    row, (tokenizer, ends) = own.rows[0], family("hermes")
    interaction = make_interaction(tokenizer, ends, own.rows, GRPOConfig(), environment_factory=own.environment_factory)
    assert interaction.schemas(row) == own.environment_factory().tool_schemas
    episode = Episode(interaction, row, "row 0")
    episode.reset(row)
    turns = [[("sum_add", {"n": 2})], [("sum_add", {"n": 2}), ("no", {"n": 1})], [("sum_add", {"n": 1})]]
    first, second, third = (episode.answer(ids(tokenizer, *calls), 400) for calls in turns)
    assert "\n2\n" in tokenizer.decode(first)
    assert "there is no tool 'no'; available: sum_add" in tokenizer.decode(second)
    assert third is None, "the goal is reached"
    assert episode.reward() == 2.0 - 0.25 * 4
    assert not servers_of("tools_of_verifiers")
    assert (episode.record.calls, episode.record.failures, episode.record.errors) == (4, 1, 0)
    ours = episode.environment.trace
    assert [tool.name for tool in ours.tools] == ["sum_add"]
    assert (ours.num_turns, ours.stop_condition) == (3, "reached")


@pytest.mark.quick
def test_episodes_have_separate_states_and_stop_conditions(adding):
    factory = adding.environment_factory
    first, second, third = factory(), factory(), factory()
    openings = [within(one.reset, index=index) for one, index in ((first, 0), (second, 1), (third, 1))]
    assert openings == ["", "", ""]
    add = lambda one, *numbers: within(one.answer_calls, message(*(("sum_add", {"n": n}) for n in numbers)), [])
    assert add(first, 2) == [("2", False)]
    assert add(second, 12, 1) == [("12", False), ("13", False)]
    assert add(first, -1) == [("Error executing tool add: only from 0 up", True)]
    unread = within(first.answer_calls, message(("sum_add", {"n": 1})), ["no JSON"])
    assert unread == [("3", False), ("Error: no JSON", True)]
    assert within(first.answer_calls, message(("sum_add", [1])), []) == [
        ("Error: sum_add: the arguments must be a JSON object; got [1]", True)
    ]
    assert add(first, 2) is None, "the task must stop when the goal is reached"
    assert add(first, 2) is None, "a stopped task must stay stopped"
    assert within(third.respond, "I give up") is None
    rewards = [within(one.get_reward) for one in (first, second, third)]
    assert rewards == [2.0 - 0.25 * 6, -0.25 * 2, 0.0]
    assert [one.trace.state.total for one in (first, second, third)] == [5, 13, 0]
    assert [one.trace.stop_condition for one in (first, second, third)] == ["reached", "agent_completed", "gives_up"]
    assert [one.trace.metrics["turns"] for one in (first, second, third)] == [5.0, 1.0, 1.0]
    for one in (first, second, third):  # verifiers gives a copy of the record the same reward
        again = one.trace.model_copy(deep=True, update={"rewards": {}, "metrics": {}})
        within(one._tasks[one.trace.task.data.idx].score, again)
        assert again.reward == one.trace.reward


def test_thoughts_are_not_answers_and_changed_tools_are_refused(adding):
    environment = adding.environment_factory()
    within(environment.reset, index=0)
    assert within(environment.respond, "<think>\nSix? No.\n</think>\n\nFive.") is None
    said = environment.trace.nodes[-1].message
    assert (said.content, said.reasoning_content, environment.trace.last_reply) == ("Five.", "Six? No.", "Five.")
    environment.tool_schemas = []
    with pytest.raises(RuntimeError, match="tools differ from the first"):
        within(environment.reset, index=0)


def test_dead_tool_server_fails_its_episode(adding, monkeypatch):
    """This test must be the last in this file, as it ends the taskset's server."""
    import verifiers.v1.harnesses.utils.mcp as theirs

    monkeypatch.setattr(theirs, "MCP_CALL_ATTEMPTS", 1)  # otherwise it retries for 20 seconds
    environment = adding.environment_factory()
    within(environment.reset, index=0)
    (server,) = servers_of("tools_of_verifiers")
    os.kill(int(server), signal.SIGKILL)
    call = message(("sum_add", {"n": 1}))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"ToolsetError: the tool server of sum_add does not respond \("):
            within(environment.answer_calls, call, [])
    with pytest.raises(RuntimeError, match="the tool server of sum_add does not respond"):
        within(environment.get_reward)
    assert not environment.trace.ok
