"""A vLLM server as the sampler: weights are synchronized, log-probs agree, and faulty responses are not trained on."""

import gc
import threading
import time

import jax
import numpy as np
import pytest
from stand_in import StandIn, serving
from test_sampler import POLICY, G, T
from test_turns_run import ROWS, Game
from tiny import scored, tiny_policy

from grpo_jax import add_lora, evaluate
from grpo_jax.engines import EngineError, vllm
from grpo_jax.text.prompts import make_prompts

server = serving(POLICY)
ADAPTED = add_lora(POLICY, jax.random.key(7), rank=2)


def draws(engine, policy=POLICY, params=None, prompts=("ab", "c"), key=0, **settings):
    encoded = make_prompts([policy.tokenizer(text)["input_ids"] for text in prompts], as_numpy=True)
    every = {
        "num_generations": G, "max_completion_length": T, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None,
    }  # fmt: skip
    every |= {"eos_token_ids": policy.eos_token_ids, "pad_token_id": 0, "check_interrupt": lambda: None}
    every |= {"prompt_indices": np.arange(len(prompts))} | settings
    return engine(policy, policy.params if params is None else params, encoded, jax.random.key(key), **every)


@pytest.mark.parametrize("policy", [POLICY, ADAPTED], ids=["whole", "lora"])
def test_server_samples_from_the_latest_weights(server, policy, tmp_path):
    """Log-probs equal those of scoring with each version, tied head included. Adapters get a new name per version."""
    engine = vllm(server.url, directory=str(tmp_path))
    prompts = make_prompts([POLICY.tokenizer(text)["input_ids"] for text in ("ab", "c")])
    for step in range(2):
        params = jax.tree.map(lambda x, step=step: x + 0.1 * step, policy.params)
        found = draws(engine, policy, params)
        np.testing.assert_allclose(scored(policy.model, params, prompts, found), found.log_probs, atol=1e-4)
        assert engine.last_metrics["sampler/probe_gap_max"] < 1e-4
    assert server.most > 1  # requests ran concurrently
    if policy is ADAPTED:
        names = [body["lora_name"] for body in server.posts("/v1/load_lora_adapter")]
        assert len(set(names)) == len(names) == 2
        assert len(server.adapters) == 1  # the first was unloaded
        assert {body["model"] for body in server.posts("/v1/completions")} == set(names)
    else:
        assert len(server.posts("/collective_rpc")) == len(server.posts("/reset_prefix_cache")) == 2
    (kept,) = tmp_path.iterdir()
    assert len(list(kept.iterdir())) == 1  # earlier versions were deleted
    del engine
    gc.collect()
    assert not kept.exists()


def test_weights_that_cannot_be_written_name_their_directory(server, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("grpo_jax.rollout.engine.write_policy", full)
    with pytest.raises(EngineError, match=rf"written to {tmp_path}/.*No space left on device.* another directory"):
        draws(vllm(server.url, directory=str(tmp_path)))


def test_outdated_head_or_a_different_base_model_ends_the_batch(server):
    engine, moved = vllm(server.url), jax.tree.map(lambda x: x, POLICY.params)
    draws(engine)
    server.deaf_head = True
    moved["embed_tokens"]["embedding"] = moved["embed_tokens"]["embedding"] * 1.3
    with pytest.raises(EngineError, match=f"{server.url} does not sample with the run's weights.*differ from"):
        draws(engine, params=moved)
    with StandIn(tiny_policy(seed=3)) as other, pytest.raises(EngineError, match="the policy's base model"):
        draws(vllm(other.url), ADAPTED)
    # Without an adapter, the server receives all of the run's weights.
    with StandIn(tiny_policy(seed=3)) as other:
        draws(vllm(other.url))


@pytest.mark.quick
def test_draws_depend_only_on_key_and_prompt_index(server):
    engine = vllm(server.url)
    whole = draws(engine)
    alone = draws(engine, prompts=("c",), prompt_indices=np.array([1]))
    np.testing.assert_array_equal(whole.tokens[1:], alone.tokens)
    assert not np.array_equal(whole.tokens, draws(engine, key=1).tokens)
    assert len(server.posts("/collective_rpc")) == 1, "the same params are sent once"
    seeds = [body["seed"] for body in server.posts("/v1/completions") if "seed" in body][: 2 * G]
    assert len(set(seeds)) == 2 * G
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_requests_contain_the_sampling_settings(server):
    draws(vllm(server.url), temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    body = server.posts("/v1/completions")[-2]
    asked = {name: body[name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    assert asked == {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.0}
    assert body["ignore_eos"]
    assert set(body["stop_token_ids"]) == set(POLICY.eos_token_ids)


@pytest.mark.quick
def test_raw_log_probs_are_refused_in_every_batch(server):
    server.raw = True
    draws(vllm(server.url))  # at temperature 1 without truncation both are equal
    for settings in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.5}):
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            draws(vllm(server.url), **settings)
    server.raw, engine = False, vllm(server.url)
    draws(engine, temperature=0.7)
    server.raw = True  # as after a restart without the flag
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        draws(engine, temperature=0.7)


def nth(path, wrong, *numbers):
    """Return a fault function that returns `wrong` for the numbered requests to a path."""
    count, lock = iter(range(10**6)), threading.Lock()

    def fault(asked, body, n):
        if asked.split("?")[0] != path:
            return None
        with lock:
            return wrong if next(count) in numbers else None

    return fault


def test_missing_server_is_waited_for_and_then_reported(server):
    server.stop()
    with (
        pytest.warns(UserWarning, match="Waiting up to 0.3 s for the server"),
        pytest.raises(EngineError, match=rf"{server.url}/v1/models: Connection.*Gave up after waiting 0.3 s.*not used"),
    ):
        draws(vllm(server.url, patience=0.3))
    threading.Timer(0.5, server.start).start()
    with pytest.warns(UserWarning, match="Check that the server is running"):
        assert draws(vllm(server.url, patience=20)).tokens.shape == (2, G, T)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:.*Waiting up to")
@pytest.mark.parametrize("fault", [503, "hang", "abort", "drop"])
def test_failed_request_is_retried(server, fault):
    expected, asked = draws(vllm(server.url)), len(server.posts("/v1/completions"))
    server.fault = nth("/v1/completions", fault, 4)
    np.testing.assert_array_equal(draws(vllm(server.url, timeout=1)).tokens, expected.tokens)
    assert len(server.posts("/v1/completions")) > 2 * asked, "the failed request must be retried"


@pytest.mark.filterwarnings("ignore:.*Waiting up to")
@pytest.mark.parametrize(
    ("fault", "patience", "message"), [(429, 0.2, "returned status 429"), ("drop", 5, "lost 4 times in this batch")]
)
def test_repeated_failures_end_the_batch(server, fault, patience, message):
    server.fault = lambda path, body, n: fault if path == "/v1/completions" and body["max_tokens"] > 1 else None
    with pytest.raises(EngineError, match=message):
        draws(vllm(server.url, patience=patience))


@pytest.mark.parametrize("policy", [POLICY, ADAPTED], ids=["whole", "lora"])
def test_server_restarted_during_a_batch_receives_the_weights_again(server, policy):
    """A server that restarts with its initial weights during a batch still samples with the run's weights."""
    moved = jax.tree.map(lambda x: x + 0.05, policy.params)
    expected, drops = draws(vllm(server.url), policy, params=moved), nth("/v1/completions", "drop", 4)

    def fault(path, body, n):
        if found := drops(path, body, n):
            threading.Thread(target=lambda: (server.stop(), time.sleep(0.2), server.start())).start()
        return found

    server.fault = fault
    server.requests.clear()
    with pytest.warns(UserWarning, match="Waiting up to"):
        found = draws(vllm(server.url, patience=20), policy, params=moved)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    loads = ("/v1/load_lora_adapter", "/collective_rpc")
    assert sum(len(server.posts(path)) for path in loads) > 1


@pytest.mark.parametrize("version", [True, False], ids=["by its version", "by the probe only"])
def test_restart_between_requests_is_detected(server, version):
    server.says_version = version
    moved = jax.tree.map(lambda x: 1.1 * x, POLICY.params)
    engine = vllm(server.url)
    expected = draws(engine, params=moved)
    server.params = server.head = POLICY.params  # as after a restart between two batches
    server.version = "default"
    np.testing.assert_array_equal(draws(engine, params=moved).tokens, expected.tokens)

    def fault(path, body, n):
        if path == "/v1/completions" and body["max_tokens"] == T and engine.last_metrics.get("seen") is None:
            engine.last_metrics["seen"] = 1.0
            server.params, server.version = POLICY.params, "default"  # during a batch

    server.fault = fault
    with pytest.warns(UserWarning, match="no longer has the run's weights; the server may have been restarted"):
        np.testing.assert_array_equal(draws(engine, params=moved).tokens, expected.tokens)


@pytest.mark.quick
@pytest.mark.parametrize(("fault", "how", "message"), [
    (400, {}, "returned status 400: .*told to answer 400"),
    ("early", {"stop": ["never"], "eos_token_ids": ()}, "1 of 8 tokens with finish_reason 'stop'.*complete a stop"),
])  # fmt: skip
def test_unusable_responses_end_the_run(server, fault, how, message):
    server.fault = nth("/v1/completions", fault, *range(3, 8))
    with pytest.raises(EngineError, match=message):
        draws(vllm(server.url), **how)


def test_too_small_max_model_len_is_refused_before_sampling(server):
    server.room = 9
    with pytest.raises(EngineError, match=r"limited to 9 tokens.* need 10; start the server with --max-model-len 10"):
        draws(vllm(server.url))
    assert not server.posts("/v1/completions")
    with pytest.raises(EngineError, match=r"does not serve model='other' \(available: .*base"):
        draws(vllm(server.url, model="other"))


def test_api_key_is_read_from_the_environment_and_not_stored(server, monkeypatch):
    server.key = "not-to-be-seen"
    engine = vllm(server.url, api_key_env="SOME_KEY")
    with pytest.raises(EngineError, match=r"returned status 401.*environment variable SOME_KEY"):
        draws(engine)
    monkeypatch.setenv("SOME_KEY", server.key)
    draws(engine)
    assert server.key not in repr(engine) + repr(vars(engine))


STOP = [*"acegikmoqsuwy", "d\u00e9", "f "]


def test_both_engines_keep_the_same_turn_tokens(server):
    """The server and the local sampler keep the same tokens of each greedy turn, whatever ends the turn.

    Observations contain stop strings, and the server draws past them. A lost turn is drawn again but answered once.
    """

    class Talks(Game):
        def respond(self, text):
            heard.append(text)
            return super().respond(text) and f" {len(text)} a dé: "

    how = {"temperature": 0, "max_completion_length": 40, "environment_factory": Talks}
    how |= {"stop": STOP, "stop_token_ids": 200, "max_turn_length": 7}
    other, heard = jax.tree.map(lambda x: 1.5 * x, POLICY.params), []
    expected = evaluate(POLICY, ROWS, [], params=other, **how)
    ours, heard[:] = sorted(heard), []
    assert len(ours) > 2 * len(ROWS)
    server.fault, server.late = nth("/v1/completions", "abort", 11), 2
    with pytest.warns(UserWarning, match="Waiting up to"):
        assert evaluate(POLICY, ROWS, [], params=other, sampler=vllm(server.url), **how) == expected
    assert sorted(heard) == ours
    assert STOP in [body.get("stop") for body in server.posts("/v1/completions")]


def test_interrupt_stops_sampling(server):
    class Stopped(Exception):
        pass

    def interrupt():
        raise Stopped

    engine = vllm(server.url)
    draws(engine)
    server.fault = lambda path, body, n: "hang" if path == "/v1/completions" and body["max_tokens"] == T else None
    begin = time.monotonic()
    with pytest.raises(Stopped):
        draws(engine, check_interrupt=interrupt)
    assert time.monotonic() - begin < 2.5
