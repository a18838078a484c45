"""Faulty server responses: unfinished, malformed, or containing the API key."""

import contextlib
import socket
import threading
import time
import traceback

import pytest

from grpo_jax.rewards.calls import run_on_event_loop
from grpo_jax.rollout.draw import DecodeSettings
from grpo_jax.rollout.engine_client import Client, ConnectionLost, EngineError, StatusError
from grpo_jax.rollout.engine_server import VLLM

pytestmark = pytest.mark.quick
log_probs = lambda *values: choices(logprobs={"token_logprobs": list(values)})


@contextlib.contextmanager
def serving(answer):
    """Yield the address of a server that sends what `answer(request)` yields until the client disconnects."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with contextlib.suppress(OSError):  # raised when the test closes the socket
                while True:
                    connection, _ = listening.accept()
                    with connection, contextlib.suppress(OSError):
                        for piece in answer(connection.recv(2**16)):
                            connection.sendall(piece)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def of(status, body, head=""):
    return f"HTTP/1.1 {status} said\r\n{head or f'Content-Length: {len(body)}'}\r\n\r\n".encode() + body


CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize(("answer", "kind", "message"), [
    (of(200, b"", "Content-Length: 99999999999999"), ConnectionLost, "IncompleteRead"),
    (of(200, b"ffffffffffffff\r\n", CHUNKED), ConnectionLost, "IncompleteRead"),
    (of(200, b"-5\r\n", CHUNKED), ConnectionLost, "IncompleteRead"),
    (of(200, b'{"a":' + b"[" * 100_000), EngineError, "returned invalid JSON"),
    (of(200, b'{"a": ' + b"7" * 5_000 + b"}"), EngineError, "returned invalid JSON"),
    (of(400, b"[" * 100_000), StatusError, "returned status 400"),
], ids=["length", "chunk", "negative chunk", "deep", "digits", "deep refusal"])  # fmt: skip
def test_unreadable_response_error_contains_the_url(answer, kind, message):
    with serving(lambda _: [answer]) as url, pytest.raises(kind, match=message) as caught:
        run_on_event_loop(Client(url).request("/v1/models"))
    assert f"{url}/v1/models" in str(caught.value)


def test_a_response_ends_after_its_length_if_the_server_keeps_the_connection_open():
    ended = threading.Event()

    def answer(_):
        yield of(200, b'{"a": 1}', "Content-Type: application/json\r\ncontent-length: 8")
        ended.wait(10)

    with serving(answer) as url:
        assert run_on_event_loop(Client(url, timeout=5).request("/v1/models")) == {"a": 1}
        ended.set()


@pytest.mark.parametrize(("begin", "piece"), [
    (of(200, b"", "Content-Length: 9999"), b" "),
    (of(200, b"", "Connection: close"), b" "),
    (of(200, b"", CHUNKED), b"1\r\n \r\n"),
    (b"HTTP/1.1 200", b"x"),
    (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
], ids=["body", "endless", "chunks", "status", "100 Continue"])  # fmt: skip
def test_timeout_covers_the_whole_response(begin, piece):
    """A response that is incomplete at the timeout is abandoned, even if bytes keep arriving."""

    def answer(_):
        yield begin
        while True:
            yield piece
            time.sleep(0.02)

    started = time.monotonic()
    with serving(answer) as url, pytest.raises(ConnectionLost, match=r"did not respond within 0\.3 s"):
        run_on_event_loop(Client(url, timeout=0.3).request("/v1/models"))
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("given", [{"timeout": 0}, {"timeout": float("nan")}, {"patience": -1}, {"patience": None}])
def test_invalid_time_limit_is_rejected(given):
    with pytest.raises(ValueError, match=rf"{next(iter(given))} must be a finite number of seconds ≥"):
        Client("http://127.0.0.1:1", **given)


@pytest.mark.parametrize("begin", [of(200, b"{", "Connection: close"), of(400, b"", "Connection: close"), b""])
def test_echoed_api_key_is_not_in_the_message(begin, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-not-to-be-seen")
    back = lambda request: [begin + request[request.index(b"Authorization") :]]
    with serving(back) as url, pytest.raises(EngineError, match=r"Bearer \*\*\*") as caught:
        run_on_event_loop(Client(url, api_key_env="SOME_KEY").request("/v1/models"))
    assert "not-to-be-seen" not in "".join(traceback.format_exception(caught.value))


class Answering:
    """A client that returns the same response to every request."""

    base_url = "http://here"

    def __init__(self, answer):
        self.answer = answer

    async def request(self, path, body=None, **how):
        return self.answer


def choices(**changes):
    choice = {"token_ids": [3, 4], "finish_reason": "length", "logprobs": {"token_logprobs": [-1.0, 0]}}
    choice |= {"prompt_logprobs": [None, {"4": {"logprob": -1.0, "rank": 1}}]}
    return {"choices": [choice | changes]}


def drawn(answer, **settings):
    settings = DecodeSettings(**settings)
    return run_on_event_loop(VLLM(Answering(answer)).draw([3, 4], max_tokens=2, seed=0, settings=settings))


def scored(answer):
    return run_on_event_loop(VLLM(Answering(answer)).log_probs([3, 4]))


def found(answer):
    return run_on_event_loop(VLLM(Answering(answer)).look_up(8))


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stop_id_ends_the_completion_even_if_it_is_the_last_possible_token(reason):
    """vLLM 0.10 checks the length before the stop ids, so its reason for such a completion is "length"."""
    assert drawn(choices(finish_reason=reason), eos_token_ids=(4,)).ended


BAD = [
    (drawn, {}, "malformed response .KeyError: 'choices'.. Use vLLM 0.10 or newer"),
    (drawn, {"choices": 7}, "malformed response .TypeError: "),
    (drawn, {"choices": [None]}, "malformed response .TypeError: "),
    (drawn, {"choices": []}, "malformed response .ValueError: not enough values to unpack"),
    (drawn, {"choices": choices()["choices"] * 2}, "malformed response .ValueError: too many values to unpack"),
    (drawn, {"choices": [{}]}, "malformed response .KeyError: 'finish_reason'"),
    *((drawn, choices(token_ids=bad), "malformed response .TypeError: ") for bad in (None, [3, 3.7], [3, "7"])),
    (drawn, choices(token_ids=[3]), "got 1 token_ids and 2 token_logprobs"),
    (drawn, choices(token_ids=[3, 4, 5], logprobs={"token_logprobs": [-1.0] * 3}), "must return 1 to max_tokens=2"),
    (drawn, choices(logprobs=None), "malformed response .TypeError: "),
    (drawn, log_probs(-1.0, "-1"), "malformed response .TypeError: "),
    *((drawn, log_probs(-1.0, bad), r"ValueError: log-probs must be in \(-1e4, 0\]; got")
      for bad in (-1e30, 0.5, float("nan"))),
    (scored, choices(prompt_logprobs=None), "malformed response .TypeError: "),
    *((scored, choices(prompt_logprobs=bad), "must return prompt_logprobs for all 2 tokens")
      for bad in ([None], [None, None], [None, {"3": {"logprob": -1.0}}])),
    *((scored, choices(prompt_logprobs=[None, bad]), f"malformed response .{kind}: ") for bad, kind in (
        (5, "AttributeError"), ({"4": -1.0}, "TypeError"), ({"4": {}}, "KeyError"),
        ({"4": {"logprob": float("-inf")}}, "ValueError"), ({"four": {"logprob": -1.0}}, "ValueError"))),
    (found, {"data": 5}, "malformed response .TypeError: "),
    (found, {"data": []}, r"must name a model on .* \(available: none\)"),
    (found, {"data": [{"parent": None}]}, "malformed response .KeyError: 'id'"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "answer", "message"), BAD)
def test_malformed_response_is_an_engine_error(ask, answer, message):
    with pytest.raises(EngineError, match=message) as caught:
        ask(answer)
    assert not isinstance(caught.value, ConnectionLost), "a retry would not help"
    assert "http://here" in str(caught.value)


def test_well_formed_response_is_parsed():
    assert drawn(choices()) == ([3, 4], [-1.0, 0], False)
    assert scored(choices()) == [{4: -1.0}]
    found({"data": [{"id": "base", "root": "base", "parent": None, "max_model_len": 8}]})
