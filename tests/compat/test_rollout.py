"""A script with TRL's `rollout_func` samples by it, and its further fields reach the reward functions."""

import chex
import jax
import numpy as np
import pytest
from tiny import tiny_policy

import grpo_jax
from grpo_jax import generate, make_prompts
from grpo_jax.compat.trainer import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": "ab", "kind": "x"}, {"prompt": "cde", "kind": "y"}]
POLICY = tiny_policy().replace(generation_config={"eos_token_id": [1, *range(2, 66)], "pad_token_id": 0})


class Engine:
    """A `rollout_func` that samples from the trainer's policy, and spoils what it returns as it is told."""

    def __init__(self, **spoiled):
        self.spoiled, self.calls, self.params = spoiled, [], []

    def __call__(self, prompts, trainer):
        self.calls.append(prompts)
        self.params.append(jax.tree.map(np.array, trainer.policy.params))
        prompt_ids = [trainer.processing_class(text)["input_ids"] for text in prompts]
        found = generate(
            trainer.policy.model,
            trainer.policy.params,
            make_prompts(prompt_ids),
            jax.random.key(len(self.calls)),
            num_generations=1,
            max_completion_length=trainer.args.max_completion_length,
            eos_token_ids=trainer.policy.eos_token_ids,
        )
        tokens, mask, l = (np.asarray(x)[:, 0] for x in (found.tokens, found.mask, found.log_probs))
        cut = lambda x: [row[keep].tolist() for row, keep in zip(x, mask, strict=True)]
        number = list(range(len(prompts)))
        output = {"prompt_ids": prompt_ids, "completion_ids": cut(tokens), "logprobs": cut(l), "number": number}
        output |= {"same": "for all", "env_mask": [[1] * len(ids) for ids in cut(tokens)]}
        output |= {name: change(output.get(name)) for name, change in self.spoiled.items()}
        return {name: value for name, value in output.items() if value is not None}


def trainer_of(engine, reward_funcs, data=ROWS, **settings):
    settings = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 6, **settings}
    args = GRPOConfig(max_steps=2, learning_rate=1e-2, logging_steps=1, shuffle_dataset=False, bf16=False, **settings)
    lines = []
    keep = lambda step, metrics: lines.append(metrics)
    trainer = GRPOTrainer(POLICY, reward_funcs, args, data, rollout_func=engine, callbacks=[keep])
    return trainer, lines


def first_letter(completions, number, kind, **others):
    assert number == list(range(8))
    assert kind == ["x"] * 4 + ["y"] * 4
    assert others["same"] == ["for all"] * 8
    return [float(n % 3) for n in number]


async def later(completion_ids, number=None, trainer_state=None):
    assert number == list(range(8))
    assert trainer_state.max_steps == 2
    return [float(len(ids)) for ids in completion_ids]


def test_a_rollout_func_samples_and_its_fields_are_rewarded():
    engine = Engine()
    trainer, lines = trainer_of(engine, [first_letter, later])
    trainer.train()
    state = trainer.train_state
    assert engine.calls == [["ab"] * 4 + ["cde"] * 4] * 2
    assert [line["rewards/first_letter/mean"] for line in lines] == [7 / 8, 7 / 8]
    assert all("rewards/later/mean" in line for line in lines)
    assert max(line["sampler/log_prob_difference_max"] for line in lines) < 1e-4
    assert not any("sampler/importance_weight_mean" in line for line in lines), "TRL corrects for vLLM only"
    chex.assert_trees_all_equal(engine.params[0], jax.tree.map(np.array, POLICY.params))
    assert any(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x != y).any()), *engine.params))), "the present params"
    chex.assert_trees_all_equal(trainer.policy.params, state.params)


@pytest.mark.quick
def test_with_vllm_and_with_configs_of_ours_it_is_corrected_for():
    make = lambda args: GRPOTrainer(POLICY, later, args, ROWS, rollout_func=Engine()).config.sampler_correction
    assert make(GRPOConfig(use_vllm=True)) == "sequence_mask"
    assert make(GRPOConfig(use_vllm=True, vllm_importance_sampling_mode="token_mask")) == "token_mask"
    assert make(GRPOConfig()) is None
    assert make(grpo_jax.GRPOConfig()) == "sequence_mask"


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        ({"logprobs": lambda _: None}, "rollout_func returned no logprobs: return a dict that has them"),
        ({"number": lambda x: x[:3]}, r"lists of other lengths than the 8 prompts: \{'number': 3\}"),
        ({"env_mask": lambda x: [[0, *row[1:]] for row in x]}, "an env_mask with zeros"),
        ({"prompt_ids": lambda x: [*x[:7], [5]]}, r"other prompt_ids than the trainer has for prompt 7: \[5\] for \["),
        ({"logprobs": lambda x: [x[0], x[1][1:], *x[2:]]}, "ids of completion 1: return one for each"),
        (
            {"logprobs": lambda x: [[None] * len(x[0]), *x[1:]]},
            "sampler returned a log-prob that is not a finite number",
        ),
        (
            {"completion_ids": lambda x: [[999] * len(row) for row in x]},
            "sampler returned a token outside of the vocab",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_a_rollout_func_may_not_return_is_refused(spoiled, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(Engine(**spoiled), later)[0].train()


@pytest.mark.quick
def test_a_field_that_does_not_come_is_named():
    def needs(completions, number, wanted):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="it needs wanted, which rollout_func did not return"):
        trainer_of(Engine(), needs)[0].train()


def test_a_sampler_in_the_form_of_train_is_handed_on():
    seen = []

    def engine(**arguments):
        seen.append(arguments["num_generations"])
        return generate(**arguments)

    args = GRPOConfig(
        num_generations=4, per_device_train_batch_size=4, max_completion_length=4, max_steps=1, bf16=False
    )
    plain = lambda completions: [float(len(text)) for text in completions]
    GRPOTrainer(POLICY, plain, args, ROWS, sampler=engine).train()
    assert seen == [4]
