"""A bench's last line: one JSON object that says every figure, its goal, and whether all were
met."""

import argparse
import json

import pytest

from bench.report import Figure, count, finish, in_turns, options, table


def test_goals_are_bounds_from_either_side_and_decide_the_status(capsys):
    met = [
        Figure("speed", 1.3, "x", 1.3),
        Figure("memory", 0.5, "x", 0.5, "max"),
        Figure("seconds", 1.234567e-9, "s"),
    ]
    assert finish("some", met, repeats=3) == 0
    assert finish("some", [*met, Figure("slow", 1.29, "x", 1.3)]) == 1
    first, last = (
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    )
    assert (first["bench"], first["ok"], first["repeats"]) == ("some", True, 3)
    assert first["figures"]["memory"] == {
        "value": 0.5,
        "unit": "x",
        "goal": 0.5,
        "bound": "max",
        "ok": True,
    }
    assert first["figures"]["seconds"] == {"value": 1.23457e-9, "unit": "s"}
    assert (last["ok"], last["figures"]["slow"]["ok"]) == (False, False)


def test_a_table_has_names_on_the_left_and_numbers_on_the_right():
    assert (
        table([("a", 1), ("long", 23)], ("name", "n")) == "name   n\n----  --\na      1\nlong  23"
    )


def test_a_median_is_shown_with_the_lowest_and_the_highest_of_its_repeats(capsys):
    finish("some", [Figure("speed", 3.0, "x", 1.5, spread=(2.5, 3.25)), Figure("plain", 1.0)])
    lines = capsys.readouterr().out.splitlines()
    assert "2.5 to 3.25" in lines[2] and "to" not in lines[3]
    assert json.loads(lines[-1])["figures"]["speed"]["spread"] == [2.5, 3.25]


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_a_bench_of_no_repeats_is_refused_before_it_begins(text):
    with pytest.raises(
        argparse.ArgumentTypeError, match=f"got '{text}', expected a whole number of at least 1"
    ):
        count(text)
    assert count("3") == 3


def test_each_repeat_begins_with_another_side():
    assert [*in_turns("abc", 3)] == [*"abc", *"bca", *"cab"]


def test_a_bench_has_the_options_that_it_names():
    given = options("Some.", repeats=3, quick="less").parse_args(["--quick"])
    assert vars(given) == {"quick": True, "repeats": 3}
    assert vars(options("Some.").parse_args([])) == {}
