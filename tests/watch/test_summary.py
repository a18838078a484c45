"""The banner, the headline and the model card of a run; the card leaves out what may be private."""

import pytest

from grpo_jax.watch.summary import held_out, held_out_scores

pytestmark = pytest.mark.quick


def test_held_out_scores():
    scores = {"eval/accuracy": "accuracy", "eval/length_reward": "length_reward", "eval/greedy/format": "greedy/format"}
    assert {name: held_out(name) for name in scores} == scores
    assert not any(held_out(f"eval/{name}") for name in ("mean_length", "clipped_ratio", "rewards/a/std", "seconds"))
    assert held_out_scores(["kl", *scores, "eval/reward"]) == scores | {"eval/reward": "reward"}
    assert held_out_scores(["eval/accuracy", "eval/reward"]) == {"eval/accuracy": "accuracy"}, "the same value twice"
    assert held_out_scores(["eval/reward"]) == {"eval/reward": "reward"}
