"""A run in words: its banner, its sentence, and a card that says what it was and nothing that is nobody's business."""

import pytest
from huggingface_hub import ModelCard

from grpo_jax import GRPOConfig
from grpo_jax.watch.summary import MARK, describe_run, headline, held_out, held_out_scores, model_card, phase_seconds
from grpo_jax.watch.writer import RunWriter


@pytest.mark.quick
def test_held_out_scores():
    scores = {"eval/accuracy": "accuracy", "eval/length_reward": "length_reward", "eval/greedy/format": "greedy/format"}
    assert {name: held_out(name) for name in scores} == scores
    assert not any(held_out(f"eval/{name}") for name in ("mean_length", "clipped_ratio", "rewards/a/std", "seconds"))
    assert held_out("evaluation") is None
    assert held_out_scores(["kl", *scores, "eval/reward"]) == scores | {"eval/reward": "reward"}
    assert held_out_scores(["eval/accuracy", "eval/reward"]) == {"eval/accuracy": "accuracy"}, "the same once more"
    assert held_out_scores(["eval/reward", "eval/rewards/reward/mean"]) == {"eval/rewards/reward/mean": "reward"}
    assert held_out_scores(["eval/reward"]) == {"eval/reward": "reward"}


@pytest.mark.quick
def test_the_banner_by_hand():
    config = GRPOConfig(
        num_generations=4,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        steps_per_generation=6,
        num_iterations=2,
        max_completion_length=64,
        max_steps=20,
        mesh={"data": 2},
    )
    text = describe_run(config, num_rows=48, num_parameters=999_600, state_bytes=4_000_000_000)
    # On two devices: 16 × 2 × 6 = 192 completions of 48 prompts; 3 minibatches of 16 prompts, each in 2; 2 passes.
    assert text == (
        "1 M parameters · 4 GB of training state · 2 devices\n"
        "each iteration: 48 prompts × 4 = 192 completions of up to 64 tokens · 2 passes × 3 minibatches = 6 updates of"
        " 16 prompts in 2 micro-batches\n"
        "20 optimizer steps · 4 iterations · 48 prompts, gone through 4 times"
    )
    small = describe_run(GRPOConfig(mesh={"data": 2, "tensor": 2}), num_rows=6, num_parameters=500, state_bytes=0)
    assert small == (
        "500 parameters · 0 B of training state · 4 devices\n"
        "each iteration: 2 prompts × 8 = 16 completions of up to 512 tokens · 1 pass × 1 minibatch = 1 update of"
        " 2 prompts\n"
        "9 optimizer steps · 9 iterations · 6 prompts, gone through 3 times"
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], ""),
        ([{"step": 1}], "1 step"),
        ([{"step": 1, "reward": 0.5}], "reward 0.5 in 1 step"),
        (
            [{"step": 1, "reward": 0.5}, {"step": 2, "reward": None}, {"step": 3, "reward": 1}],
            "reward 0.5 → 1 in 3 steps",
        ),
        # A score on held-out prompts tells more than a reward, also where it is logged later.
        (
            [{"step": 10, "reward": 0.5, "eval/mean_length": 9.0}, {"step": 2000, "reward": 0.9, "eval/right": 0.1234}],
            "right on held-out prompts 0.123 in 2,000 steps",
        ),
        (
            [{"step": 1, "seconds/rollout": 3.0, "seconds/update": 1.0, "seconds/total": 5.0}] * 2,
            "1 step; 60 % of the time in rollouts",
        ),
        ([{"step": 1, "seconds/reindexing": 3.0, "seconds/total": 3.0}], "1 step; 100 % of the time in reindexing"),
    ],
    ids=str,
)
def test_a_run_is_told_by_its_score_its_steps_and_its_longest_phase(lines, sentence):
    assert headline(lines) == sentence


@pytest.mark.quick
def test_seconds_that_no_phase_holds_are_other():
    lines = [{"step": 1, "seconds/update": 1.0, "seconds/total": 1.5}, {"step": 2, "seconds/rollout": 2.0}]
    assert phase_seconds(lines) == {"update": 1.0, "rollout": 2.0}  # rounding: no less than nothing is left over
    assert phase_seconds([*lines, {"step": 3, "seconds/total": 2.5}]) == {"update": 1.0, "rollout": 2.0, "other": 1.0}
    assert phase_seconds([{"step": 1, "seconds/update": None, "tokens_per_second": 3}]) == {}


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--token", "hf_secret"])
    writer = RunWriter(tmp_path / "secret_client")
    config = GRPOConfig(learning_rate=0.5, max_steps=10, run_name="secret", push_to_hub=True, hub_model_id="me/sums")
    writer.config(config, prompts=1)
    writer.metrics(0, {"eval/right": 0.0625, "eval/mean_length": 7.0})
    writer.metrics(10, {"reward": 1.0, "rewards/right/mean": 1.0, "rewards/short/mean": 0.5, "num_tokens": 12345})
    writer.metrics(10, {"eval/right": 0.75, "eval/short": 0.5})
    writer.completions(
        1, [{"prompt": "a secret", "completion": "a secret", "rewards": {}, "advantage": 0, "ended": True}]
    )
    return writer.run_dir


@pytest.mark.quick
def test_a_card_tells_of_the_run(run_dir):
    card = ModelCard(
        model_card("me/sums", run_dir=run_dir, base_model="some/base", license="mit", picture="curves.png")
    )
    assert card.data.to_dict() == {
        "base_model": "some/base",
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "grpo_jax"],
    }
    text = card.text.lstrip()
    assert text.startswith(
        "# sums\n\nA language model, trained from [some/base](https://huggingface.co/some/base) with"
    )
    assert "\nRight on held-out prompts 0.0625 → 0.75 in 10 steps.\n\n![Curves of the run](curves.png)\n" in text
    assert "\n1 prompt; rewarded by `right`, `short`; 12,345 tokens of completions sampled.\n" in text
    assert "| right | 0.0625 | 0.75 |\n| short | 0.5 | 0.5 |\n" in text
    assert "```\nmax_steps = 10\nlearning_rate = 0.5\n```" in text
    assert "jax " in text.partition("## Versions")[2]
    assert "secret" not in text
    assert text.rstrip().endswith(MARK)


@pytest.mark.quick
def test_a_card_without_a_run_or_of_one_that_logged_nothing_says_how_to_load(tmp_path):
    for run_dir in (None, tmp_path):
        card = ModelCard(model_card("me/sums", run_dir=run_dir))
        assert "license" not in card.data.to_dict()
        assert "base_model" not in card.data.to_dict()
        assert 'AutoModelForCausalLM.from_pretrained("me/sums")' in card.text
        assert 'policy = from_pretrained("me/sums")' in card.text
        assert not {"## Scores", "## Settings", "## Versions"} & set(card.text.splitlines())
        assert "\n\n\n" not in card.text


@pytest.mark.quick
def test_a_card_of_adapters_loads_them_on_their_base():
    card = ModelCard(model_card("me/sums", adapters=True, base_model="some/base"))
    assert card.data.library_name == "peft"
    assert "Adapters (LoRA) of [some/base]" in card.text
    assert 'base = AutoModelForCausalLM.from_pretrained("some/base")' in card.text
    assert 'load_lora("me/sums", from_pretrained("some/base"))' in card.text
