"""Expected gradients by enumeration: every action, completion or group, weighted by its probability under π_old.

JAX differentiates the public functions. The expected values are computed here in NumPy, from closed forms or from the
objective by complex step. There is no sampling, so the tolerances only cover rounding: 1e-6 in float32, 1e-12 in
float64.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precision import x64

from grpo_jax.maths.advantages import compute_advantages
from grpo_jax.maths.kl import kl_divergence
from grpo_jax.maths.losses import grpo_loss
from grpo_jax.maths.surrogates import LOSS_TYPES

NO_CLIP = {"epsilon": 1e3, "epsilon_high": 1e3}
DTYPES = [jnp.float32, jnp.float64]


def softmax(x):
    e = np.exp(x - np.max(np.real(x), axis=-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def assert_gradient(function, theta, expected, dtype=jnp.float64):
    """Assert that jax.grad(function)(theta) equals `expected` to the precision of dtype."""
    with x64():
        got = jax.jit(jax.grad(function))(jnp.asarray(theta, dtype))
        assert got.dtype == dtype
    assert np.abs(expected - np.asarray(got)).max() < (1e-12 if dtype == jnp.float64 else 1e-6)


def complex_gradient(function, theta):
    """Differentiate a NumPy function by complex step."""
    gradient = np.zeros_like(theta)
    for i in np.ndindex(theta.shape):
        moved = theta.astype(complex)
        moved[i] += 1e-30j
        gradient[i] = function(moved).imag / 1e-30
    return gradient


# One token, four actions --------------------------------------------------------------------------------------------

THETA = np.array([0.3, -0.8, 0.5, 0.1])
THETA_OLD = np.array([0.1, -0.2, 0.4, -0.5])
THETA_REF = np.array([-0.4, 0.3, 0.9, 0.0])
REWARD = np.array([1.0, 0.0, -0.5, 2.0])
PI, OLD, REF = softmax(THETA), softmax(THETA_OLD), softmax(THETA_REF)
D = np.log(PI / REF)


def score_sum(weights):
    """Return Σ_a weights_a ∇ log π(a), with ∇ log π(a) = e_a − π."""
    return weights - weights.sum() * PI


REVERSE = score_sum(PI * D)  # ∇KL(π‖ref): Σ ∇π (log π/ref + 1), and Σ ∇π = 0
FORWARD = score_sum(-REF)  # ∇KL(ref‖π) = π − ref
POLICY = score_sum(PI * REWARD)  # ∇J, J = E_π[R]


@pytest.mark.quick
def test_closed_forms_are_the_gradients_of_the_divergences():
    reverse = lambda x: np.sum(softmax(x) * np.log(softmax(x) / REF))
    forward = lambda x: np.sum(REF * np.log(REF / softmax(x)))
    np.testing.assert_allclose(complex_gradient(reverse, THETA), REVERSE, atol=1e-14)
    np.testing.assert_allclose(complex_gradient(forward, THETA), FORWARD, atol=1e-14)
    np.testing.assert_allclose(complex_gradient(lambda x: np.sum(softmax(x) * REWARD), THETA), POLICY, atol=1e-14)
    # The four directions differ by far more than any tolerance below.
    directions = [x / np.linalg.norm(x) for x in (REVERSE, FORWARD, POLICY, score_sum(OLD))]
    for a, b in itertools.combinations(directions, 2):
        assert abs(a @ b) < 0.999


def expected_loss(old, *, explicit_old=True, advantages=(0.0,) * 4, **settings):
    """Return θ ↦ Σ_a π_old(a)·loss(a), where each action is a batch with one completion of one token."""

    def function(theta):
        l = jax.nn.log_softmax(theta)
        constant = lambda x: jnp.asarray(np.log(x), theta.dtype)

        def loss(a):
            column = lambda x: x[a].reshape(1, 1)
            l_old = column(constant(old)) if explicit_old else None
            A = jnp.asarray(advantages, theta.dtype)[a].reshape(1)
            return grpo_loss(column(l), l_old, column(constant(REF)), A, jnp.ones((1, 1)), **settings)[0]

        return jnp.sum(jnp.asarray(old, theta.dtype) * jax.vmap(loss)(jnp.arange(4)))

    return function


def kl_settings(estimator, corrected):
    return {"beta": 1.0, "kl_estimator": estimator, "use_bias_correction_kl": corrected, "kl_placement": "loss"}


# Expected gradient of each estimator in the loss, with the importance ratio ("corrected") or without.
ON_POLICY = {
    ("k1", False): np.zeros(4),  # zero-mean noise, whatever the reference is
    ("k2", False): REVERSE,
    ("k3", False): FORWARD,  # KL in the other direction
    ("k1", True): REVERSE,
    ("k2", True): REVERSE,
    ("k3", True): REVERSE,
}
OFF_POLICY = {
    ("k1", False): score_sum(OLD),  # π_old − π: pulls to the old policy and ignores the reference
    ("k2", False): score_sum(OLD * D),  # weighted by π_old instead of π
    ("k3", False): score_sum(OLD * (1 - REF / PI)),  # ∇KL(ref‖π) only where π_old = π
    ("k1", True): REVERSE,
    ("k2", True): REVERSE,  # with w held constant; otherwise it would be ∇E_π[d²/2], which is not a KL
    ("k3", True): REVERSE,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("explicit_old", [True, False])
@pytest.mark.parametrize(("estimator", "corrected"), ON_POLICY)
def test_kl_in_the_loss_on_policy(estimator, corrected, explicit_old, dtype):
    """On-policy, each KL estimator in the loss has the documented expected gradient."""
    function = expected_loss(PI, explicit_old=explicit_old, **kl_settings(estimator, corrected))
    assert_gradient(function, THETA, ON_POLICY[estimator, corrected], dtype)


@pytest.mark.parametrize(("estimator", "corrected"), OFF_POLICY)
def test_kl_in_the_loss_off_policy(estimator, corrected):
    assert_gradient(expected_loss(OLD, **kl_settings(estimator, corrected)), THETA, OFF_POLICY[estimator, corrected])


@pytest.mark.quick
def test_only_corrected_estimators_have_a_kl_gradient_off_policy():
    right = {name for name, gradient in OFF_POLICY.items() if np.abs(gradient - REVERSE).max() < 1e-12}
    assert right == {("k1", True), ("k2", True), ("k3", True)}
    for name, gradient in OFF_POLICY.items():
        assert name in right or np.abs(gradient - REVERSE).max() > 1e-2
        assert np.abs(gradient - FORWARD).max() > 1e-2


@pytest.mark.parametrize("level", ["token", "sequence", "trajectory"])
def test_default_correction_is_exact_at_every_level_for_one_token(level):
    assert_gradient(expected_loss(OLD, beta=1.0, importance_sampling_level=level), THETA, REVERSE)


@pytest.mark.quick
@pytest.mark.parametrize(("estimator", "expected"), [("k3", FORWARD), ("k2", REVERSE), ("k1", np.zeros(4))])
def test_constant_ratio_corrects_only_k2(estimator, expected):
    """sg(w)·k3 has the gradient of the forward KL, even though the ratio corrects for the samples."""

    def function(theta):
        l = jax.nn.log_softmax(theta)
        w = jax.lax.stop_gradient(jnp.exp(l)) / jnp.asarray(OLD, theta.dtype)
        k = kl_divergence(l, jnp.asarray(np.log(REF), theta.dtype), estimator=estimator)
        return jnp.sum(jnp.asarray(OLD, theta.dtype) * w * k)

    assert_gradient(function, THETA, expected)


@pytest.mark.parametrize("old", [PI, OLD], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize(
    ("estimator", "level"),
    [("k1", "token"), ("k2", "token"), ("k3", "token"), ("k3", "sequence"), ("k3", "trajectory")],
)
def test_kl_in_the_reward_is_the_reverse_kl_for_every_estimator(estimator, level, old):
    function = expected_loss(
        old, beta=1.0, kl_placement="reward", kl_estimator=estimator, importance_sampling_level=level
    )
    assert_gradient(function, THETA, REVERSE)


@pytest.mark.quick
def test_kl_at_the_old_log_probs_is_off_by_the_kl_to_the_old_policy():
    """A KL computed from the old log-probs and put into the advantages, as is common, has a biased gradient."""
    d_old = np.log(OLD / REF)
    to_old = score_sum(PI * np.log(PI / OLD))
    function = expected_loss(OLD, advantages=-d_old, **NO_CLIP)
    assert_gradient(function, THETA, REVERSE - to_old)
    assert np.abs(to_old).max() > 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_surrogate_has_the_policy_gradient_on_policy(loss_type, dtype):
    """On-policy, the gradient of every surrogate is the policy gradient, whatever the baseline."""
    function = expected_loss(PI, advantages=REWARD - 0.7, loss_type=loss_type, epsilon_high=5.0)
    assert_gradient(function, THETA, -POLICY, dtype)


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence", "trajectory"])
def test_unclipped_surrogates_have_the_policy_gradient_off_policy(loss_type, level):
    # This includes cispo: −sg(w)·A·∇l = −A·∇π/π_old.
    function = expected_loss(
        OLD, advantages=REWARD - 0.7, loss_type=loss_type, importance_sampling_level=level, **NO_CLIP
    )
    assert_gradient(function, THETA, -POLICY)


@pytest.mark.quick
def test_clipping_drops_the_clipped_actions_from_the_policy_gradient():
    A, w = REWARD - 0.7, PI / OLD
    alive = ~(((w > 1.3) & (A > 0)) | ((w < 0.9) & (A < 0)))
    assert 0 < alive.sum() < 4
    function = expected_loss(OLD, advantages=A, epsilon=0.1, epsilon_high=0.3)
    assert_gradient(function, THETA, -score_sum(PI * A * alive))


# Two tokens ---------------------------------------------------------------------------------------------------------
# With `stop`, action 0 ends the completion: the second token is then masked and its values are NaN.

PARAMS = np.array([[0.4, -0.3], [0.2, 0.7], [-0.6, 0.1]])  # first token; second token after 0; second token after 1
PARAMS_OLD = np.array([[-0.1, 0.2], [0.5, 0.3], [0.2, -0.2]])
PARAMS_REF = np.array([[0.0, 0.6], [-0.3, 0.4], [0.9, 0.3]])


class Game:
    """All four completions of two tokens over two actions, or three completions if action 0 ends the completion."""

    def __init__(self, stop):
        pairs = [(0, 0), (1, 0), (1, 1)] if stop else [(0, 0), (0, 1), (1, 0), (1, 1)]
        self.first, self.second = (np.array(x) for x in zip(*pairs, strict=True))
        self.mask = np.array([[1, 0 if stop and a == 0 else 1] for a, _ in pairs], bool)
        self.reward = np.array([1.0, -0.5, 0.3, 2.0])[: len(pairs)]

    def tokens(self, params):
        """Return the log-prob of each token, [completions, 2], in NumPy; `params` may be complex."""
        l = np.log(softmax(params))
        return np.stack([l[0, self.first], l[1 + self.first, self.second]], 1)

    def total(self, params):
        return np.sum(np.where(self.mask, self.tokens(params), 0), 1)

    def objective(self, params, beta):
        """Return E[R] − beta·KL(π‖ref) for whole completions."""
        l = self.total(params)
        return np.sum(np.exp(l) * (self.reward - beta * (l - self.total(PARAMS_REF))))

    def expected_loss(self, old, beta, advantages=None, **settings):
        """Return θ ↦ Σ_completions π_old·loss; dr_grpo with max_completion_length=1 sums over tokens."""

        def function(params):
            dtype = params.dtype
            l = jax.nn.log_softmax(params)
            l = jnp.stack([l[0, self.first], l[1 + self.first, self.second]], 1)
            hide = lambda x: jnp.asarray(np.where(self.mask, x, np.nan), dtype)
            A = jnp.asarray(np.zeros(len(self.first)) if advantages is None else advantages, dtype)

            def loss(i):
                row = lambda x: x[i][None]
                return grpo_loss(
                    row(jnp.where(self.mask, l, jnp.nan)),
                    row(hide(self.tokens(old))),
                    row(hide(self.tokens(PARAMS_REF))),
                    row(A),
                    row(jnp.asarray(self.mask)),
                    loss_type="dr_grpo",
                    max_completion_length=1,
                    beta=beta,
                    **NO_CLIP,
                    **settings,
                )[0]

            p_old = jnp.asarray(np.exp(self.total(old)), dtype)
            return jnp.sum(p_old * jax.vmap(loss)(jnp.arange(len(self.first))))

        return function


GAMES = {"two tokens": Game(stop=False), "one or two tokens": Game(stop=True)}


@pytest.fixture(params=GAMES)
def game(request):
    return GAMES[request.param]


@pytest.mark.quick
def test_completion_probabilities_sum_to_one(game):
    for params in (PARAMS, PARAMS_OLD, PARAMS_REF):
        assert np.exp(game.total(params)).sum() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("old", [PARAMS, PARAMS_OLD], ids=["on-policy", "off-policy"])
def test_trajectory_level_with_kl_in_the_reward_has_the_full_gradient(game, old, dtype):
    """With trajectory-level ratios and the KL in the reward, the gradient is exact on-policy and off-policy."""
    beta = 0.4
    function = game.expected_loss(old, beta, game.reward, importance_sampling_level="trajectory", kl_placement="reward")
    assert_gradient(function, PARAMS, -complex_gradient(lambda x: game.objective(x, beta), PARAMS), dtype)


def test_token_level_with_kl_in_the_reward_is_exact_only_on_policy(game):
    beta = 0.4
    full = -complex_gradient(lambda x: game.objective(x, beta), PARAMS)
    token = {"importance_sampling_level": "token", "kl_placement": "reward"}
    assert_gradient(game.expected_loss(PARAMS, beta, game.reward, **token), PARAMS, full)

    # Off-policy, each token keeps only its own ratio, in a sum over completions from π_old. The ratios of the earlier
    # tokens (its state) and of the later tokens (its return) are missing.
    l, old = game.tokens(PARAMS), game.tokens(PARAMS_OLD)
    d = np.where(game.mask, l - game.tokens(PARAMS_REF), 0)
    togo = d[:, ::-1].cumsum(1)[:, ::-1]
    weight = np.exp(l - old) * (beta * togo - game.reward[:, None]) * game.mask
    p_old = np.exp(game.total(PARAMS_OLD))
    biased = complex_gradient(lambda x: np.sum(p_old[:, None] * weight * game.tokens(x)), PARAMS)
    assert_gradient(game.expected_loss(PARAMS_OLD, beta, game.reward, **token), PARAMS, biased)
    assert np.abs(biased - full).max() > 1e-2


@pytest.mark.parametrize("old", [PARAMS, PARAMS_OLD], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_token_level_correction_is_the_kl_per_token_in_states_of_the_old_policy(game, level, estimator, old):
    function = game.expected_loss(old, 1.0, importance_sampling_level=level, kl_estimator=estimator)
    visits = np.exp(game.tokens(old))[:, 0]  # probability of the first token; each first action counted once below

    def states_of_old(params):
        kl = np.sum(softmax(params) * (np.log(softmax(params)) - np.log(softmax(PARAMS_REF))), -1)
        total = kl[0]
        for action in (0, 1):
            rows = np.flatnonzero((game.first == action) & game.mask[:, 1])
            if len(rows):
                total = total + visits[rows[0]] * kl[1 + action]
        return total

    assert_gradient(function, PARAMS, complex_gradient(states_of_old, PARAMS))
    # It is not the gradient of the KL of completions, because the first token's effect on the next state is missing.
    full = complex_gradient(lambda x: -game.objective(x, 1.0) + game.objective(x, 0.0), PARAMS)
    assert np.abs(complex_gradient(states_of_old, PARAMS) - full).max() > 1e-2


@pytest.mark.parametrize("old", [PARAMS, PARAMS_OLD], ids=["on-policy", "off-policy"])
def test_sequence_level_correction_is_biased(game, old):
    """Correcting the KL by the geometric mean of the ratios, as TRL does, biases the gradient."""
    level = {"importance_sampling_level": "sequence", "kl_correction_level": "importance_sampling_level"}
    function = game.expected_loss(old, 1.0, **level)
    p_old, n = np.exp(game.total(old)), game.mask.sum(1)

    def weighted(params):
        l = game.tokens(params)
        d = l - game.tokens(PARAMS_REF)
        k = np.where(game.mask, np.exp(-d) - 1 + d, 0).sum(1)
        return np.sum(p_old * np.exp((game.total(params) - game.total(old)) / n) * k)

    biased = complex_gradient(weighted, PARAMS)
    assert_gradient(function, PARAMS, biased)
    full = complex_gradient(lambda x: -game.objective(x, 1.0) + game.objective(x, 0.0), PARAMS)

    def token_by_token(params):
        l = game.tokens(params)
        d = l - game.tokens(PARAMS_REF)
        ratio = np.exp(l - game.tokens(old))
        return np.sum(p_old[:, None] * np.where(game.mask, ratio * (np.exp(-d) - 1 + d), 0))

    assert np.abs(biased - full).max() > 1e-2
    assert np.abs(biased - complex_gradient(token_by_token, PARAMS)).max() > 1e-3


@pytest.mark.parametrize("level", ["token", "sequence", "trajectory"])
def test_policy_term_is_unbiased_off_policy_only_at_trajectory_level(level):
    game = GAMES["two tokens"]
    l, old = game.tokens(PARAMS), game.tokens(PARAMS_OLD)
    p_old, A = np.exp(game.total(PARAMS_OLD)), game.reward
    ratio = {
        "token": lambda x: np.exp(game.tokens(x) - old).sum(1),
        "sequence": lambda x: 2 * np.exp((game.total(x) - game.total(PARAMS_OLD)) / 2),
        "trajectory": lambda x: np.exp(l.sum(1) - old.sum(1)) * (game.tokens(x) - l).sum(1),
    }[level]
    expected = complex_gradient(lambda x: -np.sum(p_old * A * ratio(x)), PARAMS)
    assert_gradient(game.expected_loss(PARAMS_OLD, 0.0, A, importance_sampling_level=level), PARAMS, expected)
    distance = np.abs(expected + complex_gradient(lambda x: game.objective(x, 0.0), PARAMS)).max()
    assert distance < 1e-14 if level == "trajectory" else distance > 1e-2


# Size of the error, as the documentation quotes it: four draws of a problem with two tokens and three words -----------

WORDS = np.array(list(itertools.product(range(3), repeat=2)))


def whole_kl(params, ref):
    """Return KL(π‖ref) of completions; params [4, 3] are logits for the first token and for the second after each."""
    kl = np.sum(softmax(params) * (np.log(softmax(params)) - np.log(softmax(ref))), -1)
    return kl[0] + np.sum(softmax(params)[0] * kl[1:])


def kl_by_token(params, ref, old, reverse=True):
    """Return the KL per token, summed over states visited by π_old; it ignores a token's effect on later states."""
    p, q = (softmax(params), softmax(ref)) if reverse else (softmax(ref), softmax(params))
    kl = np.sum(p * (np.log(p) - np.log(q)), -1)
    return kl[0] + np.sum(softmax(old)[0] * kl[1:])


def kl_term_gradients(thetas, olds, refs, **settings):
    """Return the expected gradient of the KL term in `grpo_loss` (advantages are 0), [draws, 4, 3] float64."""

    def tokens(theta):
        l = jax.nn.log_softmax(theta)
        return jnp.stack([l[0][WORDS[:, 0]], l[1 + WORDS[:, 0], WORDS[:, 1]]], axis=1)

    def loss(theta, old, ref):
        one = lambda l, l_old, l_ref: grpo_loss(
            l[None], l_old[None], l_ref[None], jnp.zeros(1), jnp.ones((1, 2)), loss_type="luspo", beta=1.0, **settings
        )[0]
        return jnp.sum(jnp.exp(tokens(old).sum(1)) * jax.vmap(one)(tokens(theta), tokens(old), tokens(ref)))

    with x64():
        return np.asarray(jax.jit(jax.vmap(jax.grad(loss)))(*(jnp.asarray(x) for x in (thetas, olds, refs))))


def off_by(gradients, right):
    """Return the relative error (norm) of each draw's gradient."""
    right = np.stack(right)
    return np.linalg.norm(gradients - right, axis=(1, 2)) / np.linalg.norm(right, axis=(1, 2))


def four_draws():
    """Return (θ_old, θ_ref, a step in θ) for four draws, [4, 4, 3] float64 each, as in the notebook."""
    draws = [jax.random.normal(jax.random.key(seed), (3, 4, 3), jnp.float32) for seed in range(4)]
    return np.stack(draws, axis=1).astype(np.float64)


off_policy = pytest.mark.parametrize("far", [0, 1], ids=["on-policy", "off-policy"])


@off_policy
def test_corrected_kl_is_exact_per_token_but_4_to_47_percent_off_for_whole_completions(far):
    """The corrected KL term in the loss has the exact gradient of the KL per token. Compared with the KL of whole
    completions, its on-policy gradient is off by 4 to 47 %.
    """
    olds, refs, away = four_draws()
    thetas = olds + far * away
    got = kl_term_gradients(thetas, olds, refs)
    cases = list(zip(thetas, olds, refs, strict=True))
    by_token = [complex_gradient(lambda x: kl_by_token(x, ref, old), theta) for theta, old, ref in cases]
    assert off_by(got, by_token).max() < 1e-12
    whole = [complex_gradient(lambda x: whole_kl(x, ref), theta) for theta, _, ref in cases]
    documented = [[0.472, 0.373, 0.040, 0.213], [0.543, 0.561, 0.105, 0.101]][far]
    np.testing.assert_allclose(off_by(got, whole), documented, atol=1e-3)


@pytest.mark.quick
@off_policy
def test_trajectory_level_kl_in_the_reward_is_exact_for_whole_completions(far):
    olds, refs, away = four_draws()
    thetas = olds + far * away
    got = kl_term_gradients(thetas, olds, refs, kl_placement="reward", importance_sampling_level="trajectory")
    whole = [complex_gradient(lambda x: whole_kl(x, ref), theta) for theta, ref in zip(thetas, refs, strict=True)]
    assert off_by(got, whole).max() < 1e-12


def test_uncorrected_k3_has_the_gradient_of_the_forward_kl():
    """Uncorrected k3 has the gradient of KL(ref‖π), even at the first update."""
    thetas, refs, _ = four_draws()
    got = kl_term_gradients(thetas, thetas, refs, use_bias_correction_kl=False)
    cases = list(zip(thetas, refs, strict=True))
    other = [complex_gradient(lambda x: kl_by_token(x, ref, theta, reverse=False), theta) for theta, ref in cases]
    assert off_by(got, other).max() < 1e-12
    right = [complex_gradient(lambda x: kl_by_token(x, ref, theta), theta) for theta, ref in cases]
    assert off_by(got, right).min() > 0.15


# Groups of four over three actions ----------------------------------------------------------------------------------

G = 4
ARM = np.array([0.2, -0.5, 0.4])
ARM_REWARD = np.array([0.0, 1.0, 12.0])
GROUPS = np.array(list(itertools.product(range(3), repeat=G)))
ARM_PI = softmax(ARM)
ARM_GRADIENT = ARM_PI * (ARM_REWARD - ARM_PI @ ARM_REWARD)  # ∇J


def expected_group_loss(advantages):
    """Return θ ↦ Σ_groups π(group)·loss(group), where each group is a batch [1, G, 1]."""

    def function(theta):
        l = jax.nn.log_softmax(theta)
        groups = jnp.asarray(GROUPS)

        def loss(i):
            A = jnp.asarray(advantages, theta.dtype)[i][None]
            return grpo_loss(l[groups[i]][None, :, None], None, None, A, jnp.ones((1, G, 1)), loss_type="grpo")[0]

        weight = jnp.asarray(ARM_PI[GROUPS].prod(1), theta.dtype)
        return jnp.sum(weight * jax.vmap(loss)(jnp.arange(len(GROUPS))))

    return function


def group_advantages(dtype=jnp.float64, **settings):
    with x64():
        return np.asarray(compute_advantages(jnp.asarray(ARM_REWARD[GROUPS], dtype), **settings), np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_group_mean_baseline_scales_the_policy_gradient_by_g_minus_one_over_g(dtype):
    # The mean includes the completion's own reward, which cancels 1/G of the signal.
    function = expected_group_loss(group_advantages(dtype, scale_rewards="none"))
    assert_gradient(function, ARM, -(G - 1) / G * ARM_GRADIENT, dtype)


def test_leave_one_out_baseline_has_the_policy_gradient():
    rewards = ARM_REWARD[GROUPS]
    leave_one_out = rewards - (rewards.sum(1, keepdims=True) - rewards) / (G - 1)
    scaled = group_advantages(scale_rewards="none") * G / (G - 1)
    np.testing.assert_allclose(scaled, leave_one_out, atol=1e-14)
    assert_gradient(expected_group_loss(scaled), ARM, -ARM_GRADIENT)


def test_division_by_the_group_std_changes_the_direction_of_the_gradient():
    """Dividing by the group's std changes the direction of the gradient (the bias that Dr. GRPO describes)."""
    rewards = ARM_REWARD[GROUPS]
    A = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    score = np.eye(3)[GROUPS] - ARM_PI
    expected = -np.einsum("n,ng,nga->a", ARM_PI[GROUPS].prod(1), A, score) / G
    assert_gradient(expected_group_loss(group_advantages()), ARM, expected)
    cosine = -expected @ ARM_GRADIENT / np.linalg.norm(expected) / np.linalg.norm(ARM_GRADIENT)
    assert 0.5 < cosine < 0.999


def test_division_by_the_batch_std_keeps_the_direction_of_the_gradient():
    # All 81 groups form one batch with one std, so the direction is the same as without division.
    A, plain = group_advantages(scale_rewards="batch"), group_advantages(scale_rewards="none")
    std = ARM_REWARD[GROUPS].std(ddof=1) + 1e-4
    np.testing.assert_allclose(A, plain / std, atol=1e-6)
    assert_gradient(expected_group_loss(A), ARM, -(G - 1) / G * ARM_GRADIENT / std)
