"""The training loop is bitwise reproducible, compiles once, and learns from the right policy's samples."""

import json
import sys
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import scored, tiny_policy

from grpo_jax import Batch, GRPOConfig, add_lora, compute_advantages, generate, make_prompts, train
from grpo_jax.rollout import decode as decode_module
from grpo_jax.run.prepare import prepare
from grpo_jax.run.run import new_state
from grpo_jax.update import packed
from grpo_jax.update.step import train_step
from grpo_jax.watch.monitor import StopRun
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


def test_runs_with_different_seeds_differ_and_leave_the_policy_unchanged():
    """Runs with the same seed are bitwise equal (test_resume.py)."""
    policy = tiny_policy()
    before = jax.tree.map(np.array, policy.params)
    one, other = run(beta=0.1, max_steps=2), run(beta=0.1, max_steps=2, seed=1)
    for state in (one, other):
        chex.assert_trees_all_equal(state.ref_params, before)
    chex.assert_trees_all_equal(policy.params, before)
    scales = [params["norm"]["scale"] for params in (before, one.params, other.params)]
    assert len({scale.tobytes() for scale in map(np.asarray, scales)}) == 3


def test_no_compilation_after_warm_up(tmp_path):
    """After warm-up an iteration compiles nothing, and neither does a resumed run in the same process."""
    programs = [packed.add_gradients, packed.apply_update, packed.score_part]
    programs += [decode_module.prefill, decode_module.decode, decode_module.rearrange]
    sizes = []

    def note(step, metrics):
        sizes.append([program._cache_size() for program in programs])
        if len(sizes) == 4:
            raise StopRun

    for _ in range(2):
        run(max_steps=6, beta=0.1, num_iterations=2, callbacks=[note], run_dir=tmp_path)
    assert sizes[2:] == [sizes[2]] * 4


def test_programs_compiled_in_advance_are_the_ones_that_run(monkeypatch):
    """The first burst compiles during prefill, the metrics and the optimizer step during `add_gradients`, each once."""
    compiled, ready, add_gradients = [], threading.Event(), packed.add_gradients

    def note(event, seconds, fun_name="", **about):
        if event.endswith("backend_compile_duration"):
            compiled.append((fun_name, "background" in threading.current_thread().name))
            if fun_name == "jit(sum_metrics)":
                ready.set()

    def slow(*args):  # a large model's `add_gradients` takes longer to compile than `sum_metrics`
        assert ready.wait(60)
        return add_gradients(*args)

    def only_ab(prompts, completions):  # only the completions of "ab" have different rewards
        return np.where(np.array(prompts) == "ab", lower_case(completions), 0.0)

    jax.monitoring.register_event_duration_secs_listener(note)
    monkeypatch.setattr(packed, "add_gradients", slow)
    monkeypatch.setattr(packed, "count_threads", lambda *_: 1)
    run(only_ab, rows=ROWS[:2], max_steps=1, max_completion_length=5)
    names = ("add_gradients", "decode", "sum_metrics", "apply_gradients")
    at = {name: [background for found, background in compiled if found == f"jit({name})"] for name in names}
    assert at == {"add_gradients": [False], "decode": [True], "sum_metrics": [True], "apply_gradients": [True]}


def test_state_holds_only_what_the_objective_reads():
    """The state holds old, reference and initial params only if the objective reads them, and all of them as adapters
    if adapters are trained.
    """

    def state_of(policy, **settings):
        return new_state(prepare(policy, ROWS, lower_case, GRPOConfig(**SMALL, max_steps=4, **settings)))

    def held(**settings):
        state = state_of(tiny_policy(), **settings)
        return [tree is not None for tree in (state.old_params, state.ref_params, state.initial_params)]

    assert held() == [False, False, False]
    assert held(beta=0.1) == [False, True, False]
    assert held(num_iterations=2) == [True, False, False]
    sync = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    assert held(**sync) == [False, True, True]
    synced = run(max_steps=2, **sync)
    chex.assert_trees_all_equal(synced.ref_params, synced.params)
    chex.assert_trees_all_equal(synced.initial_params, tiny_policy().params)
    policy = add_lora(tiny_policy(), jax.random.key(0), rank=4)
    state = state_of(policy, **sync | {"ref_model_mixup_alpha": 0.6})
    size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    assert size(state.initial_params) == size(policy.params) < 0.5 * size(policy.model.base)
    assert size(state.opt_state) < 2.1 * size(policy.params)
    widths = [x["layers_0"]["self_attn"]["q_proj"]["a"].shape[1] for x in (state.params, state.ref_params)]
    assert widths[0] < widths[1], "the reference mixes weights, not factors (test_lora.py), so its rank is larger"


def test_run_files_and_run_dir_lock(tmp_path):
    def another(step, metrics):
        with pytest.raises(RuntimeError, match="is in use by another process"):
            run(run_dir=tmp_path)

    how = {"max_steps": 3, "eval_steps": 2, "num_generations_eval": 2, "beta": 0.1, "callbacks": [another]}
    how |= {"gradient_checkpointing": None}
    run(run_dir=tmp_path, eval_dataset=ROWS[:2], **how)
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [line["step"] for line in lines if "reward" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if "eval/lower_case" in line] == [0, 2, 3]
    wanted = {"kl", "entropy", "completions/mean_length", "clip_fraction", "learning_rate", "seconds/update"}
    assert wanted <= lines[1].keys()
    written = json.loads((tmp_path / "run.json").read_text())["config"]
    assert (written["max_steps"], written["gradient_checkpointing"]) == (3, False), "the resolved value is stored"
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_run_dir_is_absolute_and_may_be_in_the_home_directory(tmp_path, monkeypatch):
    """All files are written below the same directory, also if a reward function changes the working directory."""
    for name in ("home", "here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def moving(completions):
        monkeypatch.chdir(tmp_path / "elsewhere")
        return lower_case(completions)

    for run_dir, parent in (("~/run", "home"), ("run", "here")):
        monkeypatch.chdir(tmp_path / "here")
        run(moving, run_dir=run_dir, max_steps=1)
        assert {"metrics.jsonl", "run.json", "checkpoints"} <= {
            path.name for path in (tmp_path / parent / "run").iterdir()
        }
        assert not [*(tmp_path / "elsewhere").iterdir()]
    assert not (tmp_path / "here" / "~").exists()


def test_finished_bfloat16_run_called_again_says_so(tmp_path, capsys):
    policy = tiny_policy()
    policy = policy.replace(params=jax.tree.map(lambda x: x.astype("bfloat16"), policy.params))

    def call(**settings):
        config = GRPOConfig(max_steps=2, max_completion_length=4, compute_dtype="bfloat16", **settings)
        return train(policy, [{"prompt": "ab"}], length, config, run_dir=tmp_path), capsys.readouterr().err

    length = lambda completions: [float(len(text)) for text in completions]
    state, _ = call(lr_scheduler_type="constant")
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    chex.assert_trees_all_equal(state.params, jax.tree.map(lambda x: x.astype("bfloat16"), state.master_params))
    assert {x.dtype.name for x in jax.tree.leaves((state.opt_state, state.master_params)) if x.ndim} == {"float32"}
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), state.master_params, policy.params)
    assert min(jax.tree.leaves(moved)) > 0
    again, printed = call(lr_scheduler_type="constant")
    assert "complete: 2 of 2 steps; to start a new run, pass a different run_dir" in printed
    assert "compiles" not in printed
    chex.assert_trees_all_equal(again.params, state.params)
    for shown in (repr(state), repr(policy.replace(params=state.params))):
        assert len(shown) < 120
        assert "7,264 parameters" in shown


@pytest.mark.quick
def test_checkpoint_without_a_finite_evaluation_is_not_the_best(tmp_path):
    def judge(completions, trainer_state):  # not available from step 4 on
        return [1.0 if trainer_state.global_step < 4 else None for _ in completions]

    best = {"metric_for_best_model": "eval/judge", "load_best_model_at_end": True, "eval_steps": 2, "save_steps": 2}
    with pytest.warns(UserWarning, match="no finite value at step 4"):
        state = run(judge, eval_dataset=ROWS[:2], run_dir=tmp_path, **best)
    assert state.step == 2


G, T = 4, 6


def sums(completion_ids):
    return [float(sum(ids) % 7) for ids in completion_ids]


def test_rollout_ahead_learns_from_samples_of_the_previous_policy(monkeypatch):
    """With `rollout_ahead`, an iteration learns from the previous policy's samples, checked against pure functions."""
    sampling = sys.modules["grpo_jax.run.collect"]
    sampled, seen, states, threads = threading.Semaphore(0), [], [], []
    real_generate, real_update = sampling.generate, packed.PackedUpdater.update

    def spied_generate(*args, **how):
        completions = jax.block_until_ready(real_generate(*args, **how))
        threads.append(threading.current_thread() is threading.main_thread())
        sampled.release()
        return completions

    def spied_update(updater, state, batch):
        states.append(jax.tree.map(jnp.copy, state))
        return real_update(updater, state, batch)

    def reward(completion_ids):
        # Wait for this iteration's completions and for the next ones, which must be sampled in the meantime.
        for _ in range([2, 1, 0][len(seen)]):
            assert sampled.acquire(timeout=240), "the next completions are not sampled during the rewards"
        assert threading.current_thread() is threading.main_thread()
        seen.append(completion_ids)
        return sums(completion_ids)

    monkeypatch.setattr(sampling, "generate", spied_generate)
    monkeypatch.setattr(packed.PackedUpdater, "update", spied_update)
    settings = {"num_generations": G, "max_completion_length": T, "beta": 0.1, "logging_steps": 1}
    config = GRPOConfig(**settings, max_steps=3, shuffle_dataset=False, rollout_ahead=True)
    lines, policy, optimizer = [], tiny_policy(), optax.sgd(0.5)  # Adam would amplify rounding
    keep = lambda step, metrics: lines.append(metrics)
    states.append(train(policy, ROWS, reward, config, callbacks=[keep], optimizer=optimizer))
    assert threads == [True, False, False], "no rollout after the last iteration"

    def ids_of(completions):
        rows = zip(completions.tokens.reshape(-1, T), completions.mask.reshape(-1, T), strict=True)
        return [np.asarray(tokens)[np.asarray(mask)].tolist() for tokens, mask in rows]

    how = {"num_generations": G, "max_completion_length": T, "eos_token_ids": policy.eos_token_ids}
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    off_policy = 0
    for i in range(3):
        numbers = [2 * i, 2 * i + 1]
        prompts = make_prompts([policy.tokenizer.encode(ROWS[n % len(ROWS)]["prompt"]) for n in numbers], length=32)
        at = lambda params: generate(policy.model, params, prompts, key, prompt_indices=jnp.array(numbers), **how)
        completions = at(states[max(i - 1, 0)].params)
        assert seen[i] == ids_of(completions)
        off_policy += ids_of(at(states[i].params)) != seen[i]
        batch = Batch(
            prompts, completions.tokens, completions.mask, compute_advantages(jnp.array(sums(seen[i])).reshape(2, G)),
            completions.log_probs, scored(policy.model, policy.params, prompts, completions),
        )  # fmt: skip
        step = jax.jit(train_step, static_argnames=("model", "optimizer", "config", "on_policy"))
        after, metrics = step(states[i], batch, model=policy.model, optimizer=optimizer, config=config, on_policy=False)
        chex.assert_trees_all_close(after.params, states[i + 1].params, atol=2e-6)
        for name in ("loss", "kl", "ratio_max", "clip_fraction", "sampler_gap"):
            assert lines[i][name] == pytest.approx(float(metrics[name]), rel=1e-4, abs=2e-6), name
    assert off_policy == 2, "samples from the current policy would differ"
    assert lines[0]["ratio_max"] == pytest.approx(1, abs=1e-4), "the first iteration is on-policy"
    assert min(line["ratio_max"] for line in lines[1:]) > 1.01
