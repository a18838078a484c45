"""The turn of each token follows from the lengths of the turns, whatever stands between them."""

import json

import numpy as np
import pytest

from grpo_jax.rollout.played import EpisodeCounts, Played, turn_ids

pytestmark = pytest.mark.quick


def record(*lengths):
    return Played([], [], None, EpisodeCounts(), lengths)


def test_turns_side_by_side_turns_of_no_length_and_a_rest_that_nobody_noted():
    drawn = np.array([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]], bool)
    played = [record(1, 2), record(1, 1), record(), record(), record(0, 2, 1)]
    assert turn_ids(drawn, played).tolist() == [
        [0, 1, 1, -1],
        [0, -1, 1, 1],
        [0, 0, -1, -1],
        [-1, -1, -1, -1],
        [-1, 1, 1, 2],
    ]


@pytest.mark.parametrize("reward", [1.0, None, [0.5, 1.0]])
def test_a_record_goes_through_json_and_those_of_older_versions_are_read(reward):
    one = Played([(True, "a")], [], reward, EpisodeCounts(turns=1), [3])
    assert Played.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert Played.from_json(one.to_json()[:4]).lengths == ()
