"""The experiments of the articles: the KL estimators end where theory says, and the arms of the others differ."""

import numpy as np
import pytest

from experiments import kl_estimators, old_and_new_policy, reference_sync

BANDIT = kl_estimators.make_bandit(0, 0.5)
REUSES = ("μ = 1", "μ = 4", "one batch")


def test_each_kl_term_ends_where_theory_says(tmp_path):
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
        assert rows["k2", reuse]["error"] < 0.01, "right while the old policy keeps up"
        assert rows["k1", reuse]["final"][BANDIT.rewards.argmax()] > 0.999, "no KL at all"
        other = kl_estimators.forward_optimum(BANDIT)
        assert rows["k3", reuse]["final"] == pytest.approx(other, rel=1e-3), "the other divergence"
    assert rows["k2", "one batch"]["variation"] > 0.1


@pytest.mark.quick
def test_the_arms_of_reference_sync_differ_in_the_sync_alone():
    frozen, synced = (
        reference_sync.make_config(beta=0.5, sync=sync, steps=32, seed=3).to_dict() for sync in (False, True)
    )
    assert {name for name in frozen if frozen[name] != synced[name]} <= {
        "sync_ref_model",
        "ref_model_sync_steps",
        "ref_model_mixup_alpha",
    }


def test_with_one_update_the_three_ways_are_one():
    """Old completions move the policy away, and the clip holds it."""
    none, weights, clipped = (old_and_new_policy.run(way, 1, iterations=2, seed=5) for way in old_and_new_policy.WAYS)
    for name, values in none.items():
        np.testing.assert_allclose(weights[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(clipped[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(none["ratio_max"], 1.0, atol=1e-4)
    assert old_and_new_policy.run("clipped", 4, iterations=2, seed=5)["ratio_max"][-1].max() > 1.001
