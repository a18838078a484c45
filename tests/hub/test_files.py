"""Directories that appear when they are complete."""

import pytest

from grpo_jax.hub.files import appearing, check_replaceable

pytestmark = pytest.mark.quick


def test_a_directory_appears_at_the_end_and_replaces_the_old_one(tmp_path):
    target = tmp_path / "a" / "b"
    for content in ("old", "new"):
        with appearing(target) as scratch:
            (scratch / "file").write_text(content)
            (scratch / "file").chmod(0o600)  # as safetensors leaves it
            assert not target.exists() or (target / "file").read_text() == "old"
        assert (target / "file").read_text() == content
        assert (target / "file").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in target.parent.iterdir()] == ["b"]


def test_only_files_of_a_checkpoint_may_be_replaced(tmp_path):
    check_replaceable(tmp_path / "new")
    for name in ("config.json", "model-1.safetensors", "tokenizer.json", "adapter_config.json"):
        (tmp_path / name).touch()
    check_replaceable(tmp_path)
    (tmp_path / "notes").mkdir()
    with pytest.raises(FileExistsError, match=r"holds files that do not belong to a checkpoint \(notes\)"):
        check_replaceable(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match=r"is not a directory"):
        check_replaceable(tmp_path / "thesis.tex")
