"""The experiments in the articles: final policies of the KL estimators, and differences between arms."""

import numpy as np
import pytest

from experiments import kl_estimators, old_and_new_policy, reference_sync

BANDIT = kl_estimators.make_bandit(0, 0.5)
REUSES = ("μ = 1", "μ = 4", "one batch")


def test_each_kl_term_ends_at_the_predicted_policy(tmp_path):
    out = tmp_path / "new" / "picture.png"
    rows = {(row["kl"], row["reuse"]): row for row in kl_estimators.main(["--out", str(out)])}
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert 5_000 < out.stat().st_size < 120_000
    assert len(rows) == 7 * 3
    assert max(row["theory_variation"] for row in rows.values()) < 1e-3
    for reuse in REUSES:
        assert all(rows[term, reuse]["error"] < 0.01 for term in ("w·k1", "w·k2", "w·k3", "in reward"))
        assert all(rows[term, reuse]["error"] > 0.5 for term in ("k1", "k3"))
        assert all(rows[term, reuse]["variation"] > 0.1 for term in ("k1", "k3"))
    for reuse in REUSES[:2]:
        assert rows["k2", reuse]["error"] < 0.01, "k2 is right while the old policy is recent"
        assert rows["k1", reuse]["final"][BANDIT.rewards.argmax()] > 0.999, "k1 has no KL gradient"
        other = kl_estimators.forward_optimum(BANDIT)
        assert rows["k3", reuse]["final"] == pytest.approx(other, rel=1e-3), "k3 follows the forward KL"
    assert rows["k2", "one batch"]["variation"] > 0.1


@pytest.mark.quick
def test_arms_of_reference_sync_differ_only_in_the_sync():
    frozen, synced = (
        reference_sync.make_config(beta=0.5, sync=sync, steps=32, seed=3).to_dict() for sync in (False, True)
    )
    assert {name for name in frozen if frozen[name] != synced[name]} <= {
        "sync_ref_model",
        "ref_model_sync_steps",
        "ref_model_mixup_alpha",
    }


def test_three_ways_are_equal_with_one_update():
    """With one update per batch the three ways are equal; with four, ratios differ from 1."""
    none, weights, clipped = (old_and_new_policy.run(way, 1, iterations=2, seed=5) for way in old_and_new_policy.WAYS)
    for name, values in none.items():
        np.testing.assert_allclose(weights[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(clipped[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(none["ratio_max"], 1.0, atol=1e-4)
    assert old_and_new_policy.run("clipped", 4, iterations=2, seed=5)["ratio_max"][-1].max() > 1.001
