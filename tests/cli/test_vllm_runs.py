"""A vLLM server in RUN.yaml samples for `train` and `evaluate` and teaches; its API key is never stored."""

import pytest
from cli_files import run, write_run
from stand_in import serving
from tiny import tiny_policy

from grpo_jax.cli import commands
from grpo_jax.engines import Engine
from grpo_jax.watch.writer import read_lines

KEY = "not-to-be-seen"
server = serving(tiny_policy(), key=KEY)


def test_server_samples_and_teaches_and_its_key_is_not_stored(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    vllm = {"vllm": {"base_url": server.url}}
    teacher = {"vllm": {"base_url": server.url, "top_k": 5}}
    top = {"distillation_coef": 1.0, "distillation_mode": "topk_logits", "distillation_topk": 5}
    file = write_run(tmp_path, sampler=vllm, teacher=teacher, save_steps=1, max_steps=1, **top)
    printed = run("train", file)
    (line,) = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert line["sampler/log_prob_difference_max"] < 1e-4
    assert abs(line["distillation"]) < 1e-6, "the server has the policy's weights"
    assert len([body for _, body in server.drawn if body["max_tokens"] == 4]) == 2
    assert 5 in {body.get("prompt_logprobs") for _, body in server.drawn}
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.yaml", "run.json", "metrics.jsonl"} <= {path.name for path in kept}
    assert KEY not in printed + "".join(capsys.readouterr())
    assert not [path for path in kept if KEY.encode() in path.read_bytes()]

    used = []
    monkeypatch.setattr(commands, "evaluate_rows", lambda *_, sampler, **__: used.append(sampler) or ({}, []))
    run("evaluate", file)
    run("evaluate", file, "--sampler", f"{{vllm: {{base_url: {server.url}}}}}")
    assert used[0] is None, "evaluate uses an engine only if the command line sets one"
    assert isinstance(used[1], Engine)


@pytest.mark.quick
@pytest.mark.parametrize("key", ["sampler", "teacher"])
def test_api_key_in_a_file_is_rejected_and_not_printed(server, tmp_path, key):
    for engine in ({"base_url": server.url, "api_key": KEY}, {"base_url": f"http://me:{KEY}@127.0.0.1:1"}):
        with pytest.raises((SystemExit, ValueError)) as refused:
            run("train", write_run(tmp_path, **{key: {"vllm": engine}}))
        assert "environment" in str(refused.value)
        assert KEY not in str(refused.value)
    assert not server.requests
