"""OpenEnv: the package's echo environment on the package's server, including a server that hangs or dies."""

import functools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_jax.rollout.tools import call_within
from grpo_jax.suites import openenv

pytest.importorskip(
    "openenv.core", reason="openenv-core is not installed, which provides the server", exc_type=ImportError
)

SERVE = """
import sys, uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from echo.models import EchoAction, EchoObservation
from echo.server.echo_environment import EchoEnvironment
app = create_fastapi_app(EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


class Server:
    """A local server process for the environment that `openenv init echo` creates from the package's template."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", SERVE, str(port)]
        self.process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)

    def end(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write what `openenv init echo` writes: the package's template with its names filled in."""
    import openenv

    template = Path(openenv.__file__).parent / "cli" / "templates" / "openenv_env"
    made = tmp_path_factory.mktemp("openenv")
    names = {"__ENV_NAME__": "echo", "__ENV_CLASS_NAME__": "Echo", "__ENV_TITLE_NAME__": "Echo"}
    for name in ("models.py", "server/__ENV_NAME___environment.py"):
        text, path = (template / name).read_text(encoding="utf-8"), name
        for mark, value in names.items():
            text, path = text.replace(mark, value), path.replace(mark, value)
        (made / "echo" / path).parent.mkdir(parents=True, exist_ok=True)
        (made / "echo" / path).write_text(text, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def server(folder):
    server = Server(folder)
    yield server
    server.end()


def begun(server, **arguments):
    """Return an environment of a suite and the text that its reset returned."""
    usual = {"observation": "echoed_message", "wait": 300.0}  # the server may still be starting
    suite = openenv(server.url, prompt="Say something.", **usual | arguments)
    environment = suite.environment_factory()
    return environment, call_within(330.0, functools.partial(environment.reset, seed=0))


@pytest.mark.quick
def test_session_returns_echoes_and_rewards(server):
    """A session returns the environment's own rewards, a tenth of each message's length."""
    environment, opening = begun(server, max_turns=3)
    assert opening == "Echo environment ready!"
    assert call_within(30.0, environment.respond, "four") == "four"
    assert call_within(30.0, environment.respond, "sevenss") == "sevenss"
    assert call_within(30.0, environment.respond, "") is None
    assert call_within(30.0, environment.get_reward) == pytest.approx(0.4 + 0.7)
    assert environment.state["step_count"] == 3
    assert call_within(30.0, environment.get_reward) is None


def test_observation_and_action_select_fields_of_the_environment(server):
    _, opening = begun(server, observation=None)
    assert '"echoed_message": "Echo environment ready!"' in opening
    with pytest.raises(ValueError, match=r"observation='text' must be a field of .*: .*echoed_message"):
        begun(server, observation="text")
    wrong, _ = begun(server, action="text")
    with pytest.raises(RuntimeError, match="message"):
        call_within(30.0, wrong.respond, "hello")
    of_text, _ = begun(server, action=lambda text: {"message": text.upper()})
    assert call_within(30.0, of_text.respond, "hello") == "HELLO"


def test_server_that_hangs_or_dies_ends_its_sessions(server):
    """A server that hangs or dies ends its sessions. This test must be the last in this file, as it ends the server."""
    (hanging, _), (lost, _) = begun(server, timeout=1.0), begun(server)
    hanging._session._ws.close_timeout = 0.1  # instead of 10 s
    os.kill(server.process.pid, signal.SIGSTOP)
    with pytest.raises(ConnectionError, match=r"lost the session with .*TimeoutError.*increase timeout"):
        call_within(60.0, hanging.respond, "hello")
    assert call_within(30.0, hanging.get_reward) is None  # not scored
    server.end()
    with pytest.raises(ConnectionError, match=r"lost the session with .*"):
        call_within(30.0, lost.respond, "hello")
    assert call_within(30.0, lost.get_reward) is None
    with pytest.raises(ConnectionError, match="Failed to connect to"):
        begun(server, wait=0.1)
