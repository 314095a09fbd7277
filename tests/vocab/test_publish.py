from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import Rejected
from app.vocab.manifest import versions
from app.vocab.publish import commit, draft


@pytest.mark.parametrize("found", ["an empty folder", "a folder", "a file", "a link to nowhere"])
def test_whatever_takes_the_name_meanwhile_stays(found: str, tmp_path: Path) -> None:
    place = tmp_path / "weights" / "v1"
    with draft(tmp_path, "weights") as made:
        made.write("a", [b"x"])
        if found == "a file":
            place.write_text("mine")
        elif found == "a link to nowhere":
            place.symlink_to(tmp_path / "nowhere")
        else:
            place.mkdir()
            if found == "a folder":
                (place / "mine").write_text("mine")
        with pytest.raises(Rejected) as caught:
            commit(made, "weights", "v1", "test", {})
    assert (caught.value.code, caught.value.location) == ("version_exists", "weights/v1")
    assert [path.name for path in place.parent.iterdir()] == ["v1"]
    assert not (place / "MANIFEST.json").exists()


def test_a_version_is_not_seen_before_it_is_complete(tmp_path: Path) -> None:
    with draft(tmp_path, "weights") as made:
        made.write("a", [b"x", b"y"])
        assert versions(tmp_path, "weights") == ()
        published = commit(made, "weights", "v1", "test", {})
    assert [found.complete for found in versions(tmp_path, "weights")] == [True]
    assert (published.directory / "a").read_bytes() == b"xy"


def test_a_source_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with draft(tmp_path, "weights") as made, pytest.raises(Rejected) as caught:
        made.copy(tmp_path / "nothing", "model.safetensors")
    assert (caught.value.code, caught.value.location) == ("file_unreadable", "model.safetensors")
