"""A vLLM server as the teacher: its log-probs match its weights, and unsuitable settings or models are refused."""

import dataclasses

import jax
import numpy as np
import pytest
from stand_in import serving
from tiny import tiny_policy

from grpo_jax import Completions, GRPOConfig, Prompts, train
from grpo_jax.engines import EngineError, vllm_scorer
from grpo_jax.types import join_rows

pytestmark = pytest.mark.quick
POLICY = tiny_policy().replace(generation_config={"eos_token_id": [1, *range(2, 66)], "pad_token_id": 0})
TEACHER = POLICY.replace(params=jax.tree.map(lambda x: 1.5 * x, POLICY.params))
ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh"]]
server = serving(TEACHER)
CONFIG = GRPOConfig(
    num_generations=4, per_device_train_batch_size=8, max_completion_length=8, gradient_checkpointing=False,
    max_steps=2, logging_steps=1, distillation_coef=1.0, distillation_mode="sampled_token",
)  # fmt: skip


def texts():
    """Return prompts and completions of several lengths; the last completion contains three observed tokens."""
    rng = np.random.default_rng(0)
    lengths, counts = np.array([2, 4], np.int32), np.array([[3, 6, 1], [6, 2, 5]])
    present = np.arange(6) < counts[..., None]
    mask = present.copy()
    mask[1, 2, 1:4] = False
    tokens = rng.integers(2, 60, (2, 3, 6)).astype(np.int32)
    prompts = Prompts(rng.integers(2, 60, (2, 4)).astype(np.int32), lengths)
    return prompts, Completions(tokens, mask, np.zeros(mask.shape, np.float32), counts < 6, present)


def whole(teacher, prompts, completions):
    """Compute log-probs [B, G, T, V] over the vocabulary at every completion token, without a cache."""
    b, g, t = completions.tokens.shape
    rows, begins = join_rows(prompts, completions.tokens)
    l = jax.nn.log_softmax(jax.jit(teacher.model.apply)({"params": teacher.params}, rows))
    at = np.asarray(begins)[:, None] - 1 + np.arange(t)
    return np.take_along_axis(np.asarray(l), at[..., None], 1).reshape(b, g, t, -1)


def test_log_probs_equal_the_teachers(server):
    prompts, completions = texts()
    l = whole(TEACHER, prompts, completions)
    alone = vllm_scorer(server.url).score(prompts, completions)
    told = vllm_scorer(server.url, top_k=5).score(prompts, completions)
    mask, own = completions.mask, np.take_along_axis(l, completions.tokens[..., None], -1)[..., 0]
    assert alone.top_ids is None
    assert server.most > 1  # requests ran concurrently
    for one in (alone, told):
        assert one.log_probs.dtype == np.float32
        np.testing.assert_allclose(one.log_probs[mask], own[mask], atol=1e-5)
    np.testing.assert_array_equal(told.top_ids[mask], np.argsort(-l, -1)[mask][:, :5])
    np.testing.assert_allclose(told.top_log_probs[mask], -np.sort(-l, -1)[mask][:, :5], atol=1e-5)


@pytest.mark.parametrize(("config", "given", "message"), [
    ({"temperature": 0.7}, {}, r"temperature must be 1\.0 with a server as teacher; got 0\.7"),
    ({}, {"top_k": 5}, r"distillation_topk must equal the scorer's top_k, 5; got None"),
    ({"distillation_mode": "topk_logits", "distillation_topk": 21},
        {"top_k": 21},
        "of 21, which is greater than max allowed: 20"),
    ({}, {"model": "other"}, r"does not serve model='other' \(available: .*base"),
])  # fmt: skip
def test_unsuitable_settings_are_refused_before_sampling(server, config, given, message):
    with pytest.raises((EngineError, ValueError), match=message):
        train(POLICY, ROWS, [], dataclasses.replace(CONFIG, **config), teacher=vllm_scorer(server.url, **given))
    assert not [body for body in server.posts("/v1/completions") if len(body["prompt"]) > 3]


@pytest.mark.filterwarnings("ignore:.*Waiting up to")
def test_server_that_changes_its_model_is_refused(server):
    prompts, completions = texts()
    scorer, answer = vllm_scorer(server.url, model="base"), server.answer
    scorer.score(prompts, completions)
    served = {"data": [{"id": "other", "root": "other"}]}
    server.answer = lambda path, body: (200, served) if path == "/v1/models" else answer(path, body)
    with pytest.raises(EngineError, match=r"does not serve model='base' \(available: other\)"):
        scorer.score(prompts, completions)
