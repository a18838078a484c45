"""A killed and resumed run is bitwise identical to an uninterrupted one; resuming with other settings is rejected."""

import copy
import dataclasses
import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import numpy as np
import optax
import pytest
from tiny import tiny_policy

from grpo_jax import GRPOConfig, SFTConfig, train
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.transformer import Transformer
from grpo_jax.rewards.contract import RewardError
from grpo_jax.run import collect
from grpo_jax.run.prepare import prepare
from grpo_jax.run.resume import differences, run_identity
from grpo_jax.run.sft import prepare_sft
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.update.packed import PackedUpdater
from grpo_jax.update.state import create_state
from grpo_jax.watch.writer import read_lines

evaluation = importlib.import_module("grpo_jax.run.evaluate")
ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh", "i", "jkl"]]
# μ = 3 over 2 minibatches of 2 prompts: 18 steps are 3 iterations of at least 4 prompts, into the third epoch.
SETTINGS = {
    "num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 2, "num_iterations": 3,
    "max_completion_length": 4, "max_steps": 18, "learning_rate": 1e-2, "gradient_checkpointing": False, "beta": 0.1,
    "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6, "dynamic_sampling": True,
    "use_adaptive_entropy": True, "entropy_coef_max": 0.1, "eval_steps": 5, "per_device_eval_batch_size": 16,
    "logging_steps": 3, "save_steps": 2, "save_total_limit": 2,
}  # fmt: skip


def vowels(completions):
    return [float(any(char in "aeiouAEIOU" for char in text)) for text in completions]


def run(run_dir, policy=None, reward_fn=vowels, callbacks=(), resume="auto", **settings):
    config, how = GRPOConfig(**SETTINGS | settings), {"run_dir": run_dir, "callbacks": callbacks, "resume": resume}
    return train(policy or tiny_policy(), ROWS, reward_fn, config, eval_dataset=ROWS[:4], **how)


class Cut(Exception):
    pass


def cut_at(step):
    def callback(now, metrics):
        if now >= step:
            raise Cut

    return callback


KILLED_IN_A_SAVE = """
import os, signal, sys
sys.path[:0] = {paths!r}
rename = os.rename

def killed(source, target, **how):  # all arrays are written, but the checkpoint still has its temporary name
    if str(target).endswith("checkpoints/{step}"):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, target, **how)

os.rename = killed
from test_resume import run
run(run_dir={run_dir!r})
"""


def assert_same_run(one, two, directory_of_one, directory_of_two):
    """Assert that the states are bitwise equal and that the files differ only in timings."""
    data = lambda state: dataclasses.replace(state, key=jax.random.key_data(state.key))
    chex.assert_trees_all_equal(data(one), data(two))
    timeless = lambda line: {name: value for name, value in line.items() if "second" not in name}
    for name in ("metrics.jsonl", "completions.jsonl"):
        one, two = ([*map(timeless, read_lines(where / name))] for where in (directory_of_one, directory_of_two))
        assert one == two, name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return run(directory), directory


def test_run_killed_while_saving_resumes_bitwise(whole, tmp_path):
    """A run killed while saving, between two updates on the same batch, resumes to a bitwise equal state."""
    paths = [*(path for path in sys.path if "tests" in path), str(Path(__file__).parent)]
    code = KILLED_IN_A_SAVE.format(paths=paths, step=4, run_dir=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    names = {path.name.partition(".")[0] for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"2", "4"}
    assert not (tmp_path / "checkpoints" / "4").exists()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 16, "rew')  # a line cut short by the kill
    assert_same_run(run(tmp_path), whole[0], tmp_path, whole[1])


def test_run_ended_by_a_reward_error_is_saved_at_its_last_step(whole, tmp_path, capfd):
    """A run ended by a reward function's error, in a rollout or an evaluation, is saved at its last step and resumes
    to a bitwise equal state.
    """

    def failing(completions, trainer_state, **columns):
        if trainer_state.global_step >= 6:
            raise RuntimeError("the service is down")
        return vowels(completions)

    failing.__name__ = "vowels"  # the function that is repaired below
    unsaved = {"save_steps": None, "save_minutes": None}
    with pytest.raises(RewardError, match="the service is down"):
        run(tmp_path, reward_fn=failing, **unsaved)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["6"]
    assert "saved a checkpoint at step 6. Fix the error and repeat the call" in capfd.readouterr().err
    assert_same_run(whole[0], run(tmp_path, **unsaved), whole[1], tmp_path)


def test_signal_finishes_the_update_saves_and_exits_with_143(whole, tmp_path, monkeypatch, capfd):
    """After a signal, a run finishes its update, saves and exits with 143; rewards and evaluations are repeated."""
    calls = []

    def signalling(function, at):
        def wrapped(*args, **kwargs):
            calls.append(at)
            if calls.count(at) == 1:
                signal.raise_signal(signal.SIGTERM)
            return function(*args, **kwargs)

        return wrapped

    moments = [(PackedUpdater, "update", 1), (collect, "compute_rewards", 12), (evaluation, "evaluate_encoded", 15)]
    for owner, name, step in moments:
        with monkeypatch.context() as patch:
            if name == "compute_rewards":  # continue to the next rollout; the newest checkpoint is from step 10
                with pytest.raises(Cut):
                    run(tmp_path, callbacks=[cut_at(12)])
            patch.setattr(owner, name, signalling(getattr(owner, name), name))
            with pytest.raises(SystemExit) as left:
                run(tmp_path)
        assert left.value.code == 143
        assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()) == step
    assert not any("eval/vowels" in line for line in read_lines(tmp_path / "metrics.jsonl") if line["step"] == 15)
    assert "stopped after step 12 of 18 and saved" in capfd.readouterr().err
    assert_same_run(run(tmp_path), whole[0], tmp_path, whole[1])


# fmt: off
def about(token_ids=((5, 6), (7,)), reward_fns=(vowels,), steps=10, optimizer=None, shape=(2, 3), model=None, eos=(1,),
          eval_ids=None, episode_setup=None, advantage_fn=None, surrogate=None, config=None, **settings):
    def encoded(ids):
        return EncodedPrompts(rows=[{}] * len(ids), token_ids=list(map(list, ids)), dropped=[])

    config = config or GRPOConfig(**{"lr_scheduler_type": "constant", **settings})
    state = create_state({"w": np.zeros(shape, np.float32)}, optimizer or optax.adam(0.1), jax.random.key(0))
    run = SimpleNamespace(
        config=config, data=encoded(token_ids), eval_datasets=[encoded(eval_ids)] if eval_ids else [],
        policy=tiny_policy().replace(model=model or tiny_policy().model), eos_token_ids=eos,
        total_steps=steps, schedule=None if optimizer else optax.constant_schedule(0.1), reward_fns=reward_fns,
        sampler=None, teacher_scoring=None, optimizer=optimizer, updater=SimpleNamespace(surrogate=surrogate),
        custom_advantages=SimpleNamespace(function=advantage_fn), episode_setup=episode_setup,
    )
    return json.loads(json.dumps(run_identity(run, state)))


def episode_setup(tools=(), classes=()):
    """Return the parts of an `EpisodeSetup` that are compared; `classes` are environments by name."""
    named = {tool.__name__: tool for tool in tools}
    return {"episode_setup": SimpleNamespace(tools=named, environment_classes=dict(classes))}
# fmt: on


class Game:
    pass


def shaped(**changes):
    """Return a model with other settings but the same arrays."""
    shape = TransformerConfig(24, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)
    return Transformer(dataclasses.replace(shape, **changes))


def lora(scale, weight=1.0):
    return LoraModel({"w": np.full((2, 2), weight, np.float32)}, shaped(), scale=scale)


@pytest.mark.quick
def test_runs_describe_what_is_compared():
    """Evaluation data is compared for both kinds of run, and EOS tokens only if a run samples."""
    rows, config = [{"prompt": "ab", "completion": "c"}], GRPOConfig(max_completion_length=4)
    grpo = prepare(tiny_policy(), ROWS, vowels, config, eval_dataset=ROWS[:2])
    of_sft = prepare_sft(tiny_policy(), rows, SFTConfig(), eval_dataset={"x": rows, "y": rows})
    assert [len(data.rows) for data in grpo.eval_datasets] == [2]
    assert [len(data.rows) for data in of_sft.eval_datasets] == [1, 1]
    assert (grpo.eos_token_ids, of_sft.eos_token_ids) == (tiny_policy().eos_token_ids, ())


HARMLESS = """eval_steps per_device_eval_batch_size num_generations_eval temperature_eval logging_steps log_completions
    num_completions_to_print save_steps save_minutes save_total_limit metric_for_best_model greater_is_better
    logging_first_step load_best_model_at_end report_to run_name project push_to_hub hub_model_id hub_private_repo
    hub_strategy hub_revision max_skipped_updates chat_template_kwargs"""
CUTS = """gradient_checkpointing mesh per_device_train_batch_size gradient_accumulation_steps steps_per_generation
    generation_batch_size rollout_batch_size"""


@pytest.mark.quick
def test_every_changed_field_is_harmless_or_rejected_by_name():
    """On resume, every changed config field is either harmless or rejected by name."""
    saved = about()
    for name in (field.name for field in dataclasses.fields(GRPOConfig)):
        present, old = copy.deepcopy(saved), saved["config"][name]
        present["config"][name] = "other" if not isinstance(old, int | float) or isinstance(old, bool) else old + 1
        lines = differences(saved, present, step=4)
        # max_steps and num_train_epochs matter only through the total number of steps, which is the same here.
        if name in [*HARMLESS.split(), *CUTS.split(), "max_steps", "num_train_epochs"]:
            assert lines == [], name
        else:
            (line,) = lines
            assert line.startswith(f"{name} = {present['config'][name]!r}, but the run has {old!r}")


WARM = {"lr_scheduler_type": "constant_with_warmup"}
DIFFERENCES = [
    ({}, {"token_ids": [[5, 6], [7], [8]]}, ["dataset: 3 rows, but the run has 2"]),
    ({}, {"token_ids": [[5], [6, 7]]},
     ["dataset: the prompts or their order differ from the saved run's (rows in both: 2)"]),
    ({}, {"reward_fns": [vowels, len]}, ["reward_fns = ['vowels', 'len'], but the run has ['vowels']"]),
    ({}, {"shape": (2, 4)},
        ["state: its arrays differ from the run's: params['w'] float32[2, 4] instead of float32[2, 3],"
         " opt_state[0].mu['w'] float32[2, 4] instead of float32[2, 3],"
         " opt_state[0].nu['w'] float32[2, 4] instead of float32[2, 3]"]),
    ({"surrogate": vowels}, {"surrogate": vowels}, []),
    ({}, {"surrogate": vowels}, ["surrogate = ['vowels'], but the run has []"]),
    ({"advantage_fn": vowels}, {}, ["advantage_fn = [], but the run has ['vowels']"]),
    ({"optimizer": optax.sgd(0.1)}, {"optimizer": optax.sgd(0.1, momentum=0.9)},
        ["state: its arrays differ from the run's: opt_state[0].trace['w'] float32[2, 3] instead of (none)"]),
    ({}, {"eos": (1, 2)}, ["policy: eos_token_ids = [1, 2], but the run has [1]"]),
    ({"model": lora(1.0)}, {"model": lora(1.0, 2.0)},
        ["policy: the frozen base model or vision tower differs from the saved run's"]),
    ({"model": shaped()}, {"model": shaped(rms_norm_eps=1e-5)},
        ["policy: rms_norm_eps = 1e-05, but the run has 1e-06"]),
    ({"model": shaped()}, {"model": shaped(dtype="bfloat16", remat=True)}, []),
    ({}, {"max_steps": 3, "steps": 3}, ["max_steps = 3, but the run has -1 and is already at step 4"]),
    (WARM | {"warmup_steps": 3}, WARM | {"warmup_steps": 3, "max_steps": 20, "steps": 20}, []),
    (WARM | {"warmup_steps": 0.1}, WARM | {"warmup_steps": 0.1, "max_steps": 20, "steps": 20},
        ["max_steps = 20, but the run has -1; the learning rates depend on the number of steps, unless they are"
        " constant after a warm-up of a fixed number of steps (lr_scheduler_type = 'constant_with_warmup')"]),
    ({"optimizer": optax.sgd(0.1)}, {"optimizer": optax.sgd(0.1), "max_steps": 20, "steps": 20}, []),
    ({"per_device_train_batch_size": 32}, {"per_device_train_batch_size": 8, "mesh": {"fsdp": 4},
        "rollout_batch_size": 32}, []),
    ({}, {"per_device_train_batch_size": 16}, ["per_device_train_batch_size = 16, but the run has 8"]),
    ({"on_reward_error": "raise"}, {"on_reward_error": "none"}, []),
    ({"on_reward_error": "none"}, {"on_reward_error": "raise"}, ["on_reward_error = 'raise', but the run has 'none'"]),
]  # fmt: skip
BEST = {"metric_for_best_model": "eval/vowels", "eval_steps": 500, "eval_ids": ((8,), (9,))}
COMPARED = "; metric_for_best_model = 'eval/vowels' requires all evaluations of the run to be comparable"


DIFFERENCES += [
    (episode_setup([vowels]), episode_setup([vowels]), []),
    (episode_setup([vowels]), {}, ["tools = [], but the run has ['vowels']"]),
    (episode_setup(classes={"a": Game}), episode_setup(classes={"a": Game, "b": Game}),
        ["environment_factory = ['a: Game', 'b: Game'], but the run has ['a: Game']"]),
    (episode_setup(classes={None: Game}), episode_setup(classes={None: Cut}),
        ["environment_factory = ['Cut'], but the run has ['Game']"]),
    (BEST, BEST, []), (BEST, BEST | {"eval_ids": [[8]]}, [f"eval_dataset: 1 row, but the run has 2{COMPARED}"]),
    (BEST, BEST | {"eval_ids": [[8], [7]]}, 
        [f"eval_dataset: the prompts or their order differ from the saved run's (rows in both: 2){COMPARED}"]),
    (BEST, BEST | {"temperature_eval": 0.5}, [f"temperature_eval = 0.5, but the run has 1.0{COMPARED}"]),
    (BEST, BEST | {"metric_for_best_model": "reward", "eval_ids": [[8]]}, []),
    ({"eval_ids": [[8]]}, {"temperature_eval": 0.0}, []),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("saved", "present", "lines"), DIFFERENCES)
def test_differences(saved, present, lines):
    """Resuming with other data, functions, models, tools, environments or evaluations is rejected by name."""
    assert differences(about(**saved), about(**present), step=4) == lines
