"""Train a small language model by GRPO, over several turns, to find a number from 1 to 64 by bisection.

    python -m experiments.guess [--seed N] [--seeds K] [--control] [--credit] [--picture FILE] [--run-dir DIR]

In each game the policy guesses and the environment answers "higher" or "lower", until the number is found or twelve
guesses are used up. A completion is a whole game, `32 higher 48 lower 40`. The policy samples the numbers, each
followed by an end-of-turn token; the environment's answers are observations, on which the policy is not trained. A new
model is first trained by SFT on a careless player that guesses at random and ignores the answers in 3/8 of its games.
GRPO then rewards games with few guesses. All prompts are the same; the completions in a group search for one number.

Time: 260 seconds on two cores (mean of five seeds; 150 of them for SFT).
Expect, over 16 games per number at temperature 1 (seeds 0 to 4; a lost game counts as 12): the mean number of guesses
falls from between 8.4 and 8.6 to 5.34, 5.33, 5.34, 5.62 and 5.33; the share of games won rises from 0.62 … 0.66 to
0.99 … 1.00, and within 7 guesses from 0.40 … 0.45 to 0.91 … 0.98. Consistent random play takes 6.64 guesses, and
bisection, which no lesson shows, 5.125. With random rewards (--control) the mean rises from 8.62 to 10.79 (seed 0,
after 3,000 lessons): at this learning rate, noise alone erases what SFT taught.
The last line on standard output is one JSON object. All files are in the run directory; `final` is the checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import (
    Lesson,
    Rates,
    Stopwatch,
    coin_flips,
    fresh_directory,
    lesson,
    report_results,
    show_completions,
    supervise,
    use_compile_cache,
)
from grpo_jax import GRPOConfig, Policy, evaluate, from_pretrained, init_policy, save_pretrained, train
from grpo_jax.watch.plots import LIGHT, color

NUMBERS = 64
"""The number to find is one of 1 … NUMBERS."""
LIMIT = 12
"""Maximum guesses per game."""
SOON = 7
"""Number of guesses within which bisection always wins: floor(log2(NUMBERS)) + 1."""
IGNORES = 3 / 8
"""Share of games in which the careless player ignores the answers. They are longer: half of all guesses."""
GROUP = 8
"""Completions per prompt, which are games with the same number."""
BATCH = 32
"""Games per supervised step."""
LONGEST = 3 * LIMIT
"""Maximum tokens per completion; each turn has a guess, an end-of-turn token and an answer."""
STEPS = 320
"""Optimizer steps of GRPO. An iteration makes SLICES · PASSES of them."""
SLICES, PASSES = 2, 2
"""Minibatches per iteration, and passes over each."""
LEARNING_RATE = 2e-3
"""Peak learning rate, for SFT and GRPO."""
BETA2 = 0.95
"""Adam's β2, for both. It is low because the gradient changes as quickly as the policy's play."""
PROMPT = "guess: "
HIGHER, LOWER = " higher ", " lower "

Row = dict[str, Any]

ROWS: list[Row] = [{"prompt": PROMPT, "target": number} for number in range(1, NUMBERS + 1)]
"""One row per number. There is no held-out set: games differ between training and test by their sampled guesses."""


class Game:
    """An environment that holds a number and answers each guess with "higher" or "lower".

    Example:
      >>> game = Game()
      >>> game.reset(target=40)
      >>> game.respond("32"), game.respond("48"), game.respond("40")
      (' higher ', ' lower ', None)
      >>> game.found, game.guesses
      (True, [32, 48, 40])
    """

    def reset(self, target: int, **row: Any) -> None:
        """Start a game with the row's target."""
        self.target, self.guesses, self.found = target, list[int](), False

    def respond(self, text: str) -> str | None:
        """Answer a guess, or return None to end the game: found, out of guesses, or not a number."""
        if not (text.isascii() and text.isdecimal() and len(text) < 4):
            return None
        self.guesses.append(int(text))
        self.found = self.guesses[-1] == self.target
        if self.found or len(self.guesses) == LIMIT:
            return None
        return HIGHER if self.guesses[-1] < self.target else LOWER


def few_guesses(environments: Sequence[Game], **_: Any) -> list[float]:
    """Return 1 if the first guess was right, less for each further guess, and 0 if the number was not found."""
    return [1 - (len(game.guesses) - 1) / LIMIT if game.found else 0.0 for game in environments]


def few_guesses_by_turn(environments: Sequence[Game], **_: Any) -> list[float | list[float]]:
    """Return the same reward by turn: each guess after the first costs 1/LIMIT, and the last one adds 1; 0 if lost.

    Example:
      >>> game = Game()
      >>> game.reset(target=40)
      >>> _ = [game.respond(guess) for guess in ("32", "40")]
      >>> few_guesses_by_turn([game]) == [[0, 1 - 1 / LIMIT]]
      True
    """
    cost = [[-float(i > 0) / LIMIT for i in range(len(game.guesses))] for game in environments]
    return [[*costs[:-1], costs[-1] + 1] if game.found else 0.0 for game, costs in zip(environments, cost, strict=True)]


def guesses(environments: Sequence[Game], **_: Any) -> list[float]:
    """Return the number of guesses in each game; a lost game counts as LIMIT."""
    return [float(len(game.guesses) if game.found else LIMIT) for game in environments]


def found(environments: Sequence[Game], **_: Any) -> list[float]:
    """Return 1 for each game in which the number was found."""
    return [float(game.found) for game in environments]


def found_soon(environments: Sequence[Game], **_: Any) -> list[float]:
    """Return 1 for each game in which the number was found within SOON guesses."""
    return [float(game.found and len(game.guesses) <= SOON) for game in environments]


def random_play(numbers: int = NUMBERS) -> float:
    """Return the mean guesses when drawing uniformly from the remaining numbers: 2 (1 + 1/N) H_N − 3.

    Example:
      >>> round(random_play(), 2)
      6.64
    """
    return 2 * (1 + 1 / numbers) * sum(1 / n for n in range(1, numbers + 1)) - 3


def bisection(numbers: int = NUMBERS) -> float:
    """Return the mean guesses when halving the remaining range, the minimum: (Σ_{i≤N} ⌊log2 i⌋ + 1) / N.

    Example:
      >>> bisection()
      5.125
    """
    return sum(math.floor(math.log2(i)) + 1 for i in range(1, numbers + 1)) / numbers


def careless_game(draw: random.Random) -> list[tuple[int, str]]:
    """Play a game as the careless player. Return its guesses, each with the answer ("" after the last guess).

    Guesses are drawn from the remaining numbers or, in a share IGNORES of the games, from all numbers.
    """
    target, low, high = draw.randint(1, NUMBERS), 1, NUMBERS
    ignores = draw.random() < IGNORES
    game: list[tuple[int, str]] = []
    while len(game) < LIMIT:
        guess = draw.randint(1, NUMBERS) if ignores else draw.randint(low, high)
        if guess == target or len(game) == LIMIT - 1:
            return [*game, (guess, "")]
        game.append((guess, HIGHER if guess < target else LOWER))
        low, high = (max(low, guess + 1), high) if guess < target else (low, min(high, guess - 1))
    return game


def make_tokenizer() -> Any:
    """Create a byte-level tokenizer with one token per number and answer. `AutoTokenizer` reloads it unchanged."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([PROMPT] * 10, trainer)
    words = [HIGHER, LOWER, *map(str, range(10, NUMBERS + 1))]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def make_policy(seed: int, *, width: int = 64, layers: int = 2) -> Policy:
    """Create a small model with Llama's architecture and random weights.

    It has many heads and does not normalize queries and keys: to find the remaining range it must attend only to the
    highest "higher" and the lowest "lower", which takes large attention logits.
    """
    tokenizer = make_tokenizer()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": width // 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return init_policy(config, jax.random.key(seed), tokenizer=tokenizer)


def lessons(policy: Policy, count: int, seed: int) -> list[Lesson]:
    """Return `count` games by the careless player. Only its guesses and their end tokens are learned."""
    draw, end = random.Random(seed), policy.eos_token_ids[0]
    words = [PROMPT, HIGHER, LOWER, *map(str, range(1, NUMBERS + 1))]
    ids = dict(zip(words, policy.tokenizer(words, add_special_tokens=False)["input_ids"], strict=True)) | {"": []}
    shown: list[Lesson] = []
    for _ in range(count):
        game, own = list(ids[PROMPT]), [False] * len(ids[PROMPT])
        for guess, answer in careless_game(draw):
            turn, said = [*ids[str(guess)], end], ids[answer]
            game, own = [*game, *turn, *said], [*own, *[True] * len(turn), *[False] * len(said)]
        shown.append(lesson(game, own))
    return shown


def first_guesses(policy: Policy, params: Any) -> np.ndarray:
    """Return the probability of each number as the first guess, [NUMBERS], from the logits after the prompt."""
    tokenizer = policy.tokenizer
    ids = jnp.asarray([tokenizer(PROMPT, add_special_tokens=False)["input_ids"]])
    numbers = [ids[0] for ids in tokenizer([str(n) for n in range(1, NUMBERS + 1)])["input_ids"]]
    logits = policy.model.apply({"params": params}, ids)[0, -1]
    return np.asarray(jax.nn.softmax(logits))[numbers]


def make_config(arguments: argparse.Namespace, seed: int) -> GRPOConfig:
    """Build the settings that GRPO and its control share."""
    return GRPOConfig(
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * arguments.prompts // SLICES,
        steps_per_generation=SLICES,
        num_iterations=PASSES,
        max_completion_length=LONGEST,
        max_steps=arguments.steps,
        scale_rewards="none",  # late in training groups differ by a guess or two; scaling would amplify noise
        epsilon=0.4,
        learning_rate=LEARNING_RATE,
        adam_beta2=BETA2,
        max_grad_norm=0.3,
        lr_scheduler_type="linear",
        environment_timeout=None,  # a thread per call would take longer than the call itself
        gradient_checkpointing=False,
        pad_to_multiple_of=None,  # all prompts have the same length
        seed=seed,
        logging_steps=min(20, arguments.steps),
        save_steps=None,
    )


def play(policy: Policy, params: Any, arguments: argparse.Namespace, seed: int) -> tuple[Rates, np.ndarray, list[Row]]:
    """Play `arguments.games` games for every number, at temperature 1 as in training.

    Returns:
      the mean number of guesses and the shares of games won, and won within SOON guesses; guesses per game; the games.
    """
    metrics, games = evaluate(
        policy,
        ROWS,
        [guesses, found, found_soon],
        params=params,
        environment_factory=Game,
        environment_timeout=None,
        num_generations=arguments.games,
        max_completion_length=LONGEST,
        temperature=1.0,
        batch_size=arguments.prompts,
        pad_to_multiple_of=1,
        seed=seed + 1_000_003,  # differs from the training seeds
    )
    rates = {name: round(metrics[name], 4) for name in ("guesses", "found", "found_soon")}
    return rates, np.array([game["rewards"]["guesses"] for game in games]), games


def show(rates: Rates) -> str:
    """Format rates for printing.

    Example:
      >>> show({"guesses": 5.5, "found": 1.0, "found_soon": 0.95})
      '5.50 guesses · found 1.00 · within 7 guesses 0.95'
    """
    return (
        f"{rates['guesses']:.2f} guesses · found {rates['found']:.2f} · within {SOON} guesses {rates['found_soon']:.2f}"
    )


def draw_picture(firsts: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray], out: Path) -> None:
    """Draw the distributions of the first guess and of the guesses per game, before and after training."""
    from matplotlib.figure import Figure

    colors = dict(zip(firsts, (color("start"), color("policy")), strict=True))
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained", facecolor=LIGHT.page)
    heading = f"A small language model finds a number from 1 to {NUMBERS}, before and after GRPO"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=14, weight="bold", color=LIGHT.ink)
    left, right = figure.subplots(1, 2)
    means = {name: games.mean() for name, games in lengths.items()}
    for (name, first), offset in zip(firsts.items(), (-0.2, 0.2), strict=True):
        left.bar(np.arange(1, NUMBERS + 1), first, 0.9, color=colors[name])
        share = np.bincount(lengths[name].astype(int), minlength=LIMIT + 1)[1:] / len(lengths[name])
        label = f"{name}: {means[name]:.2f} guesses on average"
        right.bar(np.arange(1, LIMIT + 1) + offset, share, 0.4, color=colors[name], label=label)
    for value, style, name in (
        (random_play(), (0, (1, 2)), "consistent random play"),
        (bisection(), "--", "bisection"),
    ):
        right.axvline(value, color=color("high"), lw=2, linestyle=style, label=f"{name}: {value:.2f}")
    left.set_title("Probability of each number as the first guess", loc="left", fontsize=12, color=LIGHT.ink)
    left.set_xlabel("number", fontsize=10, color=LIGHT.gray)
    right.set_title("Share of games that took so many guesses", loc="left", fontsize=12, color=LIGHT.ink)
    right.set_xlabel(f"guesses ({LIMIT}: the lost games too)", fontsize=10, color=LIGHT.gray)
    right.set_xticks(range(1, LIMIT + 1))
    for axes in (left, right):
        axes.grid(axis="y", color=LIGHT.grid, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=9, colors=LIGHT.gray, length=0)
        axes.spines[:].set_visible(False)
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False, labelcolor=LIGHT.ink
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")


def run(arguments: argparse.Namespace, seed: int, run_dir: Path, watch: Stopwatch) -> dict[str, dict[str, Rates]]:
    """Run one seed from random weights to the last evaluation. Return each arm's rates before and after."""
    with watch("warm_up"):
        new = make_policy(seed)
        shown = lessons(new, arguments.warm_up_steps * BATCH, seed)
        taught = supervise(new, shown, batch=BATCH, learning_rate=LEARNING_RATE, adam_beta2=BETA2)
        save_pretrained(run_dir / "base", taught)
        base = from_pretrained(run_dir / "base")
    with watch("evaluation"):
        before, lengths_before, games = play(base, base.params, arguments, seed)
    print(f"seed {seed}, before: {show(before)}")
    show_completions("before", games[:: len(games) // 4])

    print("\nGRPO, rewarded for few guesses:")
    config = make_config(arguments, seed)
    with watch("grpo"):
        state = train(base, ROWS, few_guesses, config, environment_factory=Game, run_dir=run_dir)
    save_pretrained(run_dir / "final", base.replace(params=state.params))
    with watch("evaluation"):
        after, lengths_after, games = play(base, state.params, arguments, seed)
    show_completions("after", games[:: len(games) // 4])
    firsts = {"before": first_guesses(base, base.params), "after": first_guesses(base, state.params)}
    draw_picture(firsts, {"before": lengths_before, "after": lengths_after}, run_dir / "guess.png")
    arms = {"grpo": {"before": before, "after": after}}

    others: dict[str, tuple[Any, GRPOConfig]] = {}
    if arguments.control:
        others["control"] = (coin_flips(seed), config)
    if arguments.credit:
        others["to_go"] = (few_guesses_by_turn, dataclasses.replace(config, turn_credit="to_go"))
    for name, (reward, settings) in others.items():
        print(f"\n{name}: GRPO, {'random rewards' if name == 'control' else 'credit per guess (reward to go)'}.")
        with watch(name):
            state = train(base, ROWS, reward, settings, environment_factory=Game, run_dir=run_dir / name)
        with watch("evaluation"):
            arms[name] = {"before": before, "after": play(base, state.params, arguments, seed)[0]}
    return arms


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.guess", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed for weights, lessons and samples (default 0)")
    add("--seeds", type=int, default=1, help="number of runs, with consecutive seeds from --seed (default 1)")
    add("--control", action="store_true", help="also run GRPO with random rewards")
    add("--credit", action="store_true", help="also run GRPO with the reward to go as each guess's credit")
    add("--steps", type=int, default=STEPS, help="GRPO steps (default %(default)s)")
    add("--prompts", type=int, default=64, help=f"numbers per iteration, × {GROUP} games (default 64)")
    add("--warm-up-steps", type=int, default=4000, help="supervised steps (default 4000)")
    add("--games", type=int, default=16, help="test games per number (default 16)")
    add("--picture", type=Path, metavar="FILE", help="copy the first seed's picture to FILE, such as docs/guess.png")
    add("--run-dir", help="an empty or new directory (default runs/guess-<seed>-<time>)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the experiment and return the results that its last line prints."""
    arguments, watch = parse(argv), Stopwatch()
    use_compile_cache()
    run_dir = fresh_directory(arguments.run_dir, f"guess-{arguments.seed}")
    arms: dict[str, dict[str, Rates]] = {}
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        own = run_dir if arguments.seeds == 1 else run_dir / f"seed-{seed}"
        own.mkdir(exist_ok=True)
        arms |= {f"{arm}, seed {seed}": rates for arm, rates in run(arguments, seed, own, watch).items()}
        if arguments.picture and seed == arguments.seed:
            arguments.picture.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(own / "guess.png", arguments.picture)

    print(f"\nconsistent random play {random_play():.3f} guesses · bisection {bisection():.3f}")
    for name, arm in arms.items():
        print(f"{name:>16}: {show(arm['before'])}  →  {show(arm['after'])}")
    return report_results(run_dir, arms, watch)


if __name__ == "__main__":
    main()
