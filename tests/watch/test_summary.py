"""The banner, the headline and the model card of a run; the card leaves out what may be private."""

import pytest
from huggingface_hub import ModelCard

from grpo_jax import GRPOConfig
from grpo_jax.watch.summary import MARK, describe_run, headline, held_out, held_out_scores, model_card, phase_seconds
from grpo_jax.watch.writer import RunWriter

pytestmark = pytest.mark.quick


def test_held_out_scores():
    scores = {"eval/accuracy": "accuracy", "eval/length_reward": "length_reward", "eval/greedy/format": "greedy/format"}
    assert {name: held_out(name) for name in scores} == scores
    assert not any(held_out(f"eval/{name}") for name in ("mean_length", "clipped_ratio", "rewards/a/std", "seconds"))
    assert held_out_scores(["kl", *scores, "eval/reward"]) == scores | {"eval/reward": "reward"}
    assert held_out_scores(["eval/accuracy", "eval/reward"]) == {"eval/accuracy": "accuracy"}, "the same value twice"
    assert held_out_scores(["eval/reward"]) == {"eval/reward": "reward"}


def test_the_banner_by_hand():
    sizes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "steps_per_generation": 6}
    sizes |= {"num_generations": 4, "num_iterations": 2, "max_completion_length": 64, "max_steps": 20}
    config = GRPOConfig(**sizes, mesh={"data": 2})
    # On two devices: 16 × 2 × 6 = 192 completions of 48 prompts; 3 minibatches of 16 prompts, each in 2; 2 passes.
    assert describe_run(config, num_rows=48, num_parameters=999_600, state_bytes=4_000_000_000, device="cpu") == (
        "1 M parameters · 4 GB of training state · 2 devices (cpu)\n"
        "each iteration: 48 prompts × 4 = 192 completions of up to 64 tokens · 2 passes × 3 minibatches = 6 updates of"
        " 16 prompts in 2 micro-batches\n"
        "20 optimizer steps · 4 iterations · 48 prompts, gone through 4 times"
    )


def test_the_headline():
    line = {"step": 1, "reward": 0.5}
    assert (headline([]), headline([{"step": 1, "seconds/rollout": 3.0}])) == ("", "1 step")
    assert headline([line]) == "reward 0.5 in 1 step"
    assert headline([line, {"step": 2, "reward": None}, {"step": 3, "reward": 1}]) == "reward 0.5 → 1 in 3 steps"
    # A held-out score is preferred to a reward, also if it is logged later.
    lines = [line | {"eval/mean_length": 9.0}, {"step": 2000, "reward": 0.9, "eval/right": 0.1234}]
    assert headline(lines) == "right on held-out prompts 0.123 in 2,000 steps"


def test_seconds_outside_any_phase_are_other():
    lines = [{"step": 1, "seconds/update": 1.0, "seconds/total": 1.5}, {"step": 2, "seconds/rollout": 2.0}]
    assert phase_seconds(lines) == {"update": 1.0, "rollout": 2.0}  # rounding: never less than zero
    assert phase_seconds([*lines, {"step": 3, "seconds/total": 2.5}]) == {"update": 1.0, "rollout": 2.0, "other": 1.0}


def test_a_card_describes_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--token", "hf_secret"])
    writer = RunWriter(tmp_path / "secret_client")
    hub = {"run_name": "secret", "push_to_hub": True, "hub_model_id": "me/sums"}
    config = GRPOConfig(learning_rate=0.5, max_steps=10, stop=["a|b"], **hub)
    writer.config(config, prompts=1)
    writer.metrics(0, {"eval/right": 0.0625, "eval/mean_length": 7.0})
    writer.metrics(10, {"reward": 1.0, "rewards/right/mean": 1.0, "num_tokens": 12345, "eval/right": 0.75})
    writer.completions(1, [{"prompt": "a secret", "completion": "a secret", "rewards": {}}])
    about = {"run_dir": writer.run_dir, "base_model": "some/base", "license": "mit", "picture": "curves.png"}
    card = ModelCard(model_card("me/sums", **about))
    assert card.data.to_dict() == {
        "base_model": "some/base",
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "grpo_jax"],
    }
    text = card.text
    assert "\n\nA language model, trained from [some/base](https://huggingface.co/some/base) with" in text
    assert "\nRight on held-out prompts 0.0625 → 0.75 in 10 steps.\n\n![Curves of the run](curves.png)\n" in text
    settings = '| stop | ["a\\|b"] |\n| max_steps | 10 |\n| learning_rate | 0.5 |\n'
    assert f"\n| setting | value |\n|---|---|\n{settings}" in text
    assert "secret" not in text
    assert text.rstrip().endswith(MARK)


def test_a_card_without_a_run_and_one_of_adapters(tmp_path):
    for run_dir in (None, tmp_path):
        card = ModelCard(model_card("me/sums", run_dir=run_dir))
        assert {"license", "base_model"} & card.data.to_dict().keys() == set()
        assert '\npolicy = from_pretrained("me/sums")\n' in card.text
        assert "| setting |" not in card.text
    card = ModelCard(model_card("me/sums", adapters=True, base_model="some/base"))
    assert card.data.library_name == "peft"
    assert 'load_lora("me/sums", from_pretrained("some/base"))' in card.text
