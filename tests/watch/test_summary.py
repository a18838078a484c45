"""The banner, the headline and the model card of a run; the card leaves out what may be private."""

import pytest
from huggingface_hub import ModelCard

from grpo_jax import GRPOConfig
from grpo_jax.watch.summary import MARK, held_out, held_out_scores, model_card
from grpo_jax.watch.writer import RunWriter

pytestmark = pytest.mark.quick


def test_held_out_scores():
    scores = {"eval/accuracy": "accuracy", "eval/length_reward": "length_reward", "eval/greedy/format": "greedy/format"}
    assert {name: held_out(name) for name in scores} == scores
    assert not any(held_out(f"eval/{name}") for name in ("mean_length", "clipped_ratio", "rewards/a/std", "seconds"))
    assert held_out_scores(["kl", *scores, "eval/reward"]) == scores | {"eval/reward": "reward"}
    assert held_out_scores(["eval/accuracy", "eval/reward"]) == {"eval/accuracy": "accuracy"}, "the same value twice"
    assert held_out_scores(["eval/reward"]) == {"eval/reward": "reward"}


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
    assert (card.data.base_model, card.data.license, card.data.library_name) == ("some/base", "mit", "transformers")
    text = card.text
    assert "\n\nA language model, trained from [some/base](https://huggingface.co/some/base) with" in text
    assert "\nRight on held-out prompts 0.0625 → 0.75 in 10 steps.\n\n![Curves of the run](curves.png)\n" in text
    settings = '| stop | ["a\\|b"] |\n| max_steps | 10 |\n| learning_rate | 0.5 |\n'
    assert f"\n| setting | value |\n|---|---|\n{settings}" in text
    assert "secret" not in text
    assert text.rstrip().endswith(MARK)
