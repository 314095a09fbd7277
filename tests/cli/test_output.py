import json

from app.cli.output import print_json, print_table, progress, say


def test_json_goes_to_stdout_and_talk_to_stderr(capsys):
    print_json({"a": [1, "ä"]})
    say("working")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": [1, "ä"]}
    assert err == "working\n"


def test_a_table_aligns_numbers_right_and_prints_brackets_as_they_are(capsys):
    print_table(("name", "count"), [("[red]x[/]", 1), ("y", 100)])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["name       count", "[red]x[/]      1", "y            100"]


def test_progress_without_a_terminal_is_one_line(capsys):
    assert list(progress(range(3), "counting", 3)) == [0, 1, 2]
    assert capsys.readouterr().err == "counting\n"
