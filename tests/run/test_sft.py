"""SFT: agreement with TRL, packing, resuming, adapters, meshes and evaluation."""

import copy
import dataclasses
import functools
import json
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from tiny import tiny_policy

from grpo_jax import GRPOConfig, SFTConfig, save_pretrained, sft, train
from grpo_jax.maths.metrics import finalize_metrics
from grpo_jax.models.packing import lengths_to_last_true
from grpo_jax.models.sharding import make_mesh, place
from grpo_jax.run.checkpoint_reader import load_params
from grpo_jax.run.run import new_state
from grpo_jax.run.session import open_session
from grpo_jax.run.sft import evaluate_examples, next_examples, prepare_sft
from grpo_jax.update.step import Updater
from grpo_jax.watch.display import Display
from grpo_jax.watch.writer import read_lines

sys.path.append(str(Path(__file__).with_name("golden")))
import make_sft

ROWS = [
    {"prompt": "ab", "completion": "cde"}, {"prompt": "the ", "completion": "cat sat"},
    {"prompt": "x", "completion": "y"}, {"prompt": "one two ", "completion": "three"},
    {"prompt": "q", "completion": "rstuvw"}, {"prompt": "7+5=", "completion": "12"},
]  # fmt: skip
ALIKE = [{**row, "prompt": f"Say: {row['prompt']}"} for row in ROWS]
"""The same examples with a common prefix, which is processed once for all of them."""


def settings(**more):
    small = {"per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2, "max_length": 32}
    return SFTConfig(**small | {"lr_scheduler_type": "constant", "logging_steps": 1} | more)


@functools.partial(jax.jit, static_argnames="model")
def loss_by_logits(params, tokens, masks, *, model):
    """Compute the mean −log p of the learned tokens from the model's logits for whole rows."""
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, tokens)[:, :-1])
    l = jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]
    return -jnp.where(masks[:, 1:], l, 0).sum() / masks.sum()


def rows_of(data, numbers=None, size=(6, 48)):
    """Return the tokens and masks of `data`'s examples, padded to a shape that all tests share."""
    tokens, masks = np.zeros(size, np.int32), np.zeros(size, bool)
    for row, i in enumerate(range(len(data.token_ids)) if numbers is None else numbers):
        tokens[row, : len(data.token_ids[i])] = data.token_ids[i]
        masks[row, : len(data.masks[i])] = data.masks[i]
    return tokens, masks


def gradient(policy, config, rows):
    """Return the loss and gradient for the first batch, and the prepared run."""
    run = prepare_sft(policy, rows, config)
    batch, *_ = next_examples(run, 0)
    grads, sums = run.updater.gradients(new_state(run), batch)
    return float(sums.sums["loss"]), grads, run


def test_packed_update_with_a_common_prefix_equals_the_gradient_from_whole_row_logits():
    policy = tiny_policy()
    config = settings(per_device_train_batch_size=2, train_sampling_strategy="sequential", packing=True)
    loss, grads, run = gradient(policy, config, ALIKE)
    numbers = [i for block in run.data.blocks[:2] for i in block]
    assert len(numbers) > 2
    given = rows_of(run.data, numbers)
    want, wanted = jax.value_and_grad(loss_by_logits)(policy.params, *given, model=policy.model)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    chex.assert_trees_all_close(grads, wanted, rtol=1e-4, atol=1e-6)


def test_shared_prefix_is_processed_once_and_examples_are_packed():
    """SFT processes a prefix shared by all examples once and packs the examples end to end."""
    config = settings(per_device_train_batch_size=6, max_length=64, pad_to_multiple_of=1)
    shapes, laid = [], []
    for rows in (ROWS, ALIKE, [{"text": row["prompt"]} for row in ALIKE]):
        run = prepare_sft(tiny_policy(), rows, config)
        batch, *_ = next_examples(run, 0)
        shapes.append((batch.prompts.tokens.shape, batch.tokens.shape))
        assert shapes[-1][1] == run.zero_batch(new_state(run)).tokens.shape
        share = float(run.updater.update(new_state(run), batch)[1]["padding_share"])
        laid.append(round(lengths_to_last_true(batch.mask).sum() / (1 - share)))
    # In text examples all tokens are learned except the first, which has no context.
    assert shapes == [((6, 1), (6, 1, 13)), ((1, 5), (1, 6, 14)), ((1, 1), (1, 6, 13))]
    assert laid == [8 * 64, 128, 128], "a separate prompt takes a block of 64; a packed sequence has four blocks"


def test_held_out_examples_may_have_another_prefix():
    """Held-out examples need not share the training prefix; each of several eval datasets has its own loss."""
    policy, config = tiny_policy(), settings(per_device_eval_batch_size=4)
    held_out = [{**row, "prompt": f"Sum: {row['prompt']}"} for row in ROWS]
    run = prepare_sft(policy, ALIKE, config, eval_dataset={"first": ROWS[:3], "other": held_out})
    losses = evaluate_examples(run, policy.params)
    assert losses.keys() == {"first/loss", "other/loss"}
    want = loss_by_logits(policy.params, *rows_of(run.eval_data["other"]), model=policy.model)
    np.testing.assert_allclose(losses["other/loss"], want, rtol=1e-5)


def test_accuracy_is_the_share_of_learned_tokens_with_the_largest_logit(learned):
    """`mean_token_accuracy`, as in TRL, is the share of learned tokens with the largest logit."""
    policy = tiny_policy()
    policy = policy.replace(params=load_params(learned[0], policy.params, step=10)[1])
    run = prepare_sft(policy, ROWS, settings(per_device_train_batch_size=6, train_sampling_strategy="sequential"))
    tokens, masks = rows_of(run.data)
    likeliest = np.asarray(jax.jit(policy.model.apply)({"params": policy.params}, tokens).argmax(axis=-1))
    right = np.mean((likeliest[:, :-1] == tokens[:, 1:])[masks[:, 1:]])
    assert 0 < right < 1
    for updater in (run.updater, Updater(run.updater.model, run.updater.config, micro_shape=(2, 1))):
        _, sums = updater.gradients(new_state(run), next_examples(run, 0)[0])
        np.testing.assert_allclose(finalize_metrics(sums)["mean_token_accuracy"], right, rtol=1e-6)


def trl_gradient(policy, case, directory):
    """Return our loss and gradient, {checkpoint name: array}, for one of the TRL cases."""
    rows, more = make_sft.CASES[case]
    tokenizer = copy.copy(policy.tokenizer)
    tokenizer.chat_template = make_sft.TEMPLATE
    config = SFTConfig(max_steps=1, **make_sft.batch_sizes(rows, more))
    loss, grads, _ = gradient(policy.replace(tokenizer=tokenizer), config, rows)
    save_pretrained(directory, policy.replace(params=grads))
    return loss, load_file(directory / "model.safetensors")


@pytest.mark.filterwarnings("ignore:dataset. truncated . of . examples .longer than max_length")
@pytest.mark.parametrize("case", sorted(make_sft.CASES))
def test_loss_and_gradient_equal_trl(case, tmp_path):
    """SFT's loss and the gradient of every parameter equal those of TRL 1.16's SFTTrainer."""
    with np.load(Path(make_sft.__file__).with_name("sft.npz")) as golden:
        want = {name.removeprefix(f"{case}/"): golden[name] for name in golden if name.startswith(f"{case}/")}
    loss, grads = trl_gradient(tiny_policy(), case, tmp_path)
    np.testing.assert_allclose(loss, want.pop("loss"), rtol=1e-5)
    assert grads.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(grads[name], want[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.filterwarnings("ignore")
def test_installed_trl_matches_the_stored_results(tmp_path):
    for package in ("torch", "trl", "datasets"):
        pytest.importorskip(package)
    for case, (loss, grads) in make_sft.all_updates().items():
        (tmp_path / case).mkdir()
        ours, our_grads = trl_gradient(tiny_policy(), case, tmp_path / case)
        np.testing.assert_allclose(ours, loss, rtol=1e-5, err_msg=case)
        for name in grads:
            np.testing.assert_allclose(our_grads[name], grads[name], rtol=1e-3, atol=1e-5, err_msg=f"{case}/{name}")


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Train for 30 steps; return the run directory, the config and the final state."""
    best = {"metric_for_best_model": "eval/loss", "load_best_model_at_end": True}
    config = settings(max_steps=30, eval_steps=10, save_steps=10, **best)
    run_dir = tmp_path_factory.mktemp("learned")
    return run_dir, config, sft(tiny_policy(), ROWS, config, eval_dataset=ROWS[:3], run_dir=run_dir)


def test_sft_learns_evaluates_and_keeps_the_best(learned):
    run_dir, config, state = learned
    policy = tiny_policy()
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
    run = prepare_sft(policy, ROWS, config, eval_dataset=ROWS[:3])
    want = loss_by_logits(policy.params, *rows_of(run.eval_data[""]), model=policy.model)
    np.testing.assert_allclose(losses[0], want, rtol=1e-5)
    np.testing.assert_allclose(evaluate_examples(run, state.params)["loss"], min(losses), rtol=1e-5)
    wanted = {"loss", "entropy", "mean_token_accuracy", "grad_norm", "learning_rate", "num_tokens", "seconds/update"}
    assert wanted <= lines[1].keys()
    assert not (run_dir / "completions.jsonl").exists()
    assert json.loads((run_dir / "run.json").read_text())["config"] == config.to_dict() | {"compute_dtype": "float32"}
    for changed, message in (
        ({"completion_only_loss": False}, "completion_only_loss = False, but the run has None"),
        ({"seed": 0}, r"dataset: the prompts or their order differ from the saved run's \(rows in both: 6\)"),
    ):
        rows = [*ROWS[:5], {"prompt": "7+5=", "completion": "13"}] if "seed" in changed else ROWS
        with pytest.raises(ValueError, match=message):
            sft(policy, rows, dataclasses.replace(config, **changed), eval_dataset=ROWS[:3], run_dir=run_dir)
    with pytest.raises(ValueError, match="config: GRPOConfig, but the run has SFTConfig"):
        train(policy, ROWS, lambda completions: [0.0], GRPOConfig(max_completion_length=8), run_dir=run_dir)


def test_mesh_of_two_devices_equals_one_device():
    config = settings(per_device_train_batch_size=4, packing=True, max_steps=2)
    spread = settings(per_device_train_batch_size=2, packing=True, max_steps=2, mesh={"data": 2})
    one, two = (sft(tiny_policy(), ALIKE, some, optimizer=optax.sgd(0.1)) for some in (config, spread))
    chex.assert_trees_all_close(jax.device_get(two.params), jax.device_get(one.params), rtol=1e-4, atol=1e-5)


def test_examples_are_read_to_the_end_if_packed_and_spread_evenly():
    rows = [{"prompt": "Say: ", "completion": "x" * n} for n in (9, 9, 2, 2)]
    config = settings(per_device_train_batch_size=2, train_sampling_strategy="sequential", mesh={"data": 2})
    batch, *_ = next_examples(prepare_sft(tiny_policy(), rows, config), 0)
    assert batch.prompts.tokens.shape == (2, 5), "each device has the shared prefix"
    assert batch.mask.sum(axis=(1, 2)).tolist() == [13, 13], "each device has as many completion tokens, with EOS"
    for packing, count in ((False, 4 * 2), (True, len(ROWS) * 10)):
        run = prepare_sft(tiny_policy(), iter(ROWS * 10), settings(packing=packing), eval_dataset=iter(ROWS * 10))
        assert (len(run.data.rows), len(run.eval_data[""].rows)) == (count, len(ROWS) * 10)
    policy = tiny_policy()
    policy = policy.replace(params=place(policy.params, make_mesh({"data": 2})))
    assert len(prepare_sft(policy, iter(ROWS * 10), settings()).data.rows) == 2 * 4 * 2, "on the policy's mesh"


BAD = [
    ({"config": GRPOConfig()}, "config must be an SFTConfig"),
    ({"policy": 3}, "policy must be a Policy; got int"),
    ({"config": settings(eval_steps=2)}, "eval_steps = 2: needs an evaluation dataset; set eval_dataset"),
    ({"dataset": [{"text": "a" * 300}], "config": settings(max_length=None)}, "the longest example has 301 tokens"),
    ({"eval_dataset": ROWS, "config": settings(metric_for_best_model="eval/los", eval_steps=1)},
        "metric_for_best_model='eval/los' is not an evaluation metric; available: eval/loss"),
    ({"dataset": [{"input_ids": [1, 999]}]}, "the token id 999, but the model's vocabulary size is"),
    ({"config": settings(mesh={"data": 2}, router_aux_loss_coef=0.1)}, "router_aux_loss_coef = 0.1: the model is not"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_invalid_sft_arguments_are_rejected_before_anything_runs(arguments, message, monkeypatch):
    monkeypatch.setattr("grpo_jax.run.sft.new_state", lambda *_, **__: pytest.fail("the run began"))
    given = {"policy": tiny_policy(), "dataset": ROWS, "config": settings(), **arguments}
    with pytest.raises(ValueError, match=message):
        sft(**given)


def test_fields_shared_with_trl_have_its_defaults():
    trl = pytest.importorskip("trl", minversion="1.16", exc_type=ImportError)
    theirs = {field.name: field.default for field in dataclasses.fields(trl.SFTConfig)}
    grpo = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    for field in dataclasses.fields(SFTConfig):
        if field.name in theirs and not (field.name in grpo and field.default == grpo[field.name]):
            assert field.default == theirs[field.name], field.name


@pytest.mark.quick
def test_blocks_are_counted_at_the_start_of_a_run(monkeypatch):
    """With packing, steps are counted in blocks. Prompts have no maximum length, so none is dropped because of it."""
    said, rows = [], [*ROWS * 4, {"prompt": "x" * 40, "completion": "y"}]
    monkeypatch.setattr(Display, "say", lambda display, text: said.append(text))
    config = settings(packing=True, max_steps=-1, num_train_epochs=1, completion_only_loss=True, max_length=9)
    with pytest.warns(UserWarning, match=r"dropped 1 of 25 examples \(no tokens in the loss\)"):
        run = prepare_sft(tiny_policy(), rows, config)
    with open_session(run, None, None) as session:
        session.start(new_state(run), "auto", params_shared_with_caller=False)
    assert f"optimizer steps: {run.total_steps}" in said[0]
    assert not any("max_prompt_length" in text for text in said)
