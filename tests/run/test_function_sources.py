"""User functions are identified by their source, the functions they call and their bound arguments."""

import dataclasses
import functools

import pytest

from grpo_jax.rewards import format_reward
from grpo_jax.run.function_sources import source_of, sources_of

pytestmark = pytest.mark.quick


@dataclasses.dataclass(frozen=True)
class Scaled:
    scale: float

    def __call__(self, rewards, mask):
        return self.scale * rewards


HELPED = """
def helped(text):
    return {}

def right(completions):{}
    return [helped(text) for text in completions]
"""


def made(path, text):
    """Write `text` to `path`, execute it as a module, and return its function `right`."""
    path.write_text(text)
    names = {"__name__": "made"}
    exec(compile(text, path, "exec"), names)
    return names["right"]


def test_function_is_identified_by_its_source_and_the_functions_it_calls(tmp_path):
    texts = ["return x + 1", "return x+1  # by one", "return x + 2"]
    one, same, other = (
        source_of(made(tmp_path / f"{i}.py", f"def right(x):\n    {text}\n")) for i, text in enumerate(texts)
    )
    assert one == same != other
    assert one["name"] == "made.right"
    assert source_of(Scaled(1.0)) == source_of(Scaled(1.0)) != source_of(Scaled(2.0))
    assert source_of(Scaled(1.0))["name"] == "test_function_sources.Scaled"
    # The default repr of an object contains its address, which differs between processes.
    bound = [source_of(functools.partial(made, other=object())) for _ in range(2)]
    assert bound[0] == bound[1]
    assert source_of(len) == {"name": "builtins.len", "source": None}
    assert source_of([lambda x: x][0])["source"] is not None
    bodies = [("1.0", ""), ("1.0", "  # the same"), ("0.0", "")]
    one, same, other = (made(tmp_path / f"{i}.py", HELPED.format(*body)) for i, body in enumerate(bodies))
    assert sources_of(one) == sources_of(same) != sources_of(other)
    for wrap in (functools.partial, lambda fn: lambda **given: fn(**given)):
        assert sources_of(wrap(one)) == sources_of(wrap(same)) != sources_of(wrap(other))
    assert sources_of(format_reward("a+")) == sources_of(format_reward("a+")) != sources_of(format_reward("b+"))
