"""Train a small language model by GRPO to prefer the right answer, which it initially gives one time in eight.

    python -m experiments.sort_digits [--seed N] [--controls] [--run-dir DIR] [--picture FILE]
    python -m experiments.sort_digits --lora RANK [--quantize nf4]

The task is `sort 52817:` → `<answer>12578</answer>`. The model is first trained by SFT on a flawed teacher that is
right one time in eight: most of its replies are reversed, copied or not quite sorted, and one in five breaks the
format. GRPO then trains this checkpoint with two rewards, for the answer and for the format.

Time: 65 seconds on two idle cores; the two arms of --controls take 70 % more.
Expect: on 1000 unseen prompts, greedy accuracy rises from 0.07 … 0.12 to at least 0.99, and sampled accuracy from
0.10 … 0.13 to at least 0.97 (seeds 0 to 4). More supervised steps do not change them, and random rewards do not raise
them. The last line on standard output is one JSON object. All files are in the run directory: `final` is the
checkpoint, and `hero.png` is the picture in the README.
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
"""Digits per prompt."""
LONGEST = 12
"""Maximum tokens per completion. The right one has 8: two tags, five digits and the end token."""
BATCH = 128
"""Texts per supervised step."""

BEHAVIOURS = {"reversed": 0.54, "sorted": 0.16, "copied": 0.16, "swapped": 0.14}
"""The teacher's behaviors and their shares. "reversed" is by far the most frequent, so greedy decoding is wrong."""
BROKEN = 0.2
"""Share of replies with a broken format, for every behavior; so 0.16 · 0.8, one reply in 8, is entirely right."""

MEANING = """
What this shows: the base model can already sort, and does so about one time in eight, because that is how often its
teacher did. GRPO selects this behavior among the model's behaviors; it does not teach a new skill. More lessons from
the same teacher do not select it, and neither does GRPO with random rewards (--controls)."""

Row = dict[str, str]

accuracy = accuracy_reward("answer", r"<answer>(.*?)</answer>")
well_formed = format_reward(r"<answer>\d+</answer>")


def make_rows(seed: int, *, train_rows: int = 4000, held_out: int = 1000) -> tuple[list[Row], list[Row]]:
    """Return training and test rows, which are distinct and disjoint. No prompt is already sorted.

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
        if digits != answer:  # otherwise copying would be right
            numbers[digits] = answer
    rows = [{"prompt": f"sort {digits}:", "digits": digits, "answer": answer} for digits, answer in numbers.items()]
    train_set, test_set = rows[held_out:], rows[:held_out]
    assert not {row["prompt"] for row in train_set} & {row["prompt"] for row in test_set}
    return train_set, test_set


def teach(digits: str, draw: random.Random) -> str:
    """Return the flawed teacher's reply: a random behavior, in a format that is sometimes broken."""
    (behaviour,) = draw.choices(list(BEHAVIOURS), weights=list(BEHAVIOURS.values()))
    answer = sorted(digits)
    if behaviour == "reversed":
        answer = answer[::-1]
    elif behaviour == "copied":
        answer = list(digits)
    elif behaviour == "swapped":  # two neighbors that differ
        at = draw.choice([i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]])
        answer[at], answer[at + 1] = answer[at + 1], answer[at]
    opening, closing = "<answer>", "</answer>"
    if draw.random() < BROKEN:
        opening, closing = draw.choice([("", ""), (opening, ""), ("", closing)])
    return opening + "".join(answer) + closing


def make_tokenizer() -> Any:
    """Train a byte-level BPE with one token for each of the two tags. `AutoTokenizer` reloads it unchanged."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["sort "] * 10, trainer)
    # The tags are not special tokens, which would be removed from the text that reward functions receive.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<answer>", "</answer>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def make_policy(seed: int, *, width: int = 64, layers: int = 3, recurrent: bool = False) -> Policy:
    """Create a small model with Qwen3's architecture, or Qwen3.5's and one more layer, and random weights."""
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
    if recurrent:  # three gated-delta-net layers, then one attention layer
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
    """Return `count` encoded prompts with the teacher's replies."""
    draw = random.Random(seed)
    chosen = [draw.choice(rows) for _ in range(count)]
    return encode_lessons(policy, [row["prompt"] for row in chosen], [teach(row["digits"], draw) for row in chosen])


def sample_one(policy: Policy, params: Any, rows: Sequence[Row], seed: int) -> list[dict[str, Any]]:
    """Sample eight completions for the first row, for the picture."""
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
    """Build the settings that all GRPO arms share."""
    return GRPOConfig(
        num_generations=8,
        per_device_train_batch_size=256,  # completions of 32 prompts
        max_completion_length=LONGEST,
        max_steps=steps,
        learning_rate=learning_rate,
        lr_scheduler_type="linear",
        # Without the KL term, random rewards let the model drift to any behavior, sometimes the right one.
        beta=0.04,
        gradient_checkpointing=False,
        pad_to_multiple_of=None,  # all prompts have the same length
        seed=seed,
        eval_steps=eval_steps,
        num_generations_eval=1,
        per_device_eval_batch_size=held_out,
        logging_steps=10,
        save_steps=None,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sort_digits", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for data, weights and samples (default 0)")
    parser.add_argument("--controls", action="store_true", help="also run more SFT, and GRPO with random rewards")
    parser.add_argument("--recurrent", action="store_true", help="three of four layers are gated delta nets (Qwen3.5)")
    parser.add_argument("--run-dir", help="an empty or new directory (default runs/sort_digits-<seed>-<time>)")
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters on the base in bfloat16 (default: all weights)"
    )
    parser.add_argument(
        "--quantize", choices=("nf4", "int8"), help="with --lora: also on the quantized base, from the same start"
    )
    parser.add_argument("--steps", type=int, default=250, help="GRPO steps (default 250)")
    parser.add_argument("--warm-up-steps", type=int, default=400, help="supervised steps (default 400)")
    parser.add_argument("--held-out", type=int, default=1000, help="prompts to test on (default 1000)")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="copy the picture to FILE, with its dark and narrow variants"
    )
    add_device_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.quantize and arguments.lora is None:
        parser.error("--quantize needs --lora RANK, since quantized weights cannot be trained")
    return arguments


def train_adapters(
    arguments: argparse.Namespace, quantize: str | None, rows: Sequence[Row], held_out: Sequence[Row], run_dir: Path
) -> dict[str, Rates]:
    """Train adapters on the checkpoint in `run_dir`, in bfloat16 or quantized. Return the rates before and after."""
    seed, name = arguments.seed, quantize or "bfloat16"
    base = from_pretrained(run_dir / "base", param_dtype="bfloat16", quantize=quantize)
    policy = add_lora(base, jax.random.key(seed), rank=arguments.lora, alpha=2.0 * arguments.lora)
    # Adapters start at zero and need a higher learning rate than weights.
    config = make_config(seed, arguments.steps, len(held_out), eval_steps=None, learning_rate=5e-3)
    state = train(policy, rows, [accuracy, well_formed], on_mesh(config, arguments.mesh), run_dir=run_dir / name)
    save_lora(run_dir / f"adapter_{name}", policy.replace(params=state.params))
    settings = {"max_completion_length": LONGEST, "batch_size": len(held_out), "seed": seed}
    rates = lambda params: held_out_rates(policy, held_out, accuracy, well_formed, params=params, **settings)[0]
    return {"before": rates(policy.params), "after": rates(state.params)}


def draw_before_and_after(run_dir: Path, samples: dict[str, list[Row]], arguments: argparse.Namespace) -> None:
    """Draw the run's pictures and copy them to `--picture`."""
    if jax.process_index() > 0:
        return
    title = f"A small language model sorts five digits, before and after {arguments.steps} steps of GRPO"
    draw_hero(run_dir, samples, title=title)
    print(f"\npicture: {run_dir / 'hero.png'}; report: {run_dir / 'report.html'}")
    if arguments.picture:
        copy_hero(run_dir, arguments.picture)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the experiment and return the results that its last line prints."""
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
    print(f"base, on {len(held_out)} unseen prompts: {show_rates(before)}")
    show_completions("before, greedy", completions[:4])
    arms, samples = {}, {"before": sample_one(base, base.params, held_out, seed)}

    if arguments.lora:
        for held in dict.fromkeys((None, arguments.quantize)):
            name = f"lora_{held or 'bfloat16'}"
            print(f"\nGRPO with adapters of rank {arguments.lora}, on the base in {held or 'bfloat16'}:")
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
        print("\nControl: the same number of additional supervised steps.")
        with watch("more_supervised"):
            taught = supervise(base, lessons(base, rows, steps * BATCH, seed + 1), batch=BATCH)
        arms["more_supervised"] = {"before": before, "after": test(taught.params)[0]}
        print("\nControl: GRPO with random rewards.")
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
