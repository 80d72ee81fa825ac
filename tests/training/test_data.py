"""The training data: calculations checked by another evaluator, splits that do not overlap, ids as inference sees them."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from berrylm_ref.chat import ReasoningParser, ToolCallParser
from berrylm_ref.chat.template import ChatTemplate
from berrylm_ref.tokenizer import Tokenizer
from berrylm_ref.training.data import KINDS, conversation, encode, words
from berrylm_ref.training.data.arithmetic import LIMIT, worked
from berrylm_ref.training.data.retrieval import QUESTIONS, held_out_fact
from berrylm_ref.training.data.splits import held_out_call, held_out_pair

NANO = Path(__file__).parents[2] / "berrylm_ref" / "checkpoints" / "nano"
TEMPLATE = ChatTemplate.from_folder(NANO)
TOKENIZER = Tokenizer.from_folder(NANO)
SPLITS = ("train", "operands", "templates")
PYTHON = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}

LINE = re.compile(r"(\d+)([-+*/])(\d+)(?::([^>]*))?(?:->(\d+)(?:r(\d+))?)?")
COLUMN = re.compile(r"(\d+)([-+*/])(\d+)(?:([-+])(\d))?=(\d+)(?:r(\d+))?")


def samples(kind, count, split="train", seed=0):
    rng = Random(f"{kind} {split} {seed}")
    return [conversation(kind, rng, split) for _ in range(count)]


def thinking_of(made):
    return [message["reasoning_content"] for message in made.messages if message.get("reasoning_content")]


def calculations(text):
    """(a, op, b) of every line that is worked out."""
    found = [LINE.fullmatch(line) for line in text.split("\n")]
    return [(int(m[1]), m[2], int(m[3])) for m in found if m and m[4] is not None]


def check_line(line):
    """Evaluates one worked line with Python's own arithmetic: the columns, that they are the operands' digits, that they make
    up the result. Gives the result."""
    head = LINE.fullmatch(line)
    assert head, line
    a, op, b, result, rest = int(head[1]), head[2], int(head[3]), int(head[5]), int(head[6] or 0)
    assert 0 <= min(a, b, result) and max(a, b, result) <= LIMIT
    assert PYTHON[op](a, b) == result and (op == "/" or not rest)
    assert rest == (a % b if op == "/" else 0)
    columns = [COLUMN.fullmatch(column) for column in head[4].split(" ")]
    assert all(columns), line
    for column in columns:
        x, y, made = int(column[1]), int(column[3]), int(column[6])
        carry = int((column[4] or "+") + (column[5] or "0"))
        assert PYTHON[column[2]](x, y) + carry == made and column[2] == op
        assert int(column[7] or 0) == (x % y if op == "/" else 0)
        assert max(x, y, made) < 100 and 0 <= carry + 1 < 10, "each column is a small table"
    if op == "/":
        assert int("".join(column[6] for column in columns)) == result and int(columns[-1][7]) == rest
        assert columns[0][6] != "0" or len(columns) == 1
    else:
        digits = [column[6] for column in columns]
        assert int(digits[-1] + "".join(digit[-1] for digit in reversed(digits[:-1]))) == result
        assert int("".join(column[1][-1] for column in reversed(columns))) == a
        other = {column[3] for column in columns} if op == "*" else [column[3] for column in reversed(columns)]
        assert int("".join(other)) == b
    return result


def check_thinking(question, thinking, answer):
    """Every operand comes from the question or from a line before it (2 may be implied: half, twice), and the last line is
    the answer."""
    known = Counter(map(int, re.findall(r"\d+", question)))
    known[2] += 1
    lines, last = thinking.split("\n"), None
    while lines:
        line = lines.pop(0)
        a, _, b = map(str, re.fullmatch(r"(\d+)(.)(\d+).*", line).groups())
        assert known[int(a)] and known[int(b)], f"{line}: from nowhere in {question}"
        if ":" in line:
            last = check_line(line)
        else:  # a two-digit factor: the products of its digits, and their sum
            products = [check_line(lines.pop(0)) for digit in b if digit != "0"]
            last = int(a) * int(b)
            expect = f"{line}->{last}" if b[1] == "0" else f"{products[0]}+{products[1] * 10}:"
            assert lines[0].startswith(expect), (line, lines)
            final = lines.pop(0)
            assert int(final.removeprefix(f"{line}->")) == last if b[1] == "0" else check_line(final) == last
        known[last] += 1
    assert last == answer


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["problem", "drill"])
def test_every_worked_step_is_right(kind, split):
    """One wrong column in the data is a wrong table in the model: all columns, results and answers are evaluated anew."""
    for made in samples(kind, 1500, split):
        answer = int(re.fullmatch(r"The answer is (\d+)\.", made.messages[-1]["content"])[1])
        assert 1 <= answer <= LIMIT and made.meta["answers"] == [f"The answer is {answer}."]
        check_thinking(made.messages[-2]["content"], made.messages[-1]["reasoning_content"], answer)


@pytest.mark.parametrize(
    "line",
    [
        "487+65:7+5=12 8+6+1=15 4+0+1=5->562",
        "487+65:7+5=12 8+6=14 4+0+1=5->552",
        "487+65:7+5=12 8+6+1=15 4+0+1=6->552",
        "487+65:8+5=13 8+6+1=15 4+0+1=5->553",
        "2925/6:29/6=4r5 52/6=8r4 45/6=7r3->487",
        "2925/6:29/6=4r4 52/6=8r4 45/6=7r3->487r3",
        "48*6:8*6=48 4*6+3=27->278",
    ],
)
def test_the_evaluator_sees_a_wrong_step(line):
    """A check that accepts anything would bless any data."""
    with pytest.raises(AssertionError):
        check_line(line)


def test_worked_examples():
    assert worked(487, "+", 65) == "487+65:7+5=12 8+6+1=15 4+0+1=5->552"
    assert worked(852, "-", 365) == "852-365:12-5=7 15-6-1=8 8-3-1=4->487"
    assert worked(1000, "-", 1) == "1000-1:10-1=9 10-0-1=9 10-0-1=9 1-0-1=0->999"
    assert worked(2925, "/", 6) == "2925/6:29/6=4r5 52/6=8r4 45/6=7r3->487r3"
    assert worked(612, "/", 6) == "612/6:6/6=1r0 1/6=0r1 12/6=2r0->102"
    assert worked(3, "/", 4) == "3/4:3/4=0r3->0r3"
    assert worked(48, "*", 36) == (
        "48*36\n48*6:8*6=48 4*6+4=28->288\n48*3:8*3=24 4*3+2=14->144\n288+1440:8+0=8 8+4=12 2+4+1=7 0+1=1->1728"
    )
    assert worked(48, "*", 30) == "48*30\n48*3:8*3=24 4*3+2=14->144\n48*30->1440"
    for bad in ((1, "-", 2), (9999, "+", 2), (5, "/", 10), (5, "/", 0), (5, "*", 100), (200, "*", 99), (-1, "+", 2), (1, "%", 2)):
        with pytest.raises(ValueError, match="worked: .*expected 0 to 10000"):
            worked(*bad)


def test_drills_cover_all_lengths_carries_borrows_and_zeros():
    """A length, a borrow chain or a zero that never occurs in the drills is one that the model never gets right."""
    seen = Counter()
    for made in samples("drill", 3000):
        for a, op, b in calculations(made.messages[-1]["reasoning_content"]):
            seen[op, len(str(a)), len(str(b))] += 1
            seen[op, "zero"] += "0" in f"{a}{b}"
        text = made.messages[-1]["reasoning_content"]
        for chain in re.findall(r"(?:\d+[+-]\d[+-]1=\d+ ?)+", text):
            seen["chain", "-1=" in chain, min(3, len(chain.split()))] += 1
    sizes = {"+": 4, "-": 4}
    for op in "+-":
        for first in range(1, sizes[op] + 1):
            for second in range(1, first + 1):
                assert seen[op, first, second] >= 10, (op, first, second)
    assert all(seen["*", n, 1] >= 50 and seen["/", n, 1] >= 50 for n in (1, 2, 3, 4))
    assert all(seen[op, "zero"] >= 100 for op in "+-*/")
    assert all(seen["chain", borrow, n] >= 20 for borrow in (True, False) for n in (1, 2, 3))


def skeleton(question):
    """The wording without numbers, names and things."""
    lists = [group for name, group in vars(words).items() if name.isupper()]
    drop = {word.lower() for group in lists for word in group} | {"he", "she", "his", "her"}
    return " ".join("_" if word in drop or word.isdigit() else word for word in re.findall(r"\w+", question.lower()))


def test_held_out_calculations_never_occur_in_training():
    """"Unseen operands" means that no line, not even a partial sum inside a product, was ever shown, by no kind of sample."""
    shown = 0
    for kind in ("problem", "drill", "multi_turn", "tool_unused"):
        for made in samples(kind, 1000):
            for text in thinking_of(made):
                shown += len(calculations(text))
                assert not any(held_out_pair(*line) for line in calculations(text))
    assert shown > 3000
    for kind in ("problem", "drill"):
        for made in samples(kind, 300, "operands"):
            assert any(held_out_pair(*line) for line in calculations(made.messages[-1]["reasoning_content"]))


def test_about_a_tenth_is_held_out_and_no_basic_table():
    pairs = [(a, op, b) for a in range(100, 2000, 7) for b in range(1, 99, 5) for op in "+-*"]
    assert 0.08 < sum(held_out_pair(*pair) for pair in pairs) / len(pairs) < 0.12
    assert not any(held_out_pair(a, op, b) for a in range(100) for b in range(100) for op in "+-*/")
    assert all(held_out_pair(a, "+", b) == held_out_pair(b, "+", a) for a, _, b in pairs)


@pytest.mark.parametrize("kind", ["problem", "talk"])
def test_held_out_wordings_never_occur_in_training(kind):
    """A wording that both splits share would make "unseen templates" a measure of memory."""
    train = {skeleton(m["content"]) for made in samples(kind, 4000) for m in made.messages if m["role"] == "user"}
    held = {skeleton(m["content"]) for made in samples(kind, 300, "templates") for m in made.messages if m["role"] == "user"}
    assert len(held) >= 8 and len(train) > 100
    assert not train & held


def test_thinking_on_and_off_ask_the_same():
    """The two are compared with each other, so only the thinking may differ."""
    for seed in range(50):
        for kind in ("problem", "drill"):
            on, off = (conversation(name, Random(seed)) for name in (kind, f"{kind}_direct"))
            assert on.thinking and not off.thinking
            assert on.meta == off.meta and on.messages[:-1] == off.messages[:-1]
            assert on.messages[-1]["content"] == off.messages[-1]["content"]
            assert "reasoning_content" not in off.messages[-1]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["tool_call", "tool_multi", "tool_answer"])
def test_calls_parse_back_and_copy_the_question(kind, split):
    """The right calls are those that the parser reads from the text; each value stands in the question, each tool is listed."""
    for made in samples(kind, 200, split):
        names = {tool["function"]["name"] for tool in made.tools}
        question = next(message["content"] for message in made.messages if message["role"] == "user")
        (turn,) = (message for message in made.messages if message.get("tool_calls"))
        at = made.messages.index(turn)
        prompt = TEMPLATE.render(made.messages[:at], made.tools, enable_thinking=made.thinking)
        text = TEMPLATE.render(made.messages[: at + 1], made.tools, add_generation_prompt=False)
        reasoning, content = ReasoningParser(made.thinking).parse(text[len(prompt) :].removesuffix("<|end|>"))
        rest, calls = ToolCallParser(made.tools).parse(content)
        assert bool(reasoning) == made.thinking and rest == ""
        assert [(call.name, json.loads(call.arguments)) for call in calls] == made.meta["calls"]
        unseen = []
        for name, given in made.meta["calls"]:
            assert name in names and all(str(value) in question for value in given.values())
            expression = re.fullmatch(r"(\d+)(.)(\d+)", given.get("expression", ""))
            if expression:
                unseen.append(held_out_pair(int(expression[1]), expression[2], int(expression[3])))
            else:
                unseen.append(held_out_call(name, given))
        assert set(unseen) == {split == "operands"}
        if made.messages[-1]["role"] == "assistant" and not made.messages[-1].get("tool_calls"):
            results = [json.loads(message["content"]) for message in made.messages if message["role"] == "tool"]
            values = [str(value) for found in results for value in found.values() if value is not True]
            assert all(value in made.messages[-1]["content"] for value in values)


@pytest.mark.parametrize("kind", ["tool_call", "retrieval_256"])
def test_unseen_values_are_made_of_words_that_training_writes(kind):
    """A token that the model was never taught to write can't be copied: exact match would measure that, not the copying."""

    def written(made):
        ids, targets = encode(made, TOKENIZER, TEMPLATE)
        return {i for i, target in zip(ids, targets, strict=True) if target}

    known = set().union(*(written(made) for name in ("tool_call", "tool_answer", kind) for made in samples(name, 2000)))
    for made in samples(kind, 200, "operands"):
        assert written(made) <= known, TOKENIZER.decode(list(written(made) - known))


def test_no_call_where_none_is_needed():
    for made in samples("tool_unused", 400):
        names = {tool["function"]["name"] for tool in made.tools or ()}
        assert made.meta["calls"] == [] and not any(message.get("tool_calls") for message in made.messages)
        if made.meta["answers"] == ["I have no tool for that."] and made.thinking:
            missing = re.fullmatch(r"There is no (\w+) here\.", made.messages[-1]["reasoning_content"])
            assert missing[1] not in names


@pytest.mark.parametrize(("kind", "limit"), [("retrieval_256", 512), ("retrieval_1k", 1024), ("retrieval_4k", 4096)])
def test_retrieval_has_one_answer_and_fits(kind, limit):
    """A fact told twice, or a text longer than the training length, would make a right answer a matter of luck."""
    for made in samples(kind, 20):
        ids, _ = encode(made, TOKENIZER, TEMPLATE)
        assert limit // 2 < len(ids) <= limit
        questions = [message["content"] for message in made.messages if message["role"] == "user"]
        assert QUESTIONS[kind][0] <= len(questions) <= QUESTIONS[kind][1]
        facts = re.findall(r"The (\w+) of (\w+) is (\w+)\.", questions[0])
        told = dict((key[:2], key[2]) for key in facts)
        assert len(told) == len(facts) > len(questions)
        for question, answer, value in zip(questions, made.meta["answers"], made.meta["values"], strict=True):
            what, who, found = re.fullmatch(r"The (\w+) of (\w+) is (\w+)\.", answer).groups()
            assert told[what, who] == found == value and not held_out_fact(what, who, found)
            asked = question.split("\n\n")[-1]
            assert what in asked and who in asked


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_inference(kind):
    """Trained on other ids than the server sends, a model answers a prompt it has never seen. For each turn that is generated,
    the prompt's ids are a prefix, the targets begin right after it, and they decode to what the model has to write."""
    for made in samples(kind, 3 if kind == "retrieval_4k" else 40):
        ids, targets = encode(made, TOKENIZER, TEMPLATE)
        assert len(ids) == len(targets)
        learned = 0
        for at, message in enumerate(made.messages):
            if message["role"] != "assistant":
                continue
            thinks = bool(message.get("reasoning_content"))
            prompt = TEMPLATE.encode(made.messages[:at], made.tools, tokenizer=TOKENIZER, enable_thinking=made.thinking)
            assert ids[: len(prompt)] == prompt
            start = len(prompt) + (made.thinking and not thinks)  # a client that kept the reasoning to itself
            stop = ids.index(TOKENIZER.encode("<|end|>")[0], start) + 1
            assert not targets[start - 1] and all(targets[start:stop])
            learned += stop - start
            text = TOKENIZER.decode(ids[start:stop], skip_special=False)
            assert text.startswith(f"{message['reasoning_content']}</think>" if thinks else message["content"] or "<tool_call>")
            assert text.endswith("<|end|>")
        assert sum(targets) == learned > 0
        assert made.thinking == any(message.get("reasoning_content") for message in made.messages)


def test_most_samples_are_short():
    """Short samples are more problems a second of training."""
    for kind in set(KINDS) - {"retrieval_256", "retrieval_1k", "retrieval_4k", "tool_multi", "multi_turn"}:
        lengths = sorted(len(encode(made, TOKENIZER, TEMPLATE)[0]) for made in samples(kind, 100))
        assert lengths[80] <= 256 and lengths[-1] <= 384, (kind, lengths[80], lengths[-1])


def test_shares_make_a_whole_and_refusals_name_the_choice():
    assert sum(KINDS.values()) == pytest.approx(1)
    with pytest.raises(ValueError, match="conversation: kind: expected one of problem, .*, got 'poem'"):
        conversation("poem", Random(0))
    with pytest.raises(ValueError, match="conversation: split: expected one of train, operands, templates, got 'test'"):
        conversation("talk", Random(0), "test")


def fingerprint():
    every = [vars(conversation(kind, Random(f"{kind}{i}"), split)) for kind in KINDS for split in SPLITS for i in range(5)]
    return hashlib.sha256(json.dumps(every).encode()).hexdigest()


def test_a_seed_gives_the_same_data_in_every_process():
    """Worker processes and later runs must make the same samples: no set order, no hash seed, no clock in them."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_data; print(test_data.fingerprint())"
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    made = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=120)
    assert made.stdout.strip() == fingerprint(), made.stderr
