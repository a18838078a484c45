"""Reading RUN.yaml with command-line keys: the resulting run, and errors reported together."""

import pytest
from cli_files import write_run

from grpo_jax.cli.runfile import read_run
from grpo_jax.cli.yaml12 import dump_yaml

pytestmark = pytest.mark.quick

ALL = ("model", "data", "rewards")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_file_gives_the_arguments_of_train(folder):
    path = write_run(folder / "project")
    run = read_run(path, {"max_steps": "5", "beta": "0.1", "mesh": "data=2"}, load=ALL)
    assert run.folder == folder / "project"
    assert (run.config.max_steps, run.config.beta, run.config.num_generations) == (5, 0.1, 2)
    assert run.config.mesh == {"data": 2}
    assert [row["prompt"] for row in run.rows] == ["say a: ", "say aa: ", "say b: ", "say bb: "]
    assert len(run.eval_rows) == 2
    assert [fn.__name__ for fn in run.rewards] == ["early", "accuracy"]
    assert run.run_dir == folder / "project" / "run"
    # Written to a file, it describes the same run from any directory.
    (folder / "elsewhere.yaml").write_text(dump_yaml({**run.values, "folder": str(run.folder)}))
    again = read_run(folder / "elsewhere.yaml", load=ALL)
    assert (again.config, again.rows, again.folder, again.run_dir) == (run.config, run.rows, run.folder, run.run_dir)
    # On the command line, the directory is relative to the current directory.
    assert read_run(folder / "elsewhere.yaml", {"folder": "project", "run_dir": "2024"}, load=ALL).folder == run.folder
    named = read_run(path, {"hub_model_id": "project/model", "model": "project/model"})
    assert (named.config.hub_model_id, named.model) == ("project/model", str(folder / "project" / "model"))
    path = write_run(folder, run_dir=None)
    assert str(read_run(path).run_dir) == "runs/my_run"
    assert read_run(path, {"run_dir": "null"}).run_dir is None


def test_all_errors_are_reported_together_with_their_keys(folder):
    wrong = {
        "modle": ("x", "modle: no such key; did you mean model?"),
        "num_generation": (4, "num_generation: no such key; did you mean num_generations?"),
        "dataset_name": ("x", "dataset_name: no such key; use data"),
        "model": ("nowhere/at/all", "model = 'nowhere/at/all': name_or_directory 'nowhere/at/all' is not a directory"),
        "learning_rate": (-1, "learning_rate = -1: must be at least 0"),
        "data": ("none.jsonl", "data='"),
        "eval_data": (7, "eval_data must be a list of dicts"),
        "tools": ("os:nothing", "tools = 'os:nothing': os does not define nothing"),
        "environment_factory": ("os:nothing", "environment_factory = 'os:nothing': os does not define nothing"),
        "advantage_fn": ("os:nothing", "advantage_fn = 'os:nothing': os does not define nothing"),
        "surrogate": ("ppo", "surrogate = 'ppo': must have the form module:name or file.py:name"),
        "lora": ({"rang": 8}, "lora = {'rang': 8}: must be a rank, or a mapping with some of the keys rank, alpha"),
        "param_dtype": ("float8", 'param_dtype = \'float8\': must be "float32" or "bfloat16"'),
        "run_dir": (7, "run_dir = 7: must be a string"),
        "quantize": ("int4", 'quantize = \'int4\': must be "nf4" or "int8"'),
    }
    path = write_run(
        folder, rewards=["judging.py:eraly", "nubmer_reward"], **{name: value for name, (value, _) in wrong.items()}
    )
    with pytest.raises(ValueError, match=r"my_run\.yaml has 18 errors") as caught:
        read_run(path, {"max_steps": "many"}, load=ALL)
    lines = str(caught.value).split("\n  ")[1:]
    for begin in (
        *(begin for _, begin in wrong.values()),
        "max_steps = 'many': must be an integer, not str",
        "rewards[0] = 'judging.py:eraly': judging.py does not define eraly; did you mean early?",
        "rewards[1] = 'nubmer_reward': unknown reward function; did you mean number_reward?",
    ):
        assert [line for line in lines if line.startswith(begin)], begin
    assert len(lines) == 18


def test_missing_keys_are_reported_and_rewards_may_be_omitted(folder):
    with pytest.raises(ValueError, match="has 3 errors") as caught:
        read_run(write_run(folder, model=None, data=None, rewards=None), load=ALL)
    assert [line.split()[0] for line in str(caught.value).split("\n")[1:]] == [*ALL]
    path = write_run(folder, rewards=None, environment_factory="builtins:object")
    assert read_run(path, load=ALL).rewards == []
    assert read_run(write_run(folder, model=None, data=None, rewards=None)).rows == []
    run = read_run(write_run(folder, rewards=[], teacher="model", distillation_coef=1.0), load=ALL)
    assert (run.rewards, run.teacher) == ([], "model")


@pytest.mark.parametrize(("changes", "message"), [
    ({"prompt": "{question"}, "my_run.yaml has 1 error:\n  prompt='{question': expected '}' before end of string"),
    ({"teacher": {"model": "model"}}, "teacher: use {vllm: {base_url"),
    ({"teacher": {"vllm": {"base_url": "http://127.0.0.1:1", "k": 3}}}, "teacher: vllm_scorer cannot be called .*k"),
    ({"teacher": 7}, "teacher: use a name on the hub, a directory"),
    ({"model": 7}, "model = 7: use a name on the hub, a directory, or module:function"),
    ({"run_dir": "gs://b/runs"}, "run_dir = 'gs://b/runs' is in an object store, which cannot lock"),
    ({"mesh": "data"}, "mesh must be a list of axes and sizes such as data=2,fsdp=4; got 'data'"),
    ({"rewards": [{"accuracy_reward": "solution"}]}, "solution"),
    ({"rewards": [{"number_reward": "answer"}]}, r"the column 'answer' has no single number: row 0 has"),
])  # fmt: skip
def test_invalid_value_is_rejected_before_the_model_is_loaded(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        read_run(write_run(folder, **changes), load=ALL)
