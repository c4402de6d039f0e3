"""Numbers, as rows and answers write them: GSM8K, AIME, science."""

from __future__ import annotations

import random

from bench.answers.made import Made, kind, lowest, row, two


@kind
def gsm8k_solutions(rng: random.Random) -> Made:
    n = row(rng)
    return (
        f"So it is <<{n}={n}>>{n}.\n#### {n}",
        [f"{n}", f"{n:,}", f"{n}.0"],
        [f"{n + 1}", f"{-n - 1}"],
    )


@kind
def answers_that_are_not_worked_out(rng: random.Random) -> Made:
    n, (a, b) = row(rng) + 1, two(rng)
    wrong = [rf"{a} \cdot {b}", f"{a}*{b}", rf"\frac{{{a * b * n}}}{{{n}}}", f"x = {a}*{b}", "8+9"]
    right = [
        f"{a * b}",
        rf"{a} \cdot {b} = {a * b}",
        f"{a * b} = {a}*{b}",
        f"x = {a}*{b} = {a * b}",
    ]
    return f"{a * b}", right, [*wrong, f"{a}*{b} = {b}*{a}", f"{a}*{b} = {a * b + 1}"]


@kind
def gsm8k_money(rng: random.Random) -> Made:
    n = row(rng) + 1
    return f"#### {n}", [rf"\${n:,}", f"{n} dollars", f"{n}.00"], [f"{n} cents and 5", f"{n}.01"]


@kind
def gsm8k_counted(rng: random.Random) -> Made:
    n, name = row(rng) + 1, rng.choice(["eggs", "apples", "minutes", "clips per day"])
    right = [rf"{n}\text{{ {name}}}", f"{n} {name}", f"{n}"]
    return f"#### {n}", right, [f"{n} squared", f"{n} dozen", f"{n} {name} and a half"]


@kind
def gsm8k_percent(rng: random.Random) -> Made:
    n = rng.randrange(1, 99)
    return f"#### {n}", [rf"{n}\%", f"{n} percent", f"{n}%"], [f"{n}.5%", rf"{n + 1}\%", f"{n}00%%"]


@kind
def scales(rng: random.Random) -> Made:
    n = rng.randrange(2, 90)
    right = [f"{n}000", f"{n},000", f"{n} thousand", f"{n}k"]
    return f"{n},000", right, [f"{n}", f"{n} million", f"{n} hundred", f"{n}00"]


@kind
def names_of_things(rng: random.Random) -> Made:
    n = rng.randrange(2, 500)
    one, other = rng.sample(["apples", "eggs", "boxes", "tickets", "birds"], 2)
    return f"{n} {one}", [f"{n}", f"{n} {one}", rf"{n}\text{{ {one}}}"], [f"{n} {other}", f"{n} km"]


@kind
def whole_numbers(rng: random.Random) -> Made:
    n = rng.randrange(10**6, 10**9)
    right = [f"{n:,}", f"{n:,}".replace(",", "{,}"), f"{n:,}".replace(",", r"\,")]
    return f"{n}", right, [f"{n + 1}", f"{n - 1}.9999999", f"{n}0"]


@kind
def large_whole_numbers(rng: random.Random) -> Made:
    n = rng.randrange(10**40, 10**41)
    return f"{n}", [f"{n}", f"{n:,}"], [f"{n + 1}", f"{n - 1}", f"{float(n)}"]


@kind
def aime(rng: random.Random) -> Made:
    n = rng.randrange(1, 1000)
    wrong = [f"{(n + 1) % 1000:03}", f"{n}.5", f"{n},{n}", f"-{n}"]
    return f"{n:03}", [f"{n}", f"{n:03}", rf"\textbf{{{n:03}}}"], wrong


@kind
def decimals(rng: random.Random) -> Made:
    n, m = rng.randrange(1, 99), rng.randrange(1, 9)
    top, bottom = lowest(n * 10 + m, 10)
    right = [f"{n}.{m}0", rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}"]
    wrong = [f"{n}.{m}1", f"{n},{m}", f"{n}.{m}00001", f"{n}", f"{n}{m}0/100", f"{n} + 0.{m}"]
    return f"{n}.{m}", right, wrong


@kind
def small_decimals(rng: random.Random) -> Made:
    n = rng.randrange(2, 9)
    right = [f"{n}e-7", rf"{n} \times 10^{{-7}}", f"0.000000{n}"]
    return f"0.000000{n}", right, ["0.0", "0", f"0.000000{n + 1}", f"-{n}e-7"]


@kind
def scientific(rng: random.Random) -> Made:
    n, e = f"{rng.randrange(1, 9)}.{rng.randrange(1, 9)}", rng.randrange(5, 30)
    right = [f"{n}e-{e}", rf"{n} \cdot 10^{{-{e}}}", f"{n}×10^-{e}", f"{n}E-{e}"]
    return rf"{n}\times 10^{{-{e}}}", right, ["0.0", "0", f"{n}e-{e + 1}", f"{n}e{e}", f"{n}"]


@kind
def scientific_large(rng: random.Random) -> Made:
    n, e = rng.randrange(1, 9), rng.randrange(3, 12)
    right = [
        f"{n}e{e}",
        f"{n}{'0' * e}",
        rf"{n} \times 10^{{{e}}}",
        f"{n}E{e}",
    ]
    return f"{n}e{e}", right, [f"{n}e{e - 1}", f"{n}{'0' * (e + 1)}", f"{n} e {e}", f"{n}^{e}"]


@kind
def fractions_of_numbers(rng: random.Random) -> Made:
    a, b = two(rng, 3, 50)
    top, bottom = lowest(a, b)
    right = [f"{a}/{b}", rf"\dfrac{{{a}}}{{{b}}}", rf"\frac{{{top}}}{{{bottom}}}"]
    wrong = [f"{b}/{a}", f"-{a}/{b}", f"{a}:{b}", f"{a}/{b + 1}", f"{a} {b}", f"{2 * a}/{2 * b}"]
    return rf"\frac{{{a}}}{{{b}}}", right, wrong


@kind
def tiny_fractions(rng: random.Random) -> Made:
    n = rng.randrange(10**6 + 3, 10**8)
    right = [f"1/{n}", rf"\tfrac{{1}}{{{n}}}"]
    return rf"\frac{{1}}{{{n}}}", right, ["0", "0.0", f"1/{n + 1}", "0.00000001", r"10^{-9}"]


@kind
def rounded_fractions(rng: random.Random) -> Made:
    a, b = rng.choice([(1, 3), (2, 3), (1, 7), (5, 6), (4, 9), (10, 11)])
    exact = f"{a / b:.12f}"
    return f"{a}/{b}", [exact[:8], exact[:10], f"{a / b:.7f}"], [exact[:5], f"{a / b:.2f}", "0.5"]


@kind
def mixed_numbers(rng: random.Random) -> Made:
    n, (a, b) = rng.randrange(2, 9), two(rng, 2, 9)
    top, bottom = lowest(n * b + a, b)
    right = [f"{n} {a}/{b}", rf"\frac{{{top}}}{{{bottom}}}", rf"{n}\tfrac{{{a}}}{{{b}}}"]
    return (
        rf"{n}\frac{{{a}}}{{{b}}}",
        right,
        [rf"{n}", f"{n * a}/{b}", f"{n}{a}/{b}", f"-{n} {a}/{b}"],
    )


@kind
def percents(rng: random.Random) -> Made:
    n = rng.randrange(1, 99)
    return (
        rf"{n}\%",
        [f"{n}%", f"{n / 100:.2f}", f"{n} percent"],
        [f"{n + 1}%", f"{n / 10:.3f}", f"{n}.1"],
    )


@kind
def negative_numbers(rng: random.Random) -> Made:
    n = rng.randrange(2, 999)
    return f"-{n}", [f"−{n}", f"-{n}.0", f"$-{n}$"], [f"{n}", f"--{n}", f"-{n} or {n}", f"({n})"]


@kind
def powers(rng: random.Random) -> Made:
    n = rng.randrange(5, 30)
    right = [f"{2**n}", rf"2^{{{n}}}", rf"2 \cdot 2^{{{n - 1}}}"]
    return rf"2^{{{n}}}", right, [f"{2**n + 1}", f"2{n}", rf"2^{{{n + 1}}}", f"{2 * n}"]


@kind
def factorials(rng: random.Random) -> Made:
    n = rng.randrange(4, 9)
    value = {4: 24, 5: 120, 6: 720, 7: 5040, 8: 40320}[n]
    return (
        f"{n}!",
        [f"{value}", f"{n}!"],
        [f"{n}", f"{n} factorial times 2", f"{value + 1}", f"{n}!!!?"],
    )


@kind
def times_of_day(rng: random.Random) -> Made:
    h, m = rng.randrange(1, 12), rng.randrange(10, 59)
    return (
        f"{h}:{m}",
        [f"{h}:{m}", rf"\text{{{h}:{m}}}"],
        [f"{h}/{m}", f"{m}:{h}", f"{h}.{m}", f"{h}"],
    )


@kind
def fractions_are_no_times(rng: random.Random) -> Made:
    a, b = rng.choice([(11, 30), (7, 12), (3, 10), (9, 20), (5, 12)])
    return f"{a}/{b}", [f"{a}/{b}", rf"\frac{{{a}}}{{{b}}}"], [f"{a}:{b}", f"{b}:{a}", f"{a}-{b}"]


@kind
def other_bases(rng: random.Random) -> Made:
    n, b = f"{rng.randrange(1000, 9999)}", rng.randrange(3, 9)
    right = [f"{n}_{b}", rf"{n}_{{{b}}}"]
    return rf"{n}_{{{b}}}", right, [f"{n}_{b + 1}", f"{n[::-1]}1_{b}", f"{n}{b}", f"{n} + {b}"]
