"""What bench.sync makes of its measurements, with numbers worked out by hand."""

from bench.sync import Measured, copy_s, figures


def test_figures_are_medians_and_ratios_of_what_was_measured():
    shm = [Measured(0.2, 0.4, 0.1, 1000, 1000, None), Measured(0.4, 0.8, 0.3, 1000, 1000, None)]
    delta = [Measured(1.0, 1.0, 0.2, 50, 1000, 0.03), Measured(1.0, 1.0, 0.2, 150, 1000, 0.05)]
    found = {figure.name: figure for figure in figures("0.5B", {"shm": shm, "delta": delta}, 0.3)}
    assert abs(found["0.5B shm: publish"].value - 0.3) < 1e-9
    assert abs(found["0.5B shm: to copying"].value - 3.0) < 1e-9
    assert (found["0.5B shm: to copying"].goal, found["0.5B shm: to copying"].bound) == (3.0, "max")
    assert abs(found["0.5B delta: elements changed"].value - 0.04) < 1e-9
    whole = found["0.5B delta: bytes of the whole"]
    assert (whole.value, whole.goal, whole.ok) == (0.1, 0.1, True)


def test_only_the_demos_pause_has_a_goal():
    run = [Measured(0.1, 0.1, 0.2, 10, 10, None)]
    goals = {
        figure.name: figure.goal
        for name in ("demo", "0.5B")
        for figure in figures(name, {"http": run}, 0.1)
    }
    assert (goals["demo http: pause"], goals["0.5B http: pause"]) == (0.1, None)


def test_a_copy_takes_time():
    assert copy_s(1 << 20, 1) > 0
