"""Adapters as PEFT's `LoraConfig` asks for them: the modules that PEFT itself adapts, or a refusal by name."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from test_families import raw_config, write_checkpoint
from test_lora import ARCHITECTURES, base_policy
from tiny import tiny_policy

from grpo_jax import from_pretrained, save_lora, save_pretrained
from grpo_jax.compat.adapters import _ASIDE, _OBEYED, with_adapters
from grpo_jax.models.lora import LoraModel


def config(**fields):
    return types.SimpleNamespace(**{"r": 4, "lora_alpha": 8, **fields})


def projections_of(policy):
    return {"/".join(path[:-1]) for path in flatten_dict(policy.params)}


@pytest.mark.quick
def test_a_config_of_few_fields():
    policy = with_adapters(base_policy(), config(lora_dropout=0.1), seed=0)
    assert isinstance(policy.model, LoraModel)
    assert (policy.model.scale, policy.model.dropout) == (2.0, 0.1)
    assert projections_of(policy) == {f"layers_{i}/self_attn/{name}_proj" for i in (0, 1) for name in "qv"}
    assert {x.shape[1] for path, x in flatten_dict(policy.params).items() if path[-1] == "a"} == {4}
    assert with_adapters(base_policy(), config(lora_dropout=0.1), seed=0, dropout=False).model.dropout == 0


@pytest.mark.quick
def test_rank_stabilized_and_gaussian():
    plain = with_adapters(base_policy(), config(), seed=0)
    assert with_adapters(base_policy(), config(use_rslora=True), seed=0).model.scale == 4.0  # 8 / √4
    wide = config(r=400, init_lora_weights="gaussian", target_modules="all-linear")
    factors = flatten_dict(with_adapters(base_policy(), wide, seed=0).params)
    a = np.concatenate([x.ravel() for path, x in factors.items() if path[-1] == "a"])
    assert a.std() == pytest.approx(1 / 400, rel=0.02)
    assert (np.abs(a) > 2 / 400).mean() == pytest.approx(0.0455, abs=0.002)  # as of a normal distribution
    assert not any(x.any() for path, x in factors.items() if path[-1] == "b")
    bounds = [abs(x).max() * x.shape[0] ** 0.5 for path, x in flatten_dict(plain.params).items() if path[-1] == "a"]
    assert all(0.9 < bound <= 1 for bound in bounds)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True, "bias": "all"}, r"has bias = 'all', use_dora = True: there is no such thing here, leave"),
        ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern = \{'q_proj': 8\}"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"init_lora_weights": False}, "init_lora_weights = False"),
        ({"peft_type": "ADALORA"}, "peft_config is a SimpleNamespace: there is LoRA here, give a LoraConfig"),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            r"takes lm_head, which has no adapter here: choose of \['down_proj'",
        ),
        ({"target_modules": r".*(embed_tokens|q_proj)"}, r"takes model.embed_tokens, which has no adapter here"),
        ({"target_modules": ["qkv_proj"]}, r"= \['qkv_proj'\] matches no projection of the policy: choose of"),
        ({"layers_to_transform": [5]}, r"\('q_proj', 'v_proj'\), layers_to_transform = \[5\] matches no projection"),
        ({"exclude_modules": r".*"}, r", exclude_modules = '\.\*' matches no projection"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be_had_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        with_adapters(tiny_policy(), config(**fields), seed=0)


@pytest.mark.quick
def test_a_name_among_others_that_fits_nothing_is_told():
    with pytest.warns(UserWarning, match=r"target_modules has \['query'\], and the policy no such projection: there"):
        policy = with_adapters(tiny_policy(), config(target_modules=["query", "o_proj"]), seed=0)
    assert projections_of(policy) == {"layers_0/self_attn/o_proj"}


@pytest.mark.quick
def test_experts_and_routers_take_no_adapters(tmp_path):
    policy = from_pretrained(write_checkpoint(tmp_path / "moe", raw_config("qwen3_moe")))
    with pytest.raises(ValueError, match=r"takes model\.layers\.0\.mlp\.experts\.0\.gate_proj, which has no adapter"):
        with_adapters(policy, config(target_modules=["q_proj", "gate_proj"]), seed=0)
    asked = config(target_modules=["q_proj", "gate_proj"], exclude_modules=r".*\.experts\..*")
    found = projections_of(with_adapters(policy, asked, seed=0))
    assert found == {*(f"layers_{i}/self_attn/q_proj" for i in range(3)), "layers_1/mlp/gate_proj"}


@pytest.mark.filterwarnings("ignore")  # peft's own
def test_every_field_of_the_real_config_is_obeyed_or_refused():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    default = peft.LoraConfig()
    assert projections_of(with_adapters(tiny_policy(), default, seed=0)) == {
        f"layers_0/self_attn/{n}_proj" for n in "qv"
    }
    with_adapters(tiny_policy(), peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True), seed=0)
    names = {field.name for field in dataclasses.fields(default)}
    assert names >= _OBEYED
    for name in sorted(names - _OBEYED - _ASIDE):
        asked = peft.LoraConfig()
        setattr(asked, name, {"q_proj": 2})
        with pytest.raises(ValueError, match=rf"peft_config has {name} = \{{'q_proj': 2\}}"):
            with_adapters(tiny_policy(), asked, seed=0)
    with pytest.raises(ValueError, match="is a AdaLoraConfig: there is LoRA here"):
        with_adapters(tiny_policy(), peft.AdaLoraConfig(total_step=2), seed=0)


OPTIONS = [
    {"target_modules": "all-linear"},
    {"target_modules": ["q_proj", "mlp.up_proj", "w1", "qkv_proj", "out_proj"], "use_rslora": True},
    {"target_modules": r".*layers\.1\..*(o|down)_proj"},
    {"target_modules": ["q_proj", "k_proj", "gate_up_proj"], "layers_to_transform": 1},
    {"target_modules": ["down_proj", "o_proj", "w2"], "layers_to_transform": [0, 3], "layers_pattern": "layers"},
    {"target_modules": "all-linear", "exclude_modules": ["self_attn.q_proj", "down_proj"]},
    {"target_modules": "all-linear", "exclude_modules": r".*\.0\..*|.*_proj"},
]


@functools.cache
def pytorch_base(kind, directory):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    save_pretrained(directory, base_policy(kind))
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def kind_and_directory(request, tmp_path_factory):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    return request.param, tmp_path_factory.mktemp(request.param) / "base"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_modules_are_those_that_peft_adapts(options, kind_and_directory, tmp_path):
    """By the tensors of the files that both write; where PEFT finds nothing, nothing is found here."""
    import peft
    from safetensors import safe_open

    kind, directory = kind_and_directory
    asked = peft.LoraConfig(r=4, lora_alpha=6, **options)
    try:
        theirs = peft.get_peft_model(pytorch_base(kind, directory), asked)
    except ValueError:
        with pytest.raises(ValueError, match="matches no projection of the policy"):
            with_adapters(base_policy(kind), peft.LoraConfig(r=4, lora_alpha=6, **options), seed=0)
        return
    theirs.save_pretrained(tmp_path / "theirs")
    scales = {x.scaling["default"] for x in theirs.modules() if isinstance(x, peft.tuners.lora.Linear)}
    theirs.unload()
    policy = with_adapters(base_policy(kind), peft.LoraConfig(r=4, lora_alpha=6, **options), seed=0)
    save_lora(tmp_path / "ours", policy)
    files = [safe_open(tmp_path / who / "adapter_model.safetensors", "np") for who in ("theirs", "ours")]
    assert {*files[0].keys()} == {*files[1].keys()}
    assert scales == {policy.model.scale}


def test_a_seed_draws_the_factors():
    one, same, other = (with_adapters(tiny_policy(), config(), seed=n).params for n in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert not np.array_equal(*(p["layers_0"]["self_attn"]["q_proj"]["a"] for p in (one, other)))
