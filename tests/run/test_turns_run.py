"""Multi-turn runs: the tokens that are learned, the metrics, the stored rows and invalid combinations."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from collecting import collected
from test_collect import POLICY  # a quarter of the bytes end a turn, so most completions have several
from tiny import logged

from grpo_jax import GRPOConfig, evaluate, train
from grpo_jax.models.scoring import score_completions
from grpo_jax.run.prepare import prepare
from grpo_jax.run.run import new_state
from grpo_jax.run.sources import PrefetchedRollouts, rollout_source
from grpo_jax.update.objective import sampling_distribution
from grpo_jax.watch.monitor import Progress
from grpo_jax.watch.writer import read_lines

ROWS = [{"prompt": text, "target": i} for i, text in enumerate(["ab", "c", "def", "gh"])]
SMALL = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 40,
    "gradient_checkpointing": False, "logging_steps": 1, "max_steps": 3, "learning_rate": 1e-2,
}  # fmt: skip


class Game:
    """An environment that responds three times and whose reward depends on the policy's turns."""

    def reset(self, target, **row):
        self.target, self.heard = target, []

    def respond(self, text):
        self.heard.append(text)
        return None if len(self.heard) == 4 else f" {self.target}{len(text)}: "

    def get_reward(self):
        return float(sum(map(len, self.heard)) % 5)


def run(fns=(), policy=POLICY, run_dir=None, factory=Game, **settings):
    config = GRPOConfig(**SMALL | settings)
    return logged(train, policy, ROWS, list(fns), config, environment_factory=factory, run_dir=run_dir)[1]


def experience_of(factory=Game, fns=(), cursor=0, **settings):
    found = prepare(POLICY, ROWS, list(fns), GRPOConfig(**SMALL | settings), environment_factory=factory)
    state = new_state(found)
    return found, state, collected(found, state, cursor)


# Each letter is one of 258 tokens, so many turns end at a stop string, some at an EOS, and some at neither.
STOP = [*"abcdefghijklmnop", "é", "Q", "R"]


class Says(Game):
    """A `Game` whose responses begin with a stop string."""

    def respond(self, text):
        response = super().respond(text)
        return response and f"a{response}"


def test_run_learns_from_sampled_tokens_and_logs_turns(tmp_path):
    """A multi-turn run logs its turns, which end at an EOS, after a stop string, or are cut short and counted."""
    texts = []

    def heard(environments, completions, environment_rewards):
        assert all(isinstance(environment, Says) for environment in environments)
        texts.extend(text for environment in environments for text in environment.heard)
        return [float(len(environment.heard)) for environment in environments]

    lines = run(fns=[heard], run_dir=tmp_path, factory=Says, stop=STOP, max_turn_length=9)
    assert sum(text.endswith(tuple(STOP)) for text in texts) > 10
    assert not any(part in text[:-1] for text in texts for part in STOP), "a turn continued after a stop string"
    assert any(line["turns/cut_short"] > 0 for line in lines)
    for line in lines:
        assert line["sampler_gap"] < 2e-5
        assert 1 < line["turns/mean"] <= line["turns/max"] <= 4
        assert line["completions/observation_tokens"] > 0
        assert line["tools/calls"] == line["tools/failures"] == line["environment/errors"] == 0
        drawn = line["completions/mean_length"] - line["completions/observation_tokens"]
        assert line["tokens"] == pytest.approx(8 * drawn), "the loss excludes observations, lengths include them"
        assert np.isfinite(line["rewards/Says/mean"])
        assert line["rewards/heard/mean"] == pytest.approx(line["turns/mean"], abs=1.0)
    kept = list(read_lines(tmp_path / "completions.jsonl"))
    assert len(kept) == 3 * 8
    for row in kept:
        who = [turn["by"] for turn in row["turns"]]
        assert who == (["policy", "environment"] * len(who))[: len(who)]
        assert "".join(turn["text"] for turn in row["turns"]) == row["completion"]


class Graded(Game):
    """A `Game` that rewards each turn by the length of its text."""

    def respond(self, text):
        return super().respond(text), float(len(text))

    def get_reward(self):
        return 0.0


def of_turns(turns_played):
    """Compute the advantages of a group's turns from their rewards, using loops."""
    to_go = [[sum(r[n:]) for n in range(len(r))] for r in turns_played]
    at = lambda n: [row[n] for row in to_go if n < len(row)]
    return [[x - np.mean(at(n)) for n, x in enumerate(row)] for row in to_go]


def test_turn_credit_to_go():
    """With turn_credit="to_go", a turn's tokens get its reward-to-go advantage, checked against loops over the run's
    rows; the episode's reward is the sum over its turns.
    """
    _, _, experience = experience_of(Graded, turn_credit="to_go", scale_rewards="none")
    batch, rows = experience.batch, experience.rows
    assert batch.advantages.shape == batch.mask.shape
    for group in range(2):
        earned, owners = [], []
        for row, mask, tokens in zip(rows[4 * group :], batch.mask[group], batch.tokens[group], strict=False):
            # A turn ends with its last token, a byte in eos_token_ids or the EOS; a truncated turn gets no response.
            ends = np.isin(tokens[mask], POLICY.eos_token_ids)
            texts = [turn["text"] for turn in row["turns"] if turn["by"] == "policy"]
            earned.append([float(len(text)) for text in texts[:-1]] + [float(len(texts[-1])) * ends[-1]])
            owners.append(np.append(0, np.cumsum(ends)[:-1]))
            assert row["turn_rewards"]["Graded"] == earned[-1]
        for g, advantages in enumerate(of_turns(earned)):
            found = batch.advantages[group, g]
            np.testing.assert_allclose(found[batch.mask[group, g]], np.array(advantages)[owners[g]], atol=1e-5)
            assert not found[~batch.mask[group, g]].any()
    assert len({len(row["turn_rewards"]["Graded"]) for row in rows}) > 1
    sums = [sum(row["turn_rewards"]["Graded"]) for row in rows]
    assert experience.metrics["rewards/Graded/mean"] == pytest.approx(np.mean(sums))


def test_observations_carry_no_gradient():
    """Changing the log-probs at observed tokens does not change the gradient."""
    found, state, experience = experience_of(beta=0.1)
    batch = experience.batch
    observed = ~batch.mask & (batch.tokens != POLICY.pad_token_id)
    assert observed.sum() > 20
    gradients = lambda batch: found.updater.gradients(state, batch)
    grads, sums = gradients(batch)
    scrambled = jnp.where(observed, 7.0, 0.0)
    others = batch.replace(
        sampling_log_probs=batch.sampling_log_probs + scrambled, ref_log_probs=batch.ref_log_probs - scrambled
    )
    chex.assert_trees_all_equal((grads, sums), gradients(others))
    # The model still attends to observations: other tokens there change the log-probs of the sampled tokens.
    model, how = found.policy.model, {"sampling": sampling_distribution(found.config), "with_entropy": False}
    score = lambda tokens: score_completions(model, state.params, batch.prompts, tokens, batch.mask, **how)[0]
    np.testing.assert_allclose(score(batch.tokens), batch.sampling_log_probs, atol=2e-5)
    assert np.abs(score(jnp.where(observed, 9, batch.tokens)) - batch.sampling_log_probs).max() > 0.01


def test_evaluation_plays_environments():
    how = {"environment_factory": Game, "max_completion_length": 40, "temperature": 1.0}
    metrics, rows = evaluate(POLICY, ROWS, [lambda completions: [1.0] * len(completions)], reward_weights=[0.5], **how)
    assert set(metrics) == {"lambda", "Game", "reward", "mean_length", "clipped_ratio"}
    assert metrics["reward"] == pytest.approx(0.5 + metrics["Game"]), "an environment's reward has weight 1"
    assert all(row["turns"] for row in rows)


@pytest.mark.quick
def test_incompatible_arguments_are_rejected_before_sampling():
    class Plain:
        def apply(self, variables, tokens):
            raise AssertionError

    for given, message in (
        (
            {"rollout_ahead": True, "fns": [lambda environments: [0.0]]},
            "'lambda' needs the argument 'environments', which",
        ),
        ({"policy": POLICY.replace(model=Plain())}, "need a model with a KV cache"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**given)
    with pytest.raises(ValueError, match="needs the argument 'environments', which is not a column"):
        train(POLICY, ROWS, lambda environments: [0.0], GRPOConfig(**SMALL))
    how = {"config": GRPOConfig(**SMALL, turn_credit="to_go"), "environment_factory": Game}
    with pytest.raises(ValueError, match="advantage_fn and turn_credit='to_go' both compute the advantages"):
        train(POLICY, ROWS, [], advantage_fn=lambda rewards, mask: rewards[..., 0], **how)


@pytest.mark.quick
@pytest.mark.parametrize(("change", "message"), [
    ({"stop": ["a", "<eos>"]}, r"stop must not contain special tokens; got '<eos>'.*stop_token_ids=\[1\]"),
    ({"stop_token_ids": [3, 258]}, "stop_token_ids must be less than the model's vocabulary size, 258; got 258"),
    ({"sampler": lambda params: None}, "sampler must take the argument stop, which"),
    ({"sampler": lambda params, stop: None}, "sampler must take the argument max_turn_length, which"),
])  # fmt: skip
def test_invalid_stop_settings_are_rejected_before_sampling(change, message):
    sampler, settings = change.get("sampler"), {"stop": STOP, "max_turn_length": 9} | change
    settings.pop("sampler", None)
    with pytest.raises(ValueError, match=message):
        train(POLICY, ROWS, lambda completions: [0.0], GRPOConfig(**SMALL | settings), sampler=sampler)


def test_text_from_reset_counts_towards_the_limits_of_prompts():
    class Long(Game):
        def reset(self, target, **row):
            super().reset(target)
            return "x" * 220

    for settings, message in (
        ({"max_prompt_length": 16}, r"max_prompt_length=16 is exceeded .* after reset, row 0 with 22\d tokens"),
        (
            {},
            "max_completion_length = 40: with prompts of up to 22. tokens, the total exceeds the model's 256 positions",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            experience_of(Long, **settings)


def test_prefetched_episodes_do_not_keep_their_environments():
    """Episodes played one iteration ahead equal those without prefetching; their environments are not kept."""
    given = []

    def told(completions, environment_rewards, **more):
        given.append("environments" in more)
        return [reward / 8 + len(text) / 64 for reward, text in zip(environment_rewards, completions, strict=True)]

    found, state, alone = experience_of(fns=[told], shuffle_dataset=False, cursor=2)
    source = PrefetchedRollouts(found)
    collected(found, state, source=source)
    resumed = dataclasses.replace(found, config=dataclasses.replace(found.config, rollout_ahead=True))
    second = collected(found, state, source=rollout_source(resumed, state, Progress(cursor=2), *source.to_checkpoint()))
    assert given == [True, False, False], "a run with rollout_ahead never passes environments"
    assert second.rows == alone.rows
    names = ["turns/mean", "environment/errors", "completions/observation_tokens", "rewards/Game/mean", "num_tokens"]
    assert {name: alone.metrics[name] for name in names} == {name: second.metrics[name] for name in names}
    assert second.metrics["turns/mean"] > 1
