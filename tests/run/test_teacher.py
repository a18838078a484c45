"""Distillation: training with a policy or a scorer as the teacher, and arguments rejected before sampling."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import logged, tiny_policy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from grpo_jax import GRPOConfig, Policy, train
from grpo_jax.maths.supervised import divergence
from grpo_jax.run.prepare import prepare
from grpo_jax.types import TeacherLogProbs


class Pairs:
    """A bigram model with one logit for each pair of the four letters."""

    def apply(self, variables, tokens):
        return variables["params"]["logits"][tokens]


def letters(alphabet=".abc"):
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(alphabet)}, unk_token="."))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=".")


MODEL, TOKENIZER = Pairs(), letters()
POLICY = Policy(MODEL, {"logits": jnp.zeros((4, 4))}, TOKENIZER)
TEACHER = POLICY.replace(params={"logits": 2 * jax.random.normal(jax.random.key(1), (4, 4))}, tokenizer=letters())
ROWS = [{"prompt": "a"}, {"prompt": "cab"}]
SETTINGS = {"max_steps": 4, "max_completion_length": 4, "num_generations": 4, "distillation_coef": 1.0}
CONFIG = GRPOConfig(**SETTINGS, learning_rate=0.1, lr_scheduler_type="constant", logging_steps=1)


def ends_early(completions):
    return [float(len(text) < 2) for text in completions]


def run(config=CONFIG, reward_fns=(), **given):
    """Train with `TEACHER` by default; return the final state and the logged metrics."""
    return logged(train, POLICY, ROWS, list(reward_fns), config, **{"teacher": TEACHER} | given)


def distance(state):
    p, q = (jax.nn.log_softmax(x["logits"]) for x in (state.params, TEACHER.params))
    return float(divergence(p, q).mean())


@pytest.mark.parametrize("mode", ["full_logits", "sampled_token"])
def test_policy_approaches_its_teacher_without_a_reward(mode):
    """Distillation without a reward brings the policy close to its teacher."""
    config = dataclasses.replace(CONFIG, max_steps=60, distillation_mode=mode, per_device_train_batch_size=16)
    state, lines = run(config, eval_dataset=ROWS)
    lines, evaluations = lines[1:-1], [lines[0], lines[-1]]
    before = float(divergence(jnp.full((4, 4), -np.log(4)), jax.nn.log_softmax(TEACHER.params["logits"])).mean())
    assert distance(state) < 0.3 * before
    assert np.mean([line["distillation"] for line in lines[-5:]]) < 0.5 * lines[0]["distillation"]
    assert all("reward" not in line or np.isnan(line["reward"]) for line in lines)
    assert all(line["eval/mean_length"] >= 1 and np.isnan(line["eval/reward"]) for line in evaluations)


def test_distillation_loss_is_the_divergence_times_the_coefficient():
    _, lines = run(dataclasses.replace(CONFIG, max_steps=1, distillation_coef=0.25), [ends_early])
    alone = dataclasses.replace(CONFIG, max_steps=1, distillation_coef=0.0)
    _, plain = run(alone, [ends_early], teacher=None)
    (line,), (other,) = lines, plain
    assert line["distillation_loss"] == pytest.approx(0.25 * line["distillation"], rel=1e-5)
    assert line["loss"] == pytest.approx(other["loss"] + line["distillation_loss"], abs=1e-6)
    assert line["policy_loss"] == pytest.approx(other["policy_loss"], abs=1e-6)
    assert "distillation" not in other


class Engine:
    """A scorer that looks up the teacher's log-probs, with the k most probable tokens if `k` is set."""

    def __init__(self, k=None):
        self.k, self.calls = k, []

    def score(self, prompts, completions):
        assert isinstance(completions.tokens, np.ndarray)
        self.calls.append((prompts, completions))
        last = np.take_along_axis(prompts.tokens, prompts.lengths[:, None] - 1, 1)
        b, g, _ = completions.tokens.shape
        last = np.broadcast_to(last[:, None], (b, g, 1))
        before = np.concatenate([last, completions.tokens[:, :, :-1]], -1)
        log_q = np.asarray(jax.nn.log_softmax(TEACHER.params["logits"]))[before]
        log_probs = np.take_along_axis(log_q, completions.tokens[..., None], -1)[..., 0]
        if self.k is None:
            return log_probs
        ids = np.argsort(-log_q, -1)[..., : self.k]
        return TeacherLogProbs(log_probs, ids, np.take_along_axis(log_q, ids, -1))


def test_scorer_equals_the_teacher_it_scores_for():
    """A scorer trains the policy like the teacher whose log-probs it returns."""
    sampled = dataclasses.replace(CONFIG, distillation_mode="sampled_token")
    state, lines = run(sampled, teacher=Engine())
    other, others = run(sampled)
    chex.assert_trees_all_close(state.params, other.params, atol=1e-6)
    assert lines[-1]["distillation"] == pytest.approx(others[-1]["distillation"], abs=1e-5)
    # With four tokens, the top three and the remaining mass are the full distribution.
    top, _ = run(dataclasses.replace(CONFIG, distillation_mode="topk_logits", distillation_topk=3), teacher=Engine(3))
    whole, _ = run()
    chex.assert_trees_all_close(top.params, whole.params, atol=1e-5)


def test_run_resumes_only_with_its_own_teacher(tmp_path):
    whole, _ = run()
    run(dataclasses.replace(CONFIG, max_steps=2, save_steps=2), run_dir=tmp_path)
    other = TEACHER.replace(params={"logits": TEACHER.params["logits"] + 1})
    for teacher, settings, complaint in (
        (other, {}, r"teacher: a policy \(params \w+\), but the run has a policy \(params \w+\)"),
        (Engine(), {"distillation_mode": "sampled_token"}, r"teacher: a scorer \(Engine\), but the run has a policy"),
    ):
        with pytest.raises(ValueError, match=complaint):
            run(dataclasses.replace(CONFIG, **settings), run_dir=tmp_path, teacher=teacher)
    resumed, _ = run(run_dir=tmp_path)
    chex.assert_trees_all_equal(resumed, whole)


REFUSED = [
    ({"teacher": None}, {"distillation_coef": 0.0}, "reward_fns is empty"),
    ({"teacher": "self"}, {}, "teacher must be a Policy, .*; got 'self'"),
    ({"teacher": None}, {}, "distillation_coef=1.0 needs a teacher"),
    ({}, {"distillation_coef": 0.0}, "distillation_coef must be positive with a teacher"),
    ({"teacher": Engine()}, {}, "'full_logits' needs a Policy as the teacher"),
    ({}, {"distillation_mode": "topk_logits", "distillation_topk": 2}, "Use 'full_logits'"),
    ({}, {"distillation_mode": "sampled_token", "distillation_divergence": "jsd"}, "supports only .*; got 'jsd'"),
    ({}, {"dynamic_sampling": True}, "dynamic_sampling=True needs rewards to select groups"),
    ({}, {"reward_weights": [1.0]}, "got 1 weight for 0 reward functions"),
    ({"teacher": TEACHER.replace(tokenizer=letters(".bac"))}, {},
        r"ids differ for 2 of the tokens \(policy, teacher\): 'a' \(1, 2\), 'b' \(2, 1\)"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("given", "settings", "complaint"), REFUSED, ids=[line[2][:30] for line in REFUSED])
def test_incompatible_arguments_are_rejected(given, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        run(dataclasses.replace(CONFIG, **settings), **given)


@pytest.mark.quick
def test_dynamic_sampling_needs_rewards_from_the_environment():
    """Without `get_reward`, every group would have equal rewards, and no token would contribute to the loss."""

    class Silent:
        def respond(self, text): ...

    class Scored(Silent):
        def get_reward(self):
            return 1.0

    policy, config = tiny_policy(), dataclasses.replace(CONFIG, dynamic_sampling=True)
    with pytest.raises(ValueError, match="dynamic_sampling=True needs rewards to select groups"):
        prepare(policy, ROWS, [], config, teacher=policy, environment_factory=Silent)
    prepare(policy, ROWS, [], config, teacher=policy, environment_factory=Scored)


@pytest.mark.quick
def test_teacher_with_a_short_context_is_rejected():
    policy = tiny_policy()
    short = dataclasses.replace(policy.model.config, max_position_embeddings=6)
    teacher = policy.replace(model=policy.model.clone(config=short))
    with pytest.raises(ValueError, match=r"^teacher: max_completion_length = 4: .* exceeds the model's 6 positions"):
        train(policy, ROWS, [], CONFIG, teacher=teacher)


@pytest.mark.parametrize(("scores", "complaint"), [
    (lambda shape: np.zeros(shape).transpose(1, 2, 0), r"log_probs of shape \(1, 4, 4\); got \(4, 4, 1\)"),
    (lambda shape: np.full(shape, 0.5), "that are finite and ≤ 0 .*; got values from 0.5 to 0.5"),
    (lambda shape: TeacherLogProbs(np.zeros(shape), np.zeros((*shape, 2)), np.zeros((*shape, 2))),
        "top_ids as integers ≥ 0; got"),
], ids=["transposed", "positive", "ids"])  # fmt: skip
def test_scorer_result_is_checked(scores, complaint):
    class Wrong:
        def score(self, prompts, completions):
            return scores(completions.tokens.shape)

    config = dataclasses.replace(CONFIG, distillation_mode="topk_logits", distillation_topk=2)
    with pytest.raises(ValueError, match=complaint):
        run(dataclasses.replace(config, per_device_train_batch_size=4), teacher=Wrong())
