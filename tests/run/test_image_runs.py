"""Runs on prompts with images: sampler and trainer agree, images are encoded once per prompt, and runs resume."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import logged
from tiny_vision import random_images, write_vision_model

from grpo_jax import GRPOConfig, SFTConfig, evaluate, from_pretrained, rehearse, save_pretrained, sft, train
from grpo_jax.hub.peft import add_lora
from grpo_jax.hub.vision import load_tower
from grpo_jax.maths.sampling import Sampling
from grpo_jax.models.scoring import score_completions
from grpo_jax.run.images import with_encoder, with_tower
from grpo_jax.run.rollout_result import RolloutResult
from grpo_jax.text.images import load_processor_if_needed
from grpo_jax.text.prompts import encode_prompts
from grpo_jax.types import Completions
from grpo_jax.watch.monitor import StopRun

SETTINGS = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8, "learning_rate": 1e-2,
    "logging_steps": 1, "max_steps": 1, "beta": 0.1, "gradient_checkpointing": False,
}  # fmt: skip


def rows(seed=3):
    """Return rows with one, no, two and one images."""
    pictures = random_images([(28, 14), (42, 56), (56, 42), (28, 28)], seed)
    of_rows = [pictures[:1], [], pictures[1:3], pictures[3:]]
    return [{"prompt": [{"role": "user", "content": f"a{i}"}], "images": some} for i, some in enumerate(of_rows)]


def image_reward(completions, images):
    """Reward the number of a prompt's images, minus 0.1 per character of the completion."""
    return [len(some) - 0.1 * len(text[0]["content"]) for text, some in zip(completions, images, strict=True)]


class ThreeTurns:
    """Environment with three turns."""

    def reset(self, **row):
        self.turns = 0

    def respond(self, text):
        self.turns += 1
        return "go on" if self.turns < 3 else None


@functools.cache
def checkpoint(family, root):
    return write_vision_model(root / family, family)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return lambda family: from_pretrained(checkpoint(family, root))


def run(policy, run_dir=None, callbacks=(), **settings):
    """Train on `dataset`, by default `rows()`. Returns the final state and the logged metrics."""
    more = {name: settings.pop(name) for name in ("environment_factory",) if name in settings}
    given = (policy, settings.pop("dataset", None) or rows(), image_reward, GRPOConfig(**SETTINGS | settings))
    return logged(train, *given, run_dir=run_dir, callbacks=callbacks, **more)


TURNS = {"environment_factory": ThreeTurns, "max_turn_length": 3, "max_completion_length": 120}


def encoded_rows(policy, freeze):
    """Return the policy, with a trained tower unless `freeze`, and the encoded rows."""
    data = {"dataset": encode_prompts(rows(), policy.tokenizer, processor=load_processor_if_needed(policy, rows()))}
    policy = with_tower(policy, data, freeze=freeze)
    return policy, with_encoder(policy, data)["dataset"]


def encoded(policy, freeze):
    """Return the policy, with a trained tower unless `freeze`, and the prompts [4, P] with images."""
    policy, data = encoded_rows(policy, freeze)
    return policy, data.prompts(range(4), length=64)


def gradient(policy, prompts, tokens):
    """Return the compiled `value_and_grad` of the mean log-prob of completions."""

    def loss(params, prompts):
        return score_completions(policy.model, params, prompts, tokens, tokens > 0, Sampling()).log_probs.mean()

    return jax.jit(jax.value_and_grad(loss)).lower(policy.params, prompts).compile()


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_frozen_and_trained_towers_have_equal_losses_and_decoder_gradients(policies, family):
    tokens = jnp.asarray(np.random.default_rng(0).integers(20, 90, (4, 2, 5)))
    results = []
    for freeze in (True, False):
        policy, prompts = encoded(policies(family), freeze)
        results.append(gradient(policy, prompts, tokens)(policy.params, prompts))
    (loss, grads), (other, more) = results
    assert float(loss) == pytest.approx(float(other), abs=1e-5)
    tower = more.pop("tower")
    chex.assert_trees_all_close(grads, more, atol=2e-5)
    assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(tower))


def test_a_frozen_tower_costs_nothing_in_the_update(policies):
    """By XLA's count, a frozen tower adds no FLOPs to a gradient. A trained tower adds three encodings per prompt."""

    def flops(program):
        return program.cost_analysis()["flops"]

    frozen, prompts = encoded(policies("smolvlm"), True)
    trained, tiles = encoded(policies("smolvlm"), False)
    encode = jax.jit(lambda params, tiles: trained.model.apply({"params": params}, tiles, method="prefill"))
    one = flops(encode.lower(trained.params, tiles).compile()) - flops(encode.lower(trained.params, prompts).compile())
    tokens = jnp.ones((4, 8, 5), jnp.int32)
    of_text, of_frozen = (gradient(frozen, x, tokens) for x in (prompts.replace(images=None), prompts))
    assert one > 0.05 * flops(of_text)
    assert flops(of_frozen) == pytest.approx(flops(of_text), rel=0.02)
    assert (flops(gradient(trained, tiles, tokens)) - flops(of_frozen)) / one == pytest.approx(3, abs=0.3)
    memory = [x.memory_analysis().temp_size_in_bytes for x in (of_text, of_frozen)]
    features = prompts.images.features.nbytes + prompts.images.feature_index.nbytes
    assert memory[1] - memory[0] < 8 * features


def test_a_dry_run_reports_the_tower(policies):
    policy = policies("smolvlm")
    report = rehearse(policy, rows(), image_reward, GRPOConfig(**SETTINGS))
    assert report.memory["vision tower"] == sum(x.nbytes for x in jax.tree.leaves(load_tower(policy)[1]))


def test_a_mesh_gives_the_same_run(policies):
    """A run with three turns, with and without images, on four devices equals one on one device, in which sampler and
    trainer agree.
    """
    settings = {**TURNS, "learning_rate": 1e-3}
    state, lines = run(policies("qwen2_5_vl"), per_device_train_batch_size=16, **settings)
    assert 0 <= lines[-1]["sampler_gap"] < 2e-5
    assert lines[-1]["turns/mean"] == 3
    settings |= {"mesh": {"data": 2, "fsdp": 2}, "per_device_train_batch_size": 4}
    other, more = run(policies("qwen2_5_vl"), **settings)
    assert more[-1]["reward"] == lines[-1]["reward"]
    chex.assert_trees_all_close(jax.tree.map(np.asarray, other.params), state.params, atol=1e-5)


@pytest.mark.parametrize("freeze", [True, False])
def test_a_resumed_run_equals_an_uninterrupted_one(policies, tmp_path, freeze):
    """A run (of adapters, whose base is unchanged, or with a trained tower) that stops between two updates on the same
    batch is resumed. Sampler and trainer agree.
    """

    def stop(step, line):
        if step == 1:
            raise StopRun

    settings = {"max_steps": 3, "num_iterations": 2, "freeze_vision": freeze, "save_steps": 1}
    policy = add_lora(policies("gemma3"), jax.random.key(0), rank=2) if freeze else policies("smolvlm")
    before = jax.tree.map(np.array, getattr(policy.model, "base", None))
    whole, lines = run(policy, tmp_path / "whole", **settings)
    assert 0 <= lines[0]["sampler_gap"] < 2e-5
    run(policy, tmp_path / "cut", callbacks=[stop], **settings)
    with pytest.raises(ValueError, match="dataset: the prompts or their order differ"):
        run(policy, tmp_path / "cut", dataset=rows(seed=1), **settings)
    resumed, _ = run(policy, tmp_path / "cut", **settings)
    chex.assert_trees_all_equal(resumed.params, whole.params)
    chex.assert_trees_all_equal(getattr(policy.model, "base", None), before)
    if freeze:
        moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), whole.params, policy.params)
        assert max(jax.tree.leaves(moved)) > 1e-3


def test_a_trained_tower_is_exported_and_a_frozen_one_unchanged(policies, tmp_path):
    examples = [{**row, "completion": [{"role": "assistant", "content": "b"}]} for row in rows()]
    policy = policies("idefics3")
    for freeze in (True, False):
        config = SFTConfig(max_steps=6, learning_rate=3e-3, logging_steps=1, freeze_vision=freeze)
        state, lines = logged(sft, policy, examples, config)
        assert lines[-1]["loss"] < lines[0]["loss"]
        trained = policy.replace(params=state.params)
        save_pretrained(tmp_path / "model", trained)
        again = from_pretrained(tmp_path / "model")
        same = [np.array_equal(x, again.extra_tensors[name]) for name, x in policy.extra_tensors.items()]
        assert all(same) if freeze else not any(same)
    texts = [[row["completion"] for row in evaluate(x, rows(), image_reward, max_completion_length=4)[1]]
        for x in (trained, again)]  # fmt: skip
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match=r"freeze_vision=True, but policy\.params contains a trained vision tower"):
        sft(trained, examples, SFTConfig(max_steps=1))


def test_sft_with_and_without_images_and_with_different_lengths(policies):
    """SFT with and without images, with packing, and with a longest prompt and completion that exceed the context."""
    policy, settings = policies("smolvlm"), {"max_steps": 1, "packing": True, "max_length": 512, "logging_steps": 1}
    examples = [{**row, "completion": [{"role": "assistant", "content": "b"}]} for row in rows()]
    plain = [{"prompt": "a" * 20, "completion": "b" * 300}, {"prompt": "c" * 400, "completion": "d"}]
    for dataset, held_out in ((examples, plain[:1]), (plain, examples)):
        _, lines = logged(sft, policy, dataset, SFTConfig(**settings), eval_dataset=held_out)
        assert all(np.isfinite(line.get("loss", 0)) for line in lines)


@pytest.mark.parametrize("freeze", [True, False])
def test_joined_rollouts_keep_their_images(policies, freeze):
    """States of prompts do not change if rollouts with different prompt lengths are joined."""
    policy, data = encoded_rows(policies("qwen2_5_vl"), freeze)
    empty = Completions(*np.zeros((3, 2, 1, 1)), np.zeros((2, 1)))
    halves = (RolloutResult([], data.prompts(at, length=p), empty) for at, p in (((0, 1), 64), ((2, 3), 96)))
    states = jax.jit(lambda prompts: policy.model.apply({"params": policy.params}, prompts, method="prefill")[0])
    joined = next(halves).join(next(halves)).prompts
    np.testing.assert_allclose(states(joined), states(data.prompts(range(4), length=80)), atol=1e-5)


@pytest.mark.quick
def test_a_tower_that_was_trained_is_used_with_adapters(policies):
    policy = policies("gemma3")
    tower = jax.tree.map(lambda x: 1.1 * x, load_tower(policy)[1])
    adapted = add_lora(policy.replace(params={**policy.params, "tower": tower}), jax.random.key(0), rank=2)
    data = {"": encode_prompts(rows(), policy.tokenizer, processor=load_processor_if_needed(policy, rows()))}
    chex.assert_trees_all_equal(with_encoder(adapted, data, params=adapted.params)[""].image_encoder.params, tower)


def test_unsupported_combinations_are_rejected(policies):
    policy = policies("gemma3")
    with pytest.raises(ValueError, match="teacher does not support images"):
        train(policy, rows(), image_reward, GRPOConfig(distillation_coef=1.0, max_steps=1), teacher=policy)
    with pytest.raises(ValueError, match="sampler does not support images"):
        evaluate(policy, rows(), image_reward, sampler=lambda **keywords: None)
    adapted = add_lora(policy, jax.random.key(0), rank=2)
    with pytest.raises(ValueError, match="freeze_vision=False, but the policy has adapters"):
        run(adapted, freeze_vision=False)
    with pytest.raises(ValueError, match="freeze_vision=False, but the dataset has no images"):
        sft(policy, [{"prompt": "a", "completion": "b"}], SFTConfig(freeze_vision=False, max_steps=1))
