"""Answers that are no mathematics: times, dates, choices, chemistry, money, numbers in words."""

from __future__ import annotations

import random

from bench.answers.made import Made, kind, two
from bench.answers.written import LOWERED

MONTHS = ["January", "March", "July", "October"]


@kind
def clock_times(rng: random.Random) -> Made:
    h, m = rng.randrange(1, 11), rng.randrange(10, 59)
    right = [f"{h}:{m} pm", rf"{h}:{m}\text{{ p.m.}}", f"{h + 12}:{m}", f"{h:02}:{m} PM"]
    wrong = [f"{h}:{m}", f"{h}:{m} AM", f"{h + 1}:{m} PM", f"{h}.{m}", f"{h}{m}", f"{m}:{h} PM"]
    return f"{h}:{m} PM", right, wrong


@kind
def dates(rng: random.Random) -> Made:
    month, day, year = rng.choice(MONTHS), rng.randrange(13, 28), rng.randrange(1500, 2020)
    right = [f"{day} {month} {year}", f"{month[:3]}. {day}, {year}", f"{day}th of {month} {year}"]
    wrong = [f"{month} {day + 1}, {year}", f"{month} {day}", f"{year}", f"{day}", f"{month}"]
    return f"{month} {day}, {year}", right, [*wrong, f"May {day}, {year}"]


@kind
def dates_in_digits(rng: random.Random) -> Made:
    y, m, d = rng.randrange(1900, 2020), rng.randrange(10, 13), rng.randrange(13, 28)
    return (
        f"{y}-{m}-{d}",
        [f"{y}-{m}-{d}", rf"\text{{{y}-{m}-{d}}}"],
        [f"{y - m - d}", f"{y}-{d}-{m}", f"{y}", f"{y}-{m}-{d + 1}", f"{y + 1}-{m + 1}-{d}"],
    )


@kind
def durations(rng: random.Random) -> Made:
    h, m = rng.randrange(2, 9), rng.choice([15, 30, 45])
    right = [f"{h} h {m} min", f"{h} hours and {m} minutes", f"{h + m / 60} hours"]
    wrong = [f"{h}.{m} hours", f"{h} hours", f"{m} minutes", f"{h} minutes {m} hours", f"{h}{m}"]
    right.append(f"{60 * h + m} minutes")
    return f"{h} hours {m} minutes", right, [*wrong, f"{h} hours {m + 60} minutes", f"{h}:{m} pm"]


@kind
def amounts_of_money(rng: random.Random) -> Made:
    n = rng.randrange(2, 90)
    right = [f"USD {n}.50", f"{n}.50 USD", rf"US\${n}.50", f"{n} dollars 50 cents", f"{n}50¢"]
    wrong = [f"{n}.50 EUR", f"£{n}.50", f"{n}.05", f"{n}50", f"{n}.50%", f"{n}.50¢"]
    return rf"\${n}.50", right, wrong


@kind
def choices_with_text(rng: random.Random) -> Made:
    one, other = rng.sample("ABCDE", 2)
    right = [f"{one}. Paris", f"({one}) Paris", f"Option {one}", f"The answer is ({one})"]
    wrong = [f"{other}. Paris", f"({other}) {one}", f"({one}) and ({other})", f"not {one}"]
    return one, right, [*wrong, f"({one}) or {other}", f"{one}'", "Paris"]


@kind
def choices_that_stand_for_a_number(rng: random.Random) -> Made:
    (one, other), n = rng.sample("ABCDE", 2), rng.randrange(2, 99)
    right = [one, f"({one})", f"{n}", f"({one}) {n}", f"{one}: {n}.0"]
    wrong = [other, f"({other}) {n}", f"({one}) {n + 1}", f"{n}{one}", f"({one}) ({other})"]
    return rf"\textbf{{({one})}}\ {n}", right, wrong


@kind
def chemical_formulas(rng: random.Random) -> Made:
    c, h = two(rng, 2, 20)
    right = [f"C{c}H{h}O", rf"\text{{C}}_{{{c}}}\text{{H}}_{{{h}}}\text{{O}}", rf"\ce{{C{c}H{h}O}}"]
    right.append(f"C{str(c).translate(LOWERED)}H{str(h).translate(LOWERED)}O")
    wrong = [f"C_{{{h}}}H_{{{c}}}O", f"C_{{{c}}}H_{{{h}}}", f"C_{{{c}}}H_{{{h}}}O_2", "CHO"]
    return f"C_{{{c}}}H_{{{h}}}O", right, [*wrong, f"H_{{{h}}}C_{{{c}}}O", f"C_{{{c}}}H_{{{h}}}N"]


@kind
def ions(rng: random.Random) -> Made:
    n = rng.randrange(2, 4)
    right = [rf"\mathrm{{SO_{n}^{{2-}}}}", f"SO{n}^{{2-}}", rf"\text{{SO}}_{n}^{{2-}}"]
    wrong = [f"SO_{n}", f"SO_{n}^{{2+}}", f"SO_{n + 1}^{{2-}}", f"S_{n}O^{{2-}}", f"SO_{n}^-"]
    return f"SO_{n}^{{2-}}", right, wrong


@kind
def reactions(rng: random.Random) -> Made:
    n = rng.choice([2, 4, 6])
    right = [
        f"O2 + {n}H2 -> {n}H2O",
        rf"{n}\text{{H}}_2 + \text{{O}}_2 \to {n}\text{{H}}_2\text{{O}}",
    ]
    wrong = [rf"{n}H_2O \to {n}H_2 + O_2", f"{n}H2 + O2", rf"H_2 + O_2 \to {n}H_2O", f"{n}H_2O"]
    return rf"{n}H_2 + O_2 \rightarrow {n}H_2O", right, [*wrong, rf"{n}H_2 + O_2 \to {n}HO_2"]


@kind
def electron_shells(rng: random.Random) -> Made:
    n = rng.randrange(1, 6)
    right = [f"1s^22s^22p^{n}", f"1s² 2s² 2p^{{{n}}}", rf"1s^{{2}}2s^{{2}}2p^{{{n}}}"]
    wrong = [f"1s^2 2s^2 2p^{n + 1}", f"2p^{n} 2s^2 1s^2", f"4 s^4 p^{n}", "1s^2 2s^2"]
    return f"1s^2 2s^2 2p^{n}", right, wrong


@kind
def temperatures(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    right = [f"{n} °C", f"{n}°C", rf"{n}^{{\circ}} C", f"{n} degrees Celsius", f"{n}"]
    wrong = [f"{n} °F", f"{n} K", f"{n} C", f"{n} degrees", f"{n + 1} °C", f"{n} J"]
    return rf"{n}^\circ\text{{C}}", right, wrong


@kind
def numbers_in_words(rng: random.Random) -> Made:
    (tens, t), (ones, o) = (
        rng.choice([("twenty", 2), ("ninety", 9)]),
        rng.choice([("one", 1), ("four", 4), ("seven", 7)]),
    )
    n = 10 * t + o
    right = [f"{tens}-{ones}", f"{tens} {ones}", f"{tens}-{ones} apples", f"{tens.title()}-{ones}"]
    wrong = [tens, ones, f"{tens}-{ones} or so", f"{ones} {tens}", f"{tens}-{ones} hundred"]
    return f"{n}", right, [*wrong, f"minus {tens}-{ones}", f"{tens}-{ones}th"]


@kind
def fractions_in_words(rng: random.Random) -> Made:
    a, name = rng.choice([(2, "two"), (4, "four"), (5, "five")])
    right = [f"{name} thirds", f"{name}-thirds", f"{a}/3", f"{a}⁄3".replace("⁄", "/")]
    wrong = [name, f"{name} third-graders", f"{name} fifths", f"minus {name} thirds", f"{a}.3"]
    return rf"\frac{{{a}}}{{3}}", right, wrong


@kind
def repeating_decimals(rng: random.Random) -> Made:
    n = rng.choice([1, 2, 4, 5, 7, 8])
    right = [rf"0.\overline{{{n}}}", f"0.({n})", f"0.{n}{n}{n}...", rf"0.{n}{n}{n}\ldots", f"{n}/9"]
    wrong = [f"0.{n}", f"0.{n}{n}", rf"0.\overline{{{n}0}}", f"0.{n}{n}...", f"0.(0{n})"]
    return rf"0.\bar{{{n}}}", right, [*wrong, rf"0.0\dot{{{n}}}"]


@kind
def thousands_of_other_countries(rng: random.Random) -> Made:
    a, b, c = rng.randrange(1, 99), rng.randrange(100, 999), rng.randrange(100, 999)
    right = [f"{a}.{b}.{c}", f"{a}'{b}'{c}", f"{a}_{b}_{c}", f"{a} {b} {c}", f"{a},{b},{c}"]
    wrong = [f"{a}.{b}{c}", f"{a}.{b}", f"{a}.{b}.{c + 1}", f"{a}.{b}.{str(c)[:2]}", f"{a}'{b}"]
    return f"{a}{b}{c}", right, wrong


@kind
def unseen_and_other_digits(rng: random.Random) -> Made:
    n = rng.randrange(100, 999)
    wide = "".join(chr(0xFF10 + int(digit)) for digit in str(n))
    arabic = "".join(chr(0x0660 + int(digit)) for digit in str(n))
    wrong = [f"{n}\u200b0", wide[:2], arabic + "٠", "①" + wide, f"{n}½"]
    return f"{n}", [f"{n}\u200b", f"\u200e{n}", wide, arabic], wrong


@kind
def vulgar_fractions(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    right = [f"{n}½", f"{n} ½", f"{n}.5", f"{2 * n + 1}/2"]
    return f"{n} 1/2", right, [f"{n}⅓", f"{n}¼", "½", f"-{n}½", f"{n}½½", f"{n} · ½"]


@kind
def percents_below_one(rng: random.Random) -> Made:
    n = rng.randrange(1, 9)
    right = [f"0.{n}", f"{n}0%", f"{n}0 percent", f".{n}"]
    return f"0.{n}", right, [f"0.{n}%", f"{n}%", rf"0.{n}\%", f"{n}00%"]


@kind
def sets_and_their_words(rng: random.Random) -> Made:
    a, b = two(rng)
    right = [rf"\{{x \mid {a} \le x < {b}\}}", f"{a}<=x<{b}", rf"x \in [{a}, {b})"]
    wrong = [rf"\{{x \mid {a} < x < {b}\}}", rf"\{{{a}, {b}\}}", rf"\{{x : x < {b}\}}", f"{a} <= x"]
    return f"[{a}, {b})", right, [*wrong, rf"\{{[{a}, {b})\}} \cup \{{1\}}", "all real numbers"]


@kind
def empty_sets(rng: random.Random) -> Made:
    wrong = [r"\{\emptyset\}", "0", r"\{0\}", "()", r"\{\{\}\}", "no", "set", str(rng.random())]
    return r"\emptyset", [r"\{\}", "∅", "empty set", "The empty set", r"\varnothing"], wrong


@kind
def vectors(rng: random.Random) -> Made:
    a, b = two(rng)
    right = [rf"\begin{{bmatrix}} {a} \\ -{b} \end{{bmatrix}}", f"({a}, -{b})", f"⟨{a}, -{b}⟩"]
    right.append(rf"\left(\begin{{array}}{{c}} {a} \\ -{b} \end{{array}}\right)")
    wrong = [f"({a}, {b})", f"(-{b}, {a})", rf"\begin{{pmatrix}} {a} & -{b} \end{{pmatrix}}"]
    return rf"\langle {a}, -{b} \rangle", right, [*wrong, f"{a}, -{b}", f"[{a}, -{b}]", f"{a - b}"]
