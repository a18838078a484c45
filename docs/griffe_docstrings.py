"""Adapt this package's docstrings to mkdocstrings.

"Example:" is renamed to "Examples:", as in Google's style. In "Returns:", a line that does not start with a name
continues the previous line.
"""

import re

import griffe


def _joined(section: re.Match[str]) -> str:
    first, *rest = section[0].splitlines(keepends=True)[1:]
    return "Returns:\n" + first + "".join(x if re.match(r"  (\w+:| )", x) else "  " + x for x in rest)


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj, **kwargs):
        if obj.docstring:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = re.sub(r"^Returns:\n(  .*(\n|$))+", _joined, text, flags=re.M)
