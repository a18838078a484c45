"""RUN.yaml: all its faults come together, and the command line is a part of it."""

import inspect

import pytest
from cli_files import write_run

from grpo_jax import add_lora
from grpo_jax.cli.runfile import Lora, read_lora, read_run

ALL = ("model", "data", "rewards")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.quick
def test_a_run_is_the_arguments_of_train(folder):
    path = write_run(folder / "project")
    run = read_run(path, {"max_steps": "5", "beta": "0.1"}, wanted=ALL)
    assert run.folder == folder / "project"
    assert (run.config.max_steps, run.config.beta, run.config.num_generations) == (5, 0.1, 2)
    assert [row["prompt"] for row in run.rows] == ["say a: ", "say aa: ", "say b: ", "say bb: "]
    assert len(run.eval_rows) == 2
    assert [fn.__name__ for fn in run.rewards] == ["early", "accuracy"]
    assert run.run_dir == folder / "project" / "run"
    # Written down, it is the same run from anywhere.
    (folder / "elsewhere.yaml").write_text(run.text())
    again = read_run(folder / "elsewhere.yaml", wanted=ALL)
    assert (again.config, again.rows, again.folder, again.run_dir) == (run.config, run.rows, run.folder, run.run_dir)


@pytest.mark.quick
def test_the_run_directory_has_the_name_of_the_file_unless_there_is_none(folder):
    path = write_run(folder, run_dir=None)
    assert str(read_run(path).run_dir) == "runs/my_run"
    assert read_run(path, {"run_dir": "null"}).run_dir is None
    with pytest.raises(ValueError, match="run_dir = 'gs://b/runs': is in an object store, which can neither lock"):
        read_run(path, {"run_dir": "gs://b/runs"})
    with pytest.raises(ValueError, match="run_dir = 3: give the path of a directory, or null for none"):
        read_run(path, {"run_dir": "3"})


@pytest.mark.quick
def test_the_command_line_names_files_from_where_it_is(folder):
    path = write_run(folder / "project")
    (folder / "here.jsonl").write_text('{"question": "c", "answer": "c"}\n')
    (folder / "judging_here.py").write_text("def judge(completions, **_):\n    return [0.0] * len(completions)\n")
    run = read_run(path, {"data": "here.jsonl", "rewards": "[judging_here.py:judge]"}, wanted=ALL)
    assert [row["prompt"] for row in run.rows] == ["say c: "]
    assert [fn.__name__ for fn in run.rewards] == ["judge"]
    (folder / "making_here.py").write_text("def made(value):\n    return lambda completions, **_: [value]\n")
    (folder / "config.json").write_text("{}")
    (folder / "a").write_text("a file of the name of a column")
    mappings = {
        "data": "{path: here.jsonl, rows: 1}",
        "rewards": "[{making_here.py:made: a}]",
        "environment_factory": "{judging_here.py:judge: judging_here.py:judge}",
        "model": "{config: config.json, tokenizer: model}",
        "advantage_fn": "judging_here.py:judge",
        "surrogate": "making_here.py:made",
    }
    run = read_run(path, mappings, wanted=ALL)
    assert [row["prompt"] for row in run.rows] == ["say c: "]
    assert run.rewards[0](completions=["x"]) == ["a"]
    assert [fn.__name__ for fn in run.environment_factory.values()] == ["judge"]
    assert (run.advantage_fn.__name__, run.surrogate.__name__) == ("judge", "made")
    assert run.model == {"config": str(folder / "config.json"), "tokenizer": "model"}
    (folder / "squad").mkdir()
    hub = read_run(path, {"data": "{name: squad, split: test}"}).values["data"]
    assert hub == {"name": "squad", "split": "test"}, "a name on the hub is no file"


@pytest.mark.quick
def test_all_faults_come_together_each_with_its_key(folder):
    path = write_run(
        folder,
        modle="x",
        num_generation=4,
        model="nowhere/at/all",
        learning_rate=-1,
        data="none.jsonl",
        eval_data=7,
        rewards=["judging.py:eraly", "nubmer_reward"],
        tools="os:nothing",
        environment_factory="os:nothing",
        advantage_fn="os:nothing",
        surrogate="ppo",
        prompt="{question",
        columns=["answer"],
        lora={"rang": 8},
        param_dtype="float8",
        run_dir=7,
        dataset_name="x",
    )
    with pytest.raises(ValueError, match=r"my_run\.yaml with --max_steps has 18 errors") as caught:
        read_run(path, {"max_steps": "many"}, wanted=ALL)
    lines = str(caught.value).split("\n  ")[1:]
    for begin in (
        "modle: no such key; did you mean model?",
        "num_generation: no such key; did you mean num_generations?",
        "dataset_name: no such key; use data",
        "max_steps = 'many': must be a whole number, not str",
        "learning_rate = -1: must be at least 0",
        "model = 'nowhere/at/all': name_or_directory 'nowhere/at/all' is no directory",
        "lora = {'rang': 8}: give a rank, or a mapping of rank, alpha, targets, dropout",
        "param_dtype = 'float8': use float32 or bfloat16",
        "run_dir = 7: give the path of a directory, or null for none",
        "rewards[0] = 'judging.py:eraly': judging.py has no eraly; did you mean early?",
        "rewards[1] = 'nubmer_reward': no such reward function; did you mean number_reward?",
        "tools = 'os:nothing': os has no nothing",
        "environment_factory = 'os:nothing': os has no nothing",
        "advantage_fn = 'os:nothing': os has no nothing",
        "surrogate = 'ppo': names nothing in a module: write module:name or file.py:name",
        "prompt = '{question': expected '}' before end of string",
        "data is '",
        "eval_data is 7: give a list of dicts",
    ):
        assert [line for line in lines if line.startswith(begin)], begin
    assert len(lines) == 18


@pytest.mark.quick
def test_what_is_missing_is_said_and_environments_may_be_the_only_reward(folder):
    with pytest.raises(ValueError, match="has 3 errors") as caught:
        read_run(write_run(folder, model=None, data=None, rewards=None), wanted=ALL)
    assert [line.split(":")[0].strip() for line in str(caught.value).split("\n")[1:]] == [*ALL]
    path = write_run(folder, rewards=None, environment_factory="builtins:object")
    assert read_run(path, wanted=ALL).rewards == []
    assert read_run(write_run(folder, model=None, data=None, rewards=None)).rows == []


@pytest.mark.quick
def test_a_teacher_may_be_the_only_one_to_learn_from(folder):
    path = write_run(folder, rewards=[], teacher="model", distillation_coef=1.0)
    run = read_run(path, wanted=ALL)
    assert (run.rewards, run.teacher) == ([], "model")
    for teacher, said in (
        ({"model": "model", "size": 3}, "a mapping has model and may have quantize, or has vllm alone"),
        ({"vllm": {"base_url": "http://127.0.0.1:1", "k": 3}}, "vllm_scorer refuses its arguments .*k"),
        ({"vllm": "http://127.0.0.1:1", "quantize": "int8"}, "vllm stands alone"),
        ({"model": "model", "quantize": "int3"}, "int3"),
        (7, "give a name on the hub, a directory"),
    ):
        with pytest.raises(ValueError, match=rf"teacher( = |: ).*{said}"):
            read_run(write_run(folder, teacher=teacher), wanted=("model",))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"config": {}}, "new weights take config, tokenizer and seed"),
        ({"config": "none.json", "tokenizer": "model"}, r"config = 'none\.json' is no file of JSON \(FileNotFound"),
        ({"config": "judging.py", "tokenizer": "model"}, r"config = 'judging\.py' is no file of JSON \(JSONDecode"),
        ({"config": {}, "tokenizer": 7}, "the tokenizer of new weights is a name or a directory"),
        ({"config": {}, "tokenizer": "model", "seed": "x"}, "and their seed a whole number"),
        (7, "give a name on the hub, a directory, module:function, or a mapping"),
    ],
)
def test_a_model_that_is_none_is_refused(folder, model, said):
    with pytest.raises(ValueError, match=rf"model = .*{said}"):
        read_run(write_run(folder, model=model), wanted=("model",))


@pytest.mark.quick
def test_a_reward_function_that_asks_for_a_column_that_is_not_there_is_refused_before_the_model_is_loaded(folder):
    path = write_run(folder, rewards=[{"accuracy_reward": "solution"}])
    with pytest.raises(ValueError, match="solution"):
        read_run(path, wanted=ALL)
    path = write_run(folder, rewards=[{"number_reward": "answer"}])
    with pytest.raises(ValueError, match=r"rows of data have no single one in the column 'answer': row 0 has"):
        read_run(path, wanted=ALL)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "said"), [("a: [", "is no YAML"), ("- a", r"holds \['a'\], and not keys with values"), ("", "holds None")]
)
def test_files_that_are_none(folder, text, said):
    (folder / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_run("bad.yaml")
    with pytest.raises(FileNotFoundError, match=r"none\.yaml is no file; give a RUN\.yaml"):
        read_run("none.yaml")


@pytest.mark.quick
def test_adapters_are_a_rank_or_the_arguments_of_add_lora():
    assert read_lora(4) == Lora(rank=4, alpha=8.0)
    assert read_lora({"rank": 4, "alpha": 4, "dropout": 0.1}) == Lora(rank=4, alpha=4, dropout=0.1)
    assert read_lora({"dropout": 0.1}) == Lora(rank=16, alpha=32.0, dropout=0.1)
    assert read_lora(None) is None
    defaults = inspect.signature(add_lora).parameters
    assert Lora()._asdict() == {name: defaults[name].default for name in Lora._fields}
    for wrong in ("16", True, {"rank": "16"}, [16]):
        with pytest.raises(ValueError, match=r"give a rank|is no int"):
            read_lora(wrong)
