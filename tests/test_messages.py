"""Messages: what is cut, what is near, and several faults as one error."""

import pytest

from grpo_jax.messages import Faults, nearest, one_line, problems_of, raise_all, show, some

pytestmark = pytest.mark.quick


def test_a_value_is_shown_whole_up_to_the_limit_and_cut_beyond_it():
    assert show("abc", limit=5) == "'abc'"
    assert show("abcd", limit=5) == "'abcd…"
    assert len(show(list(range(1000)))) == 101


def test_an_error_is_told_in_one_line():
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(ValueError("first"), limit=7) == "ValueEr"


@pytest.mark.parametrize(("most", "text"), [(1, "a and 2 more"), (2, "a, b and 1 more"), (3, "a, b, c")])
def test_a_list_ends_with_how_many_are_left(most, text):
    assert some(["a", "b", "c"], most) == text


def test_the_nearest_name_is_the_one_with_the_fewest_letters_changed():
    assert nearest("betta", ["beta", "delta"]) == "beta"
    assert nearest(7, ["beta"]) is None


def test_faults_are_raised_together_and_a_single_one_as_it_is():
    def refuse(text):
        raise OSError(text)

    faults = Faults()
    faults.raise_together("this run")
    assert faults.of(refuse, "no disk") is None
    with pytest.raises(OSError, match=r"^no disk$"):
        faults.raise_together("this run")
    faults.of(raise_all, "config", ["a = 1: no", "b = 2: no"])
    with pytest.raises(ValueError, match="this run has 4 errors") as raised:
        faults.raise_together("this run", ["c = 3: no"])
    assert problems_of(raised.value) == ["no disk", "a = 1: no", "b = 2: no", "c = 3: no"]


def test_what_is_no_fault_of_the_arguments_is_not_kept():
    def broken():
        raise KeyError("bug")

    with pytest.raises(KeyError):
        Faults().of(broken)


def test_headings_are_no_errors():
    def nested(what, problems):
        with pytest.raises(ValueError, match="has") as caught:
            raise_all(what, problems)
        return str(caught.value)

    inner = nested("the template", ["a", "b"])
    assert nested("this run", [inner, "c"]).splitlines() == [
        "this run has 3 errors:",
        "  the template: a",
        "  the template: b",
        "  c",
    ]
