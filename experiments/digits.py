"""Train a small vision-language model with GRPO to read handwritten digits, using only a reward for correct answers.

    python -m experiments.digits [--seed N] [--seeds K] [--control] [--picture FILE] [--run-dir DIR]

The images are scikit-learn's 1,797 handwritten digits of 8 × 8 pixels: 1,297 for training and 500 held out, the same in
all runs (pip install '.[digits]'). A new model with Gemma 3's layout and random weights is written as a checkpoint and
loaded. Its vision tower is frozen: features of a random tower suffice to tell digits apart, and the 118 thousand
parameters of the language model are trained. `sft` on ten labeled images, one of each digit, teaches the model how to
answer, and GRPO then continues on all training images with a reward of 1 for the right digit and 0 otherwise. With
--control, a second run from the same start gets random rewards, which are 1 as often as the initial model is right.

Time, with --control: 245 seconds on two cores if the programs are in the compilation cache (seed 0), and 290 to 295 CPU
seconds with compilation (seeds 0 to 2).
Expect, on the 500 held-out images (seeds 0 to 2): greedy accuracy rises from 0.31 … 0.38 to 0.94 … 0.95, and sampled
accuracy from 0.19 … 0.22 to 0.93 … 0.95. Random rewards do not raise it: it falls to 0.26 … 0.30 greedy and 0.14 … 0.16
sampled.
The last line on standard output is one JSON object. All files are in the run directory; `final` is the checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import (
    Rates,
    Stopwatch,
    coin_flips,
    fresh_directory,
    held_out_rates,
    report_results,
    show_rates,
    supervise,
    use_compile_cache,
)
from grpo_jax import GRPOConfig, Policy, from_pretrained, init_policy, save_pretrained, train
from grpo_jax.messages import import_extra
from grpo_jax.rewards.shipped import accuracy_reward, completion_text
from grpo_jax.watch.plots import LIGHT, color, save_figure
from grpo_jax.watch.writer import read_lines

SIZE = 8
"""Height and width of an image in pixels."""
PATCH, TOKENS = 2, 4
"""Height and width of a patch in pixels, and tokens per image. Each token averages 2 × 2 of the 16 patches."""
WIDTH, LAYERS = 64, 2
"""Width of the language model and of the tower, and layers of the language model. The tower has one."""
GROUP = 16
"""Completions per image."""
PROMPTS = 64
"""Images per GRPO step."""
MAX_TOKENS = 4
"""Maximum tokens per completion. A digit and the end token take two."""
SAMPLES = 4
"""Sampled answers per held-out image."""
EVAL_STEPS = 50
"""GRPO steps between evaluations."""
NUM_DRAWN = 15
"""Number of held-out images in the picture, starting with the first."""
QUESTION = "Which digit?"

SPECIAL = [
    "<pad>", "<bos>", "<end_of_turn>", "<start_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
]  # fmt: skip
"""Special tokens, with ids 0, 1, …"""
CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\
<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant
{% endif %}"""

Row = dict[str, Any]

accuracy = accuracy_reward("answer")


def make_rows(held_out: int = 500) -> tuple[list[Row], list[Row]]:
    """Return training and held-out rows with `prompt`, `image` and `answer`, in a fixed order."""
    digits = import_extra("sklearn.datasets", "scikit-learn").load_digits()
    pillow = import_extra("PIL.Image", "pillow")
    pixels = np.minimum(digits.images * 16, 255).astype(np.uint8)  # 0 … 16 to 0 … 255
    rows = [
        {
            "prompt": [{"role": "user", "content": QUESTION}],
            "image": pillow.fromarray(pixels[i]),
            "answer": str(digits.target[i]),
        }
        for i in np.random.default_rng(0).permutation(len(pixels))
    ]
    return rows[held_out:], rows[:held_out]


def sft_rows(rows: Sequence[Row], seed: int, passes: int) -> list[Row]:
    """Return rows for `sft`: one image per digit with its answer, `passes` times. `seed` selects the images."""
    chosen = [[row for row in rows if row["answer"] == str(digit)][seed] for digit in range(10)]
    answers = [[{"role": "assistant", "content": row["answer"]}] for row in chosen]
    return [
        {"prompt": row["prompt"], "image": row["image"], "completion": answer}
        for row, answer in zip(chosen, answers, strict=True)
    ] * passes


def make_tokenizer() -> Any:
    """Train a byte-level BPE with a few tokens for the chat template. `AutoTokenizer` reloads it unchanged."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user\n\n\n", f"\n\n{QUESTION}", "assistant\n"] * 10, trainer)
    pad, bos, eos = SPECIAL[:3]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, chat_template=CHAT_TEMPLATE
    )


def random_tower(seed: int) -> dict[str, np.ndarray]:
    """Return the tensors of a random vision tower and projector, keyed by their names in Gemma 3's checkpoints."""
    draw, width, start = np.random.default_rng(seed), WIDTH, "vision_tower.vision_model."
    layer = f"{start}encoder.layers.0."
    matrices: dict[str, tuple[int, ...]] = {f"{start}embeddings.patch_embedding": (width, 3, PATCH, PATCH)}
    matrices |= {f"{layer}self_attn.{name}_proj": (width, width) for name in ("q", "k", "v", "out")}
    matrices |= {f"{layer}mlp.fc1": (2 * width, width), f"{layer}mlp.fc2": (width, 2 * width)}
    norms = [f"{start}post_layernorm", f"{layer}layer_norm1", f"{layer}layer_norm2"]
    tensors = {f"{name}.weight": draw.normal(size=x) * np.prod(x[1:]) ** -0.5 for name, x in matrices.items()}
    tensors |= {f"{name}.weight": np.ones(width) for name in norms}
    tensors |= {f"{name}.bias": np.zeros(matrices.get(name, (width,))[0]) for name in (*matrices, *norms)}
    places = (SIZE // PATCH) ** 2
    tensors[f"{start}embeddings.position_embedding.weight"] = 0.5 * draw.normal(size=(places, width))
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = np.zeros(width)  # Gemma adds 1
    tensors["multi_modal_projector.mm_input_projection_weight"] = width**-0.5 * draw.normal(size=(width, width))
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def make_policy(directory: Path, seed: int) -> Policy:
    """Write a small vision-language model with Gemma 3's layout and random weights, and load it."""
    tokenizer = make_tokenizer()
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    text = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": WIDTH // 4,
        "query_pre_attn_scalar": WIDTH // 4,
        "max_position_embeddings": 64,
        "sliding_window": 64,
        "layer_types": ["full_attention"] * LAYERS,
        "rope_theta": 10000.0,
        "initializer_range": 0.05,
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<end_of_turn>"],
        "pad_token_id": ids["<pad>"],
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": TOKENS,
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
    }
    preprocessor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "size": {"height": SIZE, "width": SIZE},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_seq_length": TOKENS,
    }
    policy = init_policy(text, jax.random.key(seed), tokenizer=tokenizer)
    save_pretrained(
        directory,
        policy.replace(
            config=config,
            extra_tensors=random_tower(seed),
            files={**policy.files, "preprocessor_config.json": json.dumps(preprocessor).encode()},
        ),
    )
    return from_pretrained(directory)


def make_config(arguments: argparse.Namespace, seed: int, held_out: int) -> GRPOConfig:
    """Build the settings that GRPO and its control share."""
    return GRPOConfig(
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * PROMPTS,
        max_completion_length=MAX_TOKENS,
        max_steps=arguments.steps,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=arguments.steps // 20,
        # With beta=0 and random rewards, noise alone made the model forget how to answer (accuracy 0.00).
        beta=0.04,
        gradient_checkpointing=False,
        pad_to_multiple_of=None,  # all prompts have the same length
        seed=seed,
        eval_steps=EVAL_STEPS,
        num_generations_eval=1,
        per_device_eval_batch_size=held_out,
        logging_steps=min(EVAL_STEPS, arguments.steps),
        save_steps=None,
    )


def held_out_curve(run_dir: Path) -> list[tuple[int, float]]:
    """Return (step, accuracy on the held-out images) for each evaluation during a run."""
    name = "eval/accuracy"
    return [(line["step"], line[name]) for line in read_lines(run_dir / "metrics.jsonl") if name in line]


@dataclasses.dataclass
class Result:
    """Result of a seed: arm → rates before and after, arm → held-out curve, greedy answers before and after."""

    rates: dict[str, dict[str, Rates]]
    curves: dict[str, list[tuple[int, float]]]
    answers: dict[str, list[str]]


def run(
    arguments: argparse.Namespace, seed: int, rows: Sequence[Row], held_out: Sequence[Row], run_dir: Path,
    watch: Stopwatch,
) -> Result:  # fmt: skip
    """Run one seed from random weights to the last evaluation."""

    def measure(params: Any) -> tuple[Rates, list[str]]:
        with watch("evaluation"):
            settings: dict[str, Any] = {"max_completion_length": MAX_TOKENS, "batch_size": len(held_out), "seed": seed}
            rates, found = held_out_rates(base, held_out, accuracy, params=params, samples=SAMPLES, **settings)
        return rates, [completion_text(row["completion"]).strip() for row in found]

    with watch("warm_up"):
        new = make_policy(run_dir / "new", seed)
        taught = supervise(new, sft_rows(rows, seed, arguments.warm_up_steps), batch=10)
        save_pretrained(run_dir / "base", taught)
        base = from_pretrained(run_dir / "base")
    before, answers = measure(base.params)
    print(f"seed {seed}, before, on {len(held_out)} unseen images: {show_rates(before)}")
    result = Result({}, {}, {"before": answers})
    config = make_config(arguments, seed, len(held_out))
    arms: dict[str, tuple[list[Any], GRPOConfig]] = {"grpo": ([accuracy], config)}
    if arguments.control:  # accuracy has weight 0: it is only measured
        flips = coin_flips(seed, mean=before["sampled"])
        arms["random"] = ([flips, accuracy], dataclasses.replace(config, reward_weights=[1.0, 0.0]))
    for arm, (rewards, settings) in arms.items():
        print(f"\nGRPO, rewarded {'for right answers' if arm == 'grpo' else 'at random'}:")
        arm_dir = run_dir if arm == "grpo" else run_dir / arm
        with watch(arm):
            state = train(base, rows, rewards, settings, eval_dataset=held_out, run_dir=arm_dir)
        after, answers = measure(state.params)
        result.rates[arm], result.curves[arm] = {"before": before, "after": after}, held_out_curve(arm_dir)
        if arm == "grpo":
            save_pretrained(run_dir / "final", base.replace(params=state.params))
            result.answers["after"] = answers
    return result


def draw_picture(held_out: Sequence[Row], results: Mapping[int, Result], out: Path) -> None:
    """Draw the first held-out images with the first seed's answers, and the accuracy of all seeds over the runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained", facecolor=LIGHT.page)
    heading = "A small vision-language model reads handwritten digits, before and after GRPO"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=14, weight="bold", color=LIGHT.ink)
    panels: Any = figure.subfigures(1, 2, width_ratios=(1, 1.15))
    left, right = panels
    left.set_facecolor(LIGHT.page)
    right.set_facecolor(LIGHT.page)
    left.suptitle(
        "Greedy answers before and after, on held-out images", x=0.02, ha="left", fontsize=12, color=LIGHT.ink
    )
    answers = next(iter(results.values())).answers
    for i, axes in enumerate(left.subplots(3, NUM_DRAWN // 3).flat):
        axes.imshow(held_out[i]["image"], cmap="gray_r")
        axes.set_axis_off()
        for when, x in (("before", 0.25), ("after", 0.75)):
            good = answers[when][i] == held_out[i]["answer"]
            text = f"{answers[when][i][:3]}{'✓' if good else '✗'}"
            shown = {"transform": axes.transAxes, "ha": "center", "va": "top", "fontsize": 11}
            axes.text(x, -0.04, text, color=color("reward0" if good else "high"), **shown)
    axes = right.subplots()
    for arm, meaning, label in (
        ("grpo", "policy", "rewarded for right answers"),
        ("random", "high", "rewarded at random"),
    ):
        for curve in (result.curves[arm] for result in results.values() if arm in result.curves):
            axes.plot(*zip(*curve, strict=True), color=color(meaning), lw=1.8, marker="o", markersize=4, label=label)
            label = ""  # one entry per arm in the legend
    axes.set_title(f"Accuracy on {len(held_out)} held-out images (sampled)", loc="left", fontsize=12, color=LIGHT.ink)
    axes.set_xlabel("GRPO steps", fontsize=10, color=LIGHT.gray)
    axes.set_ylim(0, 1.02)
    axes.grid(color=LIGHT.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=LIGHT.gray, length=0)
    axes.spines[:].set_visible(False)
    axes.legend(loc="center right", frameon=False, labelcolor=LIGHT.ink)
    save_figure(figure, str(out))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.digits", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed for weights, labeled images and samples (default 0)")
    add("--seeds", type=int, default=1, help="number of runs, with consecutive seeds from --seed (default 1)")
    add("--control", action="store_true", help="also run GRPO with random rewards")
    add("--steps", type=int, default=400, help="GRPO steps (default %(default)s)")
    add("--warm-up-steps", type=int, default=50, help="supervised steps (default %(default)s)")
    add("--held-out", type=int, default=500, help="images to test on (default %(default)s)")
    add("--picture", type=Path, metavar="FILE", help="copy the picture to FILE, such as docs/digits.png")
    add("--run-dir", help="an empty or new directory (default runs/digits-<seed>-<time>)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the experiment and return the results that its last line prints."""
    arguments, watch = parse(argv), Stopwatch()
    use_compile_cache()
    run_dir = fresh_directory(arguments.run_dir, f"digits-{arguments.seed}")
    rows, held_out = make_rows(arguments.held_out)
    results: dict[int, Result] = {}
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        seed_dir = run_dir if arguments.seeds == 1 else run_dir / f"seed-{seed}"
        seed_dir.mkdir(exist_ok=True)
        results[seed] = run(arguments, seed, rows, held_out, seed_dir, watch)
    picture = run_dir / "digits.png"
    draw_picture(held_out, results, picture)
    if arguments.picture:
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, arguments.picture)
    print(f"\npicture: {picture}")
    arms = {f"{arm}, seed {seed}": rates for seed, result in results.items() for arm, rates in result.rates.items()}
    for name, arm in arms.items():
        print(f"{name:>16}: {show_rates(arm['before'])}  →  {show_rates(arm['after'])}")
    return report_results(run_dir, arms, watch)


if __name__ == "__main__":
    main()
