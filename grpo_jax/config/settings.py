"""`Settings`: a frozen dataclass whose values are read by the rules of its fields, and refused all at once."""

import dataclasses
from collections.abc import Iterator
from typing import Self

from grpo_jax.config.fields import read, unknown_field
from grpo_jax.messages import raise_all, show

OTHER_NAMES = {
    "warmup_ratio": "use warmup_steps: below 1 it is a ratio",
    "max_new_tokens": "use max_completion_length",
    "kl_coef": "use beta",
    "lr": "use learning_rate",
    "max_length": "use max_completion_length, or max_prompt_length",
    "clip_eps": "use epsilon",
    "group_size": "use num_generations",
    "batch_size": "use per_device_train_batch_size (completions)",
}
"""Names that people bring from elsewhere, and what to do."""


def hints() -> dict[str, str]:
    """Name that no field has → what to do in its place: `OTHER_NAMES`, and TRL's by the table of `compat`."""
    # Here and not above: `compat` lies on a higher floor, and is read for the message of an unknown name alone.
    from grpo_jax.compat.trl_fields import HINTS

    return OTHER_NAMES | HINTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of a frozen dataclass of settings, whose values are read and checked before anybody sees an object of it.

    The annotation of a field is its rule (`config.fields`); fields that a subclass of a settings class adds are kept as
    they come.
    """

    def __new__(cls, *args: object, **values: object) -> Self:
        """Refuse names that are no fields, together with all else that is wrong."""
        if args:
            raise ValueError(
                f"{cls.__name__} takes its fields by keyword; for a dict use {cls.__name__}.from_dict(...)"
            )
        self = super().__new__(cls)
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := [name for name in values if name not in known]:
            vars(self).update((name, value) for name, value in values.items() if name in known)
            table = hints()
            raise_all(cls.__name__, [unknown_field(name, known, table) for name in unknown] + self._read())
        return self

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise one `ValueError` that lists every error; runs at construction, so on settings that exist it passes."""
        raise_all(type(self).__name__, self._read())

    def contradictions(self, wrong: set[str]) -> Iterator[str]:
        """Yield an error line for each contradiction between fields, none of which is in `wrong`: bad by themselves."""
        yield from ()

    def _read(self) -> list[str]:
        """Put the plain Python type of each value in its place, and return the error lines."""
        kinds = type(self).__mro__
        first: type[Settings] = kinds[kinds.index(Settings) - 1]  # what a subclass of that one adds is not read
        problems, wrong = [], set()
        for field in dataclasses.fields(first):
            came = getattr(self, field.name)
            value, fault = read(field.type, came)
            object.__setattr__(self, field.name, value)
            if fault:
                wrong.add(field.name)
                problems.append(f"{field.name} = {show(came)}: {fault}")
        return [*problems, *self.contradictions(wrong)]
