"""A script written for TRL runs with another import, and what it cannot have it is told."""

import copy
import json
import sys
import types

import jax
import pytest
from hub_server import serving
from test_readme import chat_checkpoint
from test_trackers import Fake, scalars
from tiny import tiny_policy

import grpo_jax
from grpo_jax import compat, from_pretrained, save_pretrained
from grpo_jax.compat.records import TrainOutput
from grpo_jax.compat.trainer import GRPOConfig, GRPOTrainer
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.quantized import Quantized

# As it would be written for TRL, but for the import, which the issue lets us change. Its dataset is conversational and
# has a column with the truth; of its two reward functions one is asynchronous, and they use all that TRL gives.
SCRIPT = """
import asyncio

from {package} import GRPOConfig, GRPOTrainer

def correct(prompts, completions, ground_truth, log_extra=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    log_extra("truth", ground_truth)
    return [1.0 if truth in content else 0.0 for content, truth in zip(contents, ground_truth)]

async def brevity(completions, completion_ids, trainer_state, log_metric, **kwargs):
    await asyncio.sleep(0)
    assert kwargs["topic"] == ["sums"] * len(completions)
    lengths = [len(completion[0]["content"]) for completion in completions]
    log_metric("mean_ids", sum(map(len, completion_ids)) / len(completion_ids))
    log_metric("at_step", trainer_state.global_step)
    return [-length / 100 for length in lengths]

training_args = GRPOConfig(
    output_dir=output_dir,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=8,
    learning_rate=1e-3,
    max_steps=2,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="no",
    bf16=False,
    report_to="none",
    reward_weights=[1.0, 0.5],
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=[correct, brevity],
    args=training_args,
    train_dataset=dataset,
    eval_dataset=dataset,
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_model(training_args.output_dir)
"""


def reward(completions):
    return [0.0 for _ in completions]


# The fields that have effects outside of the numbers: trackers, the hub, the best checkpoint, how the model is loaded.
OUTWARD = """
from {package} import GRPOConfig, GRPOTrainer

def short(completions, **kwargs):
    return [float(-len(completion[0]["content"])) for completion in completions]

def even(completion_ids, **kwargs):
    return [float(len(ids) % 2 == 0) for ids in completion_ids]

args = GRPOConfig(
    output_dir=output_dir,
    run_name="sums-1",
    project="sums",
    report_to=["tensorboard", "wandb", "trackio"],
    logging_steps=2,
    logging_first_step=True,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=4,
    learning_rate=0.05,
    max_steps=3,
    reward_weights=[1.0, 0.5],
    eval_strategy="steps",
    eval_steps=1,
    save_strategy="steps",
    save_steps=1,
    save_total_limit=1,
    load_best_model_at_end=True,
    metric_for_best_model="eval_reward",
    greater_is_better=True,
    model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "flash_attention_2"},
    push_to_hub=True,
    hub_model_id="me/sums",
    hub_private_repo=True,
)
trainer = GRPOTrainer(model=model, reward_funcs=[short, even], args=args, train_dataset=dataset, eval_dataset=dataset)
trainer.train()
trainer.save_model()
trainer.push_to_hub()
"""


def test_a_script_with_trackers_a_hub_and_the_best_model_runs_with_another_import(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    packages = {name: Fake(name) for name in ("wandb", "trackio")}
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}]} for n in range(2)]
    names = {"model": chat_checkpoint(tmp_path), "output_dir": str(tmp_path / "out"), "dataset": rows}
    with serving(monkeypatch) as hub:
        exec(compile(OUTWARD.replace("{package}", "grpo_jax.compat.trainer"), "script.py", "exec"), names)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    # logging_first_step: 1 beside every second and the last.
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert len([line for line in lines if "loss" in line and line["step"] == 1]) == 1
    # report_to, run_name, project: each tracker has every line, under the name of the run, and is closed.
    for package in packages.values():
        (_, settings), *logged, last = package.done
        assert (settings["project"], settings["name"]) == ("sums", "sums-1")
        assert [step for _, step, _ in logged] == [line["step"] for line in lines]
        assert last == ("finish",)
    (events,) = (tmp_path / "out" / "tensorboard").glob("events.out.tfevents.*")
    assert {step for step, _ in scalars(events)} == {0, 1, 2, 3}
    # load_best_model_at_end: the state with the best weighted sum, whose checkpoint is kept beside the last.
    totals = {line["step"]: line["eval/reward"] for line in lines if "eval/reward" in line}
    sums = {line["step"]: line["eval/short"] + 0.5 * line["eval/even"] for line in lines if "eval/even" in line}
    assert totals == pytest.approx(sums)
    best = max(range(1, 4), key=lambda step: (totals[step], step))
    trainer = names["trainer"]
    assert int(trainer.train_state.step) == best
    assert {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()} == {str(best), "3"}
    # model_init_kwargs: params in bfloat16, with masters for the optimizer, computing in bfloat16.
    assert {leaf.dtype.name for leaf in jax.tree.leaves(trainer.policy.params)} == {"bfloat16"}
    assert trainer.config.compute_dtype == "bfloat16"
    # push_to_hub: at checkpoints, where none is under way, and at the end; save_model and push_to_hub push too.
    assert hub.private == {"me/sums": True}
    messages = [message for _, _, message, _ in hub.commits]
    assert messages[0] == "Training in progress, step 1"
    assert messages[-3:] == ["End of training", "Model save", "End of training"]
    assert all(files.keys() >= {"config.json", "model.safetensors", "tokenizer.json"} for *_, files in hub.commits)
    saved = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert [files["model.safetensors"] == saved for *_, files in hub.commits[-3:]] == [True] * 3


@pytest.mark.quick
def test_the_dtype_of_a_model_is_that_of_model_init_kwargs_or_of_its_files(tmp_path):
    model = chat_checkpoint(tmp_path)
    save_pretrained(tmp_path / "half", from_pretrained(model), dtype="bfloat16")

    def dtypes(name, **values):
        trainer = GRPOTrainer(str(name), reward, args=GRPOConfig(**values))
        params = {leaf.dtype.name for leaf in jax.tree.leaves(trainer.policy.params)}
        return params, trainer.config.compute_dtype

    auto = {"model_init_kwargs": {"dtype": "auto"}}
    assert dtypes(model) == dtypes(model, **auto) == dtypes(tmp_path / "half") == ({"float32"}, "auto")
    assert dtypes(tmp_path / "half", **auto) == ({"bfloat16"}, "bfloat16")
    assert dtypes(model, model_init_kwargs={"torch_dtype": "float32"}, bf16=True) == ({"float32"}, "bfloat16")
    with pytest.raises(ValueError, match="model_init_kwargs has the dtype 'float32', and model is a Policy"):
        GRPOTrainer(tiny_policy(), reward, args=GRPOConfig(model_init_kwargs={"dtype": "float32"}))


@pytest.mark.quick
def test_the_best_model_needs_a_directory_and_an_evaluation():
    args = {"load_best_model_at_end": True, "metric_for_best_model": "reward", "max_steps": 1, "save_steps": 4}
    args |= {"max_completion_length": 4}
    trainer = GRPOTrainer(tiny_policy(), reward, args=GRPOConfig(**args), train_dataset=[{"prompt": "a"}])
    with pytest.raises(ValueError, match=r"load_best_model_at_end = True: there are no checkpoints .* give run_dir"):
        trainer.train()
    args |= {"eval_strategy": "steps", "eval_steps": 4, "output_dir": "never-made"}
    trainer = GRPOTrainer(tiny_policy(), reward, args=GRPOConfig(**args), train_dataset=[{"prompt": "a"}])
    with pytest.raises(ValueError, match="eval_steps = 4: there is nothing to evaluate on; pass eval_dataset"):
        trainer.train()


def make_dataset(rows):
    """A `datasets.Dataset` where that is installed; a list has the same rows."""
    try:
        import datasets
    except ImportError:
        return rows
    return datasets.Dataset.from_list(rows)


def test_a_trl_script_runs_with_another_import(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}+1="}], "ground_truth": str(n + 1), "topic": "sums"}
        for n in range(4)
    ]
    out = tmp_path / "out"
    names = {"model": chat_checkpoint(tmp_path), "output_dir": str(out), "dataset": make_dataset(rows)}
    exec(compile(SCRIPT.replace("{package}", "grpo_jax.compat.trainer"), "script.py", "exec"), names)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["at_step"] for line in steps] == [0, 1]
    assert all({"rewards/correct/mean", "rewards/brevity/mean"} <= set(line) for line in steps)
    for line in steps:
        assert line["mean_ids"] == pytest.approx(line["completions/mean_length"])
        assert -0.5 < line["rewards/brevity/mean"] < 0
    assert [line["eval/at_step"] for line in lines if "eval/brevity" in line] == [0, 2]
    completions = [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]
    assert len(completions) == 2 * 8
    truths = {row["prompt"][0]["content"]: row["ground_truth"] for row in rows}
    assert all(row["truth"] == truths[row["prompt"][0]["content"]] for row in completions)
    found = names["metrics"]
    assert found.keys() == {
        *("eval_rewards/correct/mean", "eval_rewards/brevity/mean", "eval_reward"),
        *("eval_completions/mean_length", "eval_completions/clipped_ratio", "eval_mean_ids", "eval_at_step"),
    }
    total = found["eval_rewards/correct/mean"] + 0.5 * found["eval_rewards/brevity/mean"]
    assert found["eval_reward"] == pytest.approx(total), "every completion is scored by both"
    saved = from_pretrained(out)
    trained = names["trainer"].train_state.params
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), saved.params, trained))
    assert not jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), saved.params, tiny_policy().params))


@pytest.mark.quick
def test_the_config_is_ours_and_refuses_what_cannot_be_had():
    args = GRPOConfig(output_dir="out", bf16=True, beta=0.1, kl_placement="reward")
    assert args.output_dir == "out"
    assert args.config == grpo_jax.GRPOConfig(compute_dtype="bfloat16", beta=0.1, kl_placement="reward")
    with pytest.raises(
        ValueError, match=r"asks for what is not here:\n  hub_token: .*\n  optim: 'sgd': pass optimizer"
    ):
        GRPOConfig(hub_token="hf_secret", optim="sgd")
    with pytest.raises(ValueError, match="num_generations = 1: must be at least 2"):
        GRPOConfig(num_generations=1)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_processing_classes": 4, "use_liger": True}, "takes no reward_processing_classes, use_liger here"),
        ({"quantization_config": 4}, "quantization_config asks for 'nf4' with load_in_4bit = False"),
        ({"rollout_func": print, "sampler": print}, "give one of them"),
        ({"rollout_func": print, "args": grpo_jax.GRPOConfig(rollout_ahead=True)}, "rollout_ahead does not go with"),
        ({"model": object()}, "model is a object: give a name, a directory or a Policy"),
        ({"args": {"beta": 0.1}}, "args is a builtins.dict: use grpo_jax.compat.trainer.GRPOConfig"),
        ({"optimizers": (None, 1)}, "optimizers has a scheduler"),
        ({"eval_dataset": {"a": []}}, "eval_dataset is a dict"),
        ({"peft_config": types.SimpleNamespace(r=4, lora_alpha=8, use_dora=True)}, "peft_config has use_dora = True"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_the_trainer_does_not_take_it_refuses_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        GRPOTrainer(**{"model": tiny_policy(), "reward_funcs": reward, **arguments})


@pytest.mark.quick
def test_the_tokenizer_that_is_given_decides_what_ends_a_completion():
    """A base model with a ChatML tokenizer: the files name one EOS, the tokenizer another."""
    tokenizer = copy.deepcopy(tiny_policy().tokenizer)
    tokenizer.eos_token = "!"
    with pytest.warns(UserWarning, match=r"the EOS of the tokenizer, '!' \(\d+\), ends completions too"):
        trainer = GRPOTrainer(tiny_policy(), reward, processing_class=tokenizer)
    assert trainer.policy.eos_token_ids == (tokenizer.eos_token_id, 1)
    assert trainer.processing_class is tokenizer


@pytest.mark.quick
def test_adapters_are_those_that_peft_asks_for_without_dropout_where_it_is_disabled():
    peft = types.SimpleNamespace(r=4, lora_alpha=8, lora_dropout=0.3, target_modules=["o_proj"])
    for args, dropout in ((GRPOConfig(), 0.3), (grpo_jax.GRPOConfig(), 0.3), (GRPOConfig(disable_dropout=True), 0.0)):
        policy = GRPOTrainer(tiny_policy(), reward, args=args, peft_config=peft).policy
        assert isinstance(policy.model, LoraModel)
        assert (policy.model.scale, policy.model.dropout) == (2.0, dropout)
        assert list(policy.params["layers_0"]["self_attn"]) == ["o_proj"]


@pytest.mark.quick
def test_a_trainer_says_what_it_lacks(tmp_path):
    trainer = GRPOTrainer(tiny_policy(), reward, processing_class=tiny_policy().tokenizer)
    with pytest.raises(ValueError, match="eval_dataset is None, here and in GRPOTrainer"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="output_dir is None, here and in GRPOConfig"):
        trainer.save_model()
    with pytest.raises(ValueError, match="resume_from_checkpoint is 'checkpoint-5'"):
        trainer.train(resume_from_checkpoint="checkpoint-5")


# What TRL's documentation, example scripts and notebooks use of a trainer, its arguments and what train() returns: read
# out of docs/source, examples/ and trl/scripts/grpo.py of TRL 1.10 and 1.16.
AROUND = """
from {package} import GRPOConfig, GRPOTrainer

def short(completions, **kwargs):
    return [float(-len(completion[0]["content"])) for completion in completions]

training_args = GRPOConfig(
    output_dir=output_dir, per_device_train_batch_size=4, num_generations=4, max_completion_length=4, max_steps=2,
    logging_steps=1, learning_rate=1e-3, hub_model_id="me/sums", eval_strategy="steps", eval_steps=2,
)
training_args.model_init_kwargs = {"revision": None, "trust_remote_code": False, "dtype": "float32"}
trainer = GRPOTrainer(
    model=model, reward_funcs=short, args=training_args, train_dataset=dataset, eval_dataset=dataset,
    callbacks=[Progress()], quantization_config=None, peft_config=None,
)
trainer.add_callback(Logged(logged))
trainer_stats = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
print(f"{trainer_stats.metrics['train_runtime']} seconds used for training.")
trainer.accelerator.print("done")
metrics = trainer_stats.metrics
metrics["train_samples"] = len(trainer.train_dataset)
trainer.log_metrics("train", metrics)
trainer.save_metrics("train", metrics)
trainer.save_state()
if trainer.is_world_process_zero():
    metrics = trainer.evaluate(eval_dataset=trainer.eval_dataset)
    trainer.save_metrics("eval", metrics)
trainer.save_model(training_args.output_dir)
trainer.model.save_pretrained(trainer.args.output_dir + "/again")
repository = f"https://huggingface.co/{trainer.hub_model_id}"
ids = trainer.processing_class("ab")["input_ids"]
texts = trainer.tokenizer.batch_decode([ids], skip_special_tokens=True)
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
trainer.end()
"""


def logged_callback():
    """A callback object as the documentation has it, of transformers' class where that can be imported."""
    try:
        from transformers import TrainerCallback
    except ImportError:
        TrainerCallback = type("TrainerCallback", (), {})

    class Logged(TrainerCallback):
        def __init__(self, lines):
            self.lines = lines

        def on_train_begin(self, args, state, control, **kwargs):
            self.lines.append(("begin", args.learning_rate, state.global_step))

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.lines.append((state.global_step, sorted(logs)))
            assert kwargs["processing_class"] is not None

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            self.lines.append(("evaluated", metrics["eval_rewards/short/mean"]))

        def on_train_end(self, args, state, control, **kwargs):
            self.lines.append(("end", state.global_step, state.max_steps))

    return Logged


def test_what_scripts_and_notebooks_use_around_training_is_there(tmp_path, capsys):
    out, logged = tmp_path / "out", []
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}]} for n in range(2)]
    names = {"model": chat_checkpoint(tmp_path), "output_dir": str(out), "dataset": rows, "logged": logged}
    names |= {"Logged": logged_callback(), "Progress": compat.RichProgressCallback}
    exec(compile(AROUND.replace("{package}", "grpo_jax.compat"), "script.py", "exec"), names)
    trainer, stats = names["trainer"], names["trainer_stats"]
    # One completion batch of 4 is one prompt: two steps see both rows once.
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert stats.global_step == trainer.state.global_step == trainer.state.max_steps == 2
    assert names["losses"] == [line["loss"] for line in lines if "loss" in line]
    assert stats.training_loss == pytest.approx(sum(names["losses"]) / 2)
    assert (trainer.state.epoch, trainer.state.num_train_epochs, stats.metrics["epoch"]) == (1.0, 1, 1.0)
    assert [line["step"] for line in trainer.state.log_history] == [line["step"] for line in lines] == [0, 1, 2, 2]
    held_out = [line["eval_rewards/short/mean"] for line in trainer.state.log_history if "eval_reward" in line]
    assert held_out == [line["eval/short"] for line in lines if "eval/short" in line]
    rate = stats.metrics["train_steps_per_second"] * stats.metrics["train_runtime"]
    assert rate == pytest.approx(2)
    assert stats.metrics["train_samples_per_second"] == pytest.approx(4 * stats.metrics["train_steps_per_second"])
    # Callback objects hear all of it.
    assert logged[0] == ("begin", 1e-3, 0)
    assert logged[-1] == ("end", 2, 2)
    assert [event[1] for event in logged if event[0] == "evaluated"] == held_out
    assert [step for step, *_ in logged if isinstance(step, int)] == [0, 1, 2, 2]
    # Files, prints and names.
    printed = capsys.readouterr().out
    assert "seconds used for training." in printed
    assert "done\n***** train metrics *****" in printed
    written = {path.stem: json.loads(path.read_text()) for path in out.glob("*_results.json")}
    assert written["train_results"]["train_samples"] == 2
    assert written["all_results"] == written["train_results"] | written["eval_results"]
    assert json.loads((out / "trainer_state.json").read_text())["log_history"] == trainer.state.log_history
    assert names["repository"] == "https://huggingface.co/me/sums"
    assert names["texts"] == ["ab"]
    again = from_pretrained(out / "again")
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again.params, trainer.train_state.params))
    dumped = trainer.args.to_dict()
    assert (dumped["learning_rate"], dumped["output_dir"], dumped["eval_strategy"]) == (1e-3, str(out), "steps")
    assert grpo_jax.compat.from_trl(dumped).config() == trainer.args.config
    # A finished run called again has the same log and no time of its own.
    assert trainer.train().training_loss == stats.training_loss
    assert len(trainer.state.log_history) == 4


@pytest.mark.quick
@pytest.mark.parametrize(
    ("reach", "message"),
    [
        (lambda t: t.lr_scheduler, "GRPOTrainer has no lr_scheduler here: lr_scheduler_type names it"),
        (lambda t: t.compute_loss, "grpo_jax.grpo_loss is the loss"),
        (lambda t: t.vllm_client_of_mine, "no vllm_client_of_mine here: docs/coming_from_trl.md lists what is here"),
        (lambda t: t.model.generate, "trainer.model, a policy of JAX, has no generate here: grpo_jax.generate"),
        (lambda t: t.accelerator.gather, "trainer.accelerator has no gather here: metrics are gathered already"),
        (lambda t: t.state.best_metric, "trainer.state has no best_metric here: the run prints its best checkpoint"),
        (lambda t: TrainOutput(0, 0.0, {}).params, "what train.. returns has no params here: trainer.train_state is"),
        (lambda t: t.args.learning_rat, "has no learning_rat: did you mean learning_rate?"),
        (lambda t: setattr(t.args, "learning_rat", 1), "has no learning_rat: did you mean learning_rate?"),
        (lambda t: type("Mine", (GRPOTrainer,), {"compute_loss": print}), "Mine.compute_loss would not be called"),
    ],
)
def test_any_other_name_says_where_it_went(reach, message):
    trainer = GRPOTrainer(tiny_policy(), reward)
    with pytest.raises(AttributeError, match=message):
        reach(trainer)


@pytest.mark.quick
def test_arguments_that_are_set_are_checked_and_translated():
    args = GRPOConfig(output_dir="out")
    args.learning_rate, args.bf16 = 1e-4, True
    assert (args.learning_rate, args.config.learning_rate, args.config.compute_dtype) == (1e-4, 1e-4, "bfloat16")
    with pytest.raises(ValueError, match="num_generations = 1: must be at least 2"):
        args.num_generations = 1
    with pytest.raises(ValueError, match="asks for what is not here:\n  hub_token"):
        args.hub_token = "hf_secret"
    assert (args.num_generations, args.hub_token) == (8, None), "nothing was taken"
    assert repr(args) == "GRPOConfig(output_dir='out', learning_rate=0.0001, bf16=True)"
    assert copy.deepcopy(args).to_dict() == args.to_dict()


class Early:
    def on_log(self, args, state, control, logs=None, **kwargs):
        control.should_training_stop = state.global_step >= 2
        return control


def test_a_callback_that_asks_to_stop_ends_the_run_saved(tmp_path):
    args = GRPOConfig(str(tmp_path), max_steps=5, logging_steps=1, max_completion_length=4, learning_rate=1e-3)
    trainer = GRPOTrainer(tiny_policy(), reward, args, [{"prompt": "a"}], callbacks=[Early])
    assert trainer.train().global_step == int(trainer.train_state.step) == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    assert isinstance(trainer.pop_callback(Early), Early)
    assert trainer.train().global_step == 5


@pytest.mark.quick
def test_callback_objects_that_would_never_be_called_are_refused():
    class Stepwise:
        def on_step_end(self, args, state, control, **kwargs): ...

    class Saving:
        def on_save(self, args, state, control, **kwargs): ...

    def trainer(callback, **settings):
        return GRPOTrainer(tiny_policy(), reward, GRPOConfig(**settings), callbacks=[callback])

    trainer(Stepwise(), logging_steps=1)
    with pytest.raises(ValueError, match=r"a Stepwise with on_step_end, which nothing here calls: .* logging_steps=1"):
        trainer(Stepwise())
    with pytest.raises(ValueError, match="a Saving with on_save, which nothing here calls"):
        trainer(Saving(), logging_steps=1)
    with pytest.raises(ValueError, match="callbacks has a object: give a function"):
        trainer(object())
    with pytest.raises(ImportError, match="TrlParser takes dataclasses, and GRPOConfig is none here"):
        compat.TrlParser  # noqa: B018


@pytest.mark.quick
def test_a_base_is_held_as_bitsandbytes_is_asked_to(tmp_path):
    save_pretrained(tmp_path, tiny_policy())
    peft = types.SimpleNamespace(r=4, lora_alpha=8)
    asked = types.SimpleNamespace(load_in_8bit=True, load_in_4bit=False, bnb_4bit_quant_type="fp4")
    policy = GRPOTrainer(str(tmp_path), reward, peft_config=peft, quantization_config=asked).policy
    held = jax.tree.leaves(policy.model.base, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    assert {leaf.codes.dtype.name for leaf in held if isinstance(leaf, Quantized)} == {"int8"}
    with pytest.raises(ValueError, match="without a peft_config: quantized weights are not trained"):
        GRPOTrainer(str(tmp_path), reward, quantization_config=asked)
