"""Error lists: several errors are raised as one."""

import pytest

from grpo_jax.messages import ErrorList, problems_of, raise_all

pytestmark = pytest.mark.quick


def test_errors_are_raised_together_and_a_single_one_unchanged():
    def refuse(text):
        raise OSError(text)

    def broken():
        raise KeyError("bug")

    errors = ErrorList()
    errors.raise_together()
    assert errors.check(refuse, "no disk") is None
    with pytest.raises(OSError, match=r"^no disk$"):
        errors.raise_together()
    errors.check(raise_all, "config", ["a = 1: no", "b = 2: no"])
    with pytest.raises(ValueError, match="this run has 4 errors") as raised:
        errors.raise_together(["c = 3: no"])
    assert problems_of(raised.value) == ["no disk", "a = 1: no", "b = 2: no", "c = 3: no"]
    with pytest.raises(KeyError):  # a bug, not an invalid argument
        errors.check(broken)
