"""Scripts for TRL's trainer with tools and environments run with another import, on a small policy that does call."""

import asyncio
import itertools
import json
import random
import re

import jax
import numpy as np
import pytest
from chat_families import family
from tiny import tiny_policy

from experiments.common import lesson, supervise
from grpo_jax import init_policy, save_pretrained

# from trl import GRPOConfig, GRPOTrainer
from grpo_jax.compat import GRPOConfig, GRPOTrainer
from grpo_jax.turns import observation_ids, read_tools, tool_message
from grpo_jax.watch.writer import read_lines

STEPS, BATCH = 140, 8


def add(n: int) -> int:
    """Add.

    Args:
        n: it
    """
    return n


class Adder:
    """An environment as TRL has them: its public methods are tools."""

    def reset(self, **row):
        self.total = 0

    def add(self, n: int) -> int:
        """Add.

        Args:
            n: it
        """
        self.total += n
        return self.total

    def get_reward(self):
        return self.total / 10


def call(number):
    return f'<tool_call>\n{{"name": "add", "arguments": {{"n": {number}}}}}\n</tool_call>'


def ask(text="Count.", **columns):
    return {"prompt": [{"role": "user", "content": text}], **columns}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint that calls `add` with a digit (one in twelve is torn), and then calls again or says something."""
    tokenizer, (end,) = family("hermes")
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    draw, schemas = random.Random(0), [tool.schema for tool in read_tools([add]).values()]
    openings = [
        tokenizer.apply_chat_template(
            ask(text)["prompt"], tools=schemas, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in ("Count.", "Count. This is level 3.", "Count. This is level 4.")
    ]
    lessons = []
    for _ in range(STEPS * BATCH):
        observed = observation_ids(tokenizer, [tool_message("add", str(draw.randint(1, 20)))], tools=schemas)
        called = call(draw.randint(1, 9) if draw.random() < 11 / 12 else "}")
        then = draw.choice((call(draw.randint(1, 9)), "The policy says 1.", "The policy says 2."))
        opening = draw.choice(openings)
        first, second = [*encode(called), end], [*encode(then), end]
        ids = [*opening, *first, *observed, *second]
        own = [False] * len(opening) + [True] * len(first) + [False] * len(observed) + [True] * len(second)
        lessons.append(lesson(ids, own))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": len(tokenizer),
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config |= {"max_position_embeddings": 1024, "tie_word_embeddings": True, "eos_token_id": end, "pad_token_id": 0}
    policy = init_policy(config | sizes, jax.random.key(0), tokenizer=tokenizer)
    directory = tmp_path_factory.mktemp("caller")
    tokenizer.save_pretrained(directory / "tokenizer")
    files = {path.name: path.read_bytes() for path in (directory / "tokenizer").iterdir()}
    taught = supervise(policy, lessons, batch=BATCH, learning_rate=1e-2)
    save_pretrained(directory / "model", taught.replace(files=files))
    return str(directory / "model")


def config(output_dir=None, **settings):
    usual = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 224, "max_steps": 1}
    usual |= {"learning_rate": 1e-3, "logging_steps": 1, "report_to": "none", "bf16": False}
    return GRPOConfig(output_dir=output_dir and str(output_dir), **usual | settings)


def train(trainer):
    """Train, and return the lines of metrics and whether every part of the policy has moved."""
    before = jax.tree.map(np.array, trainer.policy.params)
    lines = []
    trainer._callbacks += (lambda step, metrics: lines.append(metrics),)
    trainer.train()
    moved = jax.tree.leaves(jax.tree.map(lambda x, y: bool((x != np.array(y)).any()), before, trainer.policy.params))
    assert all(line["sampler_gap"] < 2e-5 for line in lines if "sampler_gap" in line)
    return lines, all(moved)


def messages_of(completions, role):
    return [message for messages in completions for message in messages if message["role"] == role]


def called(messages):
    """The numbers of the calls in a completion that could be read."""
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    return [arguments.get("n") for arguments in calls]


def varied(completions, **kwargs):
    """Rewards that tell completions of one prompt apart."""
    return [float(sum(str(messages).encode()) % 11) for messages in completions]


ROWS = [ask(topic="sums"), ask(topic="more sums")]


def test_training_with_tools(model, tmp_path):
    def right(completions, topic, **kwargs):
        assert topic == ["sums"] * 4 + ["more sums"] * 4
        for messages in completions:
            roles = [message["role"] for message in messages]
            assert roles == (["assistant", "tool"] * len(roles))[: len(roles)]
            for asked, answer in itertools.pairwise(messages):
                if "tool_calls" in asked:
                    assert answer == {"role": "tool", "name": "add", "content": str(*called([asked]))}
        return [float("1" in messages[-1]["content"]) + len(messages) / 10 for messages in completions]

    trainer = GRPOTrainer(
        model=model, reward_funcs=right, args=config(tmp_path, shuffle_dataset=False), train_dataset=ROWS, tools=[add]
    )
    (line,), moved = train(trainer)
    assert moved
    assert line["tools/calls"] >= 8
    assert line["turns/max"] >= 2
    assert line["completions/observation_tokens"] > 0
    told = [turn for row in read_lines(tmp_path / "completions.jsonl") for turn in row["turns"]]
    assert {turn["by"] for turn in told} == {"policy", "environment"}


def test_training_with_an_async_tool(model):
    heard = []

    async def add(n: int) -> int:
        """Add.

        Args:
            n: it
        """
        await asyncio.sleep(0.001)
        heard.append(n)
        return n + 100

    def sums(completions, **kwargs):
        said = [message["content"] for message in messages_of(completions, "tool")]
        assert sorted(text for text in said if text.isdecimal()) == sorted(str(n + 100) for n in heard)
        return varied(completions)

    trainer = GRPOTrainer(model=model, reward_funcs=sums, args=config(), train_dataset=ROWS, tools=[add])
    (line,), moved = train(trainer)
    assert moved
    assert len(heard) == line["tools/calls"] - line["tools/failures"] > 2


def test_training_with_an_environment(model):
    class Counter(Adder):
        def reset(self, topic, **row):
            super().reset()
            self.topic = topic

    def as_told(environments, topic, **kwargs):
        assert [environment.topic for environment in environments] == topic
        return [environment.total / 10 for environment in environments]

    trainer = GRPOTrainer(
        model=model, reward_funcs=as_told, args=config(), train_dataset=ROWS, environment_factory=Counter
    )
    (line,), moved = train(trainer)
    assert moved
    assert line["rewards/as_told/mean"] == line["rewards/Counter/mean"] > 0
    assert line["reward"] == pytest.approx(2 * line["rewards/Counter/mean"], abs=1e-5)


def test_training_with_async_methods(model):
    class Later:
        async def reset(self, **row):
            await asyncio.sleep(0)
            self.total = 0

        async def add(self, n: int) -> int:
            """Add.

            Args:
                n: it
            """
            await asyncio.sleep(0.001)
            self.total += n
            return self.total

        async def get_reward(self):
            return float(self.total)

    lines, moved = train(GRPOTrainer(model, None, config(max_steps=2), ROWS, environment_factory=Later))
    assert moved
    assert all(line["rewards/Later/mean"] > 0 == line["environment/errors"] for line in lines)


def test_reset_adds_to_the_prompt(model, tmp_path):
    class Opening(Adder):
        def reset(self, level, **row):
            super().reset()
            return f" This is level {level}."

    rows = [ask(level=3), ask(level=4)]

    def seen(prompts, level, completions, **kwargs):
        assert [prompt[-1]["content"] for prompt in prompts] == [f"Count. This is level {n}." for n in level]
        return varied(completions)

    _, moved = train(GRPOTrainer(model, seen, config(tmp_path), rows, environment_factory=Opening))
    assert moved
    asked = {row["prompt"][-1]["content"] for row in read_lines(tmp_path / "completions.jsonl")}
    assert asked == {"Count. This is level 3.", "Count. This is level 4."}
    assert rows[0]["prompt"][-1]["content"] == "Count.", "the dataset stays as it is"


def test_an_environment_gives_the_prompts_where_rows_have_none(model, tmp_path):
    """With other columns, with the name of the environment alone, and without a dataset, as TRL takes them."""

    class Levels(Adder):
        def reset(self, level):  # neither the empty prompt nor the environment's name
            super().reset()
            return f"Count. This is level {level}."

    class Counts(Adder):
        def reset(self, **row):
            super().reset()
            assert row.get("prompt", [{"content": ""}])[0]["content"] == ""
            return "Count."

    levels = [{"level": 3, "environment": "levels"}, {"level": 4, "environment": "levels"}]
    cases = {
        "columns": ([{"level": 3}, {"level": 4}], Levels, {"Count. This is level 3.", "Count. This is level 4."}),
        "names": (levels, {"levels": Levels}, {"Count. This is level 3.", "Count. This is level 4."}),
        "none": (None, Counts, {"Count."}),
    }
    for name, (rows, factory, asked) in cases.items():
        _, moved = train(GRPOTrainer(model, varied, config(tmp_path / name), rows, environment_factory=factory))
        assert moved
        found = {row["prompt"][-1]["content"] for row in read_lines(tmp_path / name / "completions.jsonl")}
        assert found == asked
    trainer = GRPOTrainer(model, varied, config(), None, levels[:1], environment_factory={"levels": Levels})
    assert trainer.evaluate()["eval_rewards/Levels/mean"] > 0


@pytest.mark.quick
def test_without_a_dataset_something_has_to_give_the_prompts():
    wrong = {
        r"train_dataset is None: give rows, or one environment_factory": {},
        r"train_dataset is None: .* whose reset gives the prompts": {"environment_factory": {"a": Adder}},
        r"and max_steps in GRPOConfig \(-1\)": {"environment_factory": Adder, "args": GRPOConfig()},
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            GRPOTrainer(tiny_policy(), varied, **{"args": config(), **arguments}).train()
    with pytest.raises(ValueError, match=r"dataset row 0 has no 'prompt'; its columns are \['level'\]"):
        GRPOTrainer(tiny_policy(), varied, config(), [{"level": 3}]).train()


def test_get_reward_is_the_only_reward_and_evaluations_have_it_too(model, tmp_path):
    args = config(tmp_path, per_device_eval_batch_size=8)
    trainer = GRPOTrainer(model, [], args, ROWS, eval_dataset=ROWS, environment_factory=Adder)
    (before, line, after), moved = train(trainer)
    assert moved
    rewards = [row["rewards"] for row in read_lines(tmp_path / "completions.jsonl")]
    assert all(list(reward) == ["Adder"] for reward in rewards)
    assert line["reward"] == pytest.approx(np.mean([reward["Adder"] for reward in rewards]))
    assert min(before["eval/Adder"], after["eval/Adder"]) > 0
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/Adder/mean"] == pytest.approx(after["eval/Adder"])
    json.dumps(metrics)


def test_a_dict_of_factories_and_the_column_environment(model):
    class Doubler(Adder):
        def add(self, n: int) -> int:
            """Add.

            Args:
                n: it
            """
            return 2 * super().add(n)

    def chosen(environments, environment, completions, **kwargs):
        assert [type(one).__name__.lower() for one in environments] == environment
        assert set(environment) == {"adder", "doubler"}
        return varied(completions)

    factories = {"adder": Adder, "doubler": Doubler}
    rows = [ask(environment="adder"), ask(environment="doubler")]
    (line,), moved = train(GRPOTrainer(model, chosen, config(), rows, environment_factory=factories))
    assert moved
    assert line["rewards/Adder/missing"] == 0.0, "a Doubler is an Adder too"
    assert line["rewards/Doubler/missing"] == 0.5
    with pytest.raises(ValueError, match="the column 'environment' has 'other', and environment_factory has only"):
        GRPOTrainer(model, [], config(), [ask(environment="other")], environment_factory=factories).train()


def test_max_tool_calling_iterations(model, tmp_path):
    run = lambda **limit: train(GRPOTrainer(model, varied, config(**limit), ROWS, tools=[add]))[0][0]
    free, limited = run(), run(max_tool_calling_iterations=1, output_dir=tmp_path)
    assert free["turns/max"] > 2 == limited["turns/max"]
    assert limited["tools/calls"] <= 8 < free["tools/calls"]
    last = [row["turns"][-1] for row in read_lines(tmp_path / "completions.jsonl") if row["ended"]]
    assert {turn["by"] for turn in last} == {"policy"}
    assert any("tool_call" in turn["text"] for turn in last), "a second call is not answered"


def test_a_tool_that_raises(model):
    def add(n: int) -> int:
        """Add.

        Args:
            n: it
        """
        raise ValueError(f"no sums with {n} today")

    said = []

    def listen(completions, **kwargs):
        said.extend(message["content"] for message in messages_of(completions, "tool"))
        return varied(completions)

    (line,), moved = train(GRPOTrainer(model, listen, config(), ROWS, tools=[add]))
    assert moved
    assert line["tools/failures"] == line["tools/calls"] >= len(said), "for the answer to a last one was no room"
    assert any(re.fullmatch(r"Error: ValueError: no sums with \d today", text) for text in said)
    assert line["environment/errors"] == 0, "the policy is told, and the run goes on"


def test_calls_that_are_malformed_or_of_no_tool(model):
    def subtract(n: int) -> int:
        """Subtract.

        Args:
            n: it
        """
        raise AssertionError("the policy knows no such call")

    said = []

    def listen(completions, **kwargs):
        said.extend(message["content"] for message in messages_of(completions, "tool"))
        return varied(completions)

    (line,), _ = train(GRPOTrainer(model, listen, config(), ROWS, tools=[subtract]))
    assert line["tools/failures"] == line["tools/calls"] >= len(said), "for the answer to a last one was no room"
    assert "Error: there is no tool 'add'; there are subtract" in said
    assert any(text.startswith("Error: A tool call could not be read: it is no valid JSON") for text in said)


@pytest.mark.quick
def test_tools_and_prompts_that_are_text_are_refused(model):
    for given in ({"tools": [add]}, {"environment_factory": Adder}):
        trainer = GRPOTrainer(model, varied, config(), [{"prompt": "Count."}], **given)
        with pytest.raises(ValueError, match="tools are called by messages, and the prompts of the dataset are text"):
            trainer.train()


def test_each_completion_has_an_environment_of_its_own(model):
    def own(environments, completions, **kwargs):
        assert len(set(map(id, environments))) == len(completions) == 8
        for environment, messages in zip(environments, completions, strict=True):
            assert environment.total == sum(called(messages[: len(messages) // 2 * 2])), "the last turn has no answer"
        return [float(environment.total) for environment in environments]

    _, moved = train(GRPOTrainer(model, own, config(), ROWS, environment_factory=Adder))
    assert moved


def test_tools_beside_an_environment(model):
    class Listener:
        """It has no tools of its own, and hears what the policy says when it has called enough."""

        def reset(self, **row):
            self.heard = None

        def respond(self, text):
            self.heard = text

        def get_reward(self):
            return None if self.heard is None else float("says 2" in self.heard)

    def same(environments, completions, **kwargs):
        heard = [environment.heard for environment in environments]
        assert all(
            text is None or messages[-1]["content"] == text for text, messages in zip(heard, completions, strict=True)
        )
        return varied(completions)

    trainer = GRPOTrainer(model, same, config(), ROWS, tools=[add], environment_factory=Listener)
    (line,), moved = train(trainer)
    assert moved
    assert line["tools/calls"] > line["tools/failures"]
    assert line["rewards/Listener/missing"] < 1
    assert 0 <= line["rewards/Listener/mean"] <= 1
    with pytest.raises(ValueError, match="Adder and tools both have 'add'"):
        GRPOTrainer(model, same, config(), ROWS, tools=[add], environment_factory=Adder).train()
