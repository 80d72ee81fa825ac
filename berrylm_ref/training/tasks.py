"""What the evaluation asks, from the same generators as the training data, held out by operands or by wording."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from .ask import Question, Reply
from .data import Conversation, conversation
from .data.problems import draw_problem

CAP = 320  # new tokens; a right answer needs fewer than 250


@dataclass(frozen=True)
class Item:
    """A question, what is right, and for word problems how many calculations lead there."""

    question: Question
    expected: Any
    steps: int | None = None


@dataclass(frozen=True)
class Task:
    """``count`` questions of ``kind`` (a key of KINDS) from ``split``. share: of the problems asked for that it takes.

    thinking: None leaves it to the sample. after: how many assistant messages the prompt shows.
    """

    name: str
    kind: str
    split: str
    right: Callable[[Any, Reply], bool]
    thinking: bool | None = None
    answered: bool = False  # the prompt holds the calls and results, the answer is asked for
    share: float = 1.0

    def items(self, problems: int) -> list[Item]:
        """Always the same ones for the same number."""
        count = max(1, round(problems * self.share))
        return [self._item(f"evaluation/{self.kind}/{self.split}/{i}") for i in range(count)]

    def _item(self, seed: str) -> Item:
        sample = conversation(self.kind, Random(seed), self.split)
        turns = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
        cut = turns[-1 if self.answered else 0]
        thinking = sample.thinking if self.thinking is None else self.thinking
        question = Question(sample.messages[:cut], sample.tools, thinking, CAP)
        # the sample begins with drawing its problem, so the same seed draws it again
        steps = len(draw_problem(Random(seed), self.split).steps) if self.kind == "problem" else None
        return Item(question, expected(self, sample), steps)


def expected(task: Task, sample: Conversation) -> Any:
    if task.right is same_calls:
        return sample.meta["calls"]
    return sample.meta["answers"][0]


def same_number(answer: str, reply: Reply) -> bool:
    """The last number of the content is that of the right answer."""
    return not reply.calls and last_number(reply.content) == last_number(answer)


def same_text(answer: str, reply: Reply) -> bool:
    return not reply.calls and reply.content.strip() == answer


def same_calls(calls: list[tuple[str, dict]], reply: Reply) -> bool:
    """Every name and every argument, in order, and nothing more."""
    return [(name, arguments) for name, arguments in calls] == reply.calls


def no_call(answer: str, reply: Reply) -> bool:
    return not reply.calls and bool(reply.content.strip())


def last_number(text: str) -> int | None:
    found = re.findall(r"-?\d+", text)
    return int(found[-1]) if found else None


# The first are asked first, in case time runs out. Thinking off gets the same problems as thinking on.
TASKS = (
    Task("problems", "problem", "operands", same_number, thinking=True),
    Task("problems, new wording", "problem", "templates", same_number, thinking=True),
    Task("tool call", "tool_call", "operands", same_calls),
    Task("retrieval 1k", "retrieval_1k", "operands", same_text, share=0.5),
    Task("problems, thinking off", "problem", "operands", same_number, thinking=False),
    Task("problems, new wording, thinking off", "problem", "templates", same_number, thinking=False),
    Task("tool call, new wording", "tool_call", "templates", same_calls),
    Task("tool calls, several", "tool_multi", "operands", same_calls, share=0.5),
    Task("tool result to answer", "tool_answer", "operands", same_text, answered=True, share=0.5),
    Task("tools listed, none fits", "tool_unused", "operands", no_call, share=0.5),
    Task("retrieval 256", "retrieval_256", "operands", same_text, share=0.5),
    Task("retrieval 4k", "retrieval_4k", "operands", same_text, share=0.25),
)
