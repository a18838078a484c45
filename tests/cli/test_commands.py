"""Each command on a small run gives the same result as the Python API with the same arguments."""

import copy
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from cli_files import lines_of, run, write_run
from PIL import Image
from tiny import tiny_policy
from tiny_vision import write_vision_model

from grpo_jax import GRPOConfig, evaluate, generate, make_prompts
from grpo_jax.cli import chat, commands
from grpo_jax.cli.runfile import read_run
from grpo_jax.hub.huggingface import from_pretrained, save_pretrained
from grpo_jax.hub.peft import add_lora, load_lora, merge_lora
from grpo_jax.models.layers import is_quantized
from grpo_jax.run.checkpoint_reader import load_params
from grpo_jax.types import as_jit_argument
from grpo_jax.watch.display import escape_controls
from grpo_jax.watch.writer import RunWriter

ALL = ("model", "data", "rewards")
same = lambda left, right: jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), left, right))
adapted = lambda folder, **how: add_lora(from_pretrained(folder / "model", **how), jax.random.key(0), rank=2, alpha=4.0)


def metrics_of(run_dir):
    lines = list(lines_of((run_dir / "metrics.jsonl").read_text().splitlines()))
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def trained(folder):
    """The run directory of a `grpo-jax train` run with adapters."""
    printed = run("train", write_run(folder, lora=2))
    assert f"to write the model: grpo-jax export {folder / 'run'} OUT" in printed
    return folder / "run"


@pytest.fixture(scope="module")
def params(folder, trained):
    """The params in that run's last checkpoint."""
    return load_params(trained, adapted(folder).params)[1]


def test_training_equals_the_api(folder, trained, monkeypatch):
    """`grpo-jax train` calls the API's `train` with the file's arguments and stores the file in the run directory."""
    calls = []
    monkeypatch.setattr(commands, "train_policy", lambda *given, **how: calls.append((given, how)))
    run("train", folder / "my_run.yaml")
    ((policy, rows, rewards, config), how), expected = calls[0], read_run(trained / "run.yaml", load=ALL)
    assert same(policy.params, adapted(folder).params)
    assert (rows, config, how["run_dir"]) == (expected.rows, expected.config, trained)
    assert [fn.__name__ for fn in rewards] == [fn.__name__ for fn in expected.rewards]
    assert {name for name, value in how.items() if value is None} == {
        *("tools", "environment_factory", "sampler", "advantage_fn", "surrogate", "teacher")
    }
    assert len(metrics_of(trained)) > 2
    assert run("report", trained).split() == [str(trained / "report.html"), str(trained / "report.png")]
    kept = yaml.safe_load((trained / "run.yaml").read_text())
    assert kept == {**yaml.safe_load((folder / "my_run.yaml").read_text()), "folder": str(folder)}


def test_resume_takes_a_run_directory_and_a_rejected_run_changes_nothing(folder, trained, monkeypatch):
    shutil.copytree(trained, folder / "moved")
    monkeypatch.chdir(folder.parent)
    run("resume", folder / "moved", "--max_steps", 3)
    assert metrics_of(folder / "moved")[: len(metrics_of(trained))] == metrics_of(trained)
    assert [line["step"] for line in metrics_of(folder / "moved") if "loss" in line] == [1, 2, 3]
    assert yaml.safe_load((folder / "moved" / "run.yaml").read_text())["max_steps"] == 3
    before = (trained / "run.yaml").read_text()
    with pytest.raises(SystemExit, match="contains a run with different settings"):
        run("train", write_run(folder, lora=2), "--learning_rate", "0.5")
    assert (trained / "run.yaml").read_text() == before
    with pytest.raises(SystemExit, match="max_completion_length = 400"):
        run("train", write_run(folder, run_dir=str(folder / "new"), max_completion_length=400))


def test_export_writes_adapters_or_merges_them(folder, trained, params):
    assert "wrote the policy from step 2" in run("export", trained, folder / "adapters")
    named = json.loads((folder / "adapters" / "adapter_config.json").read_text())["base_model_name_or_path"]
    exported = load_lora(folder / "adapters", from_pretrained(named))
    assert named == str(folder / "model")
    assert same(exported.params, params)
    run("export", trained, folder / "merged", "--merge")
    merged = merge_lora(adapted(folder).replace(params=params))
    assert same(from_pretrained(folder / "merged").params, merged.params)
    with pytest.raises(SystemExit, match="contains no checkpoint at step 1"):
        run("export", trained, folder / "out", "--checkpoint=1")


@pytest.mark.quick
def test_api_run_is_read_with_its_policy_and_sampling_settings(tmp_path):
    save_pretrained(tmp_path / "policy", tiny_policy())
    config = GRPOConfig(temperature=0.5, learning_rate=0.5, stop=["😀"])
    RunWriter(tmp_path).config(config, param_dtype="bfloat16")
    found = commands._run_at(tmp_path, {"top_k": "5"}, ("model",))
    assert (found.config.temperature, found.config.top_k, found.config.learning_rate) == (0.5, 5, 1e-6)
    assert found.config.stop == config.stop
    policy = commands.load_policy(found)
    assert policy.eos_token_ids == tiny_policy().eos_token_ids
    assert {leaf.dtype.name for leaf in jax.tree.leaves(policy.params)} == {"bfloat16"}
    with pytest.raises(SystemExit, match="data is missing"):
        run("evaluate", tmp_path)


def test_evaluate_equals_the_last_evaluation_of_the_run(folder, trained, params):
    with pytest.raises(SystemExit, match=r"--out .*none/out.jsonl: its directory does not exist; create it first"):
        run("evaluate", trained, "--out", folder / "none" / "out.jsonl")
    out = folder / "completions.jsonl"
    found = json.loads(run("evaluate", trained, "--out", out))
    evaluations = [line for line in metrics_of(trained) if "eval/early" in line]
    assert found["step"] == evaluations[-1]["step"] == 2
    means = {f"eval/{name}": found[name] for name in ("early", "accuracy", "mean_length")}
    assert means.items() <= evaluations[-1].items()
    assert [row["prompt"] for row in lines_of(out.read_text().splitlines())] == ["say a: "] * 2 + ["say aa: "] * 2


@pytest.mark.quick
def test_directory_without_a_run_is_rejected(tmp_path):
    neither = r"is not a run directory; it contains neither run.yaml nor run.json"
    for command in (["resume", tmp_path], ["export", tmp_path, "out"], ["evaluate", tmp_path]):
        with pytest.raises(SystemExit, match=neither):
            run(*command)
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "run.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"does not contain metrics.jsonl; pass a run directory"):
        run("report", tmp_path)
    with pytest.raises(SystemExit, match="so the directory does not contain its data, its reward functions"):
        run("chat", tmp_path / "sums", "--say", "ab")


def test_chat_prints_the_same_completions_as_generate(folder, trained, params):
    policy, letters = adapted(folder).replace(params=params), [*"abcdefghijklm", "."]
    how = {"max_completion_length": 40, "stop": letters, "stop_token_ids": 9, "max_turn_length": 30}
    printed = ""
    for number, prompt in enumerate(["ab", "c"]):
        drawn = generate(
            policy.model, params, make_prompts([policy.tokenizer(prompt)["input_ids"]], length=32), jax.random.key(0),
            prompt_indices=np.array([number]), num_generations=1, eos_token_ids=policy.eos_token_ids,
            tokenizer=policy.tokenizer, **how,
        )  # fmt: skip
        ids = np.asarray(drawn.tokens)[np.asarray(drawn.mask)]
        text = policy.tokenizer.decode(ids, skip_special_tokens=True)
        printed += f"> {prompt}\n{escape_controls(text)}\n"
    fields = [part for name, value in how.items() for part in (f"--{name}", json.dumps(value))]
    flags = ["--say", "ab", "--say", "c", "--seed", 0]
    assert run("chat", trained, *flags, *fields) == printed
    short = ["--say", "ab", "--temperature", 0, "--max_completion_length", 40]
    greedy = [run("chat", trained, *short, "--seed", seed) for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    with pytest.raises(SystemExit, match="special tokens; got '<eos>'"):
        run("chat", folder / "model", "--say", "a", "--stop", "<eos>")


def test_greedy_chat_ignores_the_number_of_completions_in_evaluations(tmp_path, monkeypatch):
    write_run(tmp_path, num_generations_eval=4, temperature_eval=1.0).rename(tmp_path / "run.yaml")
    configs = []
    monkeypatch.setattr(commands, "_load_checkpoint", lambda *_: (0, None))
    monkeypatch.setattr(commands, "run_chat", lambda policy, config, prompts, echo: configs.append(config))
    run("chat", tmp_path, "--say", "ab", "--temperature", 0)
    assert configs[0].eval_temperature == 0


def test_conversation_continues_until_an_empty_line(monkeypatch, capsys):
    printer, printed = chat.Printer(tiny_policy().tokenizer), []
    ids = np.array(tiny_policy().tokenizer("aé!")["input_ids"])
    for count in range(len(ids) + 1):  # an incomplete character is not printed
        printer(ids[None, None], (np.arange(len(ids)) < count)[None, None])
        printed.append(capsys.readouterr().out)
    assert printed == ["", "a", "", "é", "!"]
    seen, tokenizer = [], copy.deepcopy(tiny_policy().tokenizer)
    tokenizer.chat_template = "{{ messages }}"
    monkeypatch.setattr(
        chat, "_answer", lambda policy, config, row, index: seen.append(row["prompt"]) or f"answer {index}"
    )
    chat.run_chat(tiny_policy().replace(tokenizer=tokenizer), read_run(None).config, ["one", "two", "", "three"])
    roles = [[(message["role"][0], message["content"]) for message in prompt] for prompt in seen]
    first, third = [("u", "one")], [("u", "three")]
    assert roles == [first, [*first, ("a", "answer 0"), ("u", "two")], third]


def test_images_are_added_to_the_next_message(tmp_path, folder):
    """An image stays in the conversation; without a chat template, the prompt contains its placeholder."""
    model, image = write_vision_model(tmp_path / "model", "smolvlm"), tmp_path / "a digit.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(image)
    how = {"max_completion_length": 4, "temperature": 0}
    flags = [f"--{name}={value}" for name, value in how.items()]
    lines = run("chat", model, "--say", f"/image {image}", "--say", "what?", "--say", "sure?", *flags).split("\n")
    assert lines[:2] == [f"> /image {image}", "> what?"]
    policy = from_pretrained(model)
    said = [{"type": "image", "image": str(image)}, {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": lines[2]}]
    prompts = [messages[:1], [*messages, {"role": "user", "content": "sure?"}]]
    rows = [{"prompt": prompt} for prompt in prompts]
    wanted = evaluate(policy, rows, lambda completions: [0.0] * len(completions), **how)[1]
    assert [row["completion"][0]["content"] for row in wanted] == [lines[2], lines[4]]
    (model / "chat_template.jinja").unlink()
    assert run("chat", model, "--say", f"/image {image}", "--say", "<image>what?", *flags).count("\n") == 3
    with pytest.raises(SystemExit, match=r"the prompt in row 0 has images; .* does not support images"):
        run("chat", folder / "model", "--say", f"/image {image}", "--say", "what?")


def test_checkpoints_with_a_trained_tower_are_read(tmp_path):
    model, image = write_vision_model(tmp_path / "model", "smolvlm"), str(tmp_path / "digit.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(image)
    (tmp_path / "images.jsonl").write_text(json.dumps({"question": "what?", "answer": "a", "image": image}) + "\n")
    changes = {"data": "images.jsonl", "eval_data": None, "prompt": [{"role": "user", "content": "{question}"}]}
    changes |= {"temperature_eval": 0, "freeze_vision": False, "max_steps": 1}
    run("train", write_run(tmp_path, **changes))
    run("export", tmp_path / "run", tmp_path / "out")
    before, after = (from_pretrained(path).extra_tensors for path in (model, tmp_path / "out"))
    assert not any(np.array_equal(after[name], before[name]) for name in before if name.endswith("proj.weight"))
    said = ["--say", f"/image {image}", "--say", "what?", "--temperature", 0, "--max_completion_length", 4]
    assert run("chat", tmp_path / "run", *said) == run("chat", tmp_path / "out", *said)


def test_policy_is_loaded_with_adapters_on_a_quantized_base(tmp_path):
    path = write_run(tmp_path, lora={"rank": 2, "alpha": 4}, quantize="int8")
    policy = commands.load_policy(read_run(path, load=("model",)))
    wanted = adapted(tmp_path, quantize="int8")
    assert same((policy.params, as_jit_argument(policy.model)), (wanted.params, as_jit_argument(wanted.model)))
    assert is_quantized(as_jit_argument(policy.model))
    with pytest.raises(SystemExit, match="quantized"):
        run("train", path, "--lora", "null")


@pytest.mark.quick
def test_teacher_may_be_a_scorer_a_class_or_a_function(tmp_path):
    code = "class Told:\n    score = None\n    __call__ = None\n\nhere = Told()\n\ndef made():\n    return here\n"
    (tmp_path / "told.py").write_text(code)
    for name in ("here", "made", "Told"):
        found = commands.load_teacher(read_run(write_run(tmp_path, teacher=f"told.py:{name}")))
        assert type(found).__name__ == "Told"


@pytest.mark.quick
def test_plan_calls_the_api(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(commands, "plan_run", lambda *given, **how: calls.append((given, how)) or "a plan")
    command = ["plan", write_run(tmp_path)]
    fields = ["--per_device_train_batch_size", 4, "--num_generations", 4, "--mesh", "fsdp=2"]
    assert run(*command, *fields, "--memory", 16, "--device", "v5e-8", "--prompt-length", 64) == "a plan\n"
    assert run("plan", "--model", tmp_path / "model") == "a plan\n"
    ((model, config), how), ((model_alone, _), _) = calls
    assert str(model) == str(model_alone) == str(tmp_path / "model")
    assert (config.mesh, config.num_generations) == ({"fsdp": 2}, 4)
    wanted = {"prompt_length": 64, "memory": 16e9, "param_dtype": "float32", "device": "v5e-8", "donate": True}
    wanted |= {"lora": None, "quantize": None}
    assert how == wanted
    with pytest.raises(SystemExit, match=r"model is missing; set it in RUN.yaml or pass --model"):
        run("plan", "--beta", 0.1)


@pytest.mark.quick
def test_from_trl_exits_with_1_if_a_field_is_lost(tmp_path):
    """`from-trl` converts a TRL script to a RUN.yaml and exits with 1 if a field is lost."""
    script, out = tmp_path / "grpo.yaml", tmp_path / "run.yaml"
    text = "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: openai/gsm8k\nreward_funcs: [my.rewards.short]\n"
    script.write_text(text + "learning_rate: 1.0e-5\n")
    assert run("from-trl", script, "--out", out) == ""
    assert out.read_text() == run("from-trl", script)
    found = read_run(out)
    assert (found.config.learning_rate, found.model) == (1e-5, "Qwen/Qwen3-0.6B")
    assert found.values["data"] == {"name": "openai/gsm8k", "split": "train"}
    assert found.values["rewards"] == ["my.rewards:short"]
    script.write_text(text + "repetition_penalty: 1.1\n")
    with pytest.raises(SystemExit) as ended:
        run("from-trl", script, "--out", out)
    assert ended.value.code == "grpo-jax from-trl: fields that cannot be converted: repetition_penalty"
    assert "\n#   repetition_penalty: " in out.read_text()
    script.write_text("learning_rat: 1\nbeta: 0.1\nsystem_prompt: hi\n")
    with pytest.raises(SystemExit, match=r"2 errors:\n  learning_rat: no such field; .*learning_rate\?\n  system_prom"):
        run("from-trl", script)


def test_init_writes_a_run_that_works_offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("init", "first").splitlines()[-1] == f"to start the run: grpo-jax train {Path('first/my_run.yaml')}"
    found = json.loads(run("evaluate", "first/my_run.yaml", "--num_generations_eval", 2))
    assert 0 < found["in_word"] < 1, "the initial rewards must vary"
    with pytest.raises(SystemExit, match=r"my_run.yaml already exists; move or delete it, or pass"):
        run("init", "first")
    for name in ("x #1", "a: b", '"'):
        run("init", name)
        assert read_run(Path(name, "my_run.yaml")).run_dir == Path("runs", name)
