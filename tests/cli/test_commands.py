"""The commands on a small run: each does what the Python API does with the same arguments."""

import json
import shutil

import jax
import numpy as np
import pytest
import yaml
from cli_files import lines_of, run, write_run
from tiny import tiny_policy

from grpo_jax import (
    GRPOConfig,
    SFTConfig,
    add_lora,
    from_pretrained,
    generate,
    load_lora,
    make_prompts,
    merge_lora,
    sft,
    train,
)
from grpo_jax.cli import commands
from grpo_jax.cli.runfile import read_run
from grpo_jax.models.quantized import is_quantized
from grpo_jax.types import as_argument
from grpo_jax.watch.summary import short_number

ALL = ("model", "data", "rewards")


def metrics_of(run_dir):
    lines = list(lines_of((run_dir / "metrics.jsonl").read_text().splitlines()))
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def same(left, right):
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), left, right))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run that `grpo-jax train` has made, with the API's params of the same run."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def trained(folder):
    path = write_run(folder)
    printed = run("train", path)
    assert f"grpo-jax export {folder / 'run'} OUT writes the model" in printed
    return folder / "run"


@pytest.fixture(scope="module")
def state(folder, trained):
    asked = read_run(trained / "run.yaml", wanted=ALL)
    policy = from_pretrained(folder / "model")
    how = {"eval_dataset": asked.eval_rows, "run_dir": folder / "by_api"}
    return train(policy, asked.rows, asked.rewards, asked.config, **how)


def test_training_is_that_of_the_api(folder, trained, state):
    assert metrics_of(trained) == metrics_of(folder / "by_api")
    assert len(metrics_of(trained)) > 2
    kept = yaml.safe_load((trained / "run.yaml").read_text())
    assert kept == {**yaml.safe_load((folder / "my_run.yaml").read_text()), "folder": str(folder)}


def test_a_rehearsal_writes_nothing(folder, capsys):
    printed = run("train", write_run(folder, run_dir=str(folder / "rehearsed")), "--dry-run")
    assert printed.startswith("dry run: one group of completions, one update, nothing written")
    assert not (folder / "rehearsed").exists()


def test_export_writes_the_policy_of_the_newest_checkpoint(folder, trained, state):
    assert "the policy of step 2" in run("export", trained, folder / "out")
    assert same(from_pretrained(folder / "out").params, state.params)
    for command, said in (("--merge", "the run has no adapters"), ("--checkpoint=1", "holds no checkpoint of step 1")):
        with pytest.raises(SystemExit, match=said):
            run("export", trained, folder / "out2", command)


def test_evaluation_is_that_of_the_run(folder, trained, state):
    out = folder / "completions.jsonl"
    found = json.loads(run("evaluate", trained, "--out", out))
    last = [line for line in metrics_of(trained) if "eval/early" in line][-1]
    assert found["step"] == last["step"] == 2
    assert {f"eval/{name}": found[name] for name in ("early", "accuracy", "mean_length")}.items() <= last.items()
    rows = list(lines_of(out.read_text().splitlines()))
    assert [row["prompt"] for row in rows] == ["say a: "] * 2 + ["say aa: "] * 2
    # A file is evaluated with its model as it is: the evaluation before the first step.
    first = next(line for line in metrics_of(trained) if "eval/early" in line)
    before = json.loads(run("evaluate", write_run(folder)))
    assert before["early"] == first["eval/early"]
    with pytest.raises(SystemExit, match="is a file; give the directory of a run"):
        run("evaluate", folder / "my_run.yaml", "--checkpoint", 2)


def test_a_run_is_resumed_by_its_directory_to_the_bytes_of_one_that_was_not_stopped(folder, trained, monkeypatch):
    shutil.copytree(trained, folder / "moved")
    monkeypatch.chdir(folder.parent)
    run("resume", folder / "moved", "--max_steps", 3)
    whole = write_run(folder, max_steps=3, run_dir=str(folder / "whole"))
    run("train", whole)
    lines = lambda name: [line for line in metrics_of(folder / name) if line["step"] == 3 and "reward" in line]
    assert lines("moved") == lines("whole") != []
    assert yaml.safe_load((folder / "moved" / "run.yaml").read_text())["max_steps"] == 3


def test_a_run_that_refuses_leaves_the_file_of_the_one_that_is_there(folder, trained):
    before = (trained / "run.yaml").read_text()
    with pytest.raises(SystemExit, match="was begun otherwise"):
        run("train", write_run(folder), "--learning_rate", "0.5")
    assert (trained / "run.yaml").read_text() == before
    with pytest.raises(SystemExit, match="max_completion_length = 400"):
        run("train", write_run(folder, run_dir=str(folder / "new"), max_completion_length=400))
    assert not (folder / "new").exists()


def test_a_run_of_the_python_api_is_talked_to_evaluated_and_exported(folder, state, capsys):
    run_dir = folder / "by_api"
    run("export", run_dir, folder / "of_api")
    exported = from_pretrained(folder / "of_api")
    assert same(exported.params, state.params)
    assert exported.eos_token_ids == from_pretrained(folder / "model").eos_token_ids
    run("export", folder / "run", folder / "of_cli")
    texts = [run("chat", where, "--say", "ab", "--seed", "3") for where in (run_dir, folder / "run")]
    assert texts[0] == texts[1]
    asked = yaml.safe_load((folder / "run" / "run.yaml").read_text())
    data = [
        "--data",
        str(folder / asked["data"]),
        "--prompt",
        asked["prompt"],
        "--rewards",
        f"[{folder}/{asked['rewards'][0]}]",
    ]
    found = json.loads(run("evaluate", run_dir, *data))
    assert found["step"] == int(state.step)
    with pytest.raises(SystemExit, match="data: is missing"):
        run("evaluate", run_dir)
    with pytest.raises(SystemExit, match=r"was begun from Python, and its data and reward functions are there: run "):
        run("resume", run_dir)


def test_a_run_of_sft_in_python_is_talked_to_and_exported(tmp_path):
    """Its batch of 3 rows is no batch of groups, and neither command asks for one."""
    config = SFTConfig(max_steps=1, learning_rate=1e-3, per_device_train_batch_size=3)
    rows = [{"prompt": "ab", "completion": text} for text in ("cd", "e", "fgh")]
    state = sft(tiny_policy(), rows, config, run_dir=tmp_path / "run")
    run("export", tmp_path / "run", tmp_path / "out")
    assert same(from_pretrained(tmp_path / "out").params, state.params)
    assert "> ab\n" in run("chat", tmp_path / "run", "--say", "ab", "--max_completion_length", "4")


def test_of_adapters_of_the_python_api_the_files_are_not_enough(tmp_path):
    policy = add_lora(tiny_policy(), jax.random.key(1), rank=2, alpha=4.0)
    config = GRPOConfig(max_steps=1, max_completion_length=4)
    train(policy, [{"prompt": "ab"}], lambda completions: [0.0] * len(completions), config, run_dir=tmp_path)
    for command in (["export", tmp_path, "out"], ["chat", tmp_path, "--say", "ab"]):
        with pytest.raises(SystemExit, match=r"do not hold the whole policy .of adapters the base is elsewhere"):
            run(*command)


@pytest.mark.quick
def test_what_is_no_run_directory_is_said(tmp_path):
    neither = r"holds no run: neither run.yaml, of grpo-jax train, nor run.json, of train"
    for command in (["resume", tmp_path], ["export", tmp_path, "out"], ["evaluate", tmp_path]):
        with pytest.raises(SystemExit, match=neither):
            run(*command)
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "run.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"sum is no directory; give that of a run: there are .*sums$"):
        run("resume", tmp_path / "sum")
    with pytest.raises(SystemExit, match=r"has no metrics.jsonl; is it the directory of a run\?"):
        run("report", tmp_path)


def test_the_report_is_drawn_anew(trained):
    for name in ("report.html", "report.png"):
        (trained / name).unlink()
    assert run("report", trained).split() == [str(trained / "report.html"), str(trained / "report.png")]
    assert "<!doctype html>" in (trained / "report.html").read_text()
    assert (trained / "report.png").stat().st_size > 1000


def test_adapters_are_exported_beside_their_base_or_merged_into_it(folder):
    path = write_run(folder, lora=2, run_dir=str(folder / "adapted"), max_steps=1, eval_data=None)
    run("train", path)
    run("export", folder / "adapted", folder / "adapter")
    run("export", folder / "adapted", folder / "merged", "--merge")
    base = from_pretrained(folder / "model")
    adapted = load_lora(folder / "adapter", base)
    assert adapted.model.scale == 2.0
    assert same(merge_lora(adapted).params, from_pretrained(folder / "merged").params)


def test_chat_shows_what_generate_draws(folder, trained, state, capsys):
    policy = tiny_policy().replace(params=state.params)
    how = {"max_completion_length": 12, "eos_token_ids": policy.eos_token_ids, "num_generations": 1}
    wanted = []
    for number, prompt in enumerate(["ab", "ab", "c", "c"]):
        given = make_prompts([policy.tokenizer(prompt)["input_ids"]], length=32)
        key, index = jax.random.key(0), np.array([number])
        drawn = generate(policy.model, state.params, given, key, prompt_indices=index, **how)
        ids = np.asarray(drawn.tokens)[0, 0][np.asarray(drawn.mask)[0, 0]]
        wanted.append(policy.tokenizer.decode(ids, skip_special_tokens=True))
    fields = ["--max_completion_length", 12, "--seed", 0, "--samples", 2]
    printed = run("chat", trained, "--say", "ab", "--say", "c", *fields)
    parts = iter(wanted)
    assert printed == "".join(f"> {p}\n" + "".join(f"[{i}] {next(parts)}\n" for i in (1, 2)) for p in ("ab", "c"))
    with pytest.raises(SystemExit, match="--samples 0: use a whole number"):
        run("chat", folder / "model", "--say", "a", "--samples", 0)


@pytest.mark.quick
def test_tokens_are_shown_as_they_are_drawn_and_a_cut_character_waits(capsys):
    from grpo_jax.cli.chat import _Shown

    tokenizer = tiny_policy().tokenizer
    ids = np.array(tokenizer("aé!")["input_ids"])
    shown, printed = _Shown(tokenizer), []
    for count in range(len(ids) + 1):
        shown(ids[None, None], (np.arange(len(ids)) < count)[None, None])
        printed.append(capsys.readouterr().out)
    assert printed == ["", "a", "", "é", "!"]


@pytest.mark.quick
def test_chat_ends_where_it_is_told_to(capsys):
    policy, letters = tiny_policy(), [*"abcdefghijklmnopqrstuvwxyz", "."]
    keys = {"max_completion_length": "40", "stop": json.dumps(letters), "stop_token_ids": "9", "max_turn_length": "30"}
    config = read_run(None, keys).config
    commands.talk(policy, config, ["ab"], samples=2)
    wanted = ""
    for number in range(2):
        drawn = generate(
            *(policy.model, policy.params, make_prompts([policy.tokenizer("ab")["input_ids"]], length=32)),
            jax.random.key(config.seed),
            prompt_indices=np.array([number]),
            num_generations=1,
            max_completion_length=40,
            eos_token_ids=policy.eos_token_ids,
            stop=letters,
            stop_token_ids=9,
            max_turn_length=30,
            tokenizer=policy.tokenizer,
        )
        ids = np.asarray(drawn.tokens)[np.asarray(drawn.mask)]
        wanted += f"[{number + 1}] {policy.tokenizer.decode(ids, skip_special_tokens=True)}\n"
        assert np.asarray(drawn.ended).all()
    assert capsys.readouterr().out == wanted
    with pytest.raises(ValueError, match="'<eos>' is a special token"):
        commands.talk(policy, read_run(None, {"stop": "<eos>"}).config, ["ab"])


def test_generate_tells_what_it_has_drawn(key):
    policy, seen = tiny_policy(), []
    given = make_prompts([[5, 6], [7]])
    how = {"num_generations": 2, "max_completion_length": 40}
    watch = lambda tokens, mask: seen.append((tokens.copy(), mask.copy()))
    drawn = generate(policy.model, policy.params, given, key, watch=watch, **how)
    assert len(seen) > 2
    counts = [int(mask.sum()) for _, mask in seen]
    assert counts == sorted(counts)
    assert counts[1] < counts[-1]
    for tokens, mask in seen:
        assert np.array_equal(tokens[mask], np.asarray(drawn.tokens)[mask])


def test_a_conversation_goes_on_until_a_line_is_empty(monkeypatch, capsys):
    tokenizer = tiny_policy().tokenizer.__class__(
        tokenizer_object=tiny_policy().tokenizer.backend_tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}"
    seen = []
    template = tokenizer.apply_chat_template

    def spy(said, **keywords):
        if said[0]["content"] in ("one", "three"):  # the template is tried out with other words, too
            seen.append(said)
        return template(said, **keywords)

    monkeypatch.setattr(tokenizer, "apply_chat_template", spy)
    config = read_run(None, {"max_completion_length": "4"}).config
    commands.talk(tiny_policy().replace(tokenizer=tokenizer), config, ["one", "two", "", "three"])
    assert [[message["role"] for message in said] for said in seen] == [
        ["user"],
        ["user", "assistant", "user"],
        ["user"],
    ]
    assert capsys.readouterr().out.startswith(seen[1][1]["content"] + "\n")


@pytest.mark.parametrize(
    "held", [{}, {"lora": 2}, {"lora": {"rank": 2, "targets": r"layers_\d+/self_attn/q_proj"}, "quantize": "int8"}]
)
def test_a_plan_counts_what_the_run_will_hold(folder, held):
    path = write_run(folder, run_dir=None, eval_data=None, **held)
    policy = commands.load_policy(read_run(path, wanted=("model",)))
    params, base = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (policy.params, as_argument(policy.model)))
    said = run("plan", path, "--prompt-length", 8)
    (line,) = (line for line in said.splitlines() if line.startswith("held on each device: "))
    found = dict(part.split(" ", 1) for part in line.partition(": ")[2].split(" · "))
    assert found["params"] == short_number(params, "B")
    assert found.get("base", short_number(0, "B")) == short_number(base, "B")
    assert "policy" not in found, "the command donates"


def test_a_run_on_a_quantized_base_is_that_of_the_api(folder):
    path = write_run(folder, run_dir=str(folder / "quantized"), lora=2, quantize="int8", eval_data=None)
    policy = commands.load_policy(read_run(path, wanted=("model",)))
    wanted = add_lora(from_pretrained(folder / "model", quantize="int8"), jax.random.key(0), rank=2, alpha=4.0)
    assert same(policy.params, wanted.params)
    assert same(as_argument(policy.model), as_argument(wanted.model))
    assert is_quantized(as_argument(policy.model))
    run("train", path)
    run("export", folder / "quantized", folder / "of_quantized")
    for asked, said in (
        ({}, "quantize = 'int8': quantized params cannot be trained; give lora"),
        ({"lora": 2, "quantize": "int4"}, "quantize is 'int4'; use 'nf4' or 'int8'"),
        ({"lora": 2, "quantize_embeddings": 7}, "quantize_embeddings = 7: use true or false"),
        ({"lora": 2, "model": {"config": tiny_policy().config, "tokenizer": "model"}}, "model makes new weights"),
    ):
        with pytest.raises(SystemExit, match=said):
            run("train", write_run(folder, **{"run_dir": None, "quantize": "int8"} | asked))


def test_new_weights_are_made_of_a_config_and_a_tokenizer(folder):
    config = {**tiny_policy().config, "hidden_size": 8}
    model = {"config": config, "tokenizer": "model", "seed": 3}
    run("train", write_run(folder, model=model, run_dir=str(folder / "new_weights"), max_steps=1, eval_data=None))
    run("export", folder / "new_weights", folder / "out_new")
    assert from_pretrained(folder / "out_new").config["hidden_size"] == 8


@pytest.mark.parametrize("by_file", [True, False])
def test_a_plan_is_that_of_the_api(folder, monkeypatch, by_file):
    asked = []
    monkeypatch.setattr(commands, "plan_run", lambda *given, **how: asked.append((given, how)) or "a plan")
    fields = ["--per_device_train_batch_size", 4, "--num_generations", 4, "--mesh", "fsdp=2"]
    command = ["plan", write_run(folder)] if by_file else ["plan", "--model", folder / "model"]
    assert run(*command, *fields, "--memory", 16, "--device", "v5e-8", "--prompt-length", 64) == "a plan\n"
    (((model, config), how),) = asked
    assert (str(model), config.mesh, config.num_generations) == (str(folder / "model"), {"fsdp": 2}, 4)
    wanted = {"prompt_length": 64, "memory": 16e9, "param_dtype": "float32", "device": "v5e-8", "donate": True}
    wanted |= {"lora": None, "quantize": None, "quantize_embeddings": False}
    assert how == wanted
    with pytest.raises(SystemExit, match=r"model: is missing; give a RUN\.yaml that has one, or --model"):
        run("plan", "--beta", 0.1)
    with pytest.raises(SystemExit, match=r"config = None is no file of JSON .*give a config.json"):
        run("plan", "--model", "{seed: 1}")
    assert run("plan", "--model", f"{{config: {folder / 'model' / 'config.json'}}}") == "a plan\n"


def test_a_run_learns_from_a_teacher_that_its_file_names(tmp_path):
    teacher = {"model": "model", "quantize": "int8"}
    run("train", write_run(tmp_path, rewards=[], eval_data=None, teacher=teacher, distillation_coef=1.0))
    told = [line["distillation"] for line in metrics_of(tmp_path / "run") if "distillation" in line]
    assert len(told) == 2
    assert all(value > 0 for value in told), "it is the policy, rounded"


@pytest.mark.quick
def test_a_teacher_that_scores_is_not_called_and_a_class_or_function_is(tmp_path):
    code = "class Told:\n    score = None\n    __call__ = None\n\nhere = Told()\n\ndef made():\n    return here\n"
    (tmp_path / "told.py").write_text(code)
    for name in ("here", "made", "Told"):
        found = commands.load_teacher(read_run(write_run(tmp_path, teacher=f"told.py:{name}")))
        assert type(found).__name__ == "Told"
