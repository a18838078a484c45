"""The three experiments beside the articles: what each of them claims, on its own results."""

import functools

import numpy as np
import pytest

from experiments import kl_estimators, old_and_new_policy, reference_sync


def assert_picture(path):
    """A PNG, and small enough for the docs."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert 5_000 < len(data) < 120_000


# KL estimators: exact, so run in full --------------------------------------------------------------------------------

BANDIT = kl_estimators.make_bandit(0, 0.5)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The rows of the table by (term, old policy)."""
    out = tmp_path_factory.mktemp("kl_estimators") / "new" / "picture.png"
    rows = kl_estimators.main(["--out", str(out)])
    assert_picture(out)
    assert len(rows) == 7 * 3
    return {(row["kl"], row["reuse"]): row for row in rows}


@pytest.mark.parametrize("reuse", ["μ = 1", "μ = 4", "one batch"])
@pytest.mark.parametrize("term", ["w·k1", "w·k2", "w·k3", "in reward"])
def test_corrected_estimators_end_within_one_percent_of_the_optimum(ends, term, reuse):
    assert ends[term, reuse]["error"] < 0.01


@pytest.mark.parametrize("reuse", ["μ = 1", "μ = 4", "one batch"])
@pytest.mark.parametrize("term", ["k1", "k3"])
def test_plain_estimators_end_elsewhere(ends, term, reuse):
    assert ends[term, reuse]["variation"] > 0.1
    assert ends[term, reuse]["error"] > 0.5


def test_plain_k2_is_right_only_while_the_old_policy_keeps_up(ends):
    assert ends["k2", "μ = 1"]["error"] < 0.01
    assert ends["k2", "μ = 4"]["error"] < 0.01
    assert ends["k2", "one batch"]["variation"] > 0.1


def test_plain_k1_is_no_kl_at_all(ends):
    for reuse in ("μ = 1", "μ = 4"):
        assert ends["k1", reuse]["final"][BANDIT.rewards.argmax()] > 0.999


@pytest.mark.parametrize("reuse", ["μ = 1", "μ = 4"])
def test_plain_k3_is_the_other_divergence(ends, reuse):
    assert ends["k3", reuse]["final"] == pytest.approx(kl_estimators.forward_optimum(BANDIT), rel=1e-3)


def test_every_end_is_where_theory_says(ends):
    assert max(row["theory_variation"] for row in ends.values()) < 1e-3


@pytest.mark.quick
def test_with_the_kl_in_the_reward_the_estimator_is_not_read():
    arms = [kl_estimators.Arm(k, False, "reward") for k in ("k1", "k2")]
    paths = [kl_estimators.train_all(BANDIT, [arm])["in reward"]["μ = 4"] for arm in arms]
    np.testing.assert_array_equal(*paths)
    assert kl_estimators.relative_error(paths[0][-1], BANDIT.optimum) < 0.01


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(5))
def test_closed_forms_are_the_maxima_they_are_said_to_be(seed):
    bandit = kl_estimators.make_bandit(seed, 0.5)
    reverse = lambda p: p @ bandit.rewards - bandit.beta * p @ np.log(p / bandit.reference)
    forward = lambda p: p @ bandit.rewards - bandit.beta * bandit.reference @ np.log(bandit.reference / p)
    others = np.random.default_rng(seed).dirichlet(np.ones(4), 500)
    for objective, best in ((reverse, bandit.optimum), (forward, kl_estimators.forward_optimum(bandit))):
        assert best.sum() == pytest.approx(1.0, abs=1e-12)
        # All the way towards each of the others it only goes down, from the first step on.
        for share in (1e-3, 0.1, 1.0):
            assert max(objective((1 - share) * best + share * other) for other in others) < objective(best)


# A synced reference -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """The rows of a short run's table, by β and arm."""
    out = tmp_path_factory.mktemp("reference_sync") / "picture.png"
    rows = reference_sync.main(["--steps", str(4 * reference_sync.SYNC_STEPS), "--seed", "3", "--out", str(out)])
    assert_picture(out)
    assert len(rows) == 4
    return {(row["beta"], row["reference"]): row for row in rows}


def test_kl_to_a_frozen_reference_grows(references):
    kl = references[0.02, "frozen"]["kl"]
    assert kl == sorted(kl)
    assert kl[-1] > 5 * kl[0]
    assert references[0.02, "frozen"]["kl_initial"] == kl


def test_sync_bounds_the_kl_to_the_reference_and_not_that_to_the_start(references):
    frozen, synced = references[0.02, "frozen"], references[0.02, "synced"]
    assert synced["kl_max"] < 0.6 * frozen["kl_max"]
    assert synced["kl"][-1] < 0.5 * frozen["kl"][-1]
    initial = synced["kl_initial"]
    assert initial == sorted(initial)
    assert initial[-1] > 2 * synced["kl"][-1]
    assert initial[-1] > 0.8 * frozen["kl_initial"][-1]


def test_a_far_reference_stops_learning_at_a_large_beta_and_a_synced_one_does_not(references):
    frozen, synced = references[0.5, "frozen"], references[0.5, "synced"]
    assert frozen["kl"][-1] < 1.3 * frozen["kl"][-2]  # it has flattened
    assert frozen["reward"][-1] < frozen["reward"][-2] + 0.05
    assert synced["reward"][-1] > synced["reward"][-2] + 0.05
    assert synced["reward"][-1] > frozen["reward"][-1] + 0.1
    assert synced["kl_initial"][-1] > 2 * frozen["kl_initial"][-1]  # the price
    # Where β is small neither is held back.
    rewards = [references[0.02, arm]["reward"][-1] for arm in reference_sync.ARMS]
    assert rewards[0] == pytest.approx(rewards[1], abs=0.05)
    assert min(rewards) > synced["reward"][-1]


def test_before_the_first_sync_the_arms_are_the_same_run(references):
    for beta in reference_sync.BETAS:
        frozen, synced = references[beta, "frozen"], references[beta, "synced"]
        assert 0 < synced["kl"][0] == pytest.approx(frozen["kl"][0], rel=1e-6)  # two programs: they round differently
        assert synced["kl"][1] < frozen["kl"][1]
        assert synced["reward"][0] == frozen["reward"][0]


# Old and new policy -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reused(tmp_path_factory):
    """The rows of a short run's table, by (μ, way)."""
    out = tmp_path_factory.mktemp("old_and_new_policy") / "picture.png"
    rows = old_and_new_policy.main(["--iterations", "10", "--seeds", "1", "--out", str(out)])
    assert_picture(out)
    assert len(rows) == 9
    return {(row["reuse"], row["way"]): row for row in rows}


def test_with_one_update_the_three_ways_are_one(reused):
    none, weights, clipped = (reused[1, way] for way in old_and_new_policy.WAYS)
    for name in set(none) - {"way"}:
        assert weights[name] == pytest.approx(none[name], rel=1e-4, abs=1e-6)
        assert clipped[name] == pytest.approx(none[name], rel=1e-4, abs=1e-6)
    assert none["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert none["clip_fraction"] == 0.0
    assert none["approx_kl_old"] == pytest.approx(0.0, abs=1e-8)


def test_reuse_moves_the_policy_away_and_the_clip_holds_it(reused):
    for reuse in (4, 16):
        assert reused[reuse, "none"]["ratio_max"] > 2
        assert reused[reuse, "clipped"]["clip_fraction"] > 0.05
        assert reused[reuse, "clipped"]["approx_kl_old"] < reused[reuse, "none"]["approx_kl_old"]
    for way in ("none", "weights"):
        assert 0 < reused[16, "clipped"]["approx_kl_old"] < 0.3 * reused[16, way]["approx_kl_old"]


def test_the_weights_without_the_clip_are_a_way_of_their_own(reused):
    # The first update of a rollout is the same, so the difference is that of the later ones.
    none, weights, clipped = (reused[16, way]["approx_kl_old"] for way in old_and_new_policy.WAYS)
    assert abs(weights / none - 1) > 0.05
    assert abs(weights / clipped - 1) > 0.05


def test_more_updates_move_it_further(reused):
    for way in old_and_new_policy.WAYS:
        assert reused[16, way]["approx_kl_old"] > 3 * reused[4, way]["approx_kl_old"] > 0


def test_reuse_pays_with_the_clip(reused):
    assert reused[16, "clipped"]["final_reward"] > reused[1, "clipped"]["final_reward"] + 0.1


def test_runs_are_deterministic():
    run = functools.partial(old_and_new_policy.run, "clipped", 4, iterations=2)
    first, again, other = run(seed=5), run(seed=5), run(seed=6)
    np.testing.assert_array_equal(first["reward"], again["reward"])
    np.testing.assert_array_equal(first["ratio_max"], again["ratio_max"])
    assert not np.array_equal(first["reward"], other["reward"])
