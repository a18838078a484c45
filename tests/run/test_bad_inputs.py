"""Invalid inputs to `train`: each message names the argument, the value it got and the fix.

All errors are found and reported together before anything is compiled or sampled.
"""

import pytest
from tiny import tiny_policy, tiny_tokenizer

from grpo_jax import GRPOConfig
from grpo_jax.rewards import number_reward
from grpo_jax.run.prepare import prepare

pytestmark = pytest.mark.quick

ROWS = [{"prompt": "ab", "answer": "x"}, {"prompt": "abc", "answer": "y"}]
SMALL = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 8}
MESSAGES = [{"role": "user", "content": "a"}]


def right(completions, answer):
    return [0.0] * len(completions)


def short(completions):
    return [0.0] * len(completions)


def prepared(policy=None, dataset=ROWS, reward_fns=short, config=None, eval_dataset=None, optimizer=None, **settings):
    policy = tiny_policy() if policy is None else policy
    config = GRPOConfig(**SMALL | settings) if config is None else config
    return prepare(policy, dataset, reward_fns, config, eval_dataset=eval_dataset, optimizer=optimizer)


class Frame:
    """Like a pandas DataFrame, which is indexed by column name."""

    def __len__(self):
        return 2

    def __getitem__(self, name):
        return {"prompt": ["a", "b"]}[name]


def with_template():
    tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<eos>")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    return tiny_policy().replace(tokenizer=tokenizer)


def other_vocabulary():
    policy = tiny_policy()
    shape = policy.model.config.__class__(**policy.model.config.__dict__ | {"vocab_size": 40})
    return policy.replace(model=type(policy.model)(shape))


WANTED = "must be a list of dicts, a datasets.Dataset, an iterator of dicts, a file (.jsonl, .json, .csv, .parquet)"
TEXT = 'use a string, or a list of messages [{"role": "user", "content": ...}]'
GIVEN = "(columns: answer; also available: prompts, completions, completion_ids, trainer_state, log_metric, log_extra)"

# Arguments, and a part of the expected message.
BAD = [
    (dict(dataset=None), f"dataset {WANTED}"),
    (dict(dataset=[]), "dataset is empty; pass at least one row with a 'prompt'"),
    (dict(dataset="rows.jsonl"),
        "dataset='rows.jsonl' does not exist; pass the path to a file (.jsonl, .json, .csv, .parquet)"),
    (dict(dataset="."), "dataset='.' is a directory; pass the path to a file (.jsonl, .json, .csv, .parquet)"),
    (dict(dataset={"prompt": ["a"]}), "dataset must be a list of dicts; got a dict with keys ['prompt']"),
    (dict(dataset={"train": ROWS}), "(for a DatasetDict, pass one split: dataset['train'])"),
    (dict(dataset=Frame()), "dataset must contain dicts; reading its rows failed (KeyError: 0)"),
    (dict(dataset=["a"]), "dataset row 0 must be a dict with a 'prompt'; got 'a'"),
    (dict(dataset=[{"question": "a"}]),
        "dataset row 0 lacks a 'prompt'; set prompt to a template, or rename one of the columns ['question']"),
    (dict(dataset=[{"q": 1}, {"q": 2}, {"prompt": "a"}]), "of the columns ['q'] (3 of the 3 rows are invalid)"),
    (dict(dataset=[*ROWS, {"prompt": "a"}]),
        "row 2 and row 0 have different columns (missing: ['answer'], extra"),
    (dict(dataset=[{"prompt": "a", 3: "b"}]), "row 0 has a column 3; column names must be strings"),
    (dict(dataset=[{"prompt": "a", "completions": "b"}]),
        "dataset has a column 'completions', a reserved argument name; rename the column"),
    (dict(dataset=[{"prompt": "a", "answer": x} for x in ("7", r"7\pi", "B")], reward_fns=number_reward()),
        r"in 2 of 3 rows of the dataset, the column 'answer' has no single number: row 1 has '7\\pi', row 2 has 'B'."),
    (dict(dataset=[{"prompt": None}]), f"dataset row 0 has None of type NoneType as 'prompt'; {TEXT}"),
    (dict(dataset=[{"prompt": ""}]), "row 0: the prompt '' has no tokens; check that it is not"),
    (dict(dataset=[{"prompt": []}]), "dataset row 0 has an empty list as 'prompt'; use at least one message"),
    (dict(dataset=[{"prompt": ["a"]}]), "row 0 has 'a' as message 0 of 'prompt'; a message must be a dict with"),
    (dict(dataset=[{"prompt": [{"role": None, "content": "a"}]}]),
        "as message 0 of 'prompt'; its 'role' must be a string, such as \"user\""),
    (dict(dataset=[{"prompt": [{"role": "user", "content": None}]}]),
        "its 'content' must be a string or a list of parts"),
    (dict(dataset=[{"prompt": "a"}, {"prompt": MESSAGES}]), "row 1 and row 0 differ: one prompt is a string and"),
    (dict(dataset=[{"prompt": MESSAGES}]), "but the tokenizer has no chat template; set tokenizer.chat_template, use"),
    (dict(dataset=[{"prompt": MESSAGES}], policy=with_template),
        "'content': 'a'}] (TemplateError: roles must alternate)"),
    (dict(max_prompt_length=2),
        "max_prompt_length=2 is exceeded by 1 of 2 prompts; the longest is dataset row 1"),
    (dict(reward_fns=None), "reward_fns must be a function or a list of functions; got None"),
    (dict(reward_fns=[]), "reward_fns is empty; pass at least one reward function"),
    (dict(reward_fns=[right, 3]), "reward_fns must contain only functions; got 3"),
    (dict(reward_fns=lambda completions, anwser: 0), f"is not a column of the dataset {GIVEN}; did you mean 'answer'?"),
    (dict(reward_fns=lambda completions, /: 0), "'lambda' has positional-only parameters"),
    (dict(reward_fns=lambda of="answer": 0), "if it is a factory, pass its result: lambda(...)"),
    (dict(reward_weights=[0.0]),
        "reward_weights = (0.0,): all weights are 0; use at least one nonzero weight"),
    (dict(policy="Qwen/Qwen3-0.6B"), "policy must be a Policy; got str. Load one with from_pretrained."),
    (dict(policy=lambda: tiny_policy().replace(tokenizer=None)), "policy has no tokenizer: its checkpoint may lack"),
    (dict(policy=other_vocabulary), "but the model's vocabulary size is 40. Use the tokenizer from"),
    (dict(config={"max_steps": 1}), "config must be a GRPOConfig; got dict. Convert a dict with GRPOConfig.from_dict."),
    (dict(max_completion_length=400),
        "max_completion_length = 400: with prompts of up to 3 tokens, the total exceeds the model"),
    (dict(mesh={"data": 2, "tensor": 3}),
        "tensor = 3 does not divide the model's 4 heads and 32 MLP channels. Valid sizes: 1, 2, 4"),
    (dict(mesh={"fsdp": 5}), "mesh = {'fsdp': 5}: fsdp = 5 does not divide the model's width of 16. Valid sizes:"),
    (dict(eval_steps=2), "eval_steps = 2: needs an evaluation dataset; set eval_dataset (RUN.yaml: eval_data)"),
    (dict(eval_dataset=[{"prompt": "a"}], reward_fns=right),
        "needs the argument 'answer', which is not a column of eval_dataset (columns: no"),
    (dict(eval_dataset=ROWS, num_generations_eval=3),
        "per_device_eval_batch_size = 8: must be a multiple of the group size 3"),
    (dict(dataset=[{"prompt": "ab" * 150}]), "the prompts leave no space for completions"),
]  # fmt: skip


def refusal(**given):
    given = {name: value() if name == "policy" and callable(value) else value for name, value in given.items()}
    with pytest.raises((ValueError, OSError)) as caught:
        prepared(**given)
    return str(caught.value)


@pytest.mark.parametrize(("given", "words"), BAD, ids=[words[:50] for _, words in BAD])
def test_invalid_input_is_rejected_with_the_fix(given, words, monkeypatch):
    """An invalid input is rejected with a message that states the fix, such as the sizes that divide."""
    monkeypatch.setattr("grpo_jax.run.collect.generate", lambda *_, **__: pytest.fail("sampling began"))
    text = refusal(**given)
    assert words in text
    assert len(text.split("\n")) == 1 or text.split("\n")[0].endswith("has 1 error:"), "a single error takes one line"
    assert len(text) < 500, "the message is too long"


def test_all_errors_are_reported_together():
    """All errors of a run, here seven in five arguments, are reported in one message."""
    fns = [lambda completions, gold: 0, lambda completions, hint: 0]
    given = {"dataset": [{"prompt": "abc"}], "reward_fns": fns, "eval_dataset": "held_out.jsonl", "optimizer": "adam"}
    given |= {"policy": lambda: tiny_policy().replace(tokenizer=None), "reward_weights": [1.0] * 3}
    text = refusal(**given, max_completion_length=400)
    head, *lines = text.split("\n  ")
    assert head == "this run has 7 errors:"
    starts = [
        "policy has no tokenizer",
        "optimizer must be an optax transformation, such as optax.adamw(1e-6); got 'adam'",
        "eval_dataset='held_out.jsonl' does not exist",
    ]
    starts += [f"reward function {name} needs the argument" for name in ("'lambda'", "'lambda_2'")]
    starts += [
        "max_completion_length = 400",
        "reward_weights = (1.0, 1.0, 1.0): got 3 weights for 2 reward functions; pass one",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


def test_exception_raised_by_the_dataset_propagates():
    def rows():
        yield ROWS[0]
        raise ConnectionResetError("the mirror hung up")

    with pytest.raises(ConnectionResetError, match="the mirror hung up"):
        prepared(dataset=rows())
