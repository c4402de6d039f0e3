"""Letters, words and units: beside a number, or alone."""

from __future__ import annotations

import random

from bench.answers.made import Made, kind, two


@kind
def choices(rng: random.Random) -> Made:
    one, other = rng.sample("ABCDE", 2)
    right = [one, f"({one})", rf"\text{{{one}}}", rf"\textbf{{({one})}}", f"{one}."]
    return (
        rf"\text{{({one})}}",
        right,
        [other, f"{one}{other}", f"({other})", f"{one} or {other}", "3"],
    )


@kind
def orders_of_letters(rng: random.Random) -> Made:
    letters = rng.sample("ABCDEFG", 4)
    word, turned = "".join(letters), "".join(sorted(letters, reverse=True))
    moved = word[1:] + word[0]
    wrong = [text for text in (turned, moved, word[:3], word[::-1]) if text != word]
    return word, [word, rf"\text{{{word}}}", " ".join(letters)], wrong


@kind
def yes_and_no(rng: random.Random) -> Made:
    one, other = rng.sample([("yes", "sey"), ("no", "on"), ("true", "false"), ("even", "never")], 2)
    right = [one[0], one[0].capitalize(), rf"\text{{{one[0]}}}", f"{one[0]}."]
    return one[0], right, [one[1], other[0], f"not {one[0]}", one[0] * 2, "1"]


@kind
def words(rng: random.Random) -> Made:
    names = ["Tuesday", "Evelyn", "ellipse", "hexagon", "red", "north"]
    one, other = rng.sample(names, 2)
    return (
        rf"\text{{{one}}}",
        [one, one.lower(), rf"\textbf{{{one}}}"],
        [other, one[::-1], one + "s"],
    )


@kind
def phrases(rng: random.Random) -> Made:
    one, other = rng.sample(["two lines", "a circle", "no solution", "odd function"], 2)
    right = [one, rf"\text{{{one}}}", one.capitalize()]
    return rf"\text{{{one}}}", right, [other, " ".join(reversed(one.split())), one.split()[-1], "0"]


@kind
def imaginary_numbers(rng: random.Random) -> Made:
    a, b = two(rng)
    right = [f"{a} + {b}i", f"{b}i + {a}", f"{a}+{b} i"]
    return f"{a}+{b}i", right, [f"{a}", f"{b}+{a}i", f"{a}-{b}i", f"{a + b}", f"{a}+{b}j"]


@kind
def letters_after_numbers(rng: random.Random) -> Made:
    n, (one, other) = rng.randrange(2, 99), rng.sample(["a", "b", "x", "y", "i"], 2)
    return (
        f"{n} {one}",
        [f"{n}{one}", f"{n} {one}", rf"{n}\cdot {one}"],
        [f"{n}", f"{n} {other}", f"{n}{one}{one}"],
    )


@kind
def words_after_numbers(rng: random.Random) -> Made:
    n = rng.randrange(3, 99)
    wrong = [f"{n} {word}" for word in ("squared", "hundredths", "i", "x", "or 7", "more than 2")]
    return f"{n}", [f"{n}", f"{n}.", f"{n} units"], wrong


@kind
def full_hours(rng: random.Random) -> Made:
    hour, half = rng.randrange(1, 12), rng.choice("ap")
    other = "pa"["ap".index(half)]
    right = [f"{hour} {half}.m.", f"{hour}{half}m", f"{hour}:00 {half.upper()}M"]
    right += [f"{hour + 12 * (half == 'p')}:00", rf"{hour}\text{{ {half}.m.}}"]
    wrong = [f"{hour} {other}.m.", f"{hour}:30 {half}m", f"{hour + 1} {half}.m.", f"{hour}"]
    gold = rng.choice([f"{hour} {half}.m.", f"{hour}:00 {half}m"])
    return gold, right, [*wrong, f"{hour + 12 * (other == 'p')}:00", f"{hour} hours"]


@kind
def ratios_in_words(rng: random.Random) -> Made:
    a, b = two(rng)
    wrong = [f"{b} to {a}", f"{a} to {b + 1}", f"{a}/{b}", f"{a}", f"{a} - {b}", f"{a}, {b}"]
    return f"{a}:{b}", [f"{a} to {b}", f"{a} : {b}", rf"{a} \text{{ to }} {b}"], wrong


@kind
def numbers_that_are_one_word(rng: random.Random) -> Made:
    word, (number, others) = rng.choice(
        [
            ("half", (r"\frac{1}{2}", ["0.4", "2", "half-life", "halves", "not half", "third"])),
            ("hundred", ("100", ["10", "hundreds", "hundredth", "hundred and one", "1000"])),
            ("thousand", ("1000", ["100", "thousands", "thousandth", "thousand or so"])),
            ("dozen", ("12", ["10", "24", "dozens", "a dozen and one", "a dozen or so", "1"])),
        ]
    )
    right = [word, f"a {word}", f"one {word}", word.capitalize(), rf"\text{{{word}}}", number]
    return rng.choice([number, word]), right, others


@kind
def names_that_begin_with_a_number(rng: random.Random) -> Made:
    one, number = rng.choice(
        [("Hundred Years War", "100"), ("half-life", r"\frac{1}{2}"), ("Dozen Peaks", "12")]
    )
    return one, [one, rf"\text{{{one}}}"], [number, one[:4], one[5:]]


@kind
def lengths(rng: random.Random) -> Made:
    n = rng.randrange(2, 90)
    right = [f"{n} km", f"{n}000 m", rf"{n}\text{{ kilometers}}", f"{n}", rf"{n}\ \mathrm{{km}}"]
    return f"{n} km", right, [f"{n} m", f"{n} kg", f"{n} miles", f"{n} km^2", f"{n} apples"]


@kind
def areas(rng: random.Random) -> Made:
    n = rng.randrange(2, 90)
    right = [rf"{n}\text{{ cm}}^2", f"{n} square centimeters", f"{n}"]
    return rf"{n} \text{{ cm}}^2", right, [f"{n} cm", rf"{n}\text{{ m}}^2", rf"{n}\text{{ cm}}^3"]


@kind
def speeds(rng: random.Random) -> Made:
    n = rng.randrange(2, 40)
    right = [f"{n} m/s", rf"{n}\text{{ m s}}^{{-1}}", f"{n * 18 / 5:g} km/h", f"{n}"]
    return rf"{n}\ \text{{m/s}}", right, [f"{n} km/h", f"{n} m", f"{n} m/s^2", f"{n} s/m"]


@kind
def angles(rng: random.Random) -> Made:
    n = rng.randrange(10, 170)
    right = [rf"{n}^\circ", f"{n} degrees", f"{n}", f"{n}°"]
    return rf"{n}^{{\circ}}", right, [rf"{n + 1}^\circ", f"{n} radians", f"{n} °C", rf"{n}\pi"]


@kind
def energies(rng: random.Random) -> Made:
    n = rng.randrange(2, 90)
    right = [f"{n} kJ", f"{n}000 J", rf"{n}e3 \text{{ J}}", rf"{n} \times 10^3 \mathrm{{J}}"]
    return rf"{n} \text{{ kJ}}", right, [f"{n} J", f"{n} kW", f"{n} kN", f"{n}e-3 J"]


@kind
def science_with_units(rng: random.Random) -> Made:
    n, e = f"{rng.randrange(1, 9)}.{rng.randrange(1, 9)}", rng.randrange(8, 25)
    right = [rf"{n}e-{e} C", rf"{n} \times 10^{{-{e}}} \text{{ C}}", f"{n}e-{e}"]
    wrong = ["0.0", "0.0 C", f"{n}e-{e} V", f"{n}e-{e - 1} C", rf"{n} \text{{ C}}"]
    return rf"{n} \times 10^{{-{e}}}\ \mathrm{{C}}", right, wrong


@kind
def money(rng: random.Random) -> Made:
    n = rng.randrange(2, 999)
    right = [rf"\${n}", f"{n} dollars", f"{n}", f"${n}.00"]
    return rf"\${n}", right, [f"{n} cents", f"€{n}", f"{n} euros", f"{n}.10", rf"\${n} million"]
