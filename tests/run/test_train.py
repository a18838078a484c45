"""The loop: it learns, repeats itself to the last bit, compiles once, resumes, and refuses what cannot work."""

import json

import chex
import jax
import numpy as np
import pytest
from tiny import tiny_policy

from grpo_jax import GRPOConfig, train
from grpo_jax.rollout import decode as decode_module
from grpo_jax.run.beginning import new_state
from grpo_jax.run.prepare import prepare
from grpo_jax.run.run import Arguments
from grpo_jax.update import packed, prompts
from grpo_jax.watch.writer import read_lines

ROWS = [{"prompt": text, "answer": text[0]} for text in ["ab", "c", "def", "gh", "i", "jkl"]]
SMALL = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 4, "learning_rate": 3e-3,
    "lr_scheduler_type": "constant", "logging_steps": 1, "gradient_checkpointing": False, "seed": 0,
}  # fmt: skip


def lower_case(completions):
    return [float(np.mean([char.islower() for char in text] or [0])) for text in completions]


def run(reward_fns=lower_case, policy=None, rows=ROWS, eval_dataset=None, run_dir=None, callbacks=(), **settings):
    config = GRPOConfig(**SMALL | {"max_steps": 4} | settings)
    how = {"eval_dataset": eval_dataset, "run_dir": run_dir, "callbacks": callbacks}
    return train(policy or tiny_policy(), rows, reward_fns, config, **how)


def test_a_policy_learns_what_is_rewarded():
    """A policy learns what is rewarded."""
    rewards, note = [], lambda step, metrics: rewards.append(metrics["reward"])
    run(max_steps=45, per_device_train_batch_size=24, learning_rate=1e-2, callbacks=[note])
    assert np.mean(rewards[:3]) < 0.2
    assert np.mean(rewards[-3:]) > 0.8


def test_two_runs_with_one_seed_end_in_the_same_bytes_and_leave_the_policy_unchanged():
    policy = tiny_policy()
    before = jax.tree.map(np.array, policy.params)
    one, two, other = run(beta=0.1, max_steps=2), run(beta=0.1, max_steps=2), run(beta=0.1, max_steps=2, seed=1)
    chex.assert_trees_all_equal(one.params, two.params)
    chex.assert_trees_all_equal(one.opt_state, two.opt_state)
    for state in (one, other):
        chex.assert_trees_all_equal(state.ref_params, before)
    chex.assert_trees_all_equal(policy.params, before)
    scales = [params["norm"]["scale"] for params in (before, one.params, other.params)]
    assert len({scale.tobytes() for scale in map(np.asarray, scales)}) == 3


def test_after_warm_up_an_iteration_compiles_nothing():
    """A warm iteration compiles nothing."""
    programs = [prompts.read_some, prompts.add_prompts, packed.add_gradients, packed.apply_sums, packed.add_scores]
    programs += [packed.measure, decode_module.prefill, decode_module.decode, decode_module.move]
    sizes = []
    run(max_steps=6, beta=0.1, callbacks=[lambda *_: sizes.append([program._cache_size() for program in programs])])
    assert sizes[1:] == [sizes[1]] * 5


def test_what_is_kept_in_the_state_depends_on_what_the_objective_reads():
    """No two trees of the state share a buffer; what is not needed is not held."""

    def held(**settings):
        config = GRPOConfig(**SMALL, max_steps=4, **settings)
        state = new_state(prepare(Arguments(tiny_policy(), ROWS, lower_case, config)))
        return [tree is not None for tree in (state.old_params, state.ref_params, state.initial_params)]

    assert held() == [False, False, False]
    assert held(beta=0.1) == [False, True, False]
    assert held(num_iterations=2) == [True, False, False]
    sync = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    assert held(**sync) == [False, True, True]
    synced = run(max_steps=2, **sync)
    chex.assert_trees_all_equal(synced.ref_params, synced.params)
    chex.assert_trees_all_equal(synced.initial_params, tiny_policy().params)


def test_files_of_a_run_which_are_for_one_run_at_a_time(tmp_path):
    def another(step, metrics):
        with pytest.raises(RuntimeError, match="is in use by process"):
            run(run_dir=tmp_path)

    how = {"max_steps": 3, "eval_steps": 2, "num_generations_eval": 2, "beta": 0.1, "callbacks": [another]}
    run(run_dir=tmp_path, eval_dataset=ROWS[:2], **how)
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [line["step"] for line in lines if "reward" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if "eval/lower_case" in line] == [0, 2, 3]
    wanted = {"kl", "entropy", "completions/mean_length", "clip_fraction", "learning_rate", "seconds/update"}
    assert wanted <= lines[1].keys()
    assert json.loads((tmp_path / "run.json").read_text())["config"]["max_steps"] == 3
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_a_finished_run_called_again_says_so_and_leaves_its_report_alone(tmp_path, capsys):
    def call(**settings):
        config = GRPOConfig(max_steps=2, max_completion_length=4, **settings)
        state = train(tiny_policy(), [{"prompt": "ab"}], lambda completions: [0.0] * 8, config, run_dir=tmp_path)
        return state, capsys.readouterr().err

    state, _ = call(lr_scheduler_type="constant")
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in ("report.html", "report.png")}
    again, told = call(lr_scheduler_type="constant")
    assert "complete: 2 of 2 steps; raise max_steps to go on" in told
    assert "compiles" not in told
    assert before == {name: (tmp_path / name).stat().st_mtime_ns for name in before}
    chex.assert_trees_all_equal(again.params, state.params)
    for shown in (repr(state), repr(tiny_policy().replace(params=state.params))):
        assert len(shown) < 120
        assert "7,264 parameters" in shown


@pytest.mark.quick
def test_bad_resume():
    for resume, message in (("must", "there is no run_dir to go on in"), ("yes", "resume = 'yes': choose one of")):
        with pytest.raises(ValueError, match=message):
            train(tiny_policy(), ROWS, lower_case, GRPOConfig(**SMALL), resume=resume)
