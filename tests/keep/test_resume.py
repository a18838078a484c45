"""A run that is stopped and begun again ends in the bytes of one that was left alone, or says why it cannot."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import numpy as np
import optax
import pytest
from tiny import tiny_policy

from grpo_jax import GRPOConfig, add_lora, train
from grpo_jax.keep.resume import describe, differences, source_of, warn_of_changes, warn_of_no_rollout
from grpo_jax.keep.stored import abstract_of, as_kind
from grpo_jax.models.layers import TransformerConfig
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.transformer import Transformer
from grpo_jax.rewards.contract import RewardError
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.turns.interaction import Interaction
from grpo_jax.turns.tools import environment_tools, read_tools
from grpo_jax.types import Completions
from grpo_jax.update.state import create_state
from grpo_jax.watch.writer import read_lines

ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh", "i", "jkl"]]
# μ = 3 over 2 minibatches of 2 prompts; 18 steps are 3 iterations, of 4 prompts at least: into the third epoch.
SETTINGS = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "steps_per_generation": 2,
    "num_iterations": 3,
    "max_completion_length": 4,
    "max_steps": 18,
    "learning_rate": 1e-2,
    "gradient_checkpointing": False,
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 2,
    "ref_model_mixup_alpha": 0.6,
    "dynamic_sampling": True,
    "use_adaptive_entropy": True,
    "entropy_coef_max": 0.1,
    "eval_steps": 5,
    "per_device_eval_batch_size": 16,  # as many as in a rollout: the programs are the same
    "logging_steps": 3,
    "save_steps": 2,
    "save_total_limit": 2,
}
LORA = {"steps_per_generation": 1, "max_steps": 7, "dynamic_sampling": False, "eval_steps": None}


def vowels(completions):
    return [float(any(char in "aeiouAEIOU" for char in text)) for text in completions]


def run(run_dir, policy=None, reward_fn=vowels, callbacks=(), **settings):
    config = GRPOConfig(**{**SETTINGS, **settings})
    return train(
        policy or tiny_policy(), ROWS, reward_fn, config, eval_dataset=ROWS[:4], run_dir=run_dir, callbacks=callbacks
    )


class Cut(Exception):
    pass


def cut_at(step):
    def callback(now, metrics):
        if now >= step:
            raise Cut

    return callback


def run_killed(module, run_dir, after, **settings):
    """Run the `run` of a test module in a process of its own, and kill that when the checkpoint of a step is there."""
    paths = [*(path for path in sys.path if "tests" in path), str(Path(__file__).parents[1] / "run")]
    call = f"from {module} import run; run(run_dir={str(run_dir)!r}, **{settings!r})"
    code = f"import sys; sys.path[:0] = {paths!r}; {call}"
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"JAX_PLATFORMS": "cpu"})
    begin = time.monotonic()
    while not (run_dir / "checkpoints" / str(after)).exists() and process.poll() is None:
        assert time.monotonic() - begin < 500
        time.sleep(0.01)
    assert process.poll() is None, "it has ended by itself"
    process.send_signal(signal.SIGKILL)
    process.wait()


def assert_same_run(one, two, directory_of_one, directory_of_two):
    """The state to the last bit; the files but for their timings."""
    data = lambda state: dataclasses.replace(state, key=jax.random.key_data(state.key))
    chex.assert_trees_all_equal(data(one), data(two))
    timing = ("seconds", "tokens_per_second")
    for name in ("metrics.jsonl", "completions.jsonl"):
        lines, others = (
            [
                {key: value for key, value in line.items() if not any(part in key for part in timing)}
                for line in read_lines(directory / name)
            ]
            for directory in (directory_of_one, directory_of_two)
        )
        assert lines == others, name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return run(directory), directory


def fails_from(step):
    """`vowels`, until so many steps are made."""

    def function(completions, trainer_state, **columns):
        if trainer_state.global_step >= step:
            raise RuntimeError("the service is down")
        return vowels(completions)

    function.__name__ = "vowels"
    return function


@pytest.mark.parametrize(
    "step", [6, 10]
)  # in the rewards of the second iteration, and in an evaluation amid its updates
def test_a_run_that_a_reward_function_ends_is_saved_at_its_last_step(whole, tmp_path, capfd, step):
    unsaved = {"save_steps": None, "save_minutes": None}
    with pytest.raises(RewardError, match="the service is down"):
        run(tmp_path, reward_fn=fails_from(step), **unsaved)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(step)]
    assert f"step {step} is saved: once the cause is fixed, the same call goes on from there" in capfd.readouterr().err
    assert_same_run(whole[0], run(tmp_path, **unsaved), whole[1], tmp_path)


def test_a_run_that_its_first_rewards_end_has_nothing_to_save(tmp_path):
    with pytest.raises(RewardError, match="the service is down"):
        run(tmp_path, reward_fn=fails_from(0))
    assert not list((tmp_path / "checkpoints").iterdir())


def test_the_run_has_all_that_could_go_wrong(whole):
    _, directory = whole
    lines = list(read_lines(directory / "metrics.jsonl"))
    assert [line["step"] for line in lines if "eval/vowels" in line] == [0, 5, 10, 15, 18]
    assert sum(line.get("dynamic_sampling/refills", 0) for line in lines) > 0
    assert max(line.get("num_prompts", 0) for line in lines) > 2 * len(ROWS), "into the third epoch"
    steps = sorted({row["step"] for row in read_lines(directory / "completions.jsonl")})
    assert steps == [1, 7, 13], "and checkpoints at even steps are in the middle of an iteration"


def test_cut_anywhere_it_ends_in_the_same_bytes(whole, tmp_path):
    # Stopped while steps 3, 9 and 15 are logged; it goes on from 2, 8 and 14: lines of later steps are cut back.
    for step in (3, 9, 15):
        with pytest.raises(Cut):
            run(tmp_path, callbacks=[cut_at(step)])
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"step": 16, "rew')  # a kill in the middle of a write
    assert_same_run(run(tmp_path), whole[0], tmp_path, whole[1])


def test_a_signal_ends_the_update_saves_and_exits_with_status_143(whole, tmp_path, monkeypatch, capfd):
    """SIGTERM in each part of the loop, before it and after it; each time the run is gone on with.

    An update is finished. A rollout, its rewards and an evaluation are not: the run that goes on makes them again.
    """
    import grpo_jax.keep.checkpoint
    import grpo_jax.run.collect
    import grpo_jax.run.loop
    import grpo_jax.update.packed

    calls = []

    def signalling(function, at):
        def wrapped(*args, **kwargs):
            calls.append(at)
            if calls.count(at) == 1:
                signal.raise_signal(signal.SIGTERM)
            return function(*args, **kwargs)

        return wrapped

    module = sys.modules["grpo_jax.run.loop"]
    moments = {
        "update": (grpo_jax.update.packed.PackedUpdater, "update", 1),
        "restore": (grpo_jax.keep.checkpoint.Checkpoints, "restore", 1),
        "rollout": (grpo_jax.run.collect, "sample", 6),
        "rewards": (grpo_jax.run.scores, "compute_parts", 12),
        "save": (grpo_jax.keep.checkpoint.Checkpoints, "save", 14),
        "evaluation": (module, "evaluate_encoded", 15),
    }
    newest = lambda: max(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    stops = []
    for moment, (owner, name, _) in moments.items():
        if moment in ("rollout", "rewards"):  # the next rollout is some steps away: go up to it
            with pytest.raises(Cut):
                run(tmp_path, callbacks=[cut_at({"rollout": 6, "rewards": 12}[moment])])
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, signalling(getattr(owner, name), moment))
            with pytest.raises(SystemExit) as left:
                run(tmp_path)
        assert left.value.code == 143
        stops.append(newest())
    assert stops == [at for *_, at in moments.values()]
    assert not any("eval/vowels" in line for line in read_lines(tmp_path / "metrics.jsonl") if line["step"] == 15)
    assert "stopped after step 6 of 18 and saved" in capfd.readouterr().err
    with monkeypatch.context() as patch:  # while the pictures are drawn, all being saved
        patch.setattr("grpo_jax.watch.monitor.write_pictures", lambda writer, **_: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit) as left:
            run(tmp_path)
    assert (left.value.code, newest()) == (143, SETTINGS["max_steps"])
    assert_same_run(run(tmp_path), whole[0], tmp_path, whole[1])  # a run that is through stays as it is


def test_lora_goes_on_as_well(tmp_path):
    policy = add_lora(tiny_policy(), jax.random.key(1), rank=2, alpha=4.0, dropout=0.1)
    one = run(tmp_path / "whole", policy, **LORA)
    with pytest.raises(Cut):
        run(tmp_path / "cut", policy, callbacks=[cut_at(6)], **LORA, save_minutes=1e-9, save_steps=None)
    assert_same_run(run(tmp_path / "cut", policy, **LORA), one, tmp_path / "cut", tmp_path / "whole")
    with pytest.raises(ValueError, match="policy: the frozen base model is not that of the run"):
        run(tmp_path / "cut", add_lora(tiny_policy(1), jax.random.key(1), rank=2, alpha=4.0, dropout=0.1), **LORA)


def test_what_differs_is_refused_all_at_once_before_anything_is_sampled(whole, monkeypatch):
    monkeypatch.setattr("grpo_jax.run.sample.generate", lambda *_, **__: pytest.fail("sampled before the check"))

    def consonants(completions):
        return [0.0 for _ in completions]

    with pytest.raises(ValueError, match="holds a run that was begun otherwise") as caught:
        run(whole[1], reward_fn=consonants, beta=0.2, max_steps=20)
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("this call has 3 errors:")
    assert lines[0] == "  beta = 0.2: the run has 0.1"
    assert lines[1].startswith("  max_steps = 20: the run has 18, and the learning rate of every step depends on")
    assert lines[2] == "  reward_fns: ['consonants'], the run has ['vowels']"


HARMLESS = {
    "eval_steps",
    "per_device_eval_batch_size",
    "num_generations_eval",
    "temperature_eval",
    "logging_steps",
    "log_completions",
    "num_completions_to_print",
    "save_steps",
    "save_minutes",
    "save_total_limit",
    "metric_for_best_model",
    "greater_is_better",
    "logging_first_step",
    "load_best_model_at_end",
    "report_to",
    "run_name",
    "project",
    "push_to_hub",
    "hub_model_id",
    "hub_private_repo",
    "hub_strategy",
    "hub_revision",
    "max_skipped_updates",
}
CUTS = {
    "gradient_checkpointing",
    "mesh",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "rollout_batch_size",
}


def about(
    config=None,
    token_ids=((5, 6), (7,)),
    rows=None,
    reward_fns=(vowels,),
    steps=10,
    optimizer=None,
    shape=(2, 3),
    model=None,
    eos=(1,),
    eval_ids=None,
    eval_rows=None,
    tools=(),
    environments=None,
    functions=None,
    **settings,
):
    config = config or GRPOConfig(**{"lr_scheduler_type": "constant", **settings})
    rows = rows or [{}] * len(token_ids)
    data = EncodedPrompts(rows=rows, token_ids=[list(ids) for ids in token_ids], dropped=[])
    eval_data = None
    if eval_ids is not None:
        eval_rows = eval_rows or [{}] * len(eval_ids)
        eval_data = EncodedPrompts(rows=eval_rows, token_ids=[list(ids) for ids in eval_ids], dropped=[])
    state = create_state({"w": np.zeros(shape, np.float32)}, optimizer or optax.adam(0.1), jax.random.key(0))
    return json.loads(
        json.dumps(
            describe(
                config,
                data=data,
                reward_fns=reward_fns,
                model=model or tiny_policy().model,
                state=state,
                total_steps=steps,
                eos_token_ids=eos,
                eval_data=eval_data,
                interaction=answered(tools, environments),
                own_optimizer=optimizer is not None,
                own_functions=functions or {},
            )
        )
    )


def answered(tools, environments):
    """An `Interaction` of tools and environments; there are no rows or templates that they would have to fit."""
    if not tools and environments is None:
        return None
    kinds = environments if isinstance(environments, dict) else {None: environments} if environments else {}
    return Interaction(
        tokenizer=None,
        factories=kinds,
        kinds=kinds,
        own_tools={name: environment_tools(kind) for name, kind in kinds.items()},
        tools=read_tools(tools),
        format=None,
        thinking=False,
        template_kwargs={},
        eos_token_ids=(1,),
    )


def look(place: str):
    """Look somewhere.

    Args:
        place: where
    """


def look_around(place: str, far: bool = False):
    """Look somewhere.

    Args:
        place: where
        far: also behind it
    """


class Game:
    def respond(self, text):
        return None


class Maze(Game):
    def go(self, way: str):
        """Go.

        Args:
            way: north, say
        """


def others():
    """A tool and an environment of the same names, which the policy is told otherwise of."""

    def look(place: str, far: bool = False):
        """Look somewhere.

        Args:
            place: where
            far: also behind it
        """

    class Maze(Game):
        def go(self, way: int):
            """Go.

            Args:
                way: a number
            """

    return look, Maze


def shaped(**changes):
    """A model of the same arrays, with other settings."""
    shape = TransformerConfig(24, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)
    return Transformer(dataclasses.replace(shape, **changes))


def lora(scale):
    return LoraModel({"w": np.ones((2, 2), np.float32)}, shaped(), scale=scale)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(GRPOConfig)])
def test_each_field_is_harmless_or_refused_by_its_name(name):
    saved, present = about(), about()
    old = saved["config"][name]
    present["config"][name] = "other" if not isinstance(old, int | float) or isinstance(old, bool) else old + 1
    lines = differences(saved, present, step=4)
    # Of the cuts the sizes that follow decide, of the last two the number of steps; neither is changed here.
    if name in HARMLESS | CUTS | {"max_steps", "num_train_epochs"}:
        assert lines == []
    else:
        assert len(lines) == 1
        assert lines[0].startswith(f"{name} = {present['config'][name]!r}: the run has {old!r}")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("saved", "present", "lines"),
    [
        ({}, {}, []),
        ({}, {"token_ids": [[5, 6], [7], [8]]}, ["dataset: 3 rows, the run has 2"]),
        ({}, {"token_ids": [[7], [5, 6]]}, ["dataset: its 2 prompts are not those of the run, or not in their order"]),
        ({}, {"token_ids": [[5], [6, 7]]}, ["dataset: its 2 prompts are not those of the run, or not in their order"]),
        ({}, {"reward_fns": [vowels, len]}, ["reward_fns: ['vowels', 'len'], the run has ['vowels']"]),
        (
            {},
            {"shape": (2, 4)},
            ["policy: its params are not those of the run: params['w'] float32[2, 4] for float32[2, 3]"],
        ),
        ({}, {"optimizer": optax.sgd(0.1)}, ["optimizer: the caller's, the run has the config's"]),
        ({"functions": {"surrogate": vowels}}, {"functions": {"surrogate": vowels, "advantage_fn": None}}, []),
        ({}, {"functions": {"surrogate": vowels}}, ["surrogate: test_resume.vowels, the run has None"]),
        (
            {"functions": {"advantage_fn": functools.partial(run, beta=1)}},
            {"functions": {"advantage_fn": functools.partial(run, beta=2)}},
            [
                "advantage_fn: test_resume.run, the run has test_resume.run; its source or what it is bound to has"
                " changed"
            ],
        ),
        (
            {"optimizer": optax.sgd(0.1)},
            {"optimizer": optax.sgd(0.1, momentum=0.9)},
            ["optimizer: its state is not that of the run: opt_state[0].trace['w'] float32[2, 3] for (none)"],
        ),
        # The same arrays under other settings of the model.
        ({}, {"eos": (1, 2)}, ["policy: eos_token_ids = [1, 2], the run has [1]"]),
        ({"model": lora(1.0)}, {"model": lora(2.0)}, ["policy: scale = 2.0, the run has 1.0"]),
        (
            {"model": shaped()},
            {"model": shaped(rms_norm_eps=1e-5)},
            ["policy: rms_norm_eps = 1e-05, the run has 1e-06"],
        ),
        (
            {"model": shaped()},
            {"model": shaped(dtype="bfloat16", remat=True)},
            [],
        ),  # as the config says, compared above
        # More steps where the learning rate does not know of the last one.
        ({}, {"max_steps": 20, "steps": 20}, []),
        ({}, {"max_steps": 3, "steps": 3}, ["max_steps = 3: the run has -1, and is at step 4 already"]),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3, "max_steps": 20, "steps": 20},
            [],
        ),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1},
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1, "max_steps": 20, "steps": 20},
            [
                "max_steps = 20: the run has -1, and the learning rate of every step depends on the number of steps"
                " (lr_scheduler_type = 'constant_with_warmup'); one that is constant from the start does not"
            ],
        ),
        ({"optimizer": optax.sgd(0.1)}, {"optimizer": optax.sgd(0.1), "max_steps": 20, "steps": 20}, []),
        # The same batches on other devices, and other batches.
        (
            {"per_device_train_batch_size": 32},
            {"per_device_train_batch_size": 8, "mesh": {"fsdp": 4}, "rollout_batch_size": 8},
            [],
        ),
        ({}, {"per_device_train_batch_size": 16}, ["per_device_train_batch_size = 16: the run has 8"]),
        # After an error under "raise" there would be no checkpoint.
        ({"on_reward_error": "raise"}, {"on_reward_error": "none"}, []),
        ({"on_reward_error": "none"}, {"on_reward_error": "raise"}, ["on_reward_error = 'raise': the run has 'none'"]),
    ],
)
def test_differences(saved, present, lines):
    assert differences(about(**saved), about(**present), step=4) == lines


BEST = {"metric_for_best_model": "eval/vowels", "eval_steps": 500, "eval_ids": ((8,), (9,))}
COMPARED = "and metric_for_best_model = 'eval/vowels' compares all evaluations of the run"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("saved", "present", "lines"),
    [
        ({"tools": [look]}, {"tools": [look]}, []),
        ({"tools": [look]}, {}, ["tools: none, the run has look"]),
        ({}, {"tools": [look]}, ["tools: look, the run has none"]),
        ({"tools": [look]}, {"tools": [look_around, look]}, ["tools: look, look_around, the run has look"]),
        # The prompts show the tools, and are not named beside them.
        (
            {"tools": [look], "token_ids": [[5, 6], [7]]},
            {"tools": others()[:1], "token_ids": [[5, 6], [7, 8]]},
            ["tools: the policy is told otherwise of look than in the run"],
        ),
        ({"environments": Game}, {"environments": Game}, []),
        ({"environments": Game}, {}, ["environment_factory: none, the run has Game"]),
        (
            {"environments": {"a": Game}},
            {"environments": {"a": Game, "b": Game}},
            ["environment_factory: a: Game, b: Game, the run has a: Game"],
        ),
        (
            {"environments": Game},
            {"environments": Maze},
            ["environment_factory: Maze, the run has Game", "environments: Maze.go, the run has none"],
        ),
        (
            {"environments": Maze},
            {"environments": others()[1]},
            ["environments: the policy is told otherwise of Maze.go than in the run"],
        ),
        # Evaluations, where the best checkpoint is chosen among them.
        (BEST, BEST, []),
        (BEST, BEST | {"eval_ids": [[8]]}, [f"eval_dataset: 1 rows, the run has 2, {COMPARED}"]),
        (BEST, BEST | {"eval_ids": [[8], [7]]}, [f"eval_dataset: its 2 prompts are not those of the run, {COMPARED}"]),
        (BEST, BEST | {"temperature_eval": 0.5}, [f"temperature_eval = 0.5: the run has 1.0, {COMPARED}"]),
        (BEST, BEST | {"temperature_eval": 1.0}, []),
        (BEST, BEST | {"num_generations_eval": 4}, [f"num_generations_eval = 4: the run has 8, {COMPARED}"]),
        (BEST, BEST | {"metric_for_best_model": "eval/other", "eval_ids": [[8]]}, []),
        (BEST, BEST | {"metric_for_best_model": "reward", "eval_ids": [[8]]}, []),
        ({"eval_ids": [[8]]}, {"temperature_eval": 0.0}, []),
    ],
)
def test_what_answers_the_policy_and_what_the_best_is_chosen_by(saved, present, lines):
    saved, present = about(**saved), about(**present)
    assert differences(saved, present, step=4) == lines
    for name in ("tools", "environments", "methods", "evaluation", "eval_columns", "machine"):
        del saved[name]  # of an earlier version, which did not note them
    assert not any("the run has" in line for line in differences(saved, present, step=4))
    warn_of_changes(saved, present)


@dataclasses.dataclass(frozen=True)
class Scaled:
    scale: float

    def __call__(self, rewards, mask):
        return self.scale * rewards


@pytest.mark.quick
def test_a_function_is_known_by_its_name_and_its_source_without_comments(tmp_path):
    def made(text):
        path = tmp_path / f"made_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        names = {"__name__": "made"}
        exec(compile(text, path, "exec"), names)
        return names["f"]

    one = made("def f(x):\n    return x + 1\n")
    same = made("def f(x):\n    # more\n    return x+1  # by one\n")
    other = made("def f(x):\n    return x + 2\n")
    assert source_of(one) == source_of(same) != source_of(other)
    assert source_of(one)["name"] == "made.f"
    assert source_of(Scaled(1.0)) == source_of(Scaled(1.0)) != source_of(Scaled(2.0))
    assert source_of(Scaled(1.0))["name"] == "test_resume.Scaled"

    class Fresh:  # one object, at another address in each process
        pass

    bound = [source_of(functools.partial(differences, other=Fresh())) for _ in range(2)]
    assert bound[0] == bound[1]
    assert source_of(len) == {"name": "builtins.len", "source": None}
    assert source_of([lambda x: x][0])["source"] is not None


@pytest.mark.quick
def test_a_field_that_the_run_did_not_know_yet_had_its_default():
    saved = about()
    del saved["config"]["delta"]
    assert differences(saved, about(), step=4) == []
    assert differences(saved, about(delta=2.0), step=4) == ["delta = 2.0: the run has None"]


@pytest.mark.quick
def test_a_batch_with_a_field_of_an_earlier_version_is_read():
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {"tokens": [[2, 3], "int32"], "mask": [[2, 3], "bool"], "log_probs": [[2, 3], "float32"], "ended": None}
    read = abstract_of(Completions, {**shapes, "gone": None}, where)
    assert (read.keys(), as_kind(Completions, read)) == ({*shapes, "gone"}, abstract_of(Completions, shapes, where))


@pytest.mark.quick
def test_settings_that_were_removed_resume_with_their_defaults_and_are_named_otherwise():
    saved = about()
    saved["config"] |= {"prompt_selection": "uniform", "max_kl_old": None, "turn_gamma": 1.0, "keep_programs": False}
    assert differences(saved, about(), step=4) == []
    saved["config"] |= {"prompt_selection": "beta", "max_kl_old": 0.5}
    assert differences(saved, about(), step=4) == [
        f"{name}: this version has no such setting, and the run has {value}; resume it with the version that began it"
        for name, value in (("max_kl_old", 0.5), ("prompt_selection", "'beta'"))
    ]


@pytest.mark.quick
@pytest.mark.parametrize(("level", "refused"), [("token", False), ("sequence", True)])
def test_a_run_that_could_not_choose_the_ratio_of_its_kl_had_that_of_the_level(level, refused):
    saved = about(importance_sampling_level=level)
    del saved["config"]["kl_correction_level"]
    now = about(importance_sampling_level=level)
    line = "kl_correction_level = 'token': the run has 'importance_sampling_level'"
    assert differences(saved, now, step=4) == [line] * refused
    same = about(importance_sampling_level=level, kl_correction_level="importance_sampling_level")
    assert (differences(saved, same, step=4) == []) == refused


@pytest.mark.quick
def test_other_columns_of_the_same_prompts_are_told():
    """Reward functions read them; an object without a value of its own counts by its type."""
    rows = lambda *answers, image=None: [{"prompt": "p", "answer": x, "image": image or object()} for x in answers]
    saved = about(rows=rows("4", np.float32(5)))
    warn_of_changes(saved, about(rows=rows("4", np.float32(5))))
    for changed in (rows("4", 6.0), rows(5.0, "4"), rows("4", [5.0])):
        with pytest.warns(UserWarning, match="prompts are those of the run, and its column answer not: rewards that"):
            warn_of_changes(saved, about(rows=changed))
    with pytest.warns(UserWarning, match="its columns answer, image, level not"):
        warn_of_changes(saved, about(rows=[{"prompt": "p", "level": 1}, {"prompt": "p"}]))
    evaluated = lambda answer: about(eval_ids=[[5]], eval_rows=[{"prompt": "p", "answer": answer}])
    with pytest.warns(UserWarning, match="eval_dataset: its prompts are those of the run, and its column answer not"):
        warn_of_changes(evaluated(1), evaluated(2))
    del saved["columns"], saved["policy"]  # of an earlier version
    assert differences(saved, about(), step=4) == []
    warn_of_changes(saved, about())


@pytest.mark.quick
def test_a_run_that_decayed_norms_and_biases_is_told_that_they_no_longer_are():
    saved = about(weight_decay=0.1)
    warn_of_changes(saved, about(weight_decay=0.1))
    del saved["not_decayed"]  # of an earlier version
    assert differences(saved, about(weight_decay=0.1), step=4) == []
    with pytest.warns(UserWarning, match="weight_decay: so far it acted on norms and biases too; from here on it"):
        warn_of_changes(saved, about(weight_decay=0.1))
    for harmless in ({}, {"weight_decay": 0.1, "optimizer": optax.sgd(0.1)}):
        warn_of_changes(saved, about(**harmless))


@pytest.mark.quick
def test_other_versions_and_devices_are_told():
    saved = about()
    saved["versions"]["jax"] = "0.1"
    with pytest.warns(UserWarning, match=r"otherwise than it was begun \(jax 0\.1 → "):
        warn_of_changes(saved, about())
    with pytest.warns(
        UserWarning, match=r"begun \(mesh None → \{'data': 2\}\): from here on its numbers may differ in"
    ):
        warn_of_changes(about(), about(mesh={"data": 2}))
    warn_of_changes(about(), about())
    for name, before in (("cores", 99), ("device", "TPU v4")):
        saved = about()
        saved["machine"][name] = before
        with pytest.warns(
            UserWarning, match=rf"begun \({name} {before} → .*\): from here on its numbers may differ in"
        ):
            warn_of_changes(saved, about())
    with pytest.warns(UserWarning, match="the run was to end after step 10 and has sampled nothing ahead"):
        warn_of_no_rollout(about(steps=10), about(steps=20))
    warn_of_no_rollout(about(), about())


def test_killed_at_random_moments(tmp_path):
    """A SIGKILL at any moment, one in the middle of a save, and a SIGTERM, from outside; the whole is `--kills 50`."""
    command = ["-m", "experiments.kill_and_resume", "--kills", "2", "--terms", "1", "--run-dir"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "runs")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["kills"] == 2
    assert results["runs the same"] == results["runs"] > 0
    assert results["with a checkpoint half written"] > 0
