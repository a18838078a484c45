"""A small language model learns by GRPO to prefer the right answer, which it gives one time in eight.

    python -m experiments.sort_digits [--seed N] [--controls] [--run-dir DIR] [--picture FILE]
    python -m experiments.sort_digits --lora RANK [--quantize nf4]

The task: `sort 52817:` → `<answer>12578</answer>`. The model is first trained by SFT on a flawed teacher that is right
one time in eight: most of its replies are reversed, copied or not quite sorted, and one in five breaks the format. GRPO
then trains this checkpoint with two rewards, the answer and the format.

Time: 65 seconds on two idle cores; the two arms of --controls take 70 % more.
Expect: on 1000 unseen prompts, greedy from 0.07 … 0.12 to 0.99 and more, sampled from 0.10 … 0.13 to 0.97
and more (seeds 0 to 4); more supervised steps leave both where they were, and random rewards do not raise them.
The last line on standard output is one JSON object. All files are in the run directory: `final` is the checkpoint,
`hero.png` the picture of the README.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.common import (
    Lesson,
    Rates,
    Stopwatch,
    add_device_flags,
    coin_flips,
    copy_hero,
    draw_hero,
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
from grpo_jax import (
    GRPOConfig,
    Policy,
    add_lora,
    evaluate,
    from_pretrained,
    init_policy,
    save_lora,
    save_pretrained,
    train,
)
from grpo_jax.rewards.shipped import accuracy_reward, format_reward

DIGITS = 5
"""Digits of a prompt."""
LONGEST = 12
"""Tokens of a completion at most; the right one has 8: two tags, five digits, the end."""
BATCH = 128
"""Texts of a supervised step."""

BEHAVIOURS = {"reversed": 0.54, "sorted": 0.16, "copied": 0.16, "swapped": 0.14}
"""What the teacher does with the digits, and how often. Reversed leads by so much that greedy decoding is wrong."""
BROKEN = 0.2
"""Share of the teacher's replies whose format is broken, whatever the digits: 0.16 · 0.8 = 1 in 8 is right in all."""

MEANING = """
What this shows: the base model can sort already, and does it about one time in eight, because that is how often its
teacher did. GRPO selects this behaviour among the model's; it does not learn a new skill. More lessons of the same
teacher do not select it, and neither does GRPO with random rewards (--controls)."""

Row = dict[str, str]

accuracy = accuracy_reward("answer", r"<answer>(.*?)</answer>")
well_formed = format_reward(r"<answer>\d+</answer>")


def make_rows(seed: int, *, train_rows: int = 4000, held_out: int = 1000) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to test with: distinct, disjoint, and none of them sorted already.

    Example:
      >>> train_rows, held_out = make_rows(0, train_rows=2, held_out=1)
      >>> held_out
      [{'prompt': 'sort 87425:', 'digits': '87425', 'answer': '24578'}]
    """
    draw = random.Random(seed)
    numbers: dict[str, str] = {}
    while len(numbers) < train_rows + held_out:
        digits = "".join(draw.choices("0123456789", k=DIGITS))
        answer = "".join(sorted(digits))
        if digits != answer:  # else the habit of copying would be right
            numbers[digits] = answer
    rows = [{"prompt": f"sort {digits}:", "digits": digits, "answer": answer} for digits, answer in numbers.items()]
    train_set, test_set = rows[held_out:], rows[:held_out]
    assert not {row["prompt"] for row in train_set} & {row["prompt"] for row in test_set}
    return train_set, test_set


def teach(digits: str, draw: random.Random) -> str:
    """The flawed teacher's reply: a behaviour at random, in a format that is sometimes broken."""
    (behaviour,) = draw.choices(list(BEHAVIOURS), weights=list(BEHAVIOURS.values()))
    answer = sorted(digits)
    if behaviour == "reversed":
        answer = answer[::-1]
    elif behaviour == "copied":
        answer = list(digits)
    elif behaviour == "swapped":  # two neighbours that differ
        at = draw.choice([i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]])
        answer[at], answer[at + 1] = answer[at + 1], answer[at]
    opening, closing = "<answer>", "</answer>"
    if draw.random() < BROKEN:
        opening, closing = draw.choice([("", ""), (opening, ""), ("", closing)])
    return opening + "".join(answer) + closing


def make_tokenizer() -> Any:
    """A byte-level BPE, which `AutoTokenizer` gives back unchanged, with one token for each of the two tags."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["sort "] * 10, trainer)
    # Not special: special tokens are left out of the text that reward functions see.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<answer>", "</answer>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def make_policy(seed: int, *, width: int = 64, layers: int = 3, recurrent: bool = False) -> Policy:
    """A language model with Qwen3's layout and fresh weights; or with Qwen3.5's, and one layer more."""
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
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if recurrent:  # three layers of gated delta net to one of attention
        config |= {
            "architectures": ["Qwen3_5ForCausalLM"],
            "num_hidden_layers": layers + 1,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": width // 4,
            "linear_value_head_dim": width // 4,
        }
    return init_policy(config, jax.random.key(seed), tokenizer=tokenizer)


def lessons(policy: Policy, rows: Sequence[Row], count: int, seed: int) -> list[Lesson]:
    """`count` prompts with the teacher's replies, as `encode_lessons` returns them."""
    draw = random.Random(seed)
    chosen = [draw.choice(rows) for _ in range(count)]
    return encode_lessons(policy, [row["prompt"] for row in chosen], [teach(row["digits"], draw) for row in chosen])


def sample_one(policy: Policy, params: Any, rows: Sequence[Row], seed: int) -> list[dict[str, Any]]:
    """Eight completions of the first of the rows, for the picture."""
    settings: dict[str, Any] = {
        "max_completion_length": LONGEST,
        "num_generations": 8,
        "temperature": 1.0,
        "seed": seed,
    }
    return evaluate(policy, rows[:1], [accuracy], params=params, batch_size=1, **settings)[1]


def make_config(
    seed: int, steps: int, held_out: int, eval_steps: int | None, *, learning_rate: float = 5e-4
) -> GRPOConfig:
    """The settings of all GRPO arms."""
    return GRPOConfig(
        num_generations=8,
        per_device_train_batch_size=256,  # completions of 32 prompts
        max_completion_length=LONGEST,
        max_steps=steps,
        learning_rate=learning_rate,
        lr_scheduler_type="linear",
        # Without it random rewards let the model drift to any habit, the right one among them.
        beta=0.04,
        gradient_checkpointing=False,
        pad_to_multiple_of=None,  # all prompts have one length
        seed=seed,
        eval_steps=eval_steps,
        num_generations_eval=1,
        per_device_eval_batch_size=held_out,
        logging_steps=10,
        save_steps=None,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sort_digits", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="of data, weights and samples (default 0)")
    parser.add_argument("--controls", action="store_true", help="also more supervised steps, and GRPO by coin flips")
    parser.add_argument("--recurrent", action="store_true", help="gated delta nets in three of four layers, as Qwen3.5")
    parser.add_argument("--run-dir", help="an empty or new directory (default runs/sort_digits-<seed>-<time>)")
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters on the base in bfloat16 (default: all weights)"
    )
    parser.add_argument(
        "--quantize", choices=("nf4", "int8"), help="with --lora also on the base in so many bits, from the same start"
    )
    parser.add_argument("--steps", type=int, default=250, help="GRPO steps (default 250)")
    parser.add_argument("--warm-up-steps", type=int, default=400, help="supervised steps (default 400)")
    parser.add_argument("--held-out", type=int, default=1000, help="prompts to test with (default 1000)")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="where to copy the picture, with a dark one and two for a phone"
    )
    add_device_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.quantize and arguments.lora is None:
        parser.error("--quantize: quantized weights cannot be trained; give --lora RANK")
    return arguments


def train_adapters(
    arguments: argparse.Namespace, quantize: str | None, rows: Sequence[Row], held_out: Sequence[Row], run_dir: Path
) -> dict[str, Rates]:
    """GRPO by adapters on the checkpoint in `run_dir`, held in bfloat16 or quantized; rates before and after."""
    seed, name = arguments.seed, quantize or "bfloat16"
    base = from_pretrained(run_dir / "base", param_dtype="bfloat16", quantize=quantize)
    policy = add_lora(base, jax.random.key(seed), rank=arguments.lora, alpha=2.0 * arguments.lora)
    # Adapters start from nothing: they need longer steps than weights do.
    config = make_config(seed, arguments.steps, len(held_out), eval_steps=None, learning_rate=5e-3)
    state = train(policy, rows, [accuracy, well_formed], on_mesh(config, arguments.mesh), run_dir=run_dir / name)
    save_lora(run_dir / f"adapter_{name}", policy.replace(params=state.params))
    settings = {"max_completion_length": LONGEST, "batch_size": len(held_out), "seed": seed}
    rates = lambda params: held_out_rates(policy, held_out, accuracy, well_formed, params=params, **settings)[0]
    return {"before": rates(policy.params), "after": rates(state.params)}


def draw_before_and_after(run_dir: Path, samples: dict[str, list[Row]], arguments: argparse.Namespace) -> None:
    """The pictures of the run, and where `--picture` wants them."""
    if jax.process_index() > 0:
        return
    title = f"A small language model sorts five digits, before and after {arguments.steps} steps of GRPO"
    draw_hero(run_dir, samples, title=title)
    print(f"\npicture: {run_dir / 'hero.png'}; page of the run: {run_dir / 'report.html'}")
    if arguments.picture:
        copy_hero(run_dir, arguments.picture)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the experiment and return what its last line says."""
    arguments, watch = parse(argv), Stopwatch()
    start_processes(arguments)
    use_compile_cache()
    seed, steps = arguments.seed, arguments.steps
    run_dir = fresh_directory(arguments.run_dir, f"sort_digits-{seed}")
    rows, held_out = make_rows(seed, held_out=arguments.held_out)

    with watch("warm_up"):
        new = make_policy(seed, recurrent=arguments.recurrent)
        warm = supervise(new, lessons(new, rows, arguments.warm_up_steps * BATCH, seed), batch=BATCH)
        save_pretrained(run_dir / "base", warm)
        base = from_pretrained(run_dir / "base")

    def test(params: Any) -> tuple[Rates, list[dict[str, Any]]]:
        settings = {"max_completion_length": LONGEST, "batch_size": len(held_out), "seed": seed}
        with watch("evaluation"):
            return held_out_rates(base, held_out, accuracy, well_formed, params=params, **settings)

    before, completions = test(base.params)
    print(f"base, on {len(held_out)} prompts it has not seen: {show_rates(before)}")
    show_completions("before, greedy", completions[:4])
    arms, samples = {}, {"before": sample_one(base, base.params, held_out, seed)}

    if arguments.lora:
        for held in dict.fromkeys((None, arguments.quantize)):
            name = f"lora_{held or 'bfloat16'}"
            print(f"\nGRPO by adapters of rank {arguments.lora}, on the base in {held or 'bfloat16'}:")
            with watch(name):
                arms[name] = train_adapters(arguments, held, rows, held_out, run_dir)
    else:
        print("\nGRPO, rewarded for the answer and the format:")
        with watch("grpo"):
            config = on_mesh(make_config(seed, steps, len(held_out), eval_steps=50), arguments.mesh)
            state = train(base, rows, [accuracy, well_formed], config, eval_dataset=held_out, run_dir=run_dir)
        save_pretrained(run_dir / "final", base.replace(params=state.params))
        after, completions = test(state.params)
        show_completions("after, greedy", completions[:4])
        arms["grpo"] = {"before": before, "after": after}
        samples["after"] = sample_one(base, state.params, held_out, seed)
        draw_before_and_after(run_dir, samples, arguments)

    if arguments.controls:
        print("\nControl: as many more supervised steps.")
        with watch("more_supervised"):
            taught = supervise(base, lessons(base, rows, steps * BATCH, seed + 1), batch=BATCH)
        arms["more_supervised"] = {"before": before, "after": test(taught.params)[0]}
        print("\nControl: GRPO, rewarded by coin flips.")
        with watch("random_reward"):
            config = on_mesh(make_config(seed, steps, len(held_out), eval_steps=None), arguments.mesh)
            state = train(base, rows, coin_flips(seed), config, run_dir=run_dir / "random_reward")
        arms["random_reward"] = {"before": before, "after": test(state.params)[0]}

    print()
    for name, arm in arms.items():
        print(f"{name:>15}: {show_rates(arm['before'])}  →  {show_rates(arm['after'])}")
    print(MEANING)
    return report_results(run_dir, arms, watch)


if __name__ == "__main__":
    main()
