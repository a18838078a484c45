"""Guessing a number: the game is fair, the careless player as careless as it says, and the script comes to its end."""

import functools
import random

import numpy as np
import pytest

from experiments import guess
from experiments.guess import Game, bisection, careless_game, random_play


@pytest.mark.quick
def test_the_game_tells_higher_from_lower_until_the_number_is_found():
    game = Game()
    game.reset(target=5, prompt="guess: ")
    assert [game.respond(text) for text in ("4", "6", "5")] == [guess.HIGHER, guess.LOWER, None]
    assert guess.found([game]) == guess.found_soon([game]) == [1.0]
    assert guess.guesses([game]) == [3.0]
    assert guess.few_guesses([game]) == [pytest.approx(1 - 2 / guess.LIMIT)]
    (by_turn,) = guess.few_guesses_by_turn([game])
    assert by_turn == pytest.approx([0, -1 / guess.LIMIT, 1 - 1 / guess.LIMIT])


@pytest.mark.quick
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


def mean_of_uniform_play(numbers):
    """By enumeration: of every first guess the games that are left on either side of it."""

    @functools.cache
    def total(n):
        """Guesses in all for the n numbers of an interval."""
        return n + sum(total(g) + total(n - 1 - g) for g in range(n)) / n if n else 0.0

    return total(numbers) / numbers


def mean_of_the_best_play(numbers):
    """Likewise, with the best first guess."""

    @functools.cache
    def total(n):
        return n + min(total(g) + total(n - 1 - g) for g in range(n)) if n else 0

    return total(numbers) / numbers


@pytest.mark.quick
@pytest.mark.parametrize("numbers", [1, 2, 3, 7, 50, 64])
def test_bounds_are_those_of_all_games(numbers):
    assert random_play(numbers) == pytest.approx(mean_of_uniform_play(numbers))
    assert bisection(numbers) == pytest.approx(mean_of_the_best_play(numbers))


@pytest.mark.quick
def test_half_of_the_careless_players_guesses_ignore_what_it_was_told():
    def plays():
        """A game, and whether each of its guesses was still possible."""
        low, high, game, possible = 1, guess.NUMBERS, careless_game(draw), []
        for number, answer in game:
            possible.append(low <= number <= high)
            if answer == guess.HIGHER:
                low = max(low, number + 1)
            elif answer:
                high = min(high, number - 1)
        assert low <= high, "no answer contradicts another"
        return game, possible

    draw = random.Random(0)
    games = [plays() for _ in range(4000)]
    for game, _ in games:
        assert 1 <= len(game) <= guess.LIMIT
        assert [answer for _, answer in game].index("") == len(game) - 1
        assert all(1 <= number <= guess.NUMBERS for number, _ in game)
    lengths = np.array([len(game) for game, _ in games])
    # Whoever draws from all numbers finds one of them with 1/64 each time; the others play as `random_play` says.
    ignoring = sum((1 - 1 / guess.NUMBERS) ** n for n in range(guess.LIMIT))
    expected = guess.IGNORES * ignoring + (1 - guess.IGNORES) * random_play()
    assert lengths.mean() == pytest.approx(expected, abs=0.2)  # four standard errors
    assert guess.IGNORES * ignoring / expected == pytest.approx(0.5, abs=0.005)
    # Nearly all games that ignore are seen to: 5/8 do not, and a few end before an impossible guess.
    heeded = np.mean([all(possible) for _, possible in games])
    assert 1 - guess.IGNORES - 0.03 < heeded < 1 - guess.IGNORES + 0.06


@pytest.mark.quick
def test_lessons_are_games_in_tokens_and_masked_to_the_guesses():
    policy = guess.make_policy(0, width=16, layers=1)
    lessons = guess.lessons(policy, 40, seed=3)
    assert len(lessons) == 40
    draw, end = random.Random(3), policy.eos_token_ids[0]
    for lesson in lessons:
        row, own = np.array(lesson["input_ids"]), np.array(lesson["labels"]) != -100
        game = careless_game(draw)
        words = [policy.tokenizer.decode([i]) for i in row[own & (row != end)]]
        assert words == [str(number) for number, _ in game], "numbers are one token each"
        assert (row[own] == end).sum() == len(game)
        text = guess.PROMPT + "".join(f"{number}{answer}" for number, answer in game)
        assert policy.tokenizer.decode(row[row != end]) == text
        assert own.sum() + len(game) - 1 <= guess.LONGEST


def test_first_guesses_are_probabilities():
    policy = guess.make_policy(0, width=16, layers=1)
    first = guess.first_guesses(policy, policy.params)
    assert first.shape == (guess.NUMBERS,)
    assert (first > 0).all()
    assert first.sum() < 1, "the rest of the vocabulary is left"
