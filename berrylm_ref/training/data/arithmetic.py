"""Calculations worked out so that every step is a small lookup; digits are single tokens.

One line a calculation, `a op b:` its columns `->` result. Columns run from the right, for a division from the left:

    487+65:7+5=12 8+6+1=15 4+0+1=5->552       a column, the carry added; the last digits are the result's
    852-365:12-5=7 15-6-1=8 8-3-1=4->487      a 1 before the digit borrows, -1 pays the column on the right back
    487*6:7*6=42 8*6+4=52 4*6+5=29->2922      digit times the factor, the carry added
    2925/6:29/6=4r5 52/6=8r4 45/6=7r3->487r3  quotient digit and remainder; the remainder leads the next column
    48*36                                     a two-digit factor: its digits' products, added, follow on lines of their own
    48*6:8*6=48 4*6+4=28->288
    48*3:8*3=24 4*3+2=14->144
    288+1440:8+0=8 8+4=12 2+4+1=7 0+1=1->1728
"""

LIMIT = 10_000  # the largest number anywhere


def calculate(a: int, op: str, b: int) -> int:
    """The result; a division gives the quotient."""
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else -1}[op]


def lines(a: int, op: str, b: int) -> list[tuple[int, str, int]]:
    """The calculations of which `a op b` is made, in the order in which they are written down."""
    if op == "*" and b >= 10:
        if b % 10 == 0:
            return [(a, "*", b // 10)]
        low, high = a * (b % 10), a * (b // 10) * 10
        return [(a, "*", b % 10), (a, "*", b // 10), (low, "+", high)]
    return [(a, op, b)]


def worked(a: int, op: str, b: int) -> str:
    """`a op b` worked out. Operands and result from 0 to LIMIT, a >= b for `-`, a factor below 100, a divisor from 2 to 9.

    Errors: ValueError outside these bounds.
    """
    _check(a, op, b)
    if op == "*" and b >= 10:
        head = f"{a}*{b}"
        body = [worked(*line) for line in lines(a, op, b)]
        return "\n".join([head, *body, f"{head}->{a * b}"] if b % 10 == 0 else [head, *body])
    columns = {"+": _add, "-": _subtract, "*": _multiply, "/": _divide}[op](a, b)
    rest = f"r{a % b}" if op == "/" and a % b else ""
    return f"{a}{op}{b}:{' '.join(columns)}->{calculate(a, op, b)}{rest}"


def _check(a: int, op: str, b: int) -> None:
    fine = op in "+-*/" and 0 <= a <= LIMIT and 0 <= b <= LIMIT
    if fine and op == "-":
        fine = a >= b
    elif fine and op == "/":
        fine = 2 <= b <= 9
    elif fine and op == "*":
        fine = b < 100
    if not fine or not 0 <= calculate(a, op, b) <= LIMIT:
        raise ValueError(f"worked: {a}{op}{b}: expected 0 to {LIMIT}, a >= b for -, a factor < 100, a divisor from 2 to 9")


def _digits(number: int, count: int) -> list[int]:
    return [int(digit) for digit in reversed(f"{number:0{count}d}")]


def _add(a: int, b: int) -> list[str]:
    count, carry, columns = len(str(max(a, b))), 0, []
    for x, y in zip(_digits(a, count), _digits(b, count), strict=True):
        total = x + y + carry
        columns.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return columns


def _subtract(a: int, b: int) -> list[str]:
    count, borrowed, columns = len(str(a)), 0, []
    for x, y in zip(_digits(a, count), _digits(b, count), strict=True):
        borrows = x < y + borrowed
        columns.append(f"{x + 10 * borrows}-{y}{'-1' if borrowed else ''}={x + 10 * borrows - y - borrowed}")
        borrowed = int(borrows)
    return columns


def _multiply(a: int, b: int) -> list[str]:
    carry, columns = 0, []
    for x in _digits(a, 1):
        total = x * b + carry
        columns.append(f"{x}*{b}{f'+{carry}' if carry else ''}={total}")
        carry = total // 10
    return columns


def _divide(a: int, b: int) -> list[str]:
    rest, columns, text = 0, [], str(a)
    for place, digit in enumerate(text):
        rest = rest * 10 + int(digit)
        if rest < b and not columns and place < len(text) - 1:
            continue  # the result has no leading zero
        columns.append(f"{rest}/{b}={rest // b}r{rest % b}")
        rest %= b
    return columns
