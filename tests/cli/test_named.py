"""Functions by their names: modules, files, shipped reward functions, and what is said where there is no such thing."""

import json
import pickle
import sys
from types import SimpleNamespace

import pytest

from grpo_jax.cli.named import SHIPPED, find, reward_function, rows_of, sampler_of
from grpo_jax.rewards import isolated

CODE = "def right(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
ROWS = [{"question": "1+1", "solution": "2"}, {"question": "2+2", "solution": "4"}]


@pytest.fixture
def folder(tmp_path):
    path, modules = [*sys.path], {*sys.modules}
    (tmp_path / "my_own_judges.py").write_text(CODE)
    (tmp_path / "json.py").write_text(CODE)
    (tmp_path / "broken_judges.py").write_text("1 / 0")
    (tmp_path / "empty_judges.py").write_text("None.right")
    (tmp_path / "rows_of_my_own.py").write_text(f"ROWS = {ROWS!r}\ndef make():\n    yield from ROWS\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
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
        ("empty_judges:right", r"empty_judges cannot be imported \(AttributeError: 'NoneType' object has no"),
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
    assert set(SHIPPED) == factories | {"number_reward", "formula_reward"}


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
        (["number_reward"], r"no such reward function; did you mean number_reward\?"),
    ],
)
def test_entries_that_make_no_function_are_refused(folder, entry, said):
    with pytest.raises(ValueError, match=said):
        reward_function(entry, folder)


@pytest.mark.quick
@pytest.mark.parametrize(
    "source", ["rows.jsonl", "rows_of_my_own.py:ROWS", "rows_of_my_own:make", {"path": "rows_of_my_own:make"}]
)
def test_rows_are_those_of_a_file_in_the_folder_or_of_a_reference(folder, source):
    wanted = [{"prompt": row["question"], "solution": row["solution"]} for row in ROWS]
    assert rows_of(source, folder, columns={"prompt": "question"}) == wanted
    described = source if isinstance(source, dict) else {"path": source}
    assert rows_of({**described, "rows": 1}, folder, columns={"prompt": "question"}) == wanted[:1]


@pytest.mark.quick
def test_a_name_of_the_hub_is_no_file_of_the_folder(folder, monkeypatch):
    hub = SimpleNamespace(load_dataset=lambda *names, split: [{"prompt": f"{names} {split}"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.chdir(folder)
    (folder / "squad").mkdir()
    (folder / "project").mkdir()
    assert rows_of("squad", folder / "project") == [{"prompt": "('squad', None) train"}]
    with pytest.raises(FileNotFoundError, match=r"data is '.*squad', which is a directory"):
        rows_of("squad", folder)
    with pytest.raises(FileNotFoundError, match=r"data is '.*none', which is no file"):
        rows_of({"path": "none"}, folder)


@pytest.mark.quick
def test_a_reference_to_rows_that_are_not_there_is_said(folder):
    with pytest.raises(ValueError, match=r"data = 'rows_of_my_own.py:mke': .* has no mke; did you mean make\?"):
        rows_of("rows_of_my_own.py:mke", folder)


@pytest.mark.quick
def test_a_sampler_is_a_server_by_its_address_or_a_reference(folder):
    made = sampler_of({"vllm": {"base_url": "http://127.0.0.1:8000/v1", "tolerance": 0.05}}, folder)
    assert repr(made) == repr(sampler_of({"vllm": "http://127.0.0.1:8000"}, folder))
    for entry, said in (
        ({"sglang": {}}, "write {vllm: {base_url"),
        ("http://127.0.0.1:8000", "write {vllm: {base_url"),
        ({"vllm": {"base_url": "127.0.0.1:8000"}}, "base_url is '127.0.0.1:8000': give http://host:port"),
        ({"vllm": {"base_url": "http://a:1", "api_key": "x"}}, "put it into the environment"),
        ({"vllm": {"base_url": "http://a:1", "patient": 3}}, "vllm refuses its arguments .*patient"),
    ):
        with pytest.raises(ValueError, match=said):
            sampler_of(entry, folder)
