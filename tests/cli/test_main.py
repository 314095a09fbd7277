import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from app.cli import main
from app.cli.main import COMMANDS, app
from app.errors import BadDeployment, WidebeamError

PYTHON = [sys.executable, "-m", "app"]


def test_help_lists_every_command_and_imports_none_of_them():
    code = (
        "import sys\nfrom app.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'fastapi', 'numpy', 'uvicorn'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


def test_version_and_wrong_usage():
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).stdout.startswith("widebeam 0.")
    for args in (["nonsense"], ["--nonsense"], ["bench", "load"]):
        assert runner.invoke(app, args).exit_code == 2


def test_a_command_is_imported_when_it_runs(monkeypatch):
    def load(place):
        assert place == "serve:serve"
        made = typer.Typer(add_completion=False)
        made.command()(lambda: typer.echo("it ran"))
        return typer.main.get_command(made)

    monkeypatch.setattr(main, "load", load)
    assert CliRunner().invoke(app, ["serve"]).stdout == "it ran\n"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WidebeamError("broke", path="weights/v1"), "weights/v1: broke\n"),
        (WidebeamError("broke"), "broke\n"),
        (BadDeployment("bad", file="deployment.toml", line=3), "deployment.toml:3: bad\n"),
    ],
)
def test_an_error_of_ours_is_one_line_on_stderr_and_exit_1(error, text, monkeypatch, capsys):
    def fail(**_):
        raise error

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as end:
        main.run()
    assert end.value.code == 1
    assert capsys.readouterr().err == text


def test_python_m_app_is_the_same_program():
    done = subprocess.run([*PYTHON, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:9]) == (0, "widebeam ")


def test_every_help_is_plain_and_cuts_no_sentence_off():
    runner = CliRunner()
    for name in COMMANDS:
        shown = runner.invoke(app, [name, "--help"], env={"COLUMNS": "80"})
        assert shown.exit_code == 0, name
        assert "..." not in shown.output.partition("\n")[2], name
        assert not {"╭", "│"} & set(shown.output), name
        assert "completion" not in shown.output, name
