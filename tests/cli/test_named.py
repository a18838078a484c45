"""Resolving names: functions in modules and files, built-in rewards, and errors for unknown names."""

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_jax.cli.named import find, from_current_directory, resolve_source, reward_function, server_of
from grpo_jax.engines import vllm
from grpo_jax.text.rows import load_rows

pytestmark = pytest.mark.quick

CODE = "def right(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
SERVER = "http://127.0.0.1:8000"
ROWS = [{"question": "1+1", "solution": "2"}, {"question": "2+2", "solution": "4"}]


@pytest.fixture
def folder(tmp_path):
    path, modules = [*sys.path], {*sys.modules}
    (tmp_path / "my_own_judges.py").write_text(CODE)
    (tmp_path / "json.py").write_text(CODE)
    (tmp_path / "rows_of_my_own.py").write_text(f"ROWS = {ROWS!r}\ndef make():\n    yield from ROWS\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    yield tmp_path
    sys.path[:] = path
    for name in {*sys.modules} - modules:
        del sys.modules[name]


def test_function_in_a_module_or_a_file(folder):
    right = find("my_own_judges.py:right", folder)
    assert right(["a", "b"], ["a", "a"]) == [1.0, 0.0]
    assert find("my_own_judges:right", folder) is right
    assert pickle.loads(pickle.dumps(right)) is right, "a worker process cannot unpickle it"
    assert find("grpo_jax.rewards.shipped:format_reward", folder).__name__ == "format_reward"
    # A file does not shadow an installed module with the same name.
    assert find("json.py:right", folder)(["a"], ["a"]) == [1.0]
    assert find("json:dumps", folder) is json.dumps


def test_rewards_and_samplers_receive_their_arguments(folder):
    made = reward_function({"accuracy_reward": {"column": "truth", "extract": "<a>(.*?)</a>"}}, folder)
    assert made(completions=["<a>4</a>", "4"], truth=["4", "4"]) == [1.0, 0.0]
    assert reward_function({"get_soft_overlong_punishment": [8, 4]}, folder)(completion_ids=[[1] * 6]) == [-0.5]
    assert reward_function("number_reward", folder)(completions=["it is 4"], answer=["4"]) == [1.0]
    assert reward_function("my_own_judges:right", folder)(["a"], ["b"]) == [0.0]
    made = server_of({"vllm": {"base_url": f"{SERVER}/v1", "tolerance": 0.05}}, vllm)
    assert made._server.url == server_of({"vllm": SERVER}, vllm)._server.url == SERVER


@pytest.mark.parametrize(("read", "entry", "message"), [
    (find, "nowhere_at_all:right", r"nowhere_at_all cannot be imported \(ModuleNotFoundError: No module named"),
    (find, "nowhere.py:right", r"nowhere.py cannot be imported \(FileNotFoundError: .*nowhere.py does not exist"),
    (reward_function, "get_soft_overlong_punishment", r"cannot be called with these arguments \(.*missing 2 required"),
    (reward_function, {"format_reward": "("}, "^pattern must be a regular expression"),
    (reward_function, {"a:b": 1, "c:d": 2}, "must name exactly one function"),
    (reward_function, "os:sep", "must be a function; got str"),
    (server_of, {"sglang": {}}, "use {vllm: {base_url"),
    (server_of, {"vllm": 8000}, "base_url must have the form .* got .8000"),
    (server_of, {"vllm": {"base_url": SERVER, "patient": 3}}, "vllm cannot be called with these arguments .*patient"),
])  # fmt: skip
def test_invalid_entry_is_rejected(folder, read, entry, message):
    with pytest.raises(ValueError, match=message):
        read(entry, vllm if read is server_of else folder)


def rows_of(source, folder: Path, **columns):
    return load_rows(resolve_source(source, folder, "data"), argument="data", **columns)


@pytest.mark.parametrize(
    "source", ["rows.jsonl", "rows_of_my_own.py:ROWS", "rows_of_my_own:make", {"path": "rows_of_my_own:make"}]
)
def test_rows_come_from_a_file_or_a_reference(folder, source):
    wanted = [{"prompt": row["question"], "solution": row["solution"]} for row in ROWS]
    assert rows_of(source, folder, columns={"prompt": "question"}) == wanted
    described = source if isinstance(source, dict) else {"path": source}
    assert rows_of({**described, "rows": 1}, folder, columns={"prompt": "question"}) == wanted[:1]


def test_hub_name_is_not_read_as_a_path(folder, monkeypatch):
    hub = SimpleNamespace(load_dataset=lambda *names, split: [{"prompt": f"{names} {split}"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.chdir(folder)
    (folder / "squad").mkdir()
    assert rows_of("squad", folder / "project") == [{"prompt": "('squad', None) train"}]
    with pytest.raises(FileNotFoundError, match=r"squad.* is a directory"):
        rows_of("squad", folder)
    with pytest.raises(FileNotFoundError, match=r"data.*none'"):
        rows_of({"path": "none"}, folder)


def test_command_line_paths_are_relative_to_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("judge.py", "rows.jsonl", "auto"):
        (tmp_path / name).touch()
    given = ["rows.jsonl", "other.jsonl", "auto", 1e-6, {"judge.py:score": 2}, ["judge.py:score"]]
    template = "Think step by step. " * 20 + "<answer></answer>"
    assert from_current_directory(template) == template, "too long for a path"
    assert from_current_directory(given) == [
        f"{tmp_path}/rows.jsonl", "other.jsonl", "auto", 1e-6, {"judge.py:score": 2}, [f"{tmp_path}/judge.py:score"]
    ]  # fmt: skip
