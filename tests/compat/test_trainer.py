"""TRL scripts run with a changed import; the trainer rejects unsupported arguments and attributes by name."""

import json
import re
import types

import jax
import numpy as np
import pytest
from test_readme import chat_checkpoint
from tiny import tiny_policy

import grpo_jax
from grpo_jax import compat, from_pretrained
from grpo_jax.compat import trainer as module
from grpo_jax.compat.trainer import GRPOConfig, GRPOTrainer

# A TRL script with a changed import. The dataset is conversational; one reward function is asynchronous.
SCRIPT = """
import asyncio

from grpo_jax.compat import GRPOConfig, GRPOTrainer

def correct(prompts, completions, ground_truth, log_extra=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    log_extra("truth", ground_truth)
    return [1.0 if truth in content else 0.0 for content, truth in zip(contents, ground_truth)]

async def brevity(completions, completion_ids, trainer_state, log_metric, **kwargs):
    await asyncio.sleep(0)
    assert kwargs["topic"] == ["sums"] * len(completions)
    log_metric("at_step", trainer_state.global_step)
    return [-len(completion[0]["content"]) / 100 for completion in completions]

training_args = GRPOConfig(
    output_dir=output_dir, per_device_train_batch_size=8, num_generations=4, max_completion_length=4, max_steps=2,
    logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="no", bf16=False, report_to="none",
    reward_weights=[1.0, 0.5],
)
training_args.learning_rate = 1e-3
trainer = GRPOTrainer(
    model=model, reward_funcs=[correct, brevity], args=training_args, train_dataset=dataset, eval_dataset=dataset,
    callbacks=[lambda step, metrics: events.append((step, sorted(metrics)))],
)
trainer.add_callback(lambda step, metrics: events.append(step))
trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
metrics = trainer.evaluate()
trainer.save_model(training_args.output_dir)
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
"""


def reward(completions):
    return [0.0 for _ in completions]


def test_trl_script_runs_with_a_changed_import(tmp_path):
    """A TRL script runs after only its import is changed."""
    columns = {"prompt": [{"role": "user", "content": "1+1="}], "ground_truth": "2", "topic": "sums"}
    out, events = tmp_path / "out", []
    names = {"model": chat_checkpoint(tmp_path), "output_dir": str(out), "dataset": [columns, columns]}
    names |= {"events": events}
    exec(compile(SCRIPT, "script.py", "exec"), names)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["at_step"] for line in steps] == [0, 1]
    completions = [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]
    assert [row["truth"] for row in completions] == ["2"] * 2 * 8
    trainer = names["trainer"]
    assert names["losses"] == [line["loss"] for line in steps]
    assert [line["step"] for line in trainer.state.log_history] == [line["step"] for line in lines] == [0, 1, 2, 2]
    assert trainer.state.global_step == int(trainer.train_state.step) == 2
    held_out = [line["eval_reward"] for line in trainer.state.log_history if "eval_reward" in line]
    found = names["metrics"]
    assert found["eval_reward"] == pytest.approx(held_out[-1])
    assert {"eval_rewards/correct/mean", "eval_rewards/brevity/mean", "eval_completions/mean_length"} < found.keys()
    assert [step for step, _ in events[::2]] == events[1::2] == [0, 1, 2, 2]
    assert ["loss" in metrics for _, metrics in events[::2]] == [False, True, True, False]
    trained = trainer.train_state.params
    jax.tree.map(np.testing.assert_array_equal, from_pretrained(out).params, trained)
    assert not jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), trained, tiny_policy().params))


@pytest.fixture
def calls(monkeypatch):
    """The recorded calls to `train`, which is replaced by a stub that logs one step and one evaluation."""
    made = []

    def train(*arguments, callbacks, **settings):
        made.append((arguments, settings))
        for callback in callbacks:
            callback(1, {"loss": 0.5})
        return types.SimpleNamespace(params=arguments[0].params, step=1)

    monkeypatch.setattr(module, "train", train)
    return made


@pytest.mark.quick
def test_arguments_reach_train(calls, tmp_path):
    optimizer, tool, rows = object(), print, [{"prompt": "a"}]
    args = GRPOConfig(str(tmp_path), beta=0.1, use_vllm=True, vllm_mode="server", vllm_server_base_url="http://a:1")
    trainer = GRPOTrainer(
        tiny_policy(), reward, args, rows, rows, optimizers=(optimizer, None), tools=[tool], environment_factory=dict
    )
    state = trainer.train()
    ((policy, dataset, functions, config), settings) = calls[0]
    assert (policy, dataset, functions) == (tiny_policy(), rows, [reward])
    assert config == grpo_jax.GRPOConfig(beta=0.1)
    assert settings.pop("sampler")._server.url == "http://a:1"
    wanted = {"eval_dataset": rows, "run_dir": str(tmp_path), "optimizer": optimizer, "tools": [tool]}
    # The policy is not donated because it belongs to the caller.
    assert settings == {**wanted, "environment_factory": dict, "donate": False}
    assert state is trainer.train_state
    peft = types.SimpleNamespace(peft_type="LORA", r=4, lora_alpha=8, lora_dropout=0.3, target_modules=["o_proj"])
    trainer = GRPOTrainer(tiny_policy(), reward, train_dataset=rows, peft_config=peft)
    assert (trainer.policy.model.scale, trainer.policy.model.dropout) == (2.0, 0.3)
    trainer.train()
    trainer.train()
    assert [settings["donate"] for _, settings in calls[1:]] == [True, False]
    assert [settings["sampler"] for _, settings in calls[1:]] == [None, None]


@pytest.mark.quick
def test_policy_is_pushed_to_the_hub(monkeypatch, tmp_path):
    pushed = []
    monkeypatch.setattr(module, "push_to_hub", lambda *arguments, **settings: pushed.append((*arguments, settings)))
    args = GRPOConfig(str(tmp_path / "sums"), push_to_hub=True, hub_private_repo=True, hub_revision="v2")
    trainer = GRPOTrainer(tiny_policy(), reward, args)
    trainer.save_model()
    trainer.push_to_hub(dataset_name="me/rows")
    assert [repository for _, repository, _ in pushed] == ["sums", "sums"]
    assert [settings["commit_message"] for *_, settings in pushed] == ["Model save", "End of training"]
    common = {"run_dir": None, "private": True, "revision": "v2"}
    assert pushed[1][2] == {**common, "dataset": "me/rows", "commit_message": "End of training"}


@pytest.mark.quick
def test_fields_assigned_before_training_are_used(calls):
    trainer = GRPOTrainer(tiny_policy(), reward, train_dataset=[{"prompt": "a"}])
    trainer.args.learning_rate = 1e-4
    trainer.train()
    assert calls[0][0][3].learning_rate == 1e-4


@pytest.mark.quick
@pytest.mark.parametrize(("arguments", "message"), [
    ({"reward_processing_classes": 4}, "does not accept reward_processing_classes; pass a reward func"),
    ({"use_liger": True}, "does not accept use_liger; docs/coming_from_trl.md lists what is supported"),
    ({"args": grpo_jax.GRPOConfig()}, "args must be a grpo_jax.compat.GRPOConfig; got grpo_jax.config.config.GRPO"),
    ({"optimizers": (None, 1)}, "optimizers must not contain a scheduler"),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")  # fmt: skip
def test_unsupported_argument_is_rejected_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        GRPOTrainer(**{"model": tiny_policy(), "reward_funcs": reward, **arguments})


@pytest.mark.quick
@pytest.mark.parametrize(("use", "message"), [
    (lambda t: t.model, "GRPOTrainer has no model; use trainer.policy, with .model and .params"),
    (lambda t: t.vllm_client_of_mine, "no vllm_client_of_mine; docs/coming_from_trl.md lists what is supported"),
    (lambda t: setattr(t.args, "learning_rat", 1.0), "learning_rat: no such field; did you mean learning_rate"),
    (lambda t: type("Mine", (GRPOTrainer,), {"compute_loss": print}), "Mine.compute_loss has no effect; use"),
    (lambda t: t.evaluate(), "eval_dataset is None; pass rows"),
    (lambda t: t.push_to_hub(), "hub_model_id and output_dir are both None; set one"),
    (lambda t: t.train(), "train_dataset is None; pass a dataset"),
])  # fmt: skip
def test_unsupported_attributes_and_missing_arguments_raise(use, message):
    with pytest.raises((AttributeError, ValueError), match=re.escape(message)):
        use(GRPOTrainer(tiny_policy(), reward))


@pytest.mark.quick
def test_fields_are_translated_and_checked_when_set():
    args = GRPOConfig(output_dir="out", bf16=True, beta=0.1)
    assert args.config == grpo_jax.GRPOConfig(compute_dtype="bfloat16", beta=0.1)
    args.learning_rate = 1e-4
    assert (args.output_dir, args.learning_rate, args.config.learning_rate) == ("out", 1e-4, 1e-4)
    with pytest.raises(ValueError, match=r"unsupported fields:\n  hub_token: .*\n  optim: 'sgd': pass an"):
        GRPOConfig(hub_token="hf_secret", optim="sgd")
    assert GRPOConfig(fp16=True).config == grpo_jax.GRPOConfig()
    with pytest.raises(ValueError, match="num_generations = 1: must be at least 2"):
        args.num_generations = 1
    assert (args.num_generations, args.eval_strategy) == (8, "no"), "the failed assignment changed a field"
    assert compat.from_trl(args.to_dict()).config() == args.config
