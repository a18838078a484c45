"""Train a language model by GRPO to play Countdown: combine numbers with + - * /, each used once, to reach a target.

    python -m experiments.countdown [--seed N] [--random-rewards]                                  # from scratch
    python -m experiments.countdown --model DIRECTORY_OR_NAME [--numbers 4] [--lora RANK]           # from a checkpoint

From scratch, a problem has three numbers up to 20 and the operations + and -: `make 20 from 9 4 15:` →
`<answer>(15+9)-4</answer>`. A small new model is first trained by SFT on a flawed teacher that is right one time in
five: most of its expressions have a different value, and one reply in five lacks a tag. GRPO then trains with two
rewards: one if the expression equals the target, and one if it follows the rules. With --model, the problems are
described in words and have four to six numbers up to 100 and all four operations.

Answers are checked by `expression_value`, which parses them and accepts only listed node types; nothing is executed.

Time from scratch: 110 CPU seconds. Expect on 200 unseen problems: sampled accuracy (4 replies each) rises from 0.16 …
0.19 to 0.48 … 0.58, the share that follows the rules from 0.63 … 0.68 to 0.94 … 0.96, and greedy accuracy from 0.42 …
0.48 to 0.51 … 0.62 (seeds 0 to 4). GRPO makes solutions that the model already samples occasionally more frequent; it
hardly teaches arithmetic. With a checkpoint: not measured. Expect the rules first, and slow progress in accuracy.
The last line on standard output is one JSON object. All files are in the run directory; `final` is the checkpoint.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax

from experiments.common import (
    Lesson,
    Rates,
    Stopwatch,
    add_device_flags,
    coin_flips,
    encode_lessons,
    fresh_directory,
    held_out_rates,
    on_mesh,
    report_results,
    show_completions,
    show_rates,
    start_processes,
    supervise,
    use_compile_cache,
)
from grpo_jax import GRPOConfig, Policy, add_lora, from_pretrained, init_policy, merge_lora, save_pretrained, train
from grpo_jax.models.sharding import make_mesh
from grpo_jax.rewards.shipped import from_row
from grpo_jax.run.placement import place_policy

LONGEST_EXPRESSION = 100
"""Maximum characters in an expression. Six three-digit numbers with all brackets need about 50."""
SMALL: dict[str, Any] = {"numbers": 3, "largest": 20, "targets": range(1, 61), "operations": "+-"}
"""Problems for training from scratch."""
WORDED: dict[str, Any] = {"numbers": 4, "largest": 100, "targets": range(10, 1000)}
"""Problems for a checkpoint; --numbers replaces "numbers"."""
SOLVED, BROKEN = 0.25, 0.2
"""Share of the teacher's expressions that are solutions, and share of its replies that lack a tag."""
GROUP = 8
"""Completions per prompt."""
BATCH = 128
"""Texts per supervised step."""

OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SPELLINGS = {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", r"\times": "*", r"\cdot": "*", r"\div": "/"}

Row = dict[str, Any]


def expression_value(text: str, numbers: Sequence[int], *, use_all: bool = True) -> Fraction | None:
    """Return the exact value of an expression in the given numbers, or None if it is invalid or breaks the rules.

    Only whole numbers, + - * / and brackets are accepted, in a syntax tree; nothing is executed. Parsing and arithmetic
    are fast, since the text is short and every number in it must be one of the given numbers.

    Args:
      text: text from a completion. It may end in `= value`, which must then be correct.
      numbers: the numbers that may be used, each as often as it is listed.
      use_all: whether every number must be used.

    Example:
      >>> expression_value("(9 - 5) / 3", [3, 5, 9])
      Fraction(4, 3)
      >>> expression_value("9 - 5 + 5", [3, 5, 9]) is None
      True
    """
    for spelling, sign in SPELLINGS.items():
        text = text.replace(spelling, sign)
    text, equals, claimed = (part.strip() for part in text.partition("="))
    if len(text) > LONGEST_EXPRESSION or not re.fullmatch(r"[\d+\-*/() ]+", text, re.ASCII):
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    used = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    if used - Counter(numbers) or (use_all and used != Counter(numbers)):
        return None
    value = _value(tree)
    return None if equals and (value is None or claimed != str(value)) else value


def _value(node: ast.expr) -> Fraction | None:
    """Evaluate a tree of the four operations on whole numbers. Return None for any other tree and for x / 0."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATIONS:
        return None
    left, right = _value(node.left), _value(node.right)
    if left is None or right is None or (isinstance(node.op, ast.Div) and right == 0):
        return None
    return OPERATIONS[type(node.op)](left, right)


def last_answer(text: str) -> str | None:
    """Return the text between the last pair of answer tags, or None.

    Example:
      >>> last_answer("<answer>1+2</answer> no: <answer>1*2</answer>")
      '1*2'
    """
    found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    return found[-1] if found else None


@from_row
def accuracy(completion: str, row: Row) -> float:
    """Return 1 if the answer reaches the target with the row's numbers, each used once."""
    answer = last_answer(completion)
    return float(answer is not None and expression_value(answer, row["numbers"]) == row["target"])


@from_row
def follows_rules(completion: str, row: Row) -> float:
    """Return 1 if the answer is an expression in the row's numbers, each used once, whatever its value."""
    answer = last_answer(completion)
    return float(answer is not None and expression_value(answer, row["numbers"]) is not None)


def build(numbers: Sequence[int], draw: random.Random, operations: str = "+-*/") -> tuple[int, str]:
    """Return (value, expression) for a random expression in all the numbers; intermediate values are positive integers.

    Example:
      >>> build([3, 5, 9], random.Random(1))
      (7, '(9-5)+3')
    """
    while True:
        parts = [(number, str(number)) for number in numbers]
        while len(parts) > 1:
            (a, left), (b, right) = sorted((parts.pop(draw.randrange(len(parts))) for _ in range(2)), reverse=True)
            sign = draw.choice(operations)
            if (sign == "-" and a == b) or (sign == "/" and a % b):
                break
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
            parts.append((value, f"({left}{sign}{right})"))
        else:
            value, text = parts[0]
            return value, text[1:-1] if len(numbers) > 1 else text


def make_problems(
    seed: int, count: int, *, numbers: int, largest: int, targets: range, operations: str = "+-*/"
) -> list[Row]:
    """Return distinct problems (they differ in numbers or target), each with a solution.

    Args:
      seed: random seed.
      count: number of problems.
      numbers: how many numbers each problem has. They are all different.
      largest: largest possible number.
      targets: possible targets.
      operations: operations that the solutions may use.

    Example:
      >>> make_problems(0, 1, numbers=3, largest=9, targets=range(10, 50))
      [{'numbers': [4, 3, 8], 'target': 20, 'solution': '(4*3)+8'}]
    """
    draw = random.Random(seed)
    problems: dict[tuple[Any, ...], Row] = {}
    for attempt in itertools.count():
        if len(problems) == count:
            break
        if attempt == 100 * count:
            raise ValueError(f"count is {count}, but hardly that many problems exist. Use a smaller count.")
        chosen = draw.sample(range(1, largest + 1), numbers)
        target, solution = build(chosen, draw, operations)
        if target in targets:
            row = {"numbers": chosen, "target": target, "solution": solution}
            problems.setdefault((target, *sorted(chosen)), row)
    return list(problems.values())


def train_problems() -> list[Row]:
    """Return the training problems for a checkpoint, for recipes/countdown.yaml."""
    return make_problems(0, 2200, **WORDED)[200:]


def held_out_problems() -> list[Row]:
    """Return the held-out problems, in the same form."""
    return make_problems(0, 2200, **WORDED)[:200]


def make_tokenizer() -> Any:
    """Create a byte-level tokenizer in which each tag and each number from 10 to 99 is one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["make "] * 10, trainer)
    words = ["<answer>", "</answer>", *map(str, range(10, 100))]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def make_policy(seed: int, *, width: int = 64, layers: int = 3) -> Policy:
    """Create a small model with Qwen3's architecture and random weights."""
    tokenizer = make_tokenizer()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return init_policy(config, jax.random.key(seed), tokenizer=tokenizer)


def short_prompt(problem: Row) -> Row:
    """Convert a problem to a row for the model trained from scratch."""
    return {**problem, "prompt": f"make {problem['target']} from {' '.join(map(str, problem['numbers']))}:"}


def asked_in_words(problem: Row, *, chat: bool) -> Row:
    """Convert a problem to a row for a checkpoint: a message, or plain text if there is no chat template."""
    task = (
        f"Numbers: {', '.join(map(str, problem['numbers']))}. Combine all of them to {problem['target']}, each exactly "
        "once, with +, -, *, / and brackets. Work it out first, then give the expression alone, without its result, "
        "as <answer>expression</answer>."
    )
    return {**problem, "prompt": [{"role": "user", "content": task}] if chat else f"{task}\n"}


def teach(problem: Row, draw: random.Random) -> str:
    """Return the flawed teacher's reply: a solution or, more often, a random expression; sometimes it lacks a tag."""
    expression = problem["solution"]
    if draw.random() >= SOLVED:
        expression = build(problem["numbers"], draw, SMALL["operations"])[1]
    opening, closing = "<answer>", "</answer>"
    if draw.random() < BROKEN:
        opening, closing = draw.choice([("", closing), (opening, "")])
    return opening + expression + closing


def lessons(policy: Policy, problems: Sequence[Row], count: int, seed: int) -> list[Lesson]:
    """Return `count` encoded prompts, with their numbers in random order, and the teacher's replies."""
    draw = random.Random(seed)
    chosen = [draw.choice(problems) for _ in range(count)]
    shuffled = [{**problem, "numbers": draw.sample(problem["numbers"], len(problem["numbers"]))} for problem in chosen]
    return encode_lessons(policy, [short_prompt(row)["prompt"] for row in shuffled], [teach(p, draw) for p in chosen])


def make_config(arguments: argparse.Namespace, scratch: bool) -> GRPOConfig:
    """Build the run's `GRPOConfig` from the command line."""
    return GRPOConfig(
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * arguments.prompts if scratch else GROUP,
        gradient_accumulation_steps=1 if scratch else arguments.prompts,
        max_completion_length=arguments.max_completion_length,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="linear" if scratch else "constant",
        beta=0.02 if scratch else 0.001,
        # Weights for random rewards, accuracy and rules, or for the last two only.
        reward_weights=[1.0, 0.0, 0.0] if arguments.random_rewards else [1.0, 0.2],
        gradient_checkpointing=not scratch,
        compute_dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
        seed=arguments.seed,
        logging_steps=min(10, arguments.steps),
        save_steps=None,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.countdown", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="directory or hub name (default: a new model, from scratch)")
    add("--numbers", type=int, default=4, choices=(3, 4, 5, 6), help="numbers per problem, with --model (default 4)")
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank (default: all weights)")
    add("--random-rewards", action="store_true", help="the control: random rewards")
    add("--seed", type=int, default=0, help="seed for problems, weights and samples (default 0)")
    add("--steps", type=int, default=300, help="GRPO steps (default 300)")
    add("--prompts", type=int, default=16, help=f"problems per step, × {GROUP} completions (default 16)")
    add("--warm-up-steps", type=int, default=300, help="supervised steps for the new model (default 300)")
    add("--problems", type=int, default=2000, help="problems to train on (default 2000)")
    add("--held-out", type=int, default=200, help="problems to test on (default 200)")
    add("--max-completion-length", type=int, help="maximum tokens per completion (default 16, with --model 512)")
    add("--learning-rate", type=float, help="default 5e-4, with --model 1e-6, with --lora 1e-5")
    add("--run-dir", help="an empty or new directory (default runs/countdown-<seed>-<time>)")
    add_device_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.max_completion_length is None:
        arguments.max_completion_length = 512 if arguments.model else 16
    if arguments.learning_rate is None:
        arguments.learning_rate = 1e-5 if arguments.lora else 1e-6 if arguments.model else 5e-4
    return arguments


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the experiment and return the results that its last line prints."""
    arguments, watch = parse(argv), Stopwatch()
    start_processes(arguments)
    use_compile_cache()
    seed, scratch = arguments.seed, arguments.model is None
    run_dir = fresh_directory(arguments.run_dir, f"countdown-{seed}")
    kind = SMALL if scratch else {**WORDED, "numbers": arguments.numbers}
    problems = make_problems(seed, arguments.held_out + arguments.problems, **kind)
    held_out, problems = problems[: arguments.held_out], problems[arguments.held_out :]
    config = on_mesh(make_config(arguments, scratch), arguments.mesh)

    with watch("loading"):
        if scratch:
            new = make_policy(seed)
            texts = lessons(new, problems, arguments.warm_up_steps * BATCH, seed)
            save_pretrained(run_dir / "base", supervise(new, texts, batch=BATCH))
        source = run_dir / "base" if scratch else arguments.model
        base = from_pretrained(source, dtype=config.compute_dtype, param_dtype="float32")
        if arguments.lora is not None:
            base = add_lora(base, jax.random.key(seed), rank=arguments.lora, alpha=2.0 * arguments.lora)
        base = place_policy(base, make_mesh(config.mesh) if config.mesh else None)
    chat = base.tokenizer.chat_template is not None
    as_row = short_prompt if scratch else lambda problem: asked_in_words(problem, chat=chat)
    rows, test_rows = [as_row(p) for p in problems], [as_row(p) for p in held_out]

    def test(params: Any) -> tuple[Rates, list[Row]]:
        settings = {"max_completion_length": arguments.max_completion_length, "batch_size": 64, "seed": seed}
        with watch("evaluation"):
            return held_out_rates(base, test_rows, accuracy, follows_rules, params=params, samples=4, **settings)

    before, completions = test(base.params)
    print(f"before, on {len(test_rows)} unseen problems: {show_rates(before)}")
    show_completions("before, greedy", completions[:4])

    arm = "random_rewards" if arguments.random_rewards else "grpo"
    print(f"\nGRPO, rewarded {'at random' if arguments.random_rewards else 'for the target and the rules'}:")
    reward_fns = [coin_flips(seed)] * arguments.random_rewards + [accuracy, follows_rules]
    with watch("grpo"):
        state = train(base, rows, reward_fns, config, run_dir=run_dir)
    trained = base.replace(params=state.params)
    save_pretrained(run_dir / "final", trained if arguments.lora is None else merge_lora(trained))

    after, completions = test(state.params)
    show_completions("after, greedy", completions[:4])
    print(f"\nheld-out problems: {show_rates(before)}  →  {show_rates(after)}")
    return report_results(run_dir, {arm: {"before": before, "after": after}}, watch)


if __name__ == "__main__":
    main()
