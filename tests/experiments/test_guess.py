"""Guessing a number: the game is fair, and its bounds are those of all games."""

import functools
import statistics

import pytest

from experiments import guess
from experiments.guess import Game, bisection, random_play

pytestmark = pytest.mark.quick


def test_the_game_tells_higher_from_lower_until_the_number_is_found():
    game = Game()
    game.reset(target=5, prompt="guess: ")
    assert [game.respond(text) for text in ("4", "6", "5")] == [guess.HIGHER, guess.LOWER, None]
    assert guess.found([game]) == guess.found_soon([game]) == [1.0]
    assert guess.guesses([game]) == [3.0]
    assert guess.few_guesses([game]) == [pytest.approx(1 - 2 / guess.LIMIT)]
    (by_turn,) = guess.few_guesses_by_turn([game])
    assert by_turn == pytest.approx([0, -1 / guess.LIMIT, 1 - 1 / guess.LIMIT])


def test_a_game_that_is_lost_is_worth_nothing_and_counts_as_the_longest():
    slow, wild = Game(), Game()
    slow.reset(target=5)
    assert [slow.respond("4") for _ in range(guess.LIMIT)] == [guess.HIGHER] * (guess.LIMIT - 1) + [None]
    for text in ("", "five", " 5", "5 ", "-5", "5.0", "٥", "²", "5" * 5000):
        wild.reset(target=5)
        assert wild.respond(text) is None
        assert guess.few_guesses([slow, wild]) == guess.found([slow, wild]) == guess.found_soon([slow, wild]) == [0, 0]
        assert guess.few_guesses_by_turn([slow, wild]) == [0, 0]
        assert guess.guesses([slow, wild]) == [guess.LIMIT] * 2


def mean_of_all_games(numbers, choose):
    """By enumeration: of every first guess the games that are left on either side of it, of which `choose` takes one.

    `choose` is `min` for the best first guess, and the mean for a random one.
    """

    @functools.cache
    def total(n):
        """Guesses in all for the n numbers of an interval."""
        return n + choose([total(g) + total(n - 1 - g) for g in range(n)]) if n else 0

    return total(numbers) / numbers


@pytest.mark.parametrize("numbers", [1, 2, 3, 7, 50, 64])
def test_bounds_are_those_of_all_games(numbers):
    assert random_play(numbers) == pytest.approx(mean_of_all_games(numbers, statistics.mean))
    assert bisection(numbers) == pytest.approx(mean_of_all_games(numbers, min))
