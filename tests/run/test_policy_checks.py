"""Checks of policies, tokens and settings before anything is sampled or trained."""

import contextlib
import copy
import re
import sys
import warnings

import pytest
from tiny import EOS, tiny_model, tiny_policy, tiny_tokenizer

from grpo_jax import GRPOConfig, SFTConfig, evaluate
from grpo_jax.cli import chat
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.run.policy_checks import check_policy, group_problems, run_problems, warn_of_tokens
from grpo_jax.run.prepare import prepare
from grpo_jax.run.sft import prepare_sft
from grpo_jax.text.examples import encode_examples
from grpo_jax.text.prompts import encode_prompts

pytestmark = pytest.mark.quick

OPENING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
talk = lambda text="hi": [{"role": "user", "content": text}]


def tokenizer_with(template=None, bos=None, eos=False):
    """Return the tiny tokenizer, optionally adding `bos` and its EOS to each text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    if bos is not None:
        tokenizer.bos_token = bos
    added = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (bos, EOS) if token is not None]
    single = " ".join([*([bos] if bos else []), "$A", *([EOS] if eos else [])])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=added)
    return tokenizer


def warned(rows, tokenizer, *, eos=(), **how):
    """Return the warnings for `rows`, encoded as SFT examples if they have a completion, text or messages."""
    policy = tiny_policy().replace(tokenizer=tokenizer)
    if eos:
        policy = policy.replace(generation_config={"eos_token_id": list(eos)})
    if {"completion", "text", "messages"} & rows[0].keys():
        data = encode_examples(rows, tokenizer, SFTConfig(), eos_token_ids=policy.eos_token_ids)
    else:
        data = encode_prompts(rows, tokenizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_tokens(data, policy, "dataset", **how)
    return [str(one.message) for one in caught]


def test_special_tokens_repeated_by_the_tokenizer_warn():
    """Two BOS tokens, an EOS at a prompt's end, or two EOS tokens in an SFT example give a warning."""
    tokenizer = tokenizer_with(bos="!")
    assert warned([{"prompt": "ab"}, {"prompt": "c!"}], tokenizer) == []
    (line,) = warned([{"prompt": "ab"}, {"prompt": "!ab"}, {"prompt": "!c"}], tokenizer)
    assert line.startswith("dataset: 2 of 3 rows start with two BOS tokens, because the tokenizer adds special")
    assert warned([{"prompt": "!!ab"}], tokenizer_with()) == []  # the tokenizer has no BOS
    template = "!" + OPENING.replace("<think>", "")
    assert warned([{"prompt": talk("!ab")}], tokenizer_with(template, bos="!")) == []  # "!" is message text here
    (line,) = warned([{"prompt": "ab"}], tokenizer_with(eos=True))
    assert line.startswith("dataset: 1 of 1 rows end with an EOS token before the completion, because the tokenizer")
    for row in ({"text": "!ab"}, {"prompt": "!a", "completion": "b"}):
        (line,) = warned([row], tokenizer)
        assert line.startswith("dataset: 1 of 1 rows start with two BOS tokens, because")
        (line,) = warned([row], tokenizer_with(eos=True))
        assert line.startswith("dataset: 1 of 1 rows end with two EOS tokens, because")
        assert warned([row], tokenizer_with()) == []


CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"


def test_end_of_turn_that_does_not_end_completions_warns():
    """A template whose end-of-turn token does not end completions (ChatML on a base model) gives a warning."""
    tokenizer = tokenizer_with(CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", EOS])
    message = f"the chat template ends a turn with '<|im_end|>' ({end}), which does not end completions"
    message += " (policy.eos_token_ids = ["
    (line,) = warned([{"prompt": talk()}], tokenizer)
    assert line.startswith(
        f"dataset: {message}{eos}]). Use policy.replace(generation_config={{'eos_token_id': [{end}, {eos}]}})"
    )
    assert line.endswith(f", or stop_token_ids=[{end}]")
    assert warned([{"prompt": "hi"}], tokenizer) == warned([{"prompt": talk()}], tokenizer, eos=[end]) == []
    for ends in (TurnEnds(stop_token_ids=(end,)), TurnEnds(stop=("a",))):
        assert warned([{"prompt": talk()}], tokenizer, ends=ends) == []
    lesson = [{"messages": [*talk(), {"role": "assistant", "content": "yes"}]}]
    (line,) = warned(lesson, tokenizer)
    assert line.startswith(
        f"dataset: the loss excludes all end-of-turn tokens, so the policy does not learn to stop; {message}"
    )
    assert warned(lesson, tokenizer, eos=[eos, end]) == []
    (line,) = warned(lesson, tokenizer_with(CHATML.replace("<|im_end|>", "")))
    assert line.startswith(
        "dataset: the loss excludes all end-of-turn tokens, so the policy does not learn to stop; append"
    )


def test_template_with_the_current_date_warns():
    dated = tokenizer_with("{% if not date_string %}{{ strftime_now('%Y') }}{% endif %}" + CALLS)
    (line,) = warned([{"prompt": talk()}], dated)
    assert line.startswith("dataset: the chat template writes the current date, so the prompts change daily")
    assert warned([{"prompt": talk()}], dated, template_kwargs={"date_string": "1 May"}) == []
    assert warned([{"prompt": "hi"}], dated) == []


CALLS = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}<eos>{% endfor %}"


def without(completions):
    return [float("</think>" in text) for text in completions]


def by_chat(policy, text):
    chat.run_chat(policy, GRPOConfig(max_completion_length=4), [text])


def by_grpo(policy, text):
    prepare(policy, [{"prompt": text}], [without], GRPOConfig(max_completion_length=4))


def by_sft(policy, text):
    prepare_sft(policy, [{"prompt": text, "completion": "b"}], SFTConfig())


def by_evaluation(policy, text):
    evaluate(policy, [{"prompt": text}], [without], max_completion_length=4)


@pytest.mark.parametrize("used", [by_chat, by_grpo, by_sft, by_evaluation])
def test_every_entry_point_checks_the_policy_and_its_tokens(used, monkeypatch):
    """`train`, `sft`, `evaluate` and `chat` reject tokens and positions that the model lacks and policies without an
    EOS, and warn about an EOS that does not end completions and about repeated special tokens.
    """
    policy, tokenizer = tiny_policy(), tokenizer_with()
    tokenizer.add_tokens(["@@"])
    with pytest.raises(ValueError, match=f"the token id {len(tokenizer) - 1}, but the model's vocabulary size is 258"):
        used(policy.replace(tokenizer=tokenizer), "a@@")
    with pytest.raises(ValueError, match="256 positions"):
        used(policy, "a" * 300)
    bare = tokenizer_with()
    bare.eos_token = None
    endless = policy.replace(tokenizer=bare, config={**policy.config, "eos_token_id": None}, generation_config={})
    with pytest.raises(ValueError, match=r"policy has no EOS .* never end. Set eos_token_id in .*or set stop\."):
        used(endless, "a")
    for ends in (TurnEnds(stop=("a",)), TurnEnds(stop_token_ids=(3,))):
        check_policy(endless, ends)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "sample", stop)
    monkeypatch.setattr(sys.modules[evaluate.__module__], "evaluate_encoded", stop)
    strange = policy.replace(tokenizer=tokenizer_with(bos="!"), generation_config={"eos_token_id": 7})
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(KeyboardInterrupt):
        warnings.simplefilter("always")
        used(strange, "!a")
    text = " ".join(str(one.message) for one in caught)
    both = r"EOS token '<eos>' \(1\) is not in policy.eos_token_ids = \[7\].*'eos_token_id': \[1, 7\]"
    assert re.search(both, text)
    assert "start with two BOS tokens" in text


def test_settings_that_do_not_match_the_run_are_reported_at_once():
    """Other settings are in test_bad_inputs.py and test_sft.py."""

    def found(policy=None, **settings):
        config = GRPOConfig(max_completion_length=8, **settings)
        problems = group_problems(config, num_reward_fns=2, has_eval_data=False)
        return problems + run_problems(policy or tiny_policy(), config, has_eval_data=False)

    assert found() == found(reward_weights=[1, 2]) == found(router_aux_loss_coef=0) == []
    (line,) = found(metric_for_best_model="eval/a", save_steps=None)
    assert line.startswith(
        "metric_for_best_model = 'eval/a': needs an evaluation dataset; set eval_dataset (RUN.yaml: eval_data)"
    )
    (line,) = found(router_aux_loss_coef=0.01)
    assert line.startswith("router_aux_loss_coef = 0.01: the model is not a mixture")
    experts = tiny_model(num_experts=4, num_experts_per_token=2, expert_size=8, expert_layers=(True,), layers=1)[0]
    assert found(tiny_policy().replace(model=experts), router_aux_loss_coef=0.01) == []
