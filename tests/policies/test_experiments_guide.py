"""docs/policies/experiments.md, executed: its files serve, its numbers are the code's, its script reads the result."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from app.cli.main import app
from app.policies.assign import point, slot
from tests.support import write_root

GUIDE = (Path(__file__).parents[2] / "docs" / "policies" / "experiments.md").read_text("utf-8")
FILES = re.findall(r"`policies/([a-z/]+\.yaml)`[^\n]*\n\n```yaml\n(.*?)```", GUIDE, re.DOTALL)
(SCRIPT,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
USERS = [f"u-{n}" for n in range(120)]


def root_of(tmp_path):
    root = write_root(tmp_path / "root", sizes=(32, 32, 32))
    toml = root / "deployment.toml"
    toml.write_text(toml.read_text() + '[log]\nunit_salt = "shop"\n')
    for name, text in FILES:
        (root / "policies" / name).parent.mkdir(exist_ok=True)
        (root / "policies" / name).write_text(text)
    return root


def test_the_files_of_the_guide_pass_the_check_that_it_shows(tmp_path):
    assert [name for name, _ in FILES] == ["base.yaml", "wide.yaml", "traffic.yaml", "experiments/wider.yaml"]
    found = CliRunner().invoke(app, ["policy", "check", "--root", str(root_of(tmp_path))])
    assert (found.exit_code, found.output) == (0, "0 errors, 0 warnings, 0 notes\n")


def test_the_numbers_of_the_guide():
    assert f"(`ranking/1`, `user-1`) has slot {slot('ranking/1', 'user-1')}" in GUIDE
    assert f"`user-1`) has point {point('feed_diversity/1', 'user-1')}" in GUIDE


def test_from_requests_to_the_table(tmp_path):
    """120 users are served, some twice; those of `wide` click once more each; the script finds just that."""
    root = root_of(tmp_path)
    asked = [
        {"request_id": f"r-{at}", "user_id": user, "context": {"history": ["i1"]}, "k": 2}
        for at, user in enumerate([*USERS, *USERS[:20]])
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    arguments = ["--root", root, "--in", tmp_path / "requests.jsonl", "--out", tmp_path / "answers.jsonl"]
    assert CliRunner().invoke(app, ["recommend", *map(str, arguments)]).exit_code == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    arms = {}
    for one, answer in zip(asked, answers, strict=True):
        (seen,) = answer["experiments"]
        assert (
            arms.setdefault(one["user_id"], seen["arm"])
            == seen["arm"]
            == {"base": "control"}.get(answer["versions"]["policy"], "wide")
        )
        assert {**seen, "arm": "wide"} == json.loads(re.search(r'```json\n(\{"experiments".*?)\n```', GUIDE)[1])[
            "experiments"
        ][0]
    clicks = [{"user_id": user, "clicks": n % 2 + (arms[user] == "wide")} for n, user in enumerate(USERS)]
    (root / "clicks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in clicks if one["clicks"]))
    table = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, cwd=root).stdout
    sizes = {arm: list(arms.values()).count(arm) for arm in ("control", "wide")}
    means = {arm: sum(one["clicks"] for one in clicks if arms[one["user_id"]] == arm) / sizes[arm] for arm in sizes}
    lines = table.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [[arm, str(size)] for arm, size in sizes.items()]
    assert [float(line.split()[3]) for line in lines[:2]] == [round(mean, 3) for mean in means.values()]
    difference, margin = (float(one) for one in re.search(r"control: (\S+) \+- (\S+)", lines[2]).groups())
    assert difference == round(means["wide"] - means["control"], 3)
    assert difference - margin > 0 and abs(difference - 1) < 0.3
