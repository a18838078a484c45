"""Functions by their names: modules, files, shipped reward functions, and what is said where there is no such thing."""

import pickle
import sys

import pytest

from grpo_jax.cli.named import SHIPPED, find, reward_function
from grpo_jax.rewards import isolated

CODE = "def right(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"


@pytest.fixture
def folder(tmp_path):
    path, modules = [*sys.path], {*sys.modules}
    (tmp_path / "my_own_judges.py").write_text(CODE)
    (tmp_path / "json.py").write_text(CODE)
    (tmp_path / "broken_judges.py").write_text("1 / 0")
    yield tmp_path
    sys.path[:] = path
    for name in {*sys.modules} - modules:
        del sys.modules[name]


@pytest.mark.quick
def test_a_function_of_a_module_and_of_a_file(folder):
    right = find("my_own_judges.py:right", folder)
    assert right(["a", "b"], ["a", "a"]) == [1.0, 0.0]
    assert find("my_own_judges:right", folder) is right
    assert pickle.loads(pickle.dumps(right)) is right
    assert find("grpo_jax.rewards.shipped:format_reward", folder).__name__ == "format_reward"


@pytest.mark.quick
def test_a_file_does_not_hide_a_module_of_its_name(folder):
    import json

    assert find("json.py:right", folder)(["a"], ["a"]) == [1.0]
    assert sys.modules["json"] is json
    assert find("json:dumps", folder) is json.dumps


def test_a_function_of_a_file_runs_in_a_worker(folder):
    right = isolated(find("my_own_judges.py:right", folder), timeout=60.0)
    assert right(completions=["a", "b"], answer=["a", "a"]) == [1.0, 0.0]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("right", "names nothing in a module: write module:name or file.py:name"),
        ("my_own_judges:rihgt", "my_own_judges has no rihgt; did you mean right?"),
        ("nowhere_at_all:right", r"nowhere_at_all cannot be imported \(ModuleNotFoundError: No module named"),
        ("nowhere.py:right", r"nowhere.py cannot be imported \(FileNotFoundError: .*nowhere.py is no file"),
        ("broken_judges:right", r"broken_judges cannot be imported \(ZeroDivisionError: division by zero\)"),
    ],
)
def test_what_is_not_there_is_said(folder, text, said):
    with pytest.raises(ValueError, match=said):
        find(text, folder)


@pytest.mark.quick
def test_shipped_functions_are_made_of_what_follows_them(folder):
    made = reward_function({"accuracy_reward": {"column": "truth", "extract": "<a>(.*?)</a>"}}, folder)
    assert made(completions=["<a>4</a>", "4"], truth=["4", "4"]) == [1.0, 0.0]
    assert reward_function({"tag_reward": ["think", "answer"]}, folder)(completions=["<think></think>"]) == [0.5]
    assert reward_function("number_reward", folder)(completions=["it is 4"], answer=["4"]) == [1.0]
    assert reward_function("my_own_judges:right", folder)(["a"], ["b"]) == [0.0]


@pytest.mark.quick
def test_shipped_names_are_all_factories_of_the_room():
    from grpo_jax.rewards import shipped

    factories = {name for name in vars(shipped) if name.endswith(("_reward", "_punishment"))}
    assert set(SHIPPED) == factories | {"number_reward"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nubmer_reward", r"no such reward function; did you mean number_reward\?"),
        ("tag_reward", "tags is empty"),
        ("get_soft_overlong_punishment", "missing 2 required positional arguments.*write its arguments behind it"),
        ({"format_reward": "("}, "format_reward refuses its arguments .pattern is '\\('"),
        ({"a:b": 1, "c:d": 2}, "names more than one function"),
        ("os:sep", "is a str, and no function"),
    ],
)
def test_entries_that_make_no_function_are_refused(folder, entry, said):
    with pytest.raises(ValueError, match=said):
        reward_function(entry, folder)
