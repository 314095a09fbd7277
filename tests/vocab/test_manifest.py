from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from app.errors import Rejected
from app.vocab import manifest as manifest_module
from app.vocab.manifest import is_version, read_file, read_manifest, verify, version_key, versions
from app.vocab.publish import commit, draft, next_version


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """weights/v1 with two files."""
    with draft(tmp_path, "weights") as made:
        made.write("config.json", [b'{"a"', b": 1}"])
        made.write("model.safetensors", [bytes(1000)])
        return commit(made, "weights", "v1", "widebeam test", {"vocab": ["v2"]}).directory


def edit(directory: Path, change: Callable[[dict], object]) -> None:
    path = directory / "MANIFEST.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_published_version_verifies(version: Path) -> None:
    manifest = verify(version, "weights")
    assert list(manifest.files) == ["config.json", "model.safetensors"]
    assert manifest.requires == {"vocab": ["v2"]}
    assert read_file(version, "config.json", manifest.files["config.json"]) == b'{"a": 1}'
    assert json.loads((version / "MANIFEST.json").read_text())["files"]["model.safetensors"]["size"] == 1000
    assert len(manifest.digest) == 64


def overwrite(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(data)


def rename_key(data: dict, name: str) -> None:
    data["files"][name] = data["files"].pop("config.json")


def link(directory: Path, target: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to(target)


def fifo(directory: Path) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")


def folder_link(directory: Path) -> None:
    (directory / "sub").symlink_to("/etc", target_is_directory=True)


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "truncated file": (overwrite("model.safetensors", bytes(999)), "file_size", "model.safetensors"),
    "longer file": (overwrite("model.safetensors", bytes(1003)), "file_size", "model.safetensors"),
    "empty file": (overwrite("model.safetensors", b""), "file_size", "model.safetensors"),
    "flipped bit": (overwrite("model.safetensors", bytes(999) + b"\1"), "file_digest", "model.safetensors"),
    "missing file": (lambda d: (d / "config.json").unlink(), "file_missing", "config.json"),
    "extra file": (overwrite("extra.bin", b"x"), "file_unlisted", "extra.bin"),
    "extra hidden file": (overwrite(".extra", b"x"), "file_unlisted", ".extra"),
    "extra folder link": (folder_link, "file_unlisted", "sub"),
    "manifest missing": (lambda d: (d / "MANIFEST.json").unlink(), "manifest_missing", "MANIFEST.json"),
    "manifest empty": (overwrite("MANIFEST.json", b""), "manifest_invalid", "MANIFEST.json"),
    "manifest truncated": (
        lambda d: (d / "MANIFEST.json").write_bytes((d / "MANIFEST.json").read_bytes()[:-20]),
        "manifest_invalid",
        "MANIFEST.json",
    ),
    "manifest not UTF-8": (overwrite("MANIFEST.json", b'{"format": "\xff"}'), "manifest_invalid", "MANIFEST.json"),
    "manifest nested": (overwrite("MANIFEST.json", b"[" * 100000), "manifest_invalid", "MANIFEST.json"),
    "a key twice": (
        lambda d: (d / "MANIFEST.json").write_text(
            (d / "MANIFEST.json").read_text().replace('"config.json"', '"model.safetensors"')
        ),
        "manifest_invalid",
        "MANIFEST.json",
    ),
    "unknown key": (lambda d: edit(d, lambda m: m.update(x=1)), "manifest_invalid", "MANIFEST.json"),
    "unknown format": (lambda d: edit(d, lambda m: m.update(format=2)), "manifest_invalid", "MANIFEST.json"),
    "short digest": (
        lambda d: edit(d, lambda m: m["files"]["config.json"].update(sha256="00")),
        "manifest_invalid",
        "MANIFEST.json",
    ),
    "another kind": (lambda d: edit(d, lambda m: m.update(kind="vocab")), "manifest_kind", "MANIFEST.json"),
    "another version": (lambda d: edit(d, lambda m: m.update(version="v2")), "manifest_version", "MANIFEST.json"),
    "name going up": (lambda d: edit(d, lambda m: rename_key(m, "../v1/config.json")), "file_name", "MANIFEST.json"),
    "absolute name": (lambda d: edit(d, lambda m: rename_key(m, "/etc/passwd")), "file_name", "MANIFEST.json"),
    "name with a NUL": (lambda d: edit(d, lambda m: rename_key(m, "a\0b")), "file_name", "MANIFEST.json"),
    "backslash": (lambda d: edit(d, lambda m: rename_key(m, "..\\x")), "file_name", "MANIFEST.json"),
    "the manifest lists itself": (
        lambda d: edit(d, lambda m: rename_key(m, "MANIFEST.json")),
        "file_name",
        "MANIFEST.json",
    ),
    "link out": (lambda d: link(d, Path("/etc/hostname")), "path_escape", "config.json"),
    "dangling link": (lambda d: link(d, d / "nothing"), "file_missing", "config.json"),
    "link in a circle": (lambda d: link(d, d / "config.json"), "file_unreadable", "config.json"),
    "a pipe": (fifo, "file_unreadable", "config.json"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_twice_with_its_place(name: str, version: Path) -> None:
    break_it, code, location = FAULTS[name]
    break_it(version)
    for _ in range(2):
        with pytest.raises(Rejected) as caught:
            verify(version, "weights")
        assert (caught.value.code, caught.value.location) == (code, location), caught.value.message


def test_whoever_has_had_enough_of_a_look_ends_it_in_the_middle_of_a_file(version: Path, monkeypatch) -> None:
    monkeypatch.setattr(manifest_module, "PIECE", 1)
    size, left = sum(entry.size for entry in verify(version, "weights").files.values()), [0]

    def enough() -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyError

    verify(version, "weights", between=enough)
    assert -left[0] > size
    left[0] = size // 2
    with pytest.raises(KeyError):
        verify(version, "weights", between=enough)


def test_a_file_whose_name_is_no_text_is_refused_in_words_that_can_be_written_down(version: Path) -> None:
    os.close(os.open(os.fsencode(version) + b"/x\xff", os.O_CREAT))
    with pytest.raises(Rejected) as caught:
        verify(version, "weights")
    assert caught.value.code == "file_unlisted"
    for text in (caught.value.location, Rejected("x", "of `\ud800`").message, str(caught.value)):
        assert json.loads(msgspec.json.encode(text)) == text  # an admin's status holds it, and every event


def test_a_version_that_is_a_link_to_elsewhere_is_refused(version: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    version.rename(tmp_path / "elsewhere" / "v1")
    version.symlink_to(tmp_path / "elsewhere" / "v1", target_is_directory=True)
    with pytest.raises(Rejected) as caught:
        verify(version, "weights")
    assert caught.value.code == "path_escape"


def test_a_file_that_changed_after_the_check_is_refused_when_it_is_read(version: Path) -> None:
    manifest = read_manifest(version, "weights")
    for data in (bytes(999), bytes(1001), bytes(999) + b"\1"):
        (version / "model.safetensors").write_bytes(data)
        with pytest.raises(Rejected) as caught:
            read_file(version, "model.safetensors", manifest.files["model.safetensors"])
        assert caught.value.location == "model.safetensors"


def test_newer_versions_have_larger_numbers() -> None:
    ascending = ["code", "v1", "v1.9", "v1.10", "v2", "v9", "v10", "w1", "2", "9", "010", "10"]
    assert sorted(set(ascending), key=version_key) == ascending


def test_strays_are_no_versions(tmp_path: Path) -> None:
    for name in ["9", "10", "010", "code", ".tmp-11", "12.partial", "a b", "13.tmp"]:
        (tmp_path / "vocab" / name).mkdir(parents=True)
    (tmp_path / "vocab" / "14").write_text("a file")
    (tmp_path / "vocab" / "9" / "MANIFEST.json").write_text("{}")
    assert [(one.version, one.complete) for one in versions(tmp_path, "vocab")] == [
        ("10", False),
        ("010", False),
        ("9", True),
        ("code", False),
    ]
    assert versions(tmp_path, "weights") == ()


def test_what_cannot_be_looked_into_hides_no_other_version(tmp_path: Path) -> None:
    (tmp_path / "vocab" / "9").mkdir(parents=True)
    (tmp_path / "vocab" / "10").symlink_to("10")  # a link to itself: nobody can say what it is
    assert [one.version for one in versions(tmp_path, "vocab")] == ["9"]
    (tmp_path / "weights").symlink_to("weights")
    assert versions(tmp_path, "weights") == ()


def test_a_version_that_may_not_be_looked_into_is_there_and_says_why(
    version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.stat  # nothing is forbidden to root

    def forbidden(self: Path, **how: bool) -> os.stat_result:
        if self.parent == version:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, **how)

    monkeypatch.setattr(Path, "stat", forbidden)
    (found,) = versions(version.parents[1], "weights")
    assert found.complete
    with pytest.raises(Rejected, match="Permission denied") as caught:
        read_manifest(found.directory, "weights")
    assert (caught.value.code, caught.value.location) == ("file_unreadable", "MANIFEST.json")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../v1", "/etc", "a/b", "v1\n", ".v1", "é", "v1.partial", "x" * 129, "-x"]
)
def test_unsafe_names_are_no_versions(name: str, tmp_path: Path) -> None:
    assert not is_version(name)
    with draft(tmp_path, "vocab") as made, pytest.raises(Rejected) as caught:
        commit(made, "vocab", name, "test", {})
    assert caught.value.code == "version_name"
    assert list((tmp_path / "vocab").iterdir()) == []


@pytest.mark.parametrize(
    ("existing", "expected"),
    [
        ([], "v1"),
        (["v9"], "v10"),
        (["v9", "v10"], "v11"),
        (["007"], "008"),
        (["2024-06"], "2024-07"),
        (["release"], "release-2"),
        (["v1.9"], "v1.10"),
    ],
)
def test_the_next_version_is_the_newest(existing: list[str], expected: str, tmp_path: Path) -> None:
    for name in existing:
        (tmp_path / "vocab" / name).mkdir(parents=True)
    assert next_version(tmp_path, "vocab") == expected
    assert all(version_key(expected) > version_key(name) for name in existing)


def test_a_failed_publication_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), draft(tmp_path, "weights") as made:
        made.write("a", [b"x"])
        raise ZeroDivisionError
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may look into every folder")
def test_a_folder_that_nobody_may_look_into_is_no_reason_to_fail(version):
    inner = _with_a_closed_folder(version)
    try:
        read_manifest(version, "weights")
    finally:
        inner.parent.chmod(0o755)


def test_a_folder_whose_folders_cannot_be_looked_at_is_no_reason_to_fail(version, monkeypatch):
    inner = _with_a_closed_folder(version, 0o755)

    def closed(real):
        def look(path, *more, **how):
            if not isinstance(path, int) and os.fspath(path) == os.fspath(inner):
                raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
            return real(path, *more, **how)

        return look

    for name in ("lstat", "stat"):
        monkeypatch.setattr(os, name, closed(getattr(os, name)))
    read_manifest(version, "weights")


def _with_a_closed_folder(version: Path, mode: int = 0o600) -> Path:
    """A folder that may be read and not entered, with another one in it: the inner one."""
    inner = version / "odd" / "inner"
    inner.mkdir(parents=True)
    inner.parent.chmod(mode)
    return inner
