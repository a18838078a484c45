"""Tasks of verifiers with tools: its own servers, called by the policy's turns; its own record of them, and scores."""

import contextlib
import gc
import importlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from chat_families import family

from grpo_jax import GRPOConfig, init_policy, train
from grpo_jax.suites import verifiers
from grpo_jax.text.completions import Texts
from grpo_jax.turns.calls import Parsed, ToolCall, assistant_message
from grpo_jax.turns.episodes import Episode
from grpo_jax.turns.interaction import make_interaction
from grpo_jax.turns.tools import call_within
from grpo_jax.types import Completions

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed, which has the environments")
SECONDS = 120.0
pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning")  # verifiers' of tenacity


def message(*calls, text=""):
    return assistant_message(Parsed(text, tuple(ToolCall(*call) for call in calls)))


def within(function, *args, **keywords):
    return call_within(SECONDS, function, *args, **keywords)


def ids(tokenizer, *calls, text=""):
    """The tokens of a turn as the template writes it."""
    opening = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    turns = [{"role": "user", "content": ""}, message(*calls, text=text)]
    said = tokenizer.apply_chat_template(turns, tokenize=False).removeprefix(opening)
    said = said.removeprefix("<|im_start|>assistant\n").removesuffix("\n")
    return np.array(tokenizer(said, add_special_tokens=False)["input_ids"], np.int32)


def servers_of(module):
    """The processes of this one that serve the tools of a module."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = re.search(r"PPid:\s*(\d+)", (place / "status").read_text())[1]
            if int(parent) == os.getpid() and f"-m\0{module}" in (place / "cmdline").read_text():
                found.append(place.name)
    return found


def said_in(trace):
    """Roles, texts and calls of a record."""
    calls = lambda one: [(call.name, call.arguments) for call in getattr(one, "tool_calls", None) or ()]
    messages = [node.message for node in trace.nodes]
    return [(one.role, one.content or "", calls(one)) for one in messages]


def written(folder, name, **parts):
    """The package of a taskset as verifiers' own `init` writes it."""
    from verifiers.v1.cli.init import scaffold
    from verifiers.v1.configs.cli.init import InitConfig

    package = scaffold(InitConfig(name=name, path=str(folder), **parts)) / name
    importlib.invalidate_caches()
    return package


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Folders of tasksets, which the processes of their servers find too, as they find those that are installed."""
    folder = tmp_path_factory.mktemp("tasksets")
    with pytest.MonkeyPatch.context() as patched:
        paths = [str(Path(__file__).parent), str(folder / "echoed"), os.environ.get("PYTHONPATH", "")]
        patched.setenv("PYTHONPATH", os.pathsep.join(paths))
        for name in ("echoed", "piloted"):
            patched.syspath_prepend(folder / name)
        yield folder


@pytest.fixture(scope="module")
def echoed(found):
    """A taskset with a tool of each task, as verifiers' own `init` writes it; what that leaves open is filled in."""
    file = written(found, "echoed", add_tool=True) / "taskset.py"
    heard = 'any(one.role == "tool" and one.content == "tree" for one in trace.messages)'
    score = re.sub(r'raise NotImplementedError\("Score.*"\)', f"return 0.5 + {heard}", file.read_text())
    tasks = 'return [EchoedTask(EchoedData(prompt="Echo a tree."), self.config.task)]'
    file.write_text(re.sub(r"raise NotImplementedError\(\n.*?\n        \)", tasks, score, flags=re.DOTALL))
    return verifiers("echoed")


@pytest.mark.quick
def test_a_taskset_with_a_program_of_its_own_is_refused(found):
    written(found, "piloted", add_harness=True)
    with pytest.raises(ValueError, match="piloted comes with the harness piloted, whose program is not run here"):
        verifiers("piloted")


@pytest.fixture(scope="module")
def adding(found):
    """A taskset of ours, whose tools are one server for all episodes; a list, for the test that lets go of it."""
    return [verifiers("tools_of_verifiers")]


def begun(suite, row):
    """An episode of a policy whose template has tools, and its tokenizer."""
    tokenizer, ends = family("hermes")
    interaction = make_interaction(tokenizer, ends, suite.rows, environment_factory=suite.environment_factory)
    assert interaction.schemas(row) == suite.environment_factory().tool_schemas
    episode = Episode(interaction, row, "row 0", Texts(tokenizer))
    episode.reset(row)
    return episode, tokenizer


def test_a_tool_of_their_own_template_is_called_and_scored_as_their_own_chat_program_does(echoed, monkeypatch):
    """The program is that of their harness `null`, in a process of its own, and is told the same turns."""
    assert not servers_of("echoed.servers.tool"), "the schemas are known, and the servers have ended"
    episode, tokenizer = begun(echoed, echoed.rows[0])
    turns = [[("echoed_echo", {"text": "tree"})], [("echoed_echo", {"text": "a"}), ("no", {"n": 1})], []]
    answers = [episode.answer(ids(tokenizer, *calls), 400) for calls in turns[:2]]
    assert len(servers_of("echoed.servers.tool")) == 1
    answers.append(episode.answer(ids(tokenizer, text="Done."), 400))
    assert "\ntree\n" in tokenizer.decode(answers[0])
    assert "there is no tool 'no'; there are echoed_echo" in tokenizer.decode(answers[1])
    assert answers[2] is None
    assert episode.reward() == 1.5
    assert not servers_of("echoed.servers.tool")
    assert (episode.counts.calls, episode.counts.failures, episode.counts.errors) == (3, 1, 0)
    ours = episode.environment.trace
    theirs = within(
        own_program, echoed, [message(*calls, text="" if calls else "Done.") for calls in turns], monkeypatch
    )
    assert theirs.reward == ours.reward == 1.5
    differ = [(a, b) for a, b in zip(said_in(ours), said_in(theirs), strict=True) if a != b]
    assert [[one[:2] for one in pair] for pair in differ] == [
        [("tool", "Error: there is no tool 'no'; there are echoed_echo"), ("tool", "error: unknown tool 'no'")]
    ]
    assert [tool.name for tool in ours.tools] == [tool.name for tool in theirs.tools] == ["echoed_echo"]
    assert (ours.num_turns, ours.stop_condition) == (theirs.num_turns, theirs.stop_condition) == (3, "agent_completed")


def test_a_server_that_dies_is_an_error_of_its_episode_and_leaves_nothing(echoed, monkeypatch):
    import verifiers.v1.harnesses.utils.mcp as theirs

    monkeypatch.setattr(theirs, "MCP_CALL_ATTEMPTS", 1)  # else they wait for a third of a minute
    environment = echoed.environment_factory()
    within(environment.reset, index=0)
    (server,) = servers_of("echoed.servers.tool")
    os.kill(int(server), signal.SIGKILL)
    call = message(("echoed_echo", {"text": "a"}))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"ToolsetError: the server of echoed_echo does not answer \("):
            within(environment.answer_calls, call, [])
    with pytest.raises(RuntimeError, match="the server of echoed_echo does not answer"):
        within(environment.get_reward)
    assert not servers_of("echoed.servers.tool")
    assert not environment.trace.ok


async def own_program(suite, turns, monkeypatch):
    """A rollout by the agent of verifiers with its own harness, whose model says these turns."""
    from verifiers.v1.interception import InterceptionServer

    class Script:
        async def get_response(self, dialect, body, *_, **__):
            said = turns[sum(one["role"] == "assistant" for one in body["messages"])]
            calls = [
                {"id": f"{len(body['messages'])}.{i}", "type": "function", "function": call["function"]}
                for i, call in enumerate(said.get("tool_calls", ()))
            ]
            calls = [
                one | {"function": one["function"] | {"arguments": str(one["function"]["arguments"]).replace("'", '"')}}
                for one in calls
            ]
            choice = {"index": 0, "finish_reason": "stop", "message": said | ({"tool_calls": calls} if calls else {})}
            raw = {"id": "x", "object": "chat.completion", "created": 0, "model": "x", "choices": [choice]}
            response = dialect.parse_response(dialect.validate_response(raw))
            response.raw = raw
            return response

        async def close(self):
            """Nothing is open."""

    async def prepared(self, script, env=None, *, activate=True):
        await self.write("chat.py", script if isinstance(script, bytes) else script.encode())
        return [sys.executable, "chat.py"]

    from verifiers.v1.runtimes import SubprocessRuntime

    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", prepared)
    monkeypatch.setattr(InterceptionServer, "_client", lambda self, config: Script())
    config = vf.AgentConfig(
        model="x",
        harness=vf.HarnessConfig(id="null"),
        runtime=vf.SubprocessConfig(),
        client=vf.TrainClientConfig(base_url="http://127.0.0.1"),
    )
    return await vf.Agent(config).run(suite.environment_factory()._tasks[0])


@pytest.mark.quick
def test_each_episode_has_a_state_of_its_own_and_ends_by_the_conditions_of_its_task(adding):
    factory = adding[0].environment_factory
    first, second, third = factory(), factory(), factory()
    openings = [within(one.reset, index=index) for one, index in ((first, 0), (second, 1), (third, 1))]
    assert openings == ["", "", ""]
    add = lambda one, *numbers: within(one.answer_calls, message(*(("sum_add", {"n": n}) for n in numbers)), [])
    assert add(first, 2) == [("2", False)]
    assert add(second, 12, 1) == [("12", False), ("(unlucky)", False)], "a task may rewrite what a tool says"
    assert add(first, -1) == [("Error executing tool add: only from 0 up", True)]
    unread = within(first.answer_calls, message(("sum_add", {"n": 1})), ["no JSON"])
    assert unread == [("3", False), ("Error: no JSON", True)]
    assert within(first.answer_calls, message(("sum_add", [1])), []) == [
        ("Error: sum_add: the arguments are [1]; give a JSON object", True)
    ]
    assert add(first, 2) is None, "the goal is reached, which the task stops at before the next turn"
    assert add(first, 2) is None, "however often it is asked"
    assert within(third.respond, "I give up") is None
    rewards = [within(one.get_reward) for one in (first, second, third)]
    assert rewards == [2.0 - 0.25 * 6, -0.25 * 2, 0.0]
    assert [one.trace.state.total for one in (first, second, third)] == [5, 13, 0]
    assert [one.trace.stop_condition for one in (first, second, third)] == ["reached", "agent_completed", "gives_up"]
    assert [one.trace.metrics["turns"] for one in (first, second, third)] == [5.0, 1.0, 1.0]
    for one in (first, second, third):  # what verifiers gives to the record when it is read again
        again = one.trace.model_copy(deep=True, update={"rewards": {}, "metrics": {}})
        within(one._tasks[one.trace.task.data.idx].score, again)
        assert again.reward == one.trace.reward


def test_a_thought_is_none_of_the_answer_and_tools_that_the_prompts_do_not_show_are_refused(adding):
    environment = adding[0].environment_factory()
    within(environment.reset, index=0)
    assert within(environment.respond, "<think>\nSix? No.\n</think>\n\nFive.") is None
    said = environment.trace.nodes[-1].message
    assert (said.content, said.reasoning_content, environment.trace.last_reply) == ("Five.", "Six? No.", "Five.")
    environment.tool_schemas = []
    with pytest.raises(RuntimeError, match="the tools of this task are not those of the first, which all prompts show"):
        within(environment.reset, index=0)


def scripted(policy, answers, prompts, num_generations, max_completion_length):
    """A sampler that says what is written here, and is answered by the episodes: the g-th of each group adds g + 1."""
    count, width = prompts.lengths.shape[0], max_completion_length
    tokens = np.zeros((count, num_generations, width), np.int32)
    mask, present, ended = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool), np.zeros(tokens.shape[:2], bool)
    for b, g in np.ndindex(count, num_generations):
        at, turns = 0, [[("sum_add", {"n": g + 1})], [("sum_add", {"n": 4})], []]
        for calls in turns:
            turn = ids(policy.tokenizer, *calls, text="" if calls else "Done.")
            tokens[b, g, at : at + len(turn)], mask[b, g, at : at + len(turn)] = turn, True
            at += len(turn)
            said = answers(b * num_generations + g, turn, width - at).result()
            if said is None:
                ended[b, g] = True
                break
            tokens[b, g, at : at + len(said)] = said
            at += len(said)
        present[b, g, :at] = True
    uniform = -np.log(len(policy.tokenizer))  # which fresh weights are near
    return Completions(tokens=tokens, mask=mask, log_probs=np.where(mask, uniform, 0.0), ended=ended, present=present)


def test_three_iterations_with_tools(adding):
    tokenizer, _ = family("hermes")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|begin|>"),
    }
    policy = init_policy(config, jax.random.key(0), tokenizer=tokenizer)
    lines, conversations = [], []

    def short(completions, environments, **_):
        conversations.extend(completions)
        return [-0.01 * one.trace.num_turns for one in environments]

    train(
        policy,
        adding[0].rows,
        [short],
        GRPOConfig(
            num_generations=2,
            per_device_train_batch_size=4,
            max_completion_length=256,
            gradient_checkpointing=False,
            logging_steps=1,
            max_steps=3,
            sampler_correction="token_truncate",  # what the script says it drew by is only nearly so
        ),
        environment_factory=adding[0].environment_factory,
        sampler=scripted,
        callbacks=[lambda step, line: lines.append(line)],
    )
    assert len(lines) == 3
    for line in lines:
        assert line["rewards/VerifiersEnv/mean"] == pytest.approx(np.mean([2 - 0.5, -0.5, -0.5, -0.5]))
        assert line["rewards/short/mean"] == pytest.approx(-0.01 * np.mean([2, 2, 3, 3]))
        assert (line["tools/calls"], line["tools/failures"]) == (8.0, 0.0)
        assert line["grad_norm"] > 0
    told = {tuple(one["content"] for one in said if one["role"] == "tool") for said in conversations}
    assert told == {("1",), ("2",), ("1", "5"), ("2", "6")}


def test_their_servers_end_with_the_suite(adding):
    """The last of this file: nothing of it holds the suite any more."""
    assert len(servers_of("tools_of_verifiers")) == 1
    adding.clear()
    gc.collect()
    limit = time.monotonic() + 20
    while servers_of("tools_of_verifiers") and time.monotonic() < limit:
        time.sleep(0.05)
    assert not servers_of("tools_of_verifiers")
