"""A bench's last line: one JSON object that says every figure, its goal, and whether all were
met."""

import json

from bench.report import Figure, finish, table


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
