"""Tools through the real openai client: calls, results, tool_choice; every answer streaming and not."""

import json
from concurrent.futures import ThreadPoolExecutor

from served import all_free
from toolcalls import TOOLS, call, tool, value

NAMED = {"type": "function", "function": {"name": "g"}}
OFF = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


def test_a_call_typed_by_its_schema(ask, scripted):
    """Arguments are one JSON string; content and call stand beside each other."""
    scripted.says = "add</think>Let me see.\n" + call(value("n", "5") + value("a", "5") + value("o", '{"x": 1}'))
    want = ("f", '{"n": 5, "a": "5", "o": {"x": 1}}')
    assert ask.one(tools=TOOLS) == ("add", "Let me see.", [want], "tool_calls")
    assert ask.one(tools=TOOLS, tool_choice="auto")[2] == [want]


def test_several_calls_and_calls_without_arguments(ask, scripted):
    """PRS-3: `{}` for none, indices 0 and 1, an id each and no two alike."""
    scripted.says = call(name="now") + "\n" + call(value("s", "Zürich 漢"), name="g")
    assert ask.one(tools=TOOLS, **OFF) == (None, None, [("now", "{}"), ("g", '{"s": "Zürich 漢"}')], "tool_calls")
    answers = [ask.answer(tools=TOOLS, **OFF) for _ in range(2)]
    assert len({c.id for a in answers for c in a.choices[0].message.tool_calls}) == 4


def test_a_call_ends_the_reasoning(ask, scripted):
    """PRS-5: `<tool_call>` inside the reasoning ends it at once; the stray `</think>` reaches no one."""
    block = "<tool_call><function=f></function></tool_call>"
    scripted.says = f"plan {block} no</think>{block}"
    found = ask.both(tools=TOOLS)
    message = found["choices"][0]["message"]
    assert message["reasoning_content"] == "plan" and message["tool_calls"] == [["f", "{}"]] * 2
    assert found["choices"][0]["finish_reason"] == "tool_calls"
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("plan ")}


def test_a_call_cut_off_at_every_token(ask, scripted):
    """API-3: `length` wherever the limit ended it, with arguments that are JSON; `tool_calls` only after a natural stop."""
    scripted.says = call(value("a", "x<5"))
    total = len(scripted.tokens(scripted.says))
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda most: ask.one(tools=TOOLS, max_tokens=most, **OFF), range(1, total + 2)))
    for most, (_, content, calls, reason) in enumerate(found, 1):
        assert reason == ("length" if most < total else "tool_calls"), most
        for name, arguments in calls:
            assert name == "f" and json.loads(arguments).keys() <= {"a"} and content is None
    assert calls == [("f", '{"a": "x<5"}')]


def test_a_stop_string_within_a_call_is_no_call_to_run(ask, scripted):
    """The text ended where the client wanted it to: `stop`, as for any text; after a whole call it is a call like any other."""
    scripted.says = call(value("a", "one STOP two")) + " STOP"
    assert ask.one(tools=TOOLS, stop="STOP", **OFF) == (None, None, [("f", '{"a": "one "}')], "stop")
    scripted.says = call(value("a", "one")) + " STOP"
    assert ask.one(tools=TOOLS, stop="STOP", **OFF) == (None, None, [("f", '{"a": "one"}')], "tool_calls")


def test_without_tools_nothing_is_a_call(ask, scripted):
    """A client that offered none can't run any: what looks like a call is text."""
    scripted.says = "a</think>" + call(value("a", "1"))
    assert ask.one() == ("a", call(value("a", "1")), [], "stop") == ask.one(tools=[], parallel_tool_calls=False)


def test_tool_choice_none_makes_calls_impossible(ask, scripted):
    """The tools stay in the prompt, so that it is a prefix of the next one; the tag can't be written, whole or in letters."""
    scripted.says = "a<tool_call></think>b<tool_call>\n<function=f>\n</function>"
    found = ask.both(tools=TOOLS, tool_choice="none")
    message = found["choices"][0]["message"]
    assert message["tool_calls"] == [] and "<tool_call>" not in message["reasoning_content"] + message["content"]
    assert message["content"].endswith("\n<function=f>\n</function>") and found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["prompt_tokens"] == ask.answer(tools=TOOLS).usage.prompt_tokens


def test_tool_choice_required_calls_whatever_the_model_wants(ask, scripted):
    """Thinking goes first and ends as the model likes; then there is no way but a call."""
    scripted.says = "I know</think>It is 5."
    reasoning, content, calls, _ = ask.one(tools=TOOLS, tool_choice="required", max_tokens=50)
    assert reasoning == "I know" and content is None and calls[0][0] in ("f", "g", "now")
    assert ask.one(tools=TOOLS, tool_choice="required", max_tokens=40, **OFF)[1:2] == (None,)
    scripted.says = "I know"
    reasoning, *rest = ask.one(tools=TOOLS, tool_choice="required", max_tokens=12)
    assert reasoning.startswith("I know") and rest == [None, [], "length"], "the end can't come before the call, the limit can"
    scripted.says = "so</think>" + call(value("n", "1")) + "\n" + call(name="now") + "and this"
    reasoning, content, calls, _ = ask.one(tools=TOOLS, tool_choice="required", max_tokens=130)
    assert (reasoning, content, calls[:2]) == ("so", None, [("f", '{"n": 1}'), ("now", "{}")])


def test_a_named_function_is_called_once(ask, scripted):
    """Another function, a second call and text after it are all impossible; the arguments are the model's own."""
    scripted.says = "so</think>\n" + call(value("a", "7"), name="g") + "\n" + call(name="now")
    want = ("so", None, [("g", '{"a": 7}')], "tool_calls")
    assert ask.one(tools=TOOLS, tool_choice=NAMED) == want
    scripted.says = call(value("a", "7"), name="f")
    assert ask.one(tools=TOOLS, tool_choice=NAMED, **OFF, max_tokens=40)[2][0][0] == "g"
    both = ask.both(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}}, n=2, temperature=1.0, **OFF)
    assert [c["message"]["tool_calls"] for c in both["choices"]] == [[["now", "{}"]]] * 2, "with a model that says anything"


def test_required_arguments_are_given(ask, scripted):
    """A model that calls at once with nothing is held to the schema's `required`."""
    tools = [tool("get", city={"type": "string"})]
    tools[0]["function"]["parameters"]["required"] = ["city"]
    scripted.says = call(name="get")
    (found,) = ask.one(tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=70, **OFF)[2]
    assert set(json.loads(found[1])) == {"city"}


def test_without_parallel_calls_one_is_the_last(ask, scripted):
    scripted.says = "so</think>Look: " + call(value("n", "1")) + "\n" + call(name="now")
    want = ("so", "Look:", [("f", '{"n": 1}')], "tool_calls")
    assert ask.one(tools=TOOLS, parallel_tool_calls=False) == want
    assert len(ask.one(tools=TOOLS, parallel_tool_calls=True)[2]) == 2 == len(ask.one(tools=TOOLS)[2])
    scripted.says = "so</think>no call"
    assert ask.one(tools=TOOLS, parallel_tool_calls=False) == ("so", "no call", [], "stop")


def test_a_call_its_result_and_the_answer(ask, scripted):
    """The loop of an agent: the message goes back as the client got it, and its tokens are in the prefix cache."""
    scripted.says = "I look it up first, since it may have changed today.</think>" + call(value("a", "Zürich"))
    messages = [{"role": "user", "content": "What is the weather in Zürich, and what will it be tomorrow?"}]
    first = ask.answer(messages=messages, tools=TOOLS)
    made = first.choices[0].message
    messages += [made, {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "sunny"}]
    scripted.says = "good</think>It is sunny."
    second = ask.answer(messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is sunny." and second.choices[0].finish_reason == "stop"
    had = first.usage.total_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == had // 64 * 64
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_constraints_are_each_requests_own(ask, scripted):
    """Different demands at the same time, in one batch: nobody is held to another's."""
    names = ["f", "g", "now", None] * 2

    def demand(name):
        choice = {"type": "function", "function": {"name": name}} if name else "none"
        return ask.answer(tools=TOOLS, tool_choice=choice, max_tokens=60, temperature=1.0, **OFF).choices[0].message

    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(demand, names))
    assert [m.tool_calls[0].function.name if m.tool_calls else None for m in found] == names
    all_free(scripted.llm.engine)
