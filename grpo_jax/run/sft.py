"""Supervised fine-tuning (`sft`), often the stage before GRPO. Batches contain dataset examples, not rollouts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np
import optax

from grpo_jax.config.settings import shown
from grpo_jax.config.sft import SFTConfig
from grpo_jax.messages import ErrorList
from grpo_jax.models.packing import balanced_order, lengths_to_last_true
from grpo_jax.models.sharding import commit_to_devices, fetch, shard_count
from grpo_jax.policy import Policy
from grpo_jax.rollout.ends import BY_EOS
from grpo_jax.run.placement import run_mesh, shape_of
from grpo_jax.run.policy_checks import check_best_metric, check_is_policy, check_policy, check_tokens, run_problems
from grpo_jax.run.prepare import check_optimizer, encode_datasets, place_run
from grpo_jax.run.run import SFTRun, new_state
from grpo_jax.run.session import check_run_dir, open_session
from grpo_jax.text.examples import Examples, encode_examples, load_examples
from grpo_jax.text.images import load_processor_if_needed
from grpo_jax.text.prompts import prompt_indices
from grpo_jax.text.sources import Dataset, check_finite, named_datasets
from grpo_jax.types import Batch, Params, Row, is_builtin
from grpo_jax.update.optimizer import make_optimizer, make_schedule
from grpo_jax.update.packed import choose_updater
from grpo_jax.update.state import TrainState
from grpo_jax.watch.monitor import Callback
from grpo_jax.watch.writer import absolute_run_dir


def sft(
    policy: Policy,
    dataset: Dataset,
    config: SFTConfig,
    *,
    eval_dataset: Dataset | None = None,
    run_dir: str | Path | None = None,
    resume: str = "auto",
    callbacks: Sequence[Callback] = (),
    optimizer: optax.GradientTransformation | None = None,
    donate: bool = False,
) -> TrainState:
    """Fine-tune a policy on a dataset's completions (supervised fine-tuning).

    Updates and the files in a run directory are as in `train`. The loss is `maths.supervised.likelihood_loss`. With
    models from this package, examples are packed without padding, and their common prefix (BOS, a system prompt, tools)
    is computed once per batch. Without a common prefix, or with images, examples are padded to multiples of 64 tokens.

    Args:
      policy: policy from `from_pretrained`, with or without adapters (`add_lora`). Its params are copied and left
        unchanged, unless `donate` is True.
      dataset: rows with `prompt` and `completion` (text or messages), with `messages`, with `text`, or with token ids
        as `input_ids` and `labels` (−100 excludes a token from the loss). See `text.load_examples`.
      config: training settings.
      eval_dataset: held-out rows, or a dict of rows keyed by name. Their loss is logged as `eval/loss` (for a dict, as
        `eval/<name>/loss`) before the first step, every `eval_steps` steps and after the last step.
      run_dir: directory for metrics, checkpoints and the report, as in `train`.
      resume: "auto", "must" or "never", as in `train`.
      callbacks: functions called as `callback(step, metrics)` after every logged step.
      optimizer: optax transformation that replaces the config's AdamW, schedule and gradient clipping.
      donate: whether to update the arrays of `policy` in place, as in `train`.

    Returns:
      The final `TrainState` or, with `load_best_model_at_end`, the best checkpoint's state. To continue with `train`,
      pass `policy.replace(params=state.params)` to it.

    Raises:
      ValueError: if an argument is invalid, for example if the assistant's messages cannot be located in the output of
        the chat template. Other errors are the same as in `train`.

    Example:
      A bigram model with 16 parameters learns that "b" follows "a" and that EOS follows "b":

      >>> import jax.numpy as jnp
      >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
      >>> from transformers import PreTrainedTokenizerFast
      >>> class Pairs:
      ...     def apply(self, variables, tokens):
      ...         return variables["params"]["logits"][tokens]
      >>> letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(".abc")}, unk_token="."))
      >>> letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
      >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=".")
      >>> policy = Policy(Pairs(), {"logits": jnp.zeros((4, 4))}, tokenizer)
      >>> rows = [{"prompt": "a", "completion": "b"}, {"prompt": "ca", "completion": "b"}]
      >>> state = sft(policy, rows, SFTConfig(max_steps=30, learning_rate=0.3))
      >>> state.params["logits"].argmax(-1).tolist()[1:3]  # "a" is followed by "b", "b" by EOS
      [2, 0]
    """
    run_dir = absolute_run_dir(run_dir)
    run = prepare_sft(policy, dataset, config, eval_dataset=eval_dataset, optimizer=optimizer)
    check_run_dir(run, run_dir, resume)
    state = commit_to_devices(new_state(run, donate=donate))
    run.policy.release_params()
    with open_session(run, run_dir, state, callbacks) as session:
        state = session.start(state, resume, params_shared_with_caller=donate).state
        if donate:
            policy.release_params()
        progress, monitor = session.progress, session.monitor
        if run.eval_data:
            session.evaluate = functools.partial(evaluate_examples, run, check_interrupt=session.signals.check)
        session.evaluate_if_due(state)
        while session.should_continue():
            batch, cursor, metrics = next_examples(run, progress.cursor)
            session.record_batch(cursor, metrics)
            with monitor.phase("update"):
                state, measured = run.updater.update(state, batch)
                metrics = {name: float(value) for name, value in fetch(measured).items()}
            session.record_update(metrics)
            session.check_skipped_updates(state, batch, metrics, None)
            if not session.stop_requested():
                session.evaluate_if_due(state)
                session.save_if_due(state)
        state = session.end(state)
    return state


def prepare_sft(
    policy: Policy,
    dataset: Dataset,
    config: SFTConfig,
    *,
    eval_dataset: Dataset | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> SFTRun:
    """Validate the arguments to `sft` and build its run. Most errors are collected and raised as one ValueError."""
    if not isinstance(config, SFTConfig):
        raise ValueError(
            f"config must be an SFTConfig; got {type(config).__name__}. SFTConfig.from_dict converts a dict."
        )
    check_is_policy(policy)
    policy.check_held()
    errors = ErrorList()
    errors.check(check_policy, policy)
    errors.check(check_optimizer, optimizer)
    rows = {"dataset": errors.check(_rows, policy, dataset, config, "dataset")}
    for name, source in named_datasets(eval_dataset).items():
        argument = f"eval_dataset[{name!r}]" if name else "eval_dataset"
        rows[argument] = errors.check(_rows, policy, source, config, argument)
    if eval_dataset is not None:
        losses = [f"{part}/loss" if part else "loss" for part in named_datasets(eval_dataset)]
        errors.check(check_best_metric, config, losses)
    errors.raise_together()
    encode = functools.partial(_encode, policy, config)
    policy, config, mesh, encoded = encode_datasets(policy, config, rows, encode, errors)
    longest, shape = max((len(ids) for part in encoded.values() for ids in part.token_ids), default=1), shape_of(policy)
    problems = run_problems(policy, config, has_eval_data=len(rows) > 1)
    if shape is not None and longest > shape.max_position_embeddings:
        problems.append(
            f"{shown(config, 'max_length')}: the longest example has {longest} tokens, but the model has only"
            f" {shape.max_position_embeddings} positions; use max_length={shape.max_position_embeddings} or less"
        )
    errors.raise_together(problems)
    policy, encoded = place_run(policy, encoded, config, mesh, BY_EOS)
    data, *held_out = encoded.values()
    eval_data = dict(zip(named_datasets(eval_dataset), held_out, strict=True))
    return derive_sft(policy, config, data, eval_data, mesh=mesh, longest=longest, optimizer=optimizer)


def derive_sft(
    policy: Policy,
    config: SFTConfig,
    data: Examples,
    eval_data: Mapping[str, Examples] = MappingProxyType({}),
    *,
    mesh: jax.sharding.Mesh | None,
    longest: int,
    optimizer: optax.GradientTransformation | None = None,
) -> SFTRun:
    """Build a run from validated arguments. Params may be abstract. `longest` is the longest example's token count."""
    shape = shape_of(policy)
    sizes, total_steps = config.sizes(), config.total_steps(len(data.blocks))
    # Maximum number of rows in a batch, rounded up to whole micro-batches. Blocks may repeat across an epoch boundary.
    repeats = -(-sizes.prompts_per_iteration // len(data.blocks)) + 1
    rows = sum(sorted(list(map(len, data.blocks)) * repeats, reverse=True)[: sizes.prompts_per_iteration])
    rows = -(-rows // sizes.micro_prompts) * sizes.micro_prompts
    # With images, an example's prompt is all tokens before the first one in the loss. Otherwise, it is the common
    # prefix of all examples, which a model with a cache computes only once, or the first token if there is no prefix.
    datasets = (data, *eval_data.values())
    if images := data.image_encoder is not None:
        starts = [start for examples in datasets for start in examples.starts]
        start, shared = config.padded(max(starts)), 0
        ends = (len(ids) for examples in datasets for ids in examples.token_ids)
        rest = max(end - start_of_loss for end, start_of_loss in zip(ends, starts, strict=True))
    else:
        shared = min(examples.shared for examples in datasets) if is_builtin(policy.model) else 0
        start = max(1, shared)
        rest = longest - start
    length = config.padded(rest)
    if shape is not None:  # no example exceeds the model's context
        length = min(length, shape.max_position_embeddings - (0 if images else start))
    schedule = make_schedule(config, total_steps) if optimizer is None else None
    optimizer = make_optimizer(config, total_steps) if optimizer is None else optimizer
    updater = choose_updater(
        policy.model,
        dataclasses.replace(config, max_length=length + 1),
        micro_shape=(sizes.micro_prompts, 1),
        optimizer=optimizer,
        mesh=mesh,
    )
    updater = dataclasses.replace(updater, skip_zero_signal=False)  # there are no zero-signal groups to skip in SFT
    return SFTRun(
        policy=policy,
        config=config,
        data=data,
        eval_data=eval_data,
        prompt_length=start,
        num_groups=shard_count(mesh) if shared else None,
        images=data.batch([0], rows=len(data.blocks[0]), length=length, prompt_length=start).prompts.images,
        mesh=mesh,
        sizes=sizes._replace(prompts_per_update=rows),
        total_steps=total_steps,
        optimizer=optimizer,
        schedule=schedule,
        updater=updater,
    )


def _rows(policy: Policy, dataset: Dataset, config: SFTConfig, argument: str) -> list[Row]:
    """Load the rows of a dataset. Without packing, a training stream is read only as far as the run needs."""
    max_rows = None
    if argument == "dataset":
        check_finite(dataset, argument, config.max_steps)
        if config.max_steps > 0 and not config.packing:
            max_rows = config.max_steps * run_mesh(policy, config)[1].sizes().prompts_per_iteration
    rows = load_examples(dataset, text_field=config.dataset_text_field, argument=argument, max_rows=max_rows)
    if argument == "dataset" and config.shuffle_dataset:
        rows = [rows[i] for i in prompt_indices(0, len(rows), num_rows=len(rows), seed=config.seed)]
    return rows


def _encode(policy: Policy, config: SFTConfig, rows: Sequence[Row], argument: str) -> Examples:
    """Tokenize rows and check the token ids against the model's vocabulary."""
    eos_token_ids, packing = policy.eos_token_ids, config.packing and argument == "dataset"
    data = encode_examples(
        rows,
        policy.tokenizer,
        config,
        eos_token_ids=eos_token_ids,
        packing=packing,
        processor=load_processor_if_needed(policy, rows, argument),
        argument=argument,
    )
    check_tokens(policy, data)
    return data


def next_examples(run: SFTRun, cursor: int) -> tuple[Batch, int, dict[str, float]]:
    """Return the next update's batch, the cursor after it (in blocks since the start of the run) and its metrics."""
    count, num_blocks = run.sizes.prompts_per_iteration, len(run.data.blocks)
    shuffle = run.config.train_sampling_strategy == "random"
    blocks = prompt_indices(cursor, count, num_rows=num_blocks, seed=run.config.seed, shuffle=shuffle)
    batch = _batch(run, run.data, blocks, run.sizes.prompts_per_update)
    num_tokens = sum(len(run.data.token_ids[i]) for block in blocks for i in run.data.blocks[block])
    return batch, cursor + count, {"num_tokens": float(num_tokens)}


def _batch(run: SFTRun, examples: Examples, blocks: Sequence[int], rows: int) -> Batch:
    """Build a batch from the given blocks: [rows, 1, T], or [run.num_groups, G, T] if all examples share a prefix."""
    length, groups = run.updater.config.max_completion_length, run.num_groups
    batch = examples.batch(blocks, rows=rows, length=length, prompt_length=run.prompt_length)
    if groups is None:
        return batch
    order = balanced_order(lengths_to_last_true(np.asarray(batch.mask))[:, 0], groups)

    def grouped(x: jax.Array) -> jax.Array:
        return x[order].reshape(groups, -1, *x.shape[2:])

    return batch.replace(
        prompts=jax.tree.map(lambda x: np.repeat(x[:1], groups, axis=0), batch.prompts),
        tokens=grouped(batch.tokens),
        mask=grouped(batch.mask),
        advantages=grouped(batch.advantages),
        sampling_log_probs=grouped(batch.sampling_log_probs),
    )


def evaluate_examples(
    run: SFTRun, params: Params, *, check_interrupt: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return the held-out `loss`, averaged over tokens, or one `<name>/loss` for each dataset in a dict."""
    rows, losses = run.config.per_device_eval_batch_size * run.config.data_shards(), {}
    for name, examples in run.eval_data.items():
        count, total, tokens = len(examples.blocks), 0.0, 0
        for start in range(0, count, rows):
            check_interrupt()
            batch = _batch(run, examples, range(start, min(start + rows, count)), rows)
            log_probs = fetch(run.updater.log_probs(params, batch.prompts, batch.tokens, batch.mask))
            l = np.asarray(log_probs, np.float64)[batch.mask]
            total += float(-(l if run.config.loss_type == "nll" else np.exp(l) * l).sum())
            tokens += l.size
        losses[f"{name}/loss" if name else "loss"] = total / tokens
    return losses
