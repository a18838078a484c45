"""Stages of a run (`prepare`, `collect`, `train` and `evaluate`), and dry runs (`rehearse`)."""
