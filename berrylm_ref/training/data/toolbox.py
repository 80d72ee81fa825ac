"""The tools of the generated conversations: their definitions, and what is asked of each, called and answered.

A question's fields are the call's arguments; `{}`-fields of the answer come from arguments and result.
"""

import re
from dataclasses import dataclass
from random import Random

from . import words
from .arithmetic import calculate
from .problem import number
from .splits import held_out_call, held_out_pair


@dataclass(frozen=True)
class Tool:
    """A definition and the wordings around it; of the questions, the last is kept for the split "templates"."""

    name: str
    descriptions: tuple[str, ...]
    parameters: dict[str, str]  # name: JSON type
    questions: tuple[str, ...]
    brief: str  # the thinking before the call
    answer: str

    def definition(self, rng: Random) -> dict:
        """The OpenAI tool dict, with one of the descriptions and the parameters in any order."""
        keys = rng.sample(list(self.parameters), len(self.parameters))
        schema = {"type": "object", "properties": {key: {"type": self.parameters[key]} for key in keys}, "required": keys}
        function = {"name": self.name, "description": rng.choice(self.descriptions), "parameters": schema}
        return {"type": "function", "function": function}


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "calculator",
            ("Evaluates an expression.", "Calculates the value of an expression."),
            {"expression": "string"},
            ("Use the calculator for {expression}.", "Take the calculator: {expression}",
             "Ask the calculator what {expression} is.",
             "What is {expression}? Use the calculator.",
             "Let the calculator compute {expression}.",
             "Please calculate {expression} with the calculator.", "Take the calculator and tell me {expression}."),
            "I use the calculator for {expression}.",
            "The answer is {result}.",
        ),
        Tool(
            "get_weather",
            ("Gives the weather of a city.", "Current weather in a city."),
            {"city": "string"},
            ("What is the weather in {city}?", "Does it rain in {city}?", "Show me the weather of {city}.",
             "What is it like outside in {city}?", "How is the weather in {city} today?", "Tell me the weather in {city}.",
             "Is it warm in {city}?", "Weather in {city}, please.", "I travel to {city}. What is the weather there?"),
            "I need the weather in {city}.",
            "It is {temperature} degrees and {sky} in {city}.",
        ),
        Tool(
            "convert_units",
            ("Converts a value from one unit to another.", "Unit conversion."),
            {"value": "number", "from_unit": "string", "to_unit": "string"},
            ("Convert {value} {from_unit} to {to_unit}.", "Change {value} {from_unit} into {to_unit}.",
             "I have {value} {from_unit}. What is that in {to_unit}?", "How many {to_unit} are {value} {from_unit}?",
             "What is {value} {from_unit} in {to_unit}?", "{value} {from_unit} in {to_unit}, please.",
             "Please express {value} {from_unit} in {to_unit}."),
            "I convert {value} {from_unit} to {to_unit}.",
            "{value} {from_unit} are {result} {to_unit}.",
        ),
        Tool(
            "get_time",
            ("Gives the local time of a city.", "Current time in a city."),
            {"city": "string"},
            ("What time is it in {city}?", "Show me the clock of {city}.", "I call someone in {city}. What time is it there?",
             "Tell me the time in {city}.", "How late is it in {city} now?",
             "Which time do the clocks show in {city}?"),
            "I need the time in {city}.",
            "It is {time} in {city}.",
        ),
        Tool(
            "set_timer",
            ("Starts a timer.", "Sets a timer that rings after some minutes."),
            {"minutes": "integer", "label": "string"},
            ("Set a timer of {minutes} minutes for the {label}.", "Timer for the {label}: {minutes} minutes.",
             "Remind me of the {label} in {minutes} minutes.", "Start a timer for the {label}, {minutes} minutes.",
             "Wake me for the {label} in {minutes} minutes.", "The {label} needs {minutes} minutes. Set a timer."),
            "I set a timer for the {label}, {minutes} minutes.",
            "The timer for the {label} rings in {minutes} minutes.",
        ),
        Tool(
            "find_book",
            ("Looks a book up in the library.", "Searches the shelf of a book."),
            {"title": "string"},
            ("Where is the book {title}?", "I want to read {title}. Where is it?", "Look up the book {title}.",
             "Find the book {title}.", "On which shelf is {title}?",
             "I look for the book {title}."),
            "I look for {title}.",
            "{title} is on shelf {shelf}.",
        ),
        Tool(
            "send_message",
            ("Sends a text to a person.", "Sends a message."),
            {"to": "string", "text": "string"},
            ("Send {to} the message: {text}", "Let {to} know: {text}", "Send this to {to}: {text}",
             "Write to {to}: {text}", "Tell {to} this: {text}",
             "A message for {to}, please: {text}"),
            "I write to {to}.",
            "The message to {to} is sent.",
        ),
        Tool(
            "get_price",
            ("Gives the price of an item.", "Looks a price up."),
            {"item": "string", "amount": "integer"},
            ("What do {amount} {item} cost?", "I want to buy {amount} {item}. What is the price?", "Price of {amount} {item}?",
             "Give me the price of {amount} {item}.", "How much are {amount} {item}?",
             "Look up what {amount} {item} cost."),
            "I need the price of {amount} {item}.",
            "{amount} {item} cost {price} dollars.",
        ),
    )
}
UNITS = [("km", "miles"), ("metres", "feet"), ("kg", "pounds"), ("litres", "gallons"), ("hours", "minutes"), ("inches", "cm"),
         ("celsius", "fahrenheit"), ("grams", "ounces"), ("weeks", "days")]  # fmt: skip
SKIES = "sunny cloudy rainy windy snowy foggy clear stormy".split()
LABELS = "tea eggs rice cake bread soup pasta laundry meeting phone walk pizza".split()
TITLE_HEADS = "The Old|The Red|The Last|A Small|The Silent|My First|The Lost|A Golden".split("|")
TITLE_ENDS = "River House Garden Clock Island Forest Bridge Letter Winter Song Road Harbour".split()
TEXTS = """I am late.|See you at {}.|The {} is ready.|Please bring the {}.|Happy birthday!|Call me on {}.|I have found your {}.
The {} is broken.|Can we meet on {}?|Thank you for the {}.""".replace("\n", "|").split("|")


def arguments(name: str, rng: Random, unseen: bool) -> dict:
    """Arguments of a call; `unseen`: of one that training never shows, else of one that it may."""
    while True:
        drawn = _DRAW[name](rng)
        if name == "calculator":
            a, op, b = drawn["parts"]
            if held_out_pair(a, op, b) == unseen:
                return {"expression": f"{a}{op}{b}"}
        elif held_out_call(name, drawn) == unseen:
            return drawn


def result(name: str, given: dict, rng: Random) -> dict:
    """What the tool might return."""
    if name == "calculator":
        a, op, b = re.fullmatch(r"(\d+)(.)(\d+)", given["expression"]).groups()
        return {"result": calculate(int(a), op, int(b))}
    return {
        "get_weather": lambda: {"temperature": rng.randint(-15, 40), "sky": rng.choice(SKIES)},
        "convert_units": lambda: {"result": rng.choice((number(rng), round(number(rng) / 10, 1)))},
        "get_time": lambda: {"time": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"},
        "set_timer": lambda: {"ok": True},
        "find_book": lambda: {"shelf": rng.randint(1, 99)},
        "send_message": lambda: {"ok": True},
        "get_price": lambda: {"price": number(rng)},
    }[name]()


def _calculation(rng: Random) -> dict:
    op = rng.choice("+-*")
    a, b = number(rng), number(rng, 2, 99 if op == "*" else 9999)
    return {"parts": (max(a, b), op, min(a, b))}


def _conversion(rng: Random) -> dict:
    pair = rng.choice(UNITS)
    source, target = pair if rng.random() < 0.5 else pair[::-1]
    value = number(rng) if rng.random() < 0.7 else round(number(rng, 11) / 10, 1)
    return {"value": value, "from_unit": source, "to_unit": target}


def _text(rng: Random) -> str:
    text = rng.choice(TEXTS)
    return text.format(rng.choice(words.DAYS if " on {}" in text else words.CITIES if "at {}" in text else words.ITEMS))


_DRAW = {
    "calculator": _calculation,
    "get_weather": lambda rng: {"city": rng.choice(words.CITIES)},
    "convert_units": _conversion,
    "get_time": lambda rng: {"city": rng.choice(words.CITIES)},
    "set_timer": lambda rng: {"minutes": rng.randint(2, 120), "label": rng.choice(LABELS)},
    "find_book": lambda rng: {"title": f"{rng.choice(TITLE_HEADS)} {rng.choice(TITLE_ENDS)}"},
    "send_message": lambda rng: {"to": rng.choice(words.NAMES), "text": _text(rng)},
    "get_price": lambda rng: {"item": rng.choice(words.THINGS), "amount": rng.randint(2, 99)},
}
