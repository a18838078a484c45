"""Train a small language model by GRPO to call a calculator instead of guessing.

    python -m experiments.calculator [--seed N] [--control] [--credit]                   # from scratch
    python -m experiments.calculator --model DIRECTORY_OR_NAME [--lora RANK]             # from an instruct checkpoint

The task is one-step word problems ("Ann has 37 boxes of 48 pens. How many pens?"). The policy may call a tool,
`calculate`, which evaluates an expression; a completion is a list of messages. A small new model is first trained by
SFT on a teacher that rarely calls the calculator, uses the wrong operation in one call out of five, and otherwise
guesses. GRPO then rewards only correct answers. With --model, the checkpoint's chat template encodes the tool and the
calls, and the numbers have up to five digits.

Time: 165 seconds from scratch on two cores (85 of them for SFT), and 35 for the control.
Expect from scratch: on 50 unseen problems, 4 samples each, accuracy rises from 0.21 to 0.91, and use of the calculator
from 0.305 to 0.955; with random rewards they fall to 0.01 and 0 (seed 0, `--held-out 50 --control`).
With a checkpoint: not measured.
The last line on standard output is one JSON object. All files are in the run directory; `final` is the checkpoint.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from typing import Any

import jax

from experiments.common import (
    Lesson,
    Rates,
    Stopwatch,
    coin_flips,
    fresh_directory,
    lesson,
    report_results,
    supervise,
    use_compile_cache,
)
from experiments.countdown import expression_value
from grpo_jax import GRPOConfig, Policy, add_lora, evaluate, from_pretrained, init_policy, merge_lora, save_pretrained
from grpo_jax import train as train_grpo
from grpo_jax.rollout.tools import read_tools
from grpo_jax.text.calls import tool_message
from grpo_jax.text.templates import ChatTemplate

STORIES = (
    ("Ann has {a} boxes of {b} pens. How many pens?", "*"),
    ("{a} shelves hold {b} books each. How many books?", "*"),
    ("Ben had {a} stamps and got {b} more. How many stamps?", "+"),
    ("One farm has {a} cows, another {b}. How many cows?", "+"),
    ("Eve had {a} coins and spent {b}. How many coins are left?", "-"),
    ("Of {a} eggs {b} broke. How many eggs are left?", "-"),
)
ASKS, WRONG = 0.3, 0.2
"""Shares of the teacher's replies that call the calculator, and of these calls that use the wrong operation."""
GROUP = 8
"""Completions per prompt."""
BATCH = 32
"""Conversations per supervised step."""
SMALL, LARGE = 99, 99_999
"""Largest number in a problem: from scratch, and with a checkpoint."""

# Like Qwen's template: tools come before the first message, calls are JSON between tags, and results are user turns.
TEMPLATE = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool.function | tojson }}
{%- endfor %}
Call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

Row = dict[str, Any]


def calculate(expression: str) -> str:
    """Work out an expression.

    Args:
        expression: whole numbers with + - * /
    """
    value = expression_value(expression, [int(number) for number in re.findall(r"\d+", expression, re.ASCII)])
    if value is None:
        raise ValueError(f"{expression[:40]!r} is not an expression of whole numbers with + - * /")
    return str(value)


TOOLS = [calculate]


def make_problems(seed: int, count: int, largest: int = SMALL) -> list[Row]:
    """Return `count` distinct word problems, each with its expression and answer.

    Example:
      >>> make_problems(0, 1)
      [{'text': 'One farm has 64 cows, another 16. How many cows?', 'expression': '64 + 16', 'answer': 80}]
    """
    draw, problems = random.Random(seed), dict[str, Row]()
    while len(problems) < count:
        story, sign = draw.choice(STORIES)
        a, b = sorted((draw.randint(11, largest), draw.randint(11, largest)), reverse=True)
        expression, text = f"{a} {sign} {b}", story.format(a=a, b=b)
        problems[text] = {"text": text, "expression": expression, "answer": int(calculate(expression))}
    return list(problems.values())


def asked(problem: Row, *, scratch: bool) -> Row:
    """Convert a problem to a row with a user message. For a checkpoint, the message also says how to answer."""
    how = "" if scratch else " Finish with the number alone, without units, in a sentence: The answer is …"
    return {**problem, "prompt": [{"role": "user", "content": problem["text"] + how}]}


def last_number(text: str) -> int | None:
    """Return the last whole number in a text, with or without thousands separators (commas).

    Example:
      >>> last_number("37 boxes: The answer is 1,776.")
      1776
    """
    found = re.findall(r"-?\d[\d,]*", text, re.ASCII)
    digits = found[-1].replace(",", "") if found else ""
    return int(digits) if 0 < len(digits) < 20 else None


def accuracy(completions: Sequence[Any], answer: Sequence[int], **_: Any) -> list[float]:
    """Return 1 if the policy wrote the last message and its last number is the answer. Tool results do not count."""
    lasts = [messages[-1] for messages in completions]
    said = [last_number(last["content"] or "") if last["role"] == "assistant" else None for last in lasts]
    return [float(number == right) for number, right in zip(said, answer, strict=True)]


def used_tool(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 for each completion in which the calculator returned a result."""
    results = [[m["content"] for m in messages if m["role"] == "tool"] for messages in completions]
    return [float(any(re.fullmatch(r"-?\d+(/\d+)?", result) for result in own)) for own in results]


def make_tokenizer() -> Any:
    """Train a byte-level BPE tokenizer with one token for each digit and for each word in the conversations."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    schema = next(iter(read_tools(TOOLS).values())).schema
    texts = [row["text"] for row in make_problems(0, 200)] + [str(schema), TEMPLATE, "The answer is"] * 20
    marks = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<pad>"], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=mark[1] == "|") for mark in marks])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def make_policy(seed: int, *, width: int = 64, layers: int = 2) -> Policy:
    """Create a small model with Qwen3's architecture and random weights."""
    tokenizer = make_tokenizer()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": width // 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return init_policy(config, jax.random.key(seed), tokenizer=tokenizer)


def taught(problem: Row, draw: random.Random) -> list[tuple[str, str]]:
    """Return the teacher's turns, each with the calculator's response ("" after the last turn)."""
    a, sign, b = problem["expression"].split()
    if draw.random() >= ASKS:
        size = len(str(problem["answer"]))
        return [(f"The answer is {draw.randint(10 ** (size - 1), 10**size - 1)}.", "")]
    expression = f"{a} {draw.choice('+-*'.replace(sign, '')) if draw.random() < WRONG else sign} {b}"
    call = f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
    result = calculate(expression)
    return [(call, result), (f"The answer is {result}.", "")]


def lessons(policy: Policy, problems: Sequence[Row], count: int, seed: int) -> list[Lesson]:
    """Return `count` conversations with the teacher. Only its turns and their end tokens are learned."""
    draw, tokenizer, end = random.Random(seed), policy.tokenizer, policy.eos_token_ids[0]
    schemas = [tool.schema for tool in read_tools(TOOLS).values()]
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    shown: list[Lesson] = []
    for problem in draw.choices(problems, k=count):
        messages = asked(problem, scratch=True)["prompt"]
        opening = tokenizer.apply_chat_template(messages, tools=schemas, add_generation_prompt=True, tokenize=False)
        ids = encode(opening)
        own = [False] * len(ids)
        for turn, result in taught(problem, draw):
            said = [*encode(turn), end]
            template = ChatTemplate(tokenizer, tools=schemas)
            heard = template.observation_ids([tool_message("calculate", result)]) if result else []
            ids, own = [*ids, *said, *heard], [*own, *[True] * len(said), *[False] * len(heard)]
        shown.append(lesson(ids, own))
    return shown


def make_config(arguments: argparse.Namespace, scratch: bool) -> GRPOConfig:
    """Build the settings that GRPO and its control share."""
    return GRPOConfig(
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * arguments.prompts if scratch else GROUP,
        gradient_accumulation_steps=1 if scratch else arguments.prompts,
        max_completion_length=arguments.max_completion_length,
        max_tool_calling_iterations=4,
        turn_credit="to_go" if arguments.credit else "episode",
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="linear" if scratch else "constant",
        gradient_checkpointing=not scratch,
        seed=arguments.seed,
        logging_steps=min(10, arguments.steps),
        save_steps=None,
    )


def show(rates: Rates) -> str:
    """Format rates for printing.

    Example:
      >>> show({"accuracy": 0.25, "used_tool": 0.3})
      'right 0.25 · with the calculator 0.30'
    """
    return f"right {rates['accuracy']:.2f} · with the calculator {rates['used_tool']:.2f}"


def show_conversation(game: Row) -> None:
    """Print a problem and the messages of its completion."""
    print(f"  {game['prompt'][-1]['content']}")
    for message in game["completion"]:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
        print(f"    {message['role']}: {' '.join([message['content'] or '', *map(str, calls)]).strip()}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.calculator", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--model", help="directory or hub name of a checkpoint with tools in its template (default: new)")
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank (default: all weights)")
    add("--control", action="store_true", help="also run GRPO with random rewards")
    add(
        "--credit", action="store_true", help="compute advantages per turn, within the group, instead of per completion"
    )
    add("--seed", type=int, default=0, help="seed for problems, weights and samples (default 0)")
    add("--steps", type=int, default=80, help="GRPO steps (default 80)")
    add("--prompts", type=int, default=16, help=f"problems per step, × {GROUP} completions (default 16)")
    add("--warm-up-steps", type=int, default=800, help="supervised steps for the new model (default 800)")
    add("--problems", type=int, default=2000, help="problems to train on (default 2000)")
    add("--held-out", type=int, default=200, help="problems to test on (default 200)")
    add("--max-completion-length", type=int, help="maximum tokens in all turns (default 80, with --model 512)")
    add("--learning-rate", type=float, help="default 1e-3, with --model 1e-6, with --lora 1e-5")
    add("--run-dir", help="an empty or new directory (default runs/calculator-<seed>-<time>)")
    arguments = parser.parse_args(argv)
    if arguments.max_completion_length is None:
        arguments.max_completion_length = 512 if arguments.model else 80
    if arguments.learning_rate is None:
        arguments.learning_rate = 1e-5 if arguments.lora else 1e-6 if arguments.model else 1e-3
    return arguments


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the experiment and return the results that its last line prints."""
    arguments, watch = parse(argv), Stopwatch()
    use_compile_cache()
    seed, scratch = arguments.seed, arguments.model is None
    run_dir = fresh_directory(arguments.run_dir, f"calculator-{seed}")
    problems = make_problems(seed, arguments.held_out + arguments.problems, SMALL if scratch else LARGE)
    rows = [asked(problem, scratch=scratch) for problem in problems]
    test_rows, rows = rows[: arguments.held_out], rows[arguments.held_out :]

    with watch("loading"):
        if scratch:
            new = make_policy(seed)
            texts = lessons(new, problems[arguments.held_out :], arguments.warm_up_steps * BATCH, seed)
            save_pretrained(run_dir / "base", supervise(new, texts, batch=BATCH))
        base = from_pretrained(run_dir / "base" if scratch else arguments.model, param_dtype="float32")
        if arguments.lora is not None:
            base = add_lora(base, jax.random.key(seed), rank=arguments.lora, alpha=2.0 * arguments.lora)

    def test(params: Any) -> Rates:
        how = {"tools": TOOLS, "num_generations": 4, "temperature": 1.0, "batch_size": 50, "seed": seed + 1_000_003}
        length = arguments.max_completion_length
        with watch("evaluation"):
            metrics, games = evaluate(
                base, test_rows, [accuracy, used_tool], params=params, max_completion_length=length, **how
            )
        for game in games[: 4 * 3 : 4]:
            show_conversation(game)
        return {name: round(metrics[name], 4) for name in ("accuracy", "used_tool")}

    before = test(base.params)
    print(f"before, on {len(test_rows)} unseen problems: {show(before)}\n")
    arms: dict[str, dict[str, Rates]] = {}
    rewards = {"grpo": accuracy} | ({"control": coin_flips(seed)} if arguments.control else {})
    for arm, reward in rewards.items():
        print(f"GRPO, rewarded {'at random' if arm == 'control' else 'for right answers'}:")
        own = run_dir / "control" if arm == "control" else run_dir
        with watch(arm):
            state = train_grpo(base, rows, reward, make_config(arguments, scratch), tools=TOOLS, run_dir=own)
        arms[arm] = {"before": before, "after": test(state.params)}
        trained = base.replace(params=state.params)
        save_pretrained(own / "final", trained if arguments.lora is None else merge_lora(trained))
        print(f"{arm}: {show(before)}  →  {show(arms[arm]['after'])}\n")
    return report_results(run_dir, arms, watch)


if __name__ == "__main__":
    main()
