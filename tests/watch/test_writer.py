"""Run files survive kills and resumes and contain strict JSON for any text, array or object."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import SFTConfig, sft, train
from grpo_jax.config.config import GRPOConfig
from grpo_jax.run.resume import with_saved_gradient_checkpointing
from grpo_jax.watch.writer import RunWriter, absolute_run_dir, read_lines, read_settings

pytestmark = pytest.mark.quick
lines_of = lambda writer, name="metrics.jsonl": list(read_lines(writer.path(name)))


def test_lines_are_strict_json_for_any_text_array_and_object(tmp_path):
    writer = RunWriter(tmp_path / "new" / "run")
    writer.metrics(3, {"reward": jnp.float32(0.5), "kl": float("nan"), "ratio_max": float("inf"), "step": 5})
    text = writer.path("metrics.jsonl").read_text(encoding="utf-8")
    assert text == '{"step": 3, "reward": 0.5, "kl": null, "ratio_max": null}\n'
    row = {"prompt": [{"role": "user"}], "completion": "数字 \ud800 \x00\n", "rewards": {"a": None}, "ended": False}
    held = {"bf16": jnp.bfloat16(0.5), "ended": np.True_, "array": np.array([1.0, np.nan]), 7: (1, "text")}
    writer.completions(7, [row, held | {"other": pytest}])
    first, second = lines_of(writer, "completions.jsonl")
    assert first == {"step": 7, **row}
    assert second.pop("other").startswith("<module 'pytest'")
    assert second == {"step": 7, "bf16": 0.5, "ended": True, "array": [1.0, None], "7": [1, "text"]}


def test_truncate_drops_later_lines_in_all_files(tmp_path):
    writer = RunWriter(tmp_path)
    for step in (0, 5, 10, 15):
        writer.metrics(step, {"reward": step / 10})
        writer.completions(step, [{"completion": str(i)} for i in range(3)])
    before = writer.path("metrics.jsonl").read_bytes()
    writer.truncate(10)
    assert before.startswith(writer.path("metrics.jsonl").read_bytes())
    assert [line["step"] for line in lines_of(writer)] == [0, 5, 10]
    assert [line["step"] for line in lines_of(writer, "completions.jsonl")] == [0, 0, 0, 5, 5, 5, 10, 10, 10]
    writer.metrics(15, {"reward": 1.5})
    assert before == writer.path("metrics.jsonl").read_bytes()
    writer.metrics(15, {"eval/right": 0.5})
    for evaluated in (True, False):  # whether the checkpoint contains the evaluation of its step
        writer.truncate(15, evaluated=evaluated)
        assert [line["step"] for line in lines_of(writer)] == [0, 5, 10] + [15] * (1 + evaluated)
    writer.truncate(-1)
    assert lines_of(writer) == lines_of(writer, "completions.jsonl") == []


@pytest.mark.parametrize("text", ["", "\0\0\0\0", '{"config": {"seed'])
def test_settings_that_a_power_failure_left_incomplete_are_ignored(text, tmp_path):
    """A resumed run replaces them; its checkpoints contain the config, too."""
    (tmp_path / "run.json").write_text(text)
    assert read_settings(tmp_path) == {}
    config = GRPOConfig(gradient_checkpointing=None)
    assert with_saved_gradient_checkpointing(config, tmp_path) == config


def test_line_cut_short_by_a_kill_is_ignored_and_removed(tmp_path):
    """A line cut short by a kill is ignored and removed; no line is duplicated."""
    whole = '{"step": 1, "reward": 0.5}\n{"step": 2, "text": "数}"}\n'.encode()
    first = whole.index(b"\n") + 1
    for end in range(len(whole) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:end])
        writer = RunWriter(tmp_path)
        kept = (end >= first) + (end == len(whole))
        assert len(lines_of(writer)) == kept
        writer.truncate(2)
        writer.metrics(3, {})
        assert [line["step"] for line in lines_of(writer)] == [*[1, 2][:kept], 3], whole[:end]
    for text in (b"[1]\n", b'{"step": "1"}\n', b"\xff\xfe\n", b"\x00\x00\x00"):  # not metric lines
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + text + b'{"step": 2}\n')
        assert lines_of(writer) == [{"step": 1}]
    assert list(read_lines(tmp_path / "nothing.jsonl")) == []


@pytest.mark.parametrize("address", ["gs://bucket/runs", "S3://b/r", pathlib.Path("az://bucket/runs")])
def test_object_store_is_rejected_as_run_directory(address, tmp_path, monkeypatch):
    """`train` and `sft` reject an object store as run_dir before checking anything else."""
    monkeypatch.chdir(tmp_path)
    for refuse in (
        lambda: absolute_run_dir(address),
        lambda: train(None, None, None, GRPOConfig(), run_dir=address),
        lambda: sft(None, None, SFTConfig(), run_dir=address),
    ):
        with pytest.raises(ValueError, match=r"^run_dir = '.*' is in an object store, which cannot"):
            refuse()
    RunWriter(None).metrics(1, {"reward": 1.0})  # without a directory, nothing is written
    assert not any(tmp_path.iterdir())
    for fine in (None, "runs/a:b", "/mnt/gs/runs", tmp_path, r"C:\\runs"):
        absolute_run_dir(fine)
