"""Trackers: each gets the finite numbers of every logged step and is closed; packages are imported when asked for."""

import math
import struct
import sys
import types

import pytest

from grpo_jax import trackers
from grpo_jax.report import notify

LINES = [(10, {"reward": 0.25, "kl": math.nan, "note": "text"}), (20, {"reward": 0.5, "kl": 0.125, "seconds/total": 3})]


def feed(tracker):
    with tracker:
        for step, line in LINES:
            notify([tracker], step, line)


class Fake(types.ModuleType):
    """A package with `init`, as wandb and trackio are; it notes what is done to it."""

    def __init__(self, name):
        super().__init__(name)
        self.done = []

    def init(self, **settings):
        self.done.append(("init", settings))
        return self

    def log(self, metrics, step=None):
        self.done.append(("log", step, metrics))

    def finish(self):
        self.done.append(("finish",))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_of_wandb_or_trackio(name, monkeypatch):
    package = Fake(name)
    monkeypatch.setitem(sys.modules, name, package)
    feed(getattr(trackers, name)(project="sums", config={"beta": 0.1}))
    assert package.done == [
        ("init", {"project": "sums", "config": {"beta": 0.1}}),
        ("log", 10, {"reward": 0.25}),
        ("log", 20, {"reward": 0.5, "kl": 0.125, "seconds/total": 3}),
        ("finish",),
    ]


def test_a_run_that_fails_is_closed_too(monkeypatch):
    package = Fake("wandb")
    monkeypatch.setitem(sys.modules, "wandb", package)
    with pytest.raises(KeyError), trackers.wandb():
        raise KeyError
    assert package.done[-1] == ("finish",)


class Screen(types.ModuleType):
    """`IPython.display`, of which a handle notes what it shows."""

    def __init__(self):
        super().__init__("IPython.display")
        self.shown = []
        self.Pretty = self.Image = lambda data: data
        self.DisplayHandle = lambda: types.SimpleNamespace(display=self.shown.append, update=self.shown.append)


def test_the_live_plot_is_redrawn_in_place_now_and_then_and_at_the_end(monkeypatch):
    screen, now, drawn = Screen(), [0.0], []
    monkeypatch.setitem(sys.modules, "IPython.display", screen)
    monkeypatch.setattr(trackers, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    draw = trackers.draw_report
    monkeypatch.setattr(trackers, "draw_report", lambda lines, **more: drawn.append(len(lines)) or draw(lines, **more))
    with trackers.live_plot(["Reward"], seconds=3.0) as plot:
        for step, seconds in enumerate((0.0, 2.9, 3.0, 5.9), 1):
            now[0] = seconds
            plot(step, {"reward": step / 4, "kl": math.nan, "entropy": 1.0})
    assert drawn == [1, 3, 4]
    assert isinstance(screen.shown[0], str)
    assert [picture[:8] for picture in screen.shown[1:]] == [b"\x89PNG\r\n\x1a\n"] * 3
    width, height = struct.unpack(">II", screen.shown[-1][16:24])
    assert width < 1.5 * height + 200  # one panel of the two that could be drawn


def test_a_live_plot_without_a_line_draws_nothing(monkeypatch):
    screen = Screen()
    monkeypatch.setitem(sys.modules, "IPython.display", screen)
    trackers.live_plot().__exit__()
    assert len(screen.shown) == 1


@pytest.mark.parametrize(
    ("open_tracker", "package"),
    [
        (lambda: trackers.tensorboard("x"), "tensorboardX"),
        (trackers.wandb, "wandb"),
        (trackers.trackio, "trackio"),
        (trackers.live_plot, "IPython.display"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(open_tracker, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    extra = {"tensorboardX": "tensorboard", "IPython.display": "notebook"}.get(package, package)
    with pytest.raises(ImportError, match=rf"{package} cannot be imported .*: pip install 'grpo_jax\[{extra}\]'"):
        open_tracker()


def fields(data):
    """(number, value) of a protocol-buffer message's fields, read by hand."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        size = {0: None, 1: 8, 5: 4}.get(kind, -1)
        if size is None:
            yield number, varint()
            continue
        size = varint() if size < 0 else size
        yield number, data[at : at + size]
        at += size


def scalars(path):
    """{(step, tag): value} of an event file: length-framed Event messages with a step (2) and a summary (5)."""
    data, found = path.read_bytes(), {}
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        event = dict(fields(data[12 : 12 + size]))
        data = data[12 + size + 4 :]
        for _, value in fields(event.get(5, b"")):
            value = dict(fields(value))  # tag (1), simple_value (2)
            found[event.get(2, 0), value[1].decode()] = struct.unpack("<f", value[2])[0]
    return found


def test_a_real_event_file_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    feed(trackers.tensorboard(tmp_path))
    (path,) = tmp_path.glob("events.out.tfevents.*")
    assert scalars(path) == {(10, "reward"): 0.25, (20, "reward"): 0.5, (20, "kl"): 0.125, (20, "seconds/total"): 3.0}
