"""Train a real pretrained model by GRPO to use a given word in its stories.

    python -m experiments.stories [--model DIRECTORY_OR_NAME] [--steps 100] [--seed N] [--run-dir DIR]
    grpo-jax train experiments/recipes/stories.yaml        # the same run, with fewer measurements, as a RUN.yaml
    python -m experiments.stories --model WIDE --engine http://127.0.0.1:8000    # sample with a vLLM server (`engines`)

The model is stories260K, a Llama with 260 thousand parameters that was trained on TinyStories. Without --model it is
downloaded from the hub (karpathy/tinyllamas, in llama2.c's format) and converted by `experiments.llama2c`. Each prompt
names a word, `cat. Once upon a time, there was a girl named Lily.`, and the reward is 1 if the story uses it.

With --engine, a vLLM server that was started with --model samples during training; evaluation uses our own sampler.
vLLM on a CPU does not support heads as small as this model's, so `experiments.llama2c` widens them (WIDE above).

Time: one minute on two idle cores, a quarter of the time that TRL takes for the same run.
Expect: on 64 unseen prompts, the share of stories with the word rises from 0.16 to 1.00 greedily and from 0.07 … 0.09
to at least 0.98 sampled (8 stories each; seeds 0 to 2).
The last line on standard output is one JSON object. All files are in the run directory; `final` is the checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common import (
    Rates,
    Stopwatch,
    add_device_flags,
    fresh_directory,
    held_out_rates,
    on_mesh,
    report_results,
    show_completions,
    show_rates,
    start_processes,
    use_compile_cache,
)
from grpo_jax import GRPOConfig, engines, from_pretrained, save_pretrained, train
from grpo_jax.rewards.shipped import from_row
from grpo_jax.run.compilation_cache import user_cache

# fmt: off
WORDS = ("cat", "dog", "ball", "tree", "bird", "cake", "hat", "car", "fish", "sun", "box", "toy", "bed", "boat", "bear",
         "flower")
# fmt: on
NAMES = ("Lily", "Tom", "Ben", "Lucy", "Sam", "Mia", "Max", "Anna", "Tim", "Sue")
LONGEST = 64
"""Maximum tokens per completion."""
GROUP = 8
"""Completions per prompt, in training and in the sampled test."""


def make_rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the training rows and the test rows, which are every fifth row.

    Example:
      >>> train_rows, held_out = make_rows()
      >>> len(train_rows), held_out[0]
      (256, {'prompt': 'cat. Once upon a time, there was a boy named Lily.', 'word': 'cat'})
    """
    rows = [
        {"prompt": f"{word}. Once upon a time, there was a {kind} named {name}.", "word": word}
        for word in WORDS
        for name in NAMES
        for kind in ("boy", "girl")
    ]
    train_rows, held_out = [row for i, row in enumerate(rows) if i % 5], rows[::5]
    assert not {row["prompt"] for row in train_rows} & {row["prompt"] for row in held_out}
    return train_rows, held_out


def train_rows() -> list[dict[str, str]]:
    """Return the training rows, for recipes/stories.yaml."""
    return make_rows()[0]


def held_out_rows() -> list[dict[str, str]]:
    """Return the held-out rows, in the same form."""
    return make_rows()[1]


@from_row
def uses_word(completion: str, row: dict[str, Any]) -> float:
    """Return 1 if the completion contains the row's word.

    Example:
      >>> uses_word(completions=["The Cat, it sat!", "Cats sat."], word=["cat", "cat"])
      [1.0, 0.0]
    """
    return float(row["word"] in re.sub("[.,!]", " ", completion.lower()).split())


def fetch_stories260K(directory: Path) -> Path:
    """Download stories260K from the hub and convert it."""
    from huggingface_hub import hf_hub_download

    from experiments.llama2c import convert

    checkpoint, tokenizer = (
        hf_hub_download("karpathy/tinyllamas", f"stories260K/{name}") for name in ("stories260K.bin", "tok512.bin")
    )
    convert(checkpoint, tokenizer, directory)
    return directory


def stories260K() -> Path:
    """Return the directory of stories260K in the user's cache, downloading it at the first call."""
    directory = user_cache() / "stories260K"
    return directory if directory.is_dir() else fetch_stories260K(directory)


def make_config(seed: int, steps: int, prompts: int) -> GRPOConfig:
    """Build the settings, which are the same as in the TRL run."""
    return GRPOConfig(
        num_generations=GROUP,
        # One group per micro-batch fits the CPU's cache, and the gradient does not depend on the split.
        per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=prompts,
        max_completion_length=LONGEST,
        max_steps=steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        beta=0.02,
        loss_type="dapo",
        gradient_checkpointing=False,
        seed=seed,
        logging_steps=10,
        save_steps=None,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.stories", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="directory or hub name in Hugging Face's layout (default: fetch stories260K)")
    parser.add_argument("--steps", type=int, default=100, help="GRPO steps (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed for the order of prompts and the samples (default 0)")
    parser.add_argument("--prompts", type=int, default=16, help=f"prompts per step, × {GROUP} stories (default 16)")
    parser.add_argument(
        "--engine", metavar="URL", help="sample with a vLLM server that serves --model (default: our own sampler)"
    )
    parser.add_argument("--rollout-ahead", action="store_true", help="sample the next batch during rewards and updates")
    parser.add_argument("--run-dir", help="an empty or new directory (default runs/stories-<seed>-<time>)")
    add_device_flags(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the experiment and return the results that its last line prints."""
    arguments, watch = parse(argv), Stopwatch()
    start_processes(arguments)
    use_compile_cache()
    run_dir = fresh_directory(arguments.run_dir, f"stories-{arguments.seed}")
    rows, held_out = make_rows()
    with watch("loading"):
        base = from_pretrained(arguments.model or fetch_stories260K(run_dir / "base"))

    def test(params: Any) -> tuple[Rates, list[dict[str, Any]]]:
        # With the same number of prompts per batch as in training, the compiled programs are reused.
        settings = {"max_completion_length": LONGEST, "batch_size": arguments.prompts, "seed": arguments.seed}
        with watch("evaluation"):
            return held_out_rates(base, held_out, uses_word, params=params, samples=GROUP, **settings)

    before, stories = test(base.params)
    print(f"before, on {len(held_out)} unseen prompts: {show_rates(before)}")
    show_completions("before, greedy", stories[:: len(stories) // 4])

    print("\nGRPO, rewarded for the word:")
    with watch("grpo"):
        config = on_mesh(make_config(arguments.seed, arguments.steps, arguments.prompts), arguments.mesh)
        config = dataclasses.replace(config, rollout_ahead=arguments.rollout_ahead)
        engine = None if arguments.engine is None else engines.vllm(arguments.engine)
        state = train(base, rows, uses_word, config, run_dir=run_dir, sampler=engine)
    save_pretrained(run_dir / "final", base.replace(params=state.params))

    after, stories = test(state.params)
    show_completions("after, greedy", stories[:: len(stories) // 4])
    print(f"\nheld-out prompts: {show_rates(before)}  →  {show_rates(after)}")
    return report_results(run_dir, {"grpo": {"before": before, "after": after}}, watch)


if __name__ == "__main__":
    main()
