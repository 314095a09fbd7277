"""What is given to compute-sanitizer: every kernel there is, and cases that run up to what needs a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.ops import cuda
from tests.gpu import sanitize

ROOT = Path(__file__).parent.parent
ENTRY = re.compile(r'extern "C" __global__ void\s+(?:[A-Z_]+\s+|__\w+__\([^)]*\)\s*)*([a-z]\w*)\(')
EXPANDED = re.compile(r"^ENTRY\((\w+), (\d), \w+\)$", re.MULTILINE)


def entries():
    """Every kernel of app/ops, as `sanitize.Part` names them."""
    found = set()
    for source in sorted((ROOT / "app" / "ops").glob("*/*.cu")):
        text = cuda.text(source)
        names = ENTRY.findall(text) + [f"{form}_{positions}" for form, positions in EXPANDED.findall(text)]
        assert len(names) >= text.count('extern "C" __global__'), source
        found |= {f"{source.parent.name}/{source.name}:{name}" for name in names}
    return found - {"attention/kernel.cu:name"}  # the macro's own


def test_every_kernel_is_of_one_part():
    known = [kernel for part in sanitize.PARTS.values() for kernel in part.kernels]
    assert sorted(known) == sorted(entries())
    assert len(known) > 40


def test_parts_are_named_and_what_is_none_is_refused(capsys):
    assert sanitize.parts(["trie", "gdn", "trie"]) == ["trie", "gdn"]
    assert sanitize.parts(["all"]) == list(sanitize.PARTS)
    for wrong in (["tree"], []):
        with pytest.raises(SystemExit):
            sanitize.parts(wrong)
    assert "selection" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)  # a few seconds on an idle machine
def test_all_cases_run_to_the_launch_of_every_kernel():
    """On the CPU, with kernels that do nothing and without comparisons: what the cases call is there and takes that."""
    asked = [sys.executable, "-O", "-m", "tests.kernels_on_cpu", "all"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for name, part in sanitize.PARTS.items():
        assert f"{name}: {len(part.kernels)} kernels" in done.stdout
    assert "never" not in done.stdout
