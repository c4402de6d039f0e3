"""One answer as it is written in plain text, by programs and in LaTeX."""

from __future__ import annotations

import random

from bench.answers.made import Made, kind, two

RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
LOWERED = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@kind
def values_of_several_names(rng: random.Random) -> Made:
    a, b = two(rng)
    right = [f"y={b}, x={a}", f"x = {a} and y = {b}", f"({a}, {b})", f"{a}, {b}"]
    wrong = [f"{b},{a}", f"x={b}, y={a}", f"({b}, {a})", f"x={a}", f"{a}", f"x={a}, y={b}, z=1"]
    return f"x={a},y={b}", right, wrong


@kind
def values_of_one_name(rng: random.Random) -> Made:
    a, b = two(rng)
    right = [f"x = {a} or x = {b}", f"{b}, {a}", f"x = {b}, {a}", rf"\{{{a}, {b}\}}"]
    wrong = [f"x={a}, y={b}", f"x={a}", f"{a}", f"x={a}, x={a}", f"y={a}, y={b}"]
    return f"x={a}, x={b}", right, wrong


@kind
def text_that_is_not_seen(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    wrong = [rf"\phantom{{{n}}}", rf"{n - 1}\phantom{{+1}}", rf"\cancel{{{n}}}", rf"{n}\ldots 0"]
    return f"{n}", [f"{n}", rf"{{{n}}}", rf"\mathbf{{{n}}}"], wrong


@kind
def powers_with_stars(rng: random.Random) -> Made:
    n, m = two(rng, 2, 9)
    right = [f"{m}*x**{n}", f"{m}x^{n}", f"{m} * x ** {n}"]
    wrong = [f"{m}*x*{n}", f"{m}x{n}", f"{m * n}x", f"{m}**x*{n}", f"x**{n}"]
    return f"{m}x^{{{n}}}", right, wrong


@kind
def raised_and_lowered_digits(rng: random.Random) -> Made:
    n, a = rng.randrange(3, 30), rng.randrange(1, 99)
    name, other = f"a{str(a).translate(LOWERED)}", f"a{str(a + 1).translate(LOWERED)}"
    right = [f"10{str(n).translate(RAISED)} · {name}", rf"10^{n} a_{{{a}}}", f"10**{n}*{name}"]
    wrong = [f"10{n}{name}", f"10{str(n + 1).translate(RAISED)}{name}", f"10^{n} a{a}0"]
    return rf"10^{{{n}}} a_{{{a}}}", right, [*wrong, f"10^{n} a", f"10^{n} {other}"]


@kind
def pi_as_a_word(rng: random.Random) -> Made:
    n = rng.randrange(2, 30)
    wrong = [f"{n}*p*i", f"{n}*pie", f"{n}*pi**2", f"{n}*e", f"{n + 1}*pi", f"pi**{n}"]
    return rf"{n}\pi", [f"{n}*pi", f"pi*{n}", f"{n} pi", f"{n}.0*pi"], wrong


@kind
def roots_without_braces(rng: random.Random) -> Made:
    n = rng.randrange(2, 10)
    wrong = [rf"\sqrt[3] {n}", rf"\sqrt[4]{{{n**3}}}", f"sqrt({n * n + 1})", rf"\sqrt {n}"]
    right = [f"{n}", rf"\sqrt[3]{{{n**3}}}", f"sqrt({n * n})", rf"\sqrt{{{n * n}}}"]
    return rf"\sqrt{{{n * n}}}", [*right, r"\sqrt[3]8"] if n == 2 else right, wrong


@kind
def complex_powers(rng: random.Random) -> Made:
    n = rng.randrange(2, 30)
    wrong = [rf"{n} e^{{i}}", rf"{n} e^{{\pi}}", f"{n}i", rf"{n} e^{{2 i\pi}}", f"{n} I^2"]
    return rf"{n} \cos \pi", [f"-{n}", rf"{n} e^{{i\pi}}", rf"{n} e^{{\pi i}}", f"{n}i^2"], wrong


@kind
def inverse_functions(rng: random.Random) -> Made:
    name, value, n = rng.choice([("sin", r"\frac12", 6), ("cos", r"\frac12", 3), ("tan", "1", 4)])
    right = [rf"\{name}^{{-1}}({value})", rf"\arc{name}({value})", rf"arc{name}({value})"]
    wrong = [rf"(\{name} {value})^{{-1}}", rf"\{name}^{{-2}}({value})", rf"\{name}({value})"]
    return rf"\frac{{\pi}}{{{n}}}", right, [*wrong, rf"\arc{name}(0.4)", rf"\pi^{n}"]


@kind
def functions_without_backslash(rng: random.Random) -> Made:
    n = rng.randrange(2, 30)
    right = [
        f"{n}*sin(x) + ln(x)",
        f"ln(x)+{n} sin x",
        rf"{n}\text{{sin}}(x) + \operatorname{{ln}} x",
    ]
    wrong = [f"{n}*sin(x) - ln(x)", f"{n}*s*i*n*x + l*n*x", f"{n}*cos(x) + ln(x)", f"{n}*sin(x)"]
    return rf"{n}\sin x + \ln x", right, wrong


@kind
def indices(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    right = [f"x{n} + 1", rf"1 + x_{{{n}}}", f"x{str(n).translate(LOWERED)} + 1"]
    wrong = ["x + 1", f"x^{{{n}}} + 1", f"{n}x + 1", f"x_{{{n + 1}}} + 1", f"{n}_x + 1", "x' + 1"]
    return f"x_{{{n}}} + 1", right, wrong


@kind
def currents(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    right = [f"{n}I^2R", f"{n}RI^2", rf"{n} I \cdot I R"]
    return f"{n} I^2 R", right, [f"-{n}R", f"{n}IR", f"{n}R", f"{n}i^2R", f"{n}I_2R"]
