"""Docstrings as they are written here, for mkdocstrings: an "Example:" is what Google's style calls "Examples:"."""

import griffe


class House(griffe.Extension):
    def on_instance(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
