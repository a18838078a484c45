"""Pushing to the hub: complete checkpoints with a card in the right repository; failures lose nothing."""

import dataclasses
from pathlib import Path

import jax
import pytest
from hub_server import serving
from huggingface_hub import ModelCard
from tiny import tiny_policy

from grpo_jax import GRPOConfig, SFTConfig, from_pretrained, push_to_hub, train
from grpo_jax.run import publish
from grpo_jax.run.publish import MARK, Publisher, check_push, model_card
from grpo_jax.types import Params
from grpo_jax.watch.writer import RunWriter

CONFIG = GRPOConfig(push_to_hub=True, hub_model_id="sums")


def moved(params: Params) -> Params:
    return jax.tree.map(lambda x: x + 1, params)


def loaded(commit, directory):
    """Write a commit's files to `directory` and load the policy from it."""
    directory.mkdir()
    for name, content in commit[3].items():
        (directory / name).write_bytes(content)
    return from_pretrained(directory)


def same(a: Params, b: Params) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))


def opened(config, run_dir):
    publisher = Publisher(config, tiny_policy(), run_dir)
    publisher.open()
    return publisher


def test_run_is_pushed_at_checkpoints_and_at_its_end(tmp_path, monkeypatch):
    longer = lambda completions: [float(len(text)) for text in completions]
    longer.__name__ = "longer"
    sizes = {"max_steps": 2, "save_steps": 1, "max_completion_length": 4, "learning_rate": 0.01}
    config = dataclasses.replace(CONFIG, hub_private_repo=True, **sizes)
    with serving(monkeypatch) as hub:
        state = train(tiny_policy(), [{"prompt": "ab"}], longer, config, run_dir=tmp_path / "run")
    assert hub.private == {"me/sums": True}
    assert {authorization for _, _, authorization, _ in hub.requests} == {"Bearer hf_of_a_test"}
    assert [commit[2] for commit in hub.commits] == ["Training in progress, step 1", "End of training"]
    first, last = (loaded(commit, tmp_path / str(i)) for i, commit in enumerate(hub.commits))
    assert same(last.params, state.params)
    assert not same(first.params, state.params)
    assert last.tokenizer("ab")["input_ids"] == tiny_policy().tokenizer("ab")["input_ids"]
    # The card is pushed at the end and describes the run.
    assert "README.md" not in hub.commits[0][3]
    card = hub.commits[1][3]["README.md"].decode()
    assert "\nReward " in card
    assert "| max_steps | 2 |" in card
    assert "![Training curves](report.png)" in card
    assert hub.commits[1][3]["report.png"] == (tmp_path / "run" / "report.png").read_bytes()


@pytest.mark.quick
def test_hub_strategy_end_pushes_once(tmp_path, monkeypatch):
    params = tiny_policy().params
    with serving(monkeypatch) as hub:
        publisher = opened(
            dataclasses.replace(CONFIG, hub_strategy="end", hub_model_id=None, hub_revision="dev"), tmp_path
        )
        publisher.checkpoint_saved(1, params, last=2)
        assert hub.commits == []
        publisher.end(params)
        assert [commit[:3] for commit in hub.commits] == [(f"me/{tmp_path.name}", "dev", "End of training")]


def test_failed_push_warns_during_the_run_and_raises_at_its_end(tmp_path, monkeypatch):
    params = tiny_policy().params
    (tmp_path / "report.png").write_bytes(b"a picture")
    with serving(monkeypatch) as hub:
        publisher = opened(CONFIG, tmp_path)
        hub.broken = True
        with pytest.warns(RuntimeWarning, match="the policy at step 1 could not be pushed to 'me/sums'"):
            publisher.checkpoint_saved(1, params, last=3)
        with pytest.raises(OSError, match=r"could not be pushed to 'me/sums' .*It is saved in .*hub\. Repeat the call"):
            publisher.end(moved(params))
        hub.broken = False
        for steps in (1, 2):  # the upload is repeated, and the run is resumed with more steps
            publisher = opened(CONFIG, tmp_path)
            publisher.checkpoint_saved(1, params, last=steps)
            publisher.end(moved(params))
            assert hub.commits[-1][3]["report.png"] == b"a picture"
        (tmp_path / "hub" / "notes.txt").touch()
        with pytest.warns(RuntimeWarning, match=r"step 1 could not be pushed to 'me/sums' \(.*notes\.txt"):
            publisher.checkpoint_saved(1, params, last=3)
    assert same(from_pretrained(tmp_path / "hub").params, moved(params))


def test_invalid_push_is_rejected_before_training(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="push_to_hub = True requires run_dir"):
        check_push(tiny_policy(), None)
    with pytest.raises(ValueError, match="push_to_hub = True: the policy has a custom model"):
        check_push(tiny_policy().replace(model=object()), tmp_path)
    with serving(monkeypatch) as hub:
        config = dataclasses.replace(CONFIG, hub_model_id="other/sums", max_steps=1, max_completion_length=4)
        with pytest.raises(OSError, match=r"hub_model_id = 'other/sums': the repository or branch cannot be .*403"):
            train(tiny_policy(), [{"prompt": "a"}], lambda completions: 1 / 0, config, run_dir=tmp_path / "run")
        assert hub.commits == []


@pytest.mark.quick
def test_card_describes_the_run_and_names_the_base_model(tmp_path):
    writer = RunWriter(tmp_path / "secret_client")
    hub = {"run_name": "secret", "push_to_hub": True, "hub_model_id": "me/sums"}
    config = GRPOConfig(learning_rate=0.5, max_steps=10, stop=["a|b"], **hub)
    writer.config(config, prompts=1)
    writer.metrics(0, {"eval/right": 0.0625, "eval/mean_length": 7.0})
    writer.metrics(10, {"reward": 1.0, "rewards/right/mean": 1.0, "num_tokens": 12345, "eval/right": 0.75})
    writer.completions(1, [{"prompt": "a secret", "completion": "a secret", "rewards": {}}])
    Path(writer.run_dir, "report.png").touch()
    about = {"run_dir": writer.run_dir, "base_model": "some/base", "license": "mit"}
    card = ModelCard(model_card("me/sums", **about))
    assert (card.data.base_model, card.data.license, card.data.library_name) == ("some/base", "mit", "transformers")
    text = card.text
    assert "\n\nA language model, trained from [some/base](https://huggingface.co/some/base) with" in text
    assert "\nRight on held-out prompts 0.0625 → 0.75 in 10 steps.\n\n![Training curves](report.png)\n" in text
    rows = text.partition("\n| setting | value |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert sorted(rows) == ["| learning_rate | 0.5 |", "| max_steps | 10 |", '| stop | ["a\\|b"] |']
    assert "secret" not in text
    assert text.rstrip().endswith(MARK)
    writer.config(SFTConfig(), prompts=1)
    card = ModelCard(model_card("me/sums", run_dir=writer.run_dir))
    assert (card.data.tags, "with supervised fine-tuning using" in card.text) == (["sft", "grpo_jax"], True)
    text = model_card("me/sums", adapters=True, base_model="some/base")
    assert 'load_lora("me/sums", from_pretrained("some/base"))' in text
    assert "\nlibrary_name: peft\n" in text


@pytest.fixture
def run_dir(tmp_path):
    """Write the files of a run that the model card reads; return their directory."""
    writer = RunWriter(tmp_path / "run")
    writer.config(GRPOConfig(max_steps=9), prompts=4000)
    writer.metrics(0, {"eval/right": 0.125})
    writer.metrics(9, {"reward": 0.9, "rewards/right/mean": 0.9, "num_tokens": 1234, "eval/right": 0.975})
    (tmp_path / "run" / "report.png").write_bytes(b"a picture")
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # raised by huggingface_hub's upload
def test_manual_push_is_one_commit_that_loads_by_revision(run_dir, monkeypatch):
    policy = tiny_policy()
    with serving(monkeypatch) as hub:
        hub.large = (".safetensors", ".png")
        about = {"base_model": "some/base", "dataset": "some/data", "license": "mit"}
        first = push_to_hub(policy, "sums", run_dir=run_dir, private=True, **about)
        puts = sum(method == "PUT" for method, *_ in hub.requests)
        second = push_to_hub(policy.replace(params=moved(policy.params)), "me/sums", revision="later")
        named = {"chat_template.jinja": b"D", "additional_chat_templates/tool_use.jinja": b"T"}
        hub.trees[hub.heads["me/sums", "later"]].update(named)
        by_commit = from_pretrained("me/sums", revision=first.rpartition("/")[2])
        by_branch, main = (from_pretrained("me/sums", revision=name) for name in ("later", None))
        with pytest.raises(FileNotFoundError, match=r"'me/sums' is not a local directory and could not be downloaded"):
            from_pretrained("me/sums", revision="never")
    assert by_branch.tokenizer.chat_template == {"default": "D", "tool_use": "T"}
    # Each push makes one commit, uploads the large files with LFS, and changes nothing else.
    assert hub.private == {"me/sums": True}
    assert [commit[:3] for commit in hub.commits] == [("me/sums", x, "Upload policy") for x in ("main", "later")]
    assert [first, second] == [f"{hub.url}/me/sums/commit/{n:040x}" for n in (1, 2)]
    assert puts == 2
    files = hub.commits[0][3]
    wanted = {"README.md", "report.png", "config.json", "generation_config.json", "model.safetensors"}
    assert set(files) == {*wanted, *policy.files}
    assert files["report.png"] == b"a picture"
    # Each revision loads the policy that was pushed.
    assert same(by_commit.params, policy.params)
    assert same(main.params, policy.params)
    assert same(by_branch.params, moved(policy.params))
    card = ModelCard(files["README.md"].decode())
    assert card.data.datasets == ["some/data"]
    assert "Right on held-out prompts 0.125 → 0.975 in 9 steps." in card.text


@pytest.mark.quick
def test_handwritten_card_is_kept(monkeypatch):
    with serving(monkeypatch) as hub:
        push_to_hub(tiny_policy(), "me/sums")
        push_to_hub(tiny_policy(), "me/sums", license="mit")  # a generated card is replaced
        assert b"license: mit" in hub.commits[1][3]["README.md"]
        hub.trees[hub.heads["me/sums", "main"]]["README.md"] = b"# Mine"
        push_to_hub(tiny_policy(), "me/sums")
        assert "README.md" not in hub.commits[2][3]
        assert "model.safetensors" in hub.commits[2][3]


@pytest.mark.quick
def test_invalid_manual_push_is_rejected_before_sending(run_dir, monkeypatch):
    policy = tiny_policy()
    with serving(monkeypatch) as hub:
        with pytest.raises(ValueError, match="'repo_name' or 'namespace/repo_name': 'a/b/c'"):
            push_to_hub(policy, "a/b/c")
        with pytest.raises(FileNotFoundError, match=r"run_dir = '.*nowhere': metrics\.jsonl is missing; pass"):
            push_to_hub(policy, "me/sums", run_dir=run_dir / "nowhere")
        with pytest.raises(ValueError, match="policy has a custom model, which cannot be written as a checkpoint"):
            push_to_hub(policy.replace(model=object()), "me/sums")
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
        with pytest.raises(PermissionError, match="logged in to the Hugging Face Hub; run `hf auth login` or set"):
            push_to_hub(policy, "me/sums", run_dir=run_dir)
        # Other processes raise the error of process 0.
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        monkeypatch.setattr(publish, "gather_objects", lambda local: [f"not logged in, {local}"])
        with pytest.raises(OSError, match="not logged in, None"):
            push_to_hub(policy, "me/sums", run_dir=run_dir)
        assert hub.requests == []
