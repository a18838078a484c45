"""A run's policy on the hub: whole checkpoints in the right repository, and faults that lose nothing."""

import dataclasses
import json
import threading

import jax
import pytest
from hub_server import serving
from tiny import tiny_policy

from grpo_jax import GRPOConfig, add_lora, from_pretrained, train
from grpo_jax.hub.publish import Publisher
from grpo_jax.types import Params

CONFIG = GRPOConfig(push_to_hub=True, hub_model_id="sums")


def moved(params: Params) -> Params:
    return jax.tree.map(lambda x: x + 1, params)


def loaded(commit, directory):
    """The policy that a commit holds."""
    directory.mkdir()
    for name, content in commit[3].items():
        (directory / name).write_bytes(content)
    return from_pretrained(directory)


def same(a: Params, b: Params) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))


def opened(config, run_dir, policy=None):
    publisher = Publisher(config, policy or tiny_policy(), run_dir)
    publisher.open()
    return publisher


def test_a_run_is_pushed_at_its_checkpoints_and_at_its_end(tmp_path, monkeypatch):
    def longer(completions):
        return [float(len(text)) for text in completions]

    config = dataclasses.replace(
        CONFIG, max_steps=2, save_steps=1, max_completion_length=4, learning_rate=0.01, hub_private_repo=True
    )
    with serving(monkeypatch) as hub:
        state = train(tiny_policy(), [{"prompt": "ab"}], longer, config, run_dir=tmp_path / "run")
    assert hub.private == {"me/sums": True}
    assert {authorization for _, _, authorization, _ in hub.requests} == {"Bearer hf_of_a_test"}
    assert [commit[:3] for commit in hub.commits] == [
        ("me/sums", "main", "Training in progress, step 1"),
        ("me/sums", "main", "End of training"),
    ]
    first, last = (loaded(commit, tmp_path / str(i)) for i, commit in enumerate(hub.commits))
    assert same(last.params, state.params)
    assert not same(first.params, state.params)
    assert last.tokenizer("ab")["input_ids"] == tiny_policy().tokenizer("ab")["input_ids"]


@pytest.mark.quick
def test_the_repository_has_the_name_of_the_run_or_the_one_given(tmp_path, monkeypatch):
    with serving(monkeypatch) as hub:
        opened(dataclasses.replace(CONFIG, hub_model_id=None, hub_revision="dev"), tmp_path / "my-run").end(
            tiny_policy().params
        )
        opened(dataclasses.replace(CONFIG, hub_model_id="team/sums"), tmp_path / "my-run").end(tiny_policy().params)
    assert [commit[:2] for commit in hub.commits] == [("me/my-run", "dev"), ("team/sums", "main")]
    assert hub.private == {"me/my-run": None, "team/sums": None}


@pytest.mark.quick
def test_adapters_are_pushed_in_the_format_of_peft(tmp_path, monkeypatch):
    policy = add_lora(tiny_policy(), jax.random.key(0), rank=2)
    with serving(monkeypatch) as hub:
        opened(CONFIG, tmp_path, policy).end(policy.params)
    ((_, _, _, files),) = hub.commits
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(files["adapter_config.json"])["r"] == 2


def test_at_the_end_alone_or_never(tmp_path, monkeypatch):
    params = tiny_policy().params
    with serving(monkeypatch) as hub:
        publisher = opened(dataclasses.replace(CONFIG, hub_strategy="end"), tmp_path)
        publisher.saved(1, params, last=2)
        assert hub.commits == []
        publisher.end(params)
        assert [commit[2] for commit in hub.commits] == ["End of training"]
        asked = len(hub.requests)
        publisher = opened(GRPOConfig(hub_model_id="sums"), None)
        publisher.saved(1, params, last=2)
        publisher.end(params)
        assert len(hub.requests) == asked


def test_a_push_that_fails_on_the_way_is_a_warning_and_at_the_end_an_error_that_loses_nothing(tmp_path, monkeypatch):
    params = tiny_policy().params
    with serving(monkeypatch) as hub:
        publisher = opened(CONFIG, tmp_path)
        hub.broken = True
        publisher.saved(1, params, last=3)
        with (
            pytest.warns(RuntimeWarning, match="the policy of step 1 could not be pushed to 'me/sums'"),
            pytest.raises(OSError, match=r"could not be pushed to 'me/sums' .*it lies in .*hub\. Call train again"),
        ):
            publisher.end(moved(params))
    assert same(from_pretrained(tmp_path / "hub").params, moved(params))


def test_a_push_that_is_due_while_one_is_under_way_is_left_out(tmp_path, monkeypatch):
    params = tiny_policy().params
    with serving(monkeypatch) as hub:
        publisher, gate, answer = opened(CONFIG, tmp_path), threading.Event(), hub.answer
        monkeypatch.setattr(hub, "answer", lambda path, body: gate.wait(20) and answer(path, body))
        for step in (1, 2, 3):
            publisher.saved(step, params, last=4)
        gate.set()
        publisher.end(params)
    assert [commit[2] for commit in hub.commits] == ["Training in progress, step 1", "End of training"]


def test_what_cannot_be_pushed_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="push_to_hub = True: the policy is written before it is pushed; give run_dir"):
        Publisher(CONFIG, tiny_policy(), None)
    with pytest.raises(ValueError, match="push_to_hub = True: the policy has a model of your own"):
        Publisher(CONFIG, tiny_policy().replace(model=object()), tmp_path)
    with serving(monkeypatch) as hub:
        config = dataclasses.replace(CONFIG, hub_model_id="other/sums", max_steps=1, max_completion_length=4)
        with pytest.raises(OSError, match=r"the repository 'other/sums' \(hub_model_id\) cannot be made \(.*403"):
            train(tiny_policy(), [{"prompt": "a"}], lambda completions: 1 / 0, config, run_dir=tmp_path / "run")
        assert hub.commits == []
