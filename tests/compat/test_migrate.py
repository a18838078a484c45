"""The way over from TRL: every field of TRL 1.16 has its place, and nothing is dropped without a word."""

import ast
import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

from experiments import from_trl as from_trl_script
from grpo_jax import GRPOConfig
from grpo_jax.compat.migrate import field_table, from_trl
from grpo_jax.compat.trl_fields import ELSEWHERE, SAME
from grpo_jax.config.settings import OTHER_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_trl.md"
OURS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}


@pytest.mark.quick
def test_the_table_is_that_of_the_trl_that_is_installed():
    trl = pytest.importorskip("trl", minversion="1.16", exc_type=ImportError)
    theirs = {
        field.name: field.default_factory() if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(trl.GRPOConfig)
    }
    assert set(SAME) | set(ELSEWHERE) == set(theirs)
    assert {name: field.default for name, field in ELSEWHERE.items()} == {name: theirs[name] for name in ELSEWHERE}


@pytest.mark.quick
def test_fields_that_are_the_same_are_ours_and_the_others_are_not():
    assert set(SAME) <= set(OURS)
    assert not (set(ELSEWHERE) | set(OTHER_NAMES)) & set(OURS)
    assert len(SAME) + len(ELSEWHERE) == 191  # fields of TRL 1.16 with transformers 5.23
    assert all(field.kind in ("other name", "set outside", "not needed", "not here") for field in ELSEWHERE.values())
    unneeded = [field.advice for field in ELSEWHERE.values() if field.kind in ("not needed", "set outside")]
    assert all(advice.startswith("leave it out: ") for advice in unneeded)


@pytest.mark.quick
def test_what_has_to_be_done_elsewhere_is_not_called_needless():
    """Advice that says what to use is of another name or of a setting outside."""
    needless = {name: field.advice for name, field in ELSEWHERE.items() if field.kind == "not needed"}
    told = re.compile(r"^leave it out: (use (?!mesh)|pass |set )|says it|switch|_FLAGS|JAX_")
    assert not {name: advice for name, advice in needless.items() if told.search(advice)}
    for name in ("use_cpu", "tf32", "log_level", "full_determinism"):
        moved = from_trl({name: not ELSEWHERE[name].default})
        assert ELSEWHERE[name].kind == "set outside"
        assert list(moved.left_out) == [name]
    assert list(from_trl({"save_on_each_node": True}).missing) == ["save_on_each_node"]


@pytest.mark.quick
def test_the_page_holds_the_table():
    assert field_table() in PAGE.read_text(encoding="utf-8")


@pytest.mark.quick
def test_the_page_names_things_that_are_there():
    text = PAGE.read_text(encoding="utf-8").replace(field_table(), "")
    root = PAGE.parent.parent
    names = set(re.findall(r"`((?:grpo_jax|experiments|tests|docs)/[\w/]+\.\w+)`", text))
    assert names
    for name in names:
        assert (root / name).exists(), name
    fields = set(re.findall(r"`(\w+)(?: ?= ?[^`]+)?`", text)) & (set(ELSEWHERE) | set(OURS))
    assert fields


def functions_of_trl() -> list[tuple[set[str], set[str]]]:
    """The names in each line of the page's table of functions: TRL's, ours."""
    (table,) = re.findall(r"^\| TRL's function \|.*\n\|---\|---\|---\|\n((?:\|.*\n)+)", PAGE.read_text(), flags=re.M)
    cells = [line.split("|")[1:3] for line in table.splitlines()]
    names = lambda cell: set(re.findall(r"`(?:\w+\.)*(\w+)", cell))
    return [(names(theirs), names(ours)) for theirs, ours in cells]


@pytest.mark.quick
def test_functions_of_trl_lead_to_functions_of_ours():
    package = PAGE.parent.parent / "grpo_jax"
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)}
    fields = set(OURS) | {"ref_params", "params", "log_metric", "log_extra", "callbacks", "run_dir", "metrics"}
    rows = functions_of_trl()
    assert len(rows) > 20
    assert {"compute_loss", "_get_per_token_logps_and_entropies"} <= set().union(*(theirs for theirs, _ in rows))
    for theirs, ours in rows:
        assert theirs
        assert not ours - defined - fields, theirs


@pytest.mark.quick
def test_functions_that_are_said_to_be_trls_are():
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("TRL is not installed")
    source = "\n".join(path.read_text(encoding="utf-8") for path in Path(spec.origin).parent.rglob("*.py"))
    defined = set(re.findall(r"^ *(?:async )?(?:def|class) (\w+)", source, flags=re.M))
    for theirs, _ in functions_of_trl():
        assert not theirs - defined


@pytest.mark.quick
def test_a_usual_config_carries_over():
    moved = from_trl(
        {
            "output_dir": "out",
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "bf16": True,
            "eval_strategy": "steps",
            "eval_steps": 20,
            "save_strategy": "no",
            "logging_steps": 5,
            "report_to": "none",
            "use_vllm": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "optim": "adamw_torch",
            "remove_unused_columns": False,
        }
    )
    assert moved.run_dir == "out"
    assert moved.missing == {}
    assert set(moved.left_out) == {"use_vllm", "gradient_checkpointing_kwargs"}
    config = moved.config()
    assert config == GRPOConfig(
        num_generations=4, compute_dtype="bfloat16", eval_steps=20, save_steps=None, logging_steps=5
    )
    told = str(moved)
    assert "taken as they are: num_generations, per_device_train_batch_size, eval_steps, logging_steps" in told
    assert "  save_strategy: save_steps=None: one checkpoint stays, that of the end" in told
    assert "NOT HERE" not in told


@pytest.mark.quick
@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"hub_token": "hf_secret"}, "HF_TOKEN"),
        ({"optim": "adafactor"}, "pass optimizer to train"),
        ({"eval_strategy": "epoch"}, "give eval_steps a number"),
        ({"save_strategy": "best"}, "give save_steps a number"),
        ({"logging_strategy": "no"}, "logged always"),
        ({"repetition_penalty": 1.1}, "no such penalty"),
        ({"trackio_space_id": "me/space"}, "trackers.trackio(space_id=...)"),
        ({"model_init_kwargs": {"revision": "v2", "attn_implementation": "sdpa"}}, "revision: from_pretrained takes"),
        ({"model_init_kwargs": {"dtype": "int8"}}, "'int8': use float32, bfloat16 or auto"),
        ({"deepspeed": "zero3.json"}, "mesh says how params are cut"),
    ],
    ids=str,
)
def test_what_is_not_here_is_said(values, advice):
    moved = from_trl(values)
    assert moved.values == {}
    assert list(moved.missing) == list(values)
    assert advice in str(moved).partition("NOT HERE:")[2]


@pytest.mark.quick
def test_further_arguments_of_sampling_are_fields_or_are_named():
    asked = {"stop_strings": ["</a>"], "top_p": 0.9, "do_sample": True, "repetition_penalty": 1.0, "max_new_tokens": 64}
    moved = from_trl({"generation_kwargs": asked, "top_p": 0.5, "top_k": 7})
    assert moved.missing == {}
    assert moved.config() == GRPOConfig(stop=["</a>"], top_p=0.9, top_k=7, max_completion_length=64)
    assert moved.translated == {"generation_kwargs": "stop=['</a>'], top_p=0.9, max_completion_length=64"}
    assert moved.same == ["top_k"]
    text = from_trl(
        {"generation_kwargs": '{"stop": ".", "stop_token_ids": [3], "num_beams": 2, "repetition_penalty": 1.2}'}
    )
    assert text.config() == GRPOConfig(stop=["."], stop_token_ids=[3])
    assert text.missing["generation_kwargs"].startswith("num_beams: its stop_strings")
    assert "which the log-probs of the loss would need too" in text.missing["repetition_penalty"]
    assert list(from_trl({"generation_kwargs": {}}).notes()) == []


VLLM = "vllm_importance_sampling_"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            {"mode": "token_truncate", "clip_max": 2.0},
            {"sampler_correction": "token_truncate", "sampler_correction_max": 2.0},
        ),
        ({"correction": False, "mode": "token_mask"}, {"sampler_correction": None}),
        ({"cap": 5.0, "clip_max": 2.0}, {"sampler_correction_max": 5.0}),
        ({"clip_max": None, "clip_min": 0.0}, {"sampler_correction_max": None, "sampler_correction_min": 0.0}),
        ({"mode": "sequence_mask", "clip_max": 3.0, "correction": True, "cap": None}, {}),
    ],
    ids=str,
)
def test_the_correction_for_vllm_is_that_of_a_sampler(theirs, ours):
    moved = from_trl({VLLM + name: value for name, value in theirs.items()})
    assert (moved.values, moved.left_out, moved.missing) == (ours, {}, {})
    assert set(moved.translated) == {VLLM + name for name in theirs if ours}
    assert moved.config() == GRPOConfig(**ours)
    assert OURS["sampler_correction"] == ELSEWHERE[VLLM + "mode"].default
    assert OURS["sampler_correction_max"] == ELSEWHERE[VLLM + "clip_max"].default


class Named:
    """What a dtype of PyTorch looks like."""

    def __repr__(self):
        return "torch.bfloat16"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kwargs", "dtype", "values"),
    [
        ({"dtype": "bfloat16", "attn_implementation": "flash_attention_2"}, "bfloat16", {"compute_dtype": "bfloat16"}),
        ({"torch_dtype": Named()}, "bfloat16", {"compute_dtype": "bfloat16"}),
        ({"dtype": "float16", "device_map": "auto"}, "bfloat16", {"compute_dtype": "bfloat16"}),
        ({"dtype": "float32", "trust_remote_code": False}, "float32", {}),
        ({"dtype": "auto", "torch_dtype": None}, "auto", {}),
        ({"attn_implementation": "sdpa"}, None, {}),
        ({}, None, {}),
    ],
    ids=str,
)
def test_the_dtype_that_a_model_is_loaded_with(kwargs, dtype, values):
    moved = from_trl({"model_init_kwargs": kwargs, "bf16": False})
    assert (moved.dtype, moved.values, moved.missing) == (dtype, values, {})


@pytest.mark.quick
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("eval_reward", "eval/reward"),
        ("reward", "eval/reward"),
        ("eval_rewards/right/mean", "eval/right"),
        ("rewards/right/mean", "eval/right"),
        ("eval_completions/mean_length", "eval/mean_length"),
        ("eval/right", "eval/right"),
        ("kl", "kl"),
    ],
)
def test_the_name_of_the_best_metric_is_that_of_an_evaluation(theirs, ours):
    steps = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4}
    moved = from_trl({"metric_for_best_model": theirs, **steps})
    assert moved.missing == {}
    assert moved.config() == GRPOConfig(metric_for_best_model=ours, eval_steps=4, save_steps=4)
    assert ("metric_for_best_model" in moved.same) == (theirs == ours)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["eval_loss", "loss", "eval_rewards/right/std"])
def test_what_no_evaluation_measures_cannot_be_best(name):
    moved = from_trl({"metric_for_best_model": name, "eval_strategy": "steps", "eval_steps": 4})
    assert "name eval_reward or" in moved.missing["metric_for_best_model"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "greater"),
    [
        ({}, None),
        ({"metric_for_best_model": None, "greater_is_better": None}, None),
        ({"metric_for_best_model": "loss", "greater_is_better": False}, None),  # a dump of the two that were not set
        ({"metric_for_best_model": "eval_reward", "greater_is_better": True}, True),
    ],
    ids=str,
)
def test_the_best_model_is_that_of_the_greatest_reward_unless_something_is_named(given, greater):
    steps = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4}
    moved = from_trl({"load_best_model_at_end": True, **given, **steps})
    assert moved.missing == {}
    assert '"eval/reward"' in moved.translated["metric_for_best_model"]
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval/reward", "greater_is_better": greater}
    assert moved.config() == GRPOConfig(**best, eval_steps=4, save_steps=4)
    assert moved.config().best_is_greatest


@pytest.mark.quick
def test_evaluations_without_steps_of_their_own_come_with_the_lines_of_the_log():
    assert from_trl({"eval_strategy": "steps"}).config().eval_steps == 10
    assert from_trl({"eval_strategy": "steps", "logging_steps": 3}).config().eval_steps == 3
    assert from_trl({"eval_strategy": "no", "logging_steps": 3}).config().eval_steps is None


@pytest.mark.quick
def test_every_default_of_trl_asks_for_nothing():
    moved = from_trl({name: field.default for name, field in ELSEWHERE.items()})
    assert (moved.values, moved.translated, moved.left_out, moved.missing) == ({}, {}, {}, {})
    assert str(moved) == "nothing to carry over: every value is TRL's default"


@pytest.mark.quick
def test_a_dump_of_a_whole_config_carries_over():
    """TRL's `to_dict` has what it derived: both ways to say the generation batch, steps without a strategy, bf16."""
    dump = {**{name: OURS[name] for name in SAME}, **{name: field.default for name, field in ELSEWHERE.items()}}
    dump |= {"output_dir": "out", "bf16": True, "hub_token": "<HUB_TOKEN>", "report_to": [], "fsdp_config": {}}
    dump |= {"generation_batch_size": 8, "steps_per_generation": 1, "pad_to_multiple_of": None, "eval_steps": 500}
    moved = from_trl(dump)
    assert moved.missing == {}
    assert moved.config() == GRPOConfig(steps_per_generation=1, pad_to_multiple_of=None, compute_dtype="bfloat16")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "hint"),
    [("num_generation", "num_generations"), ("warmup_ratio", "use warmup_steps"), ("zzz", "zzz: no such field")],
)
def test_a_name_of_neither_is_refused(name, hint):
    with pytest.raises(ValueError, match=hint):
        from_trl({name: 1})


@pytest.mark.quick
def test_the_script_prints_what_becomes_of_a_file(tmp_path, capsys):
    (tmp_path / "trl.json").write_text('{"output_dir": "out", "beta": 0.04, "bf16": true, "hub_token": "hf_"}')
    moved = from_trl_script.main([str(tmp_path / "trl.json")])
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == {"beta": 0.04, "compute_dtype": "bfloat16"}
    assert list(moved.missing) == ["hub_token"]
    for text, message in (("[1]", "holds a list"), ("{", "Expecting"), ('{"bta": 1}', "did you mean beta")):
        (tmp_path / "trl.json").write_text(text)
        with pytest.raises(SystemExit, match=message):
            from_trl_script.main([str(tmp_path / "trl.json")])
