"""Messages: shortened values and lists, near names, and several errors as one."""

import pytest

from grpo_jax.messages import Faults, nearest, one_line, problems_of, raise_all, show, some

pytestmark = pytest.mark.quick


def test_values_errors_and_lists_are_shortened():
    assert (show("abc", limit=5), show("abcd", limit=5)) == ("'abc'", "'abcd…")
    assert len(show(list(range(1000)))) == 101
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(ValueError("first"), limit=7) == "ValueEr"
    texts = [some(["a", "b", "c"], most) for most in (1, 2, 3)]
    assert texts == ["a and 2 more", "a, b and 1 more", "a, b, c"]


def test_the_nearest_name_has_the_fewest_letters_changed():
    assert nearest("betta", ["beta", "delta"]) == "beta"
    assert nearest(7, ["beta"]) is None


def test_faults_are_raised_together_and_a_single_one_unchanged():
    def refuse(text):
        raise OSError(text)

    def broken():
        raise KeyError("bug")

    faults = Faults()
    faults.raise_together("this run")
    assert faults.of(refuse, "no disk") is None
    with pytest.raises(OSError, match=r"^no disk$"):
        faults.raise_together("this run")
    faults.of(raise_all, "config", ["a = 1: no", "b = 2: no"])
    with pytest.raises(ValueError, match="this run has 4 errors") as raised:
        faults.raise_together("this run", ["c = 3: no"])
    assert problems_of(raised.value) == ["no disk", "a = 1: no", "b = 2: no", "c = 3: no"]
    with pytest.raises(KeyError):  # a bug, not an error of the arguments
        faults.of(broken)


def test_headings_are_not_counted_as_errors():
    with pytest.raises(ValueError, match="the template has 2 errors") as inner:
        raise_all("the template", ["a", "b"])
    with pytest.raises(ValueError, match="this run has 3 errors") as outer:
        raise_all("this run", [str(inner.value), "c"])
    assert str(outer.value).splitlines()[1:] == ["  the template: a", "  the template: b", "  c"]
