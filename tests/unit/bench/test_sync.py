"""What bench.sync makes of its measurements, with numbers worked out by hand."""

from bench.sync import Measured, copy_s, figures


def measured(
    publish_s: float, load_s: float, pause_s: float, *, moved: int = 1000, **more: float
) -> Measured:
    given = {"cpu_s": 0.3, "changed": None, "copy_s": 0.2, "copy_cpu_s": 0.1} | more
    return Measured(
        publish_s=publish_s,
        load_s=load_s,
        pause_s=pause_s,
        moved_bytes=moved,
        whole_bytes=1000,
        **given,  # type: ignore[arg-type]
    )


def test_figures_are_medians_and_ratios_of_what_was_measured():
    shm = [
        measured(0.2, 0.4, 0.2, copy_s=0.1, pack_s=0.1),  # 6, 4 and 1 copies
        measured(0.4, 0.8, 0.8, copy_s=0.2, pack_s=0.6),  # 6, 2 and 3 copies
    ]
    delta = [
        measured(1.0, 1.0, 0.2, moved=50, changed=0.03),
        measured(1.0, 1.0, 0.2, moved=150, changed=0.05),
    ]
    found = {figure.name: figure for figure in figures("0.5B", {"shm": shm, "delta": delta})}

    def value(name: str) -> float:
        return round(found[f"0.5B {name}"].value, 9)

    assert value("shm: publish") == 0.3
    assert value("shm: to copying") == 6.0
    ours = found["0.5B shm: to copying, without the pause"]
    assert (round(ours.value, 9), ours.goal, ours.bound) == (3.0, 3.0, "max")
    assert value("shm: packing to copying") == 2.0
    assert value("shm: that in CPU time") == 3.0
    assert value("delta: elements changed") == 0.04
    whole = found["0.5B delta: bytes of the whole"]
    assert (whole.value, whole.goal, whole.ok) == (0.1, 0.1, True)


def test_only_the_demos_pause_has_a_goal():
    run = [measured(0.1, 0.1, 0.2)]
    goals = {
        figure.name: figure.goal
        for name in ("demo", "0.5B")
        for figure in figures(name, {"shm": run, "http": run})
    }
    assert (goals["demo http: pause"], goals["0.5B http: pause"]) == (0.1, None)


def test_a_copy_takes_time():
    seconds, cpu_seconds = copy_s(1 << 20)
    assert seconds > 0 and cpu_seconds > 0
