"""Formulas, equations and several answers, as MATH has them."""

from __future__ import annotations

import random

from bench.answers.made import Made, kind, two


@kind
def roots(rng: random.Random) -> Made:
    n, m = rng.randrange(2, 20), rng.choice([2, 3, 5, 7])
    right = [rf"{n}\sqrt{m}", rf"\sqrt{{{n * n * m}}}", f"{n * m**0.5:.8f}"]
    wrong = [
        rf"{n + 1}\sqrt{m}",
        rf"\sqrt{{{n * m}}}",
        f"{n * m**0.5:.2f}",
        rf"{n}\sqrt[3]{{{m}}}",
        f"{n * m}",
    ]
    return rf"{n}\sqrt{{{m}}}", right, wrong


@kind
def roots_with_units(rng: random.Random) -> Made:
    n = rng.randrange(2, 20)
    right = [rf"{n}\sqrt{{2}}\text{{ cm}}", rf"{n}\sqrt{{2}}", rf"\sqrt{{{2 * n * n}}}\text{{ cm}}"]
    return (
        rf"{n}\sqrt{{2}} \text{{ cm}}",
        right,
        [rf"{n}\sqrt{{2}}\text{{ kg}}", rf"{n}\sqrt{{3}}\text{{ cm}}", f"{n} cm"],
    )


@kind
def multiples_of_pi(rng: random.Random) -> Made:
    n = rng.randrange(2, 30)
    right = [rf"{n} \cdot \pi", rf"\frac{{{2 * n}\pi}}{{2}}", f"{n}π"]
    return rf"{n}\pi", right, [f"{n}", rf"{n + 1}\pi", rf"{n}\pi^2", f"{n * 3.14:.2f}", rf"{n}+\pi"]


@kind
def tiny_formulas(rng: random.Random) -> Made:
    n = rng.randrange(20, 60)
    right = [rf"e^{{-{n}}}", rf"\frac{{1}}{{e^{{{n}}}}}"]
    return rf"e^{{-{n}}}", right, ["0", "0.0", rf"2e^{{-{n}}}", rf"e^{{{n}}}", rf"e^{{-{n + 1}}}"]


@kind
def polynomials(rng: random.Random) -> Made:
    a, b = two(rng, 1, 20)
    right = [rf"(x+{a})(x+{b})", rf"x^2+{a + b}x+{a * b}", rf"{a * b}+{a + b}x+x^2"]
    wrong = [
        rf"x^2+{a + b}x+{a * b + 1}",
        rf"(x-{a})(x-{b})",
        rf"y^2+{a + b}y+{a * b}",
        rf"x^2+{a * b}",
    ]
    return rf"x^2 + {a + b}x + {a * b}", right, wrong


@kind
def products_of_letters(rng: random.Random) -> Made:
    n = rng.randrange(2, 30)
    right = [f"{n}ab", f"{n}ba", rf"{n} a \cdot b", rf"{n}\,ab"]
    return f"{n}ab", right, [f"{n}a", f"{n}ac", f"{n}a+b", f"{n + 1}ab", f"{n}ab^2", f"{n}"]


@kind
def trigonometry(rng: random.Random) -> Made:
    n = rng.randrange(2, 9)
    right = [rf"{n}\sin^2 x", rf"{n} - {n}\cos^2 x", rf"{n}(1-\cos^2 x)"]
    return rf"{n}\sin^2 x", right, [rf"{n}\cos^2 x", rf"{n}\sin x", rf"{n}\sin^2 y", rf"{n}"]


@kind
def lists(rng: random.Random) -> Made:
    a, b = two(rng)
    right = [
        f"{a}, {b}",
        f"{b}, {a}",
        rf"{a} \text{{ and }} {b}",
        rf"x = {a}, {b}",
        rf"\{{{a}, {b}\}}",
    ]
    return f"{a}, {b}", right, [f"{a}", f"{a}, {a}", f"{a}, {b}, {b}", f"{a}, {b + 1}", f"{a}{b}"]


@kind
def one_and_no_list(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    return (
        f"{n}",
        [f"{n}", f"x = {n}"],
        [f"{n}, {n}", f"{n}, {n + 1}", rf"\{{{n}, 0\}}", rf"\pm {n}", f"({n}, {n})"],
    )


@kind
def plus_and_minus(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    right = [rf"\pm {n}", f"{n}, -{n}", f"-{n}, {n}", rf"x = \pm {n}"]
    return rf"\pm {n}", right, [f"{n}", f"-{n}", f"{n}, {n}", rf"\pm {n + 1}"]


@kind
def points_and_intervals(rng: random.Random) -> Made:
    a, b = two(rng)
    closing, other = rng.choice([")]", "])"])
    right = [f"({a}, {b}{closing}", rf"\left({a},{b}\right{closing}", rf"({a}.0, {b}{closing}"]
    wrong = [
        f"({b}, {a}{closing}",
        f"({a}, {b}{other}",
        f"({a}, {b + 1}{closing}",
        f"{a}",
    ]
    return f"({a},{b}{closing}", right, wrong


@kind
def unions(rng: random.Random) -> Made:
    a, b = two(rng)
    right = [rf"(-\infty,{a})\cup({b},\infty)", rf"({b},\infty) \cup (-\infty,{a})"]
    wrong = [
        rf"(-\infty,{a}]\cup({b},\infty)",
        rf"(-\infty,{a})",
        rf"({a},{b})",
        rf"(-\infty,{b})\cup({a},\infty)",
    ]
    return rf"(-\infty, {a}) \cup ({b}, \infty)", right, wrong


@kind
def inequalities(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    right = [f"x > {n}", f"{n} < x", rf"({n}, \infty)"]
    return f"x > {n}", right, [rf"x \ge {n}", f"x < {n}", f"{n}", f"x = {n}", rf"[{n}, \infty)"]


@kind
def matrices(rng: random.Random) -> Made:
    a, b = two(rng)

    def matrix(cells: str, mark: str = "p") -> str:
        return rf"\begin{{{mark}matrix}} {cells} \end{{{mark}matrix}}"

    right = [matrix(rf"{a} & {b} \\ 0 & 1"), matrix(rf"{a}&{b}\\0&1", "b")]
    wrong = [
        matrix(rf"{b} & {a} \\ 0 & 1"),
        matrix(rf"{a} & {b}"),
        matrix(rf"{a} & 0 \\ {b} & 1"),
        f"{a}, {b}, 0, 1",
    ]
    return matrix(rf"{a} & {b} \\ 0 & 1"), right, wrong


@kind
def matrices_as_lists(rng: random.Random) -> Made:
    a, b = two(rng)
    gold = rf"\begin{{pmatrix}} {a} & {b} \\ 0 & 1 \end{{pmatrix}}"
    right = [f"[[{a}, {b}], [0, 1]]", rf"\left[[{a},{b}],[0,1]\right]", f"[[{a}.0,{b}],[0,1]]"]
    wrong = [
        *(f"[[{b}, {a}], [0, 1]]", f"[[{a}, 0], [{b}, 1]]", f"[[{a}, {b}, 0, 1]]"),
        *(f"[{a}, {b}], [0, 1]", f"[{a}, {b}, 0, 1]", f"[[{a}, {b}], [0]]", f"[[{a}], [{b}]]"),
        *(
            f"[[{a}, {b}], [0, 1], [0, 1]]",
            rf"\begin{{vmatrix}} {a} & {b} \\ 0 & 1 \end{{vmatrix}}",
        ),
    ]
    lists = f"[[{a}, {b}], [0, 1]]"
    return (gold, right, wrong) if rng.random() < 0.5 else (lists, [gold, lists], wrong[:6])


@kind
def intervals_with_turned_brackets(rng: random.Random) -> Made:
    a, b = two(rng)
    turned = {"(": "]", ")": "[", "[": "[", "]": "]"}
    opening, closing = rng.choice(["()", "(]", "[)"])
    said, plain = f"{turned[opening]}{a}, {b}{turned[closing]}", f"({a}, {b}{closing}"
    plain = f"{opening}{plain[1:]}"
    right = [said, rf"\left{said[0]}{a};{b}\right{said[-1]}", rf"x \in {said}", plain]
    others = {f"{left}{a}, {b}{right}" for left in "[]" for right in "[]"} - {said}
    wrong = [*sorted(others), f"{said[0]}{b}, {a}{said[-1]}", f"{said[0]}{a}, {b + 1}{said[-1]}"]
    union = rf"{said} \cup ]{b + 1},+\infty["
    return rng.choice([plain, said]), right, [*wrong, union, f"{a}", f"{a}, {b}"]


@kind
def unions_with_turned_brackets(rng: random.Random) -> Made:
    a, b = two(rng)
    right = [rf"]-\infty,{a}] \cup ]{b},+\infty[", rf"]{b};\infty[ \cup ]-\infty;{a}]"]
    wrong = [
        *(rf"]-\infty,{a}[ \cup ]{b},+\infty[", rf"]-\infty,{a}] \cup [{b},+\infty["),
        *(rf"]-\infty,{a}]", rf"]{a},{b}[", rf"]-\infty,{b}] \cup ]{a},+\infty["),
    ]
    return rf"(-\infty, {a}] \cup ({b}, \infty)", right, wrong


@kind
def unit_vectors(rng: random.Random) -> Made:
    a, b = two(rng)
    hats, plain = rf"{a}\hat{{i}}+{b}\hat{{j}}", f"{a}i+{b}j"
    right = [hats, plain, rf"{a}\mathbf{{i}}+{b}\mathbf{{j}}", rf"{b}\hat\jmath + {a}\hat\imath"]
    wrong = [
        *(f"{b}i+{a}j", f"{a}i-{b}j", f"{a}+{b}i", f"{a}+{b}j", f"{a}x+{b}y", f"{a + b}"),
        *(rf"{b}\hat{{i}}+{a}\hat{{j}}", rf"{a}\hat{{i}}+{b}\hat{{k}}", f"{a}i", f"{a}ij+{b}"),
    ]
    return rng.choice([hats, plain]), right, wrong


@kind
def imaginary_numbers_are_no_vectors(rng: random.Random) -> Made:
    a, b = two(rng)
    wrong = [rf"{a}+{b}\hat{{i}}", rf"{a}\hat{{i}}+{b}\hat{{j}}", rf"{b}\hat{{i}}", f"{a}i+{b}"]
    return f"{a}+{b}i", [f"{a}+{b}i", f"{b}i+{a}"], wrong


@kind
def inequalities_that_both_hold(rng: random.Random) -> Made:
    a, b = two(rng)
    right = [rf"x > {a} \text{{ and }} x < {b}", f"x < {b} and {a} < x", rf"{a} < x < {b}"]
    wrong = [
        *(rf"x < {a} \text{{ and }} x > {b}", rf"x > {a} \text{{ or }} x < {b}", f"x > {a}"),
        *(rf"x \ge {a} \text{{ and }} x < {b}", rf"x > {a} \text{{ and }} x > {b}"),
    ]
    union = rf"(-\infty, {a}) \cup ({b}, \infty)"
    either = [rf"x < {a} \text{{ or }} x > {b}", union]
    if rng.random() < 0.5:
        return f"({a}, {b})", right, wrong
    return union, either, [wrong[0], f"x < {b} and x > {a}", right[0], rf"x < {a} \wedge x > {b}"]


@kind
def all_numbers_but_one(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    union = rf"(-\infty, {n}) \cup ({n}, \infty)"
    wrong = [f"x = {n}", rf"x \ne {n + 1}", rf"x \ne -{n}", rf"(-\infty, {n}] \cup ({n}, \infty)"]
    right = [union, rf"x \neq {n}", rf"x \ne {n}.0"]
    return rng.choice([union, rf"x \ne {n}"]), right, [*wrong, rf"(-\infty, {n})", f"{n}"]


@kind
def names_of_a_point(rng: random.Random) -> Made:
    a, b = two(rng)
    gold = rng.choice([f"(x,y)=({a},{b})", f"x={a}, y={b}"])
    right = [f"(x, y) = ({a}, {b})", f"({a}, {b})", f"x={a}, y={b}", f"y={b}, x={a}"]
    wrong = [f"(x, y) = ({b}, {a})", f"({b}, {a})", f"(y, x) = ({a}, {b})", f"x={b}, y={a}"]
    return gold, right, [*wrong, f"(x, y) = {a}", f"(x, y, z) = ({a}, {b})", f"(x,y)=({a},{b},{b})"]


@kind
def several_points_with_names(rng: random.Random) -> Made:
    a, b = two(rng)
    gold = rng.choice([f"({a},{b}), ({b},{a})", f"(x,y)=({a},{b}), ({b},{a})"])
    right = [gold, f"(x,y) = ({b},{a}), ({a},{b})", f"(x,y)=({a},{b}) or (x,y)=({b},{a})"]
    wrong = [f"(x,y) = ({a},{b})", f"(x,y) = ({a},{b}), ({a},{b})", f"({b},{a})", f"({a},{b},{a})"]
    return gold, right, [*wrong, f"(x,y) = ({a},{b}), ({b},{a + 1})", f"x = {a}, y = {b}"]


@kind
def equal_values(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    right = [f"x=y={n}", f"x = y = z = {n}", f"{n}"]
    wrong = [f"x=y={n + 1}", f"x={n}=y={n + 1}", f"x=y={n}={n + 1}", "x=y", f"x=y>{n}"]
    return rng.choice([f"{n}", f"x=y={n}"]), right, wrong


@kind
def diagonals(rng: random.Random) -> Made:
    sign, other = rng.choice([("", "-"), ("-", "")])
    right = [f"x={sign}y", f"2y = {sign}2x", "x-y=0" if not sign else "x+y=0", f"y={sign}x"]
    wrong = [f"y={other}x", f"x={other}y", "y=0", f"y={sign}x+1", f"y={sign}z", "x+y=1", "0=0"]
    return f"y={sign}x", right, wrong


@kind
def points_with_names(rng: random.Random) -> Made:
    a, b = two(rng)
    right = [f"(x, y) = ({a}, {b})", f"({a}, {b})", f"(m,n)=({a},{b})"]
    wrong = [f"(x, y) = ({b}, {a})", f"(x, y) = [{a}, {b}]", f"(x, y) = ({a}, {b}, 0)"]
    return f"({a}, {b})", right, [*wrong, f"(x, y) = {a}", f"x + y = {a + b}"]


@kind
def infinities(rng: random.Random) -> Made:
    sign, other = rng.choice([("", "-"), ("-", "")])
    right = ["negative infinity", "Negative infinity"] if sign else ["infinity", "Infinity"]
    wrong = [rf"{other}\infty", "0", "undefined", f"{sign}999999", "infinitely many"]
    other_word = "infinity" if sign else "negative infinity"
    return rf"{sign}\infty", [rf"{sign}\infty", *right], [*wrong, other_word]


@kind
def named_values(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    right = [f"x={n}", f"{n}", f"x = {n}.0", f"{n} = x"]
    return (
        f"x={n}",
        right,
        [f"y={n}", f"x={n + 1}", f"x={n + 1}={n}", f"2x={2 * n}", f"x>{n}", "x=x"],
    )


@kind
def values_with_any_name(rng: random.Random) -> Made:
    n = rng.randrange(5, 99)
    right = [f"x={n}", f"f(2) = {n}", f"{n - 2}+2={n}", rf"\theta = {n}"]
    return (
        f"{n}",
        right,
        [f"{n + 1}={n}", f"{n}={n + 1}", f"x={n + 1}", f"x > {n}", f"{n}={n}={n + 2}"],
    )


@kind
def lines(rng: random.Random) -> Made:
    a, b = two(rng, 2, 20)
    right = [f"y={a}x+{b}", f"{a}x+{b}", f"{a}x - y + {b} = 0", f"y - {b} = {a}x"]
    return (
        f"y = {a}x + {b}",
        right,
        [f"y={b}x+{a}", f"y={a}x-{b}", "0=0", f"x={a}y+{b}", "y=y", f"{b}"],
    )


@kind
def equations(rng: random.Random) -> Made:
    a, b = two(rng, 2, 20)
    right = [f"{a}x+{b}y=1", f"{2 * a}x+{2 * b}y=2", f"1={a}x+{b}y", f"{a}x+{b}y-1=0"]
    return (
        f"{a}x + {b}y = 1",
        right,
        [f"{b}x+{a}y=1", f"{a}x+{b}y=2", "1=1", f"{a}x+{b}y>1", f"{a}x+{b}y"],
    )


@kind
def nonsense_equations(rng: random.Random) -> Made:
    n = rng.randrange(2, 99)
    return f"x=x+{n}", [f"x=x+{n}", f"x = x + {n}"], ["0=0", f"0={n}", f"{n}={n}", "x=x", f"x+{n}"]


@kind
def functions(rng: random.Random) -> Made:
    a, b = two(rng, 2, 20)
    right = [f"f(x)={a}x+{b}", f"{a}x+{b}", f"f(x) = {b}+{a}x"]
    return (
        f"f(x) = {a}x + {b}",
        right,
        [f"f(x)={b}x+{a}", f"g(x)={a}x+{b}", f"{a}x", "f(x)", f"f(x)={a}x+{b}+1"],
    )
