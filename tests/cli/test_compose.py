"""The composition root: flags over the file, and a bad file that keeps the server alive."""

from __future__ import annotations

import io

import pytest

from app.cli.compose import Overrides, available_cores, compose, read_deployment
from app.errors import BadDeployment
from tests import support


def test_flags_win_over_the_file(tmp_path):
    root = support.write_root(tmp_path / "root")
    service = compose(root, Overrides(host="0.0.0.0", port=7, device="cpu", front_ends=2), io.BytesIO())
    assert (service.deployment.server.host, service.deployment.server.port) == ("0.0.0.0", 7)
    assert service.deployment.server.front_ends == 2
    assert service.deployment.server.admin_port == 0


@pytest.mark.parametrize("text", [None, "family = ", b"\xff", 'family = "x"\n[sid]\nsizes = [4]\nnope = 1\n'])
def test_a_bad_deployment_file_is_refused_or_kept_as_the_reason(tmp_path, text):
    if text is not None:
        (tmp_path / "deployment.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadDeployment):
        read_deployment(tmp_path)
    with pytest.raises(BadDeployment):
        compose(tmp_path, Overrides(), io.BytesIO())
    loaded = compose(tmp_path, Overrides(), io.BytesIO(), tolerant=True).load()
    assert loaded.snapshot is None
    assert loaded.reasons[0].code == "bad_deployment"


def test_cores_are_those_that_this_process_may_use():
    assert available_cores() >= 1
