"""The card of a policy says what its run was, and nothing that is nobody's business."""

import pytest
from huggingface_hub import ModelCard

from grpo_jax import GRPOConfig
from grpo_jax.watch.card import MARK, model_card
from grpo_jax.watch.writer import RunWriter


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
