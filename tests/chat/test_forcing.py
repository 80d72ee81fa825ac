"""tool_choice enforced: whatever a model would say, what it can say is what was asked for."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from chat_models import TEMPLATE, chat_llm
from hypothesis import given, settings
from hypothesis import strategies as st
from toolcalls import TOOLS, tool

from berrylm_ref import SamplingParams
from berrylm_ref.chat.forcing import Masks, ToolForcing, Vocabulary
from berrylm_ref.chat.grammar import Grammar, Place, State
from berrylm_ref.chat.turn import Turn, opens_reasoning, reasoning_tokens
from berrylm_ref.tokenizer import Tokenizer

TYPED = [
    tool("get", city={"type": "string"}, days={"type": "integer"}),
    tool("get_all", city={"type": "string"}, **{"a<b": {"type": "string"}}),
    {"type": "function", "function": {"name": "now"}},
]
TYPED[0]["function"]["parameters"]["required"] = ["city"]


@pytest.fixture(scope="module")
def llm():
    return chat_llm()


@pytest.fixture(scope="module")
def forcing(llm):
    return ToolForcing(llm.tokenizer, llm.config.vocab_size, llm.end_ids)


@pytest.fixture(scope="module", params=["bytes", "shipped"])
def speaker(request, llm, forcing):
    """(what `walk` needs of a model, its forcing): a token a byte, and the shipped tokenizer with tokens of many bytes."""
    if request.param == "bytes":
        return llm, forcing
    tokenizer = Tokenizer.from_folder(TEMPLATE.parent)
    end_ids = frozenset(tokenizer.encode("<|end|>"))
    return SimpleNamespace(tokenizer=tokenizer, end_ids=end_ids), ToolForcing(tokenizer, tokenizer.size, end_ids)


def walk(llm, constraint, seed, most=400):
    """Output ids of a model that says anything it may, in a hurry to finish what it began."""
    rng, ids = random.Random(seed), []
    while len(ids) < most:
        allowed = constraint(ids).nonzero().flatten().tolist()
        assert allowed, "a turn that can neither go on nor end"
        ends = [i for i in allowed if i in llm.end_ids]
        marks = [i for i in allowed if llm.tokenizer.bytes_of(i) in rest_of_marks(constraint)]
        ids.append(rng.choice(ends if ends and rng.random() < 0.5 else marks if marks and rng.random() < 0.9 else allowed))
        if ids[-1] in llm.end_ids:
            return ids
    raise AssertionError("never came to an end")


def rest_of_marks(constraint):
    state = constraint._state
    rest = [m[len(state.begun) :] for m in constraint._masks.grammar.rule(state.place).then if m.startswith(state.begun)]
    return {r[:k] for r in rest for k in (1, len(r))}


def parsed(llm, ids, in_reasoning, tools):
    turn = Turn(in_reasoning, tools)
    first, last = turn.feed(llm.tokenizer.decode(ids)), turn.finish()
    return first.content + last.content, turn.calls


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from(["required", "get", "now", "auto"]), st.booleans(), st.booleans())
def test_a_forced_turn_is_well_formed_whatever_the_model_says(speaker, seed, choice, parallel, thinking):
    """Only functions there are, declared keys, once each, required ones always; one call for a named function and without
    parallel calls; nothing open at the end."""
    llm, forcing = speaker
    kind, function = (choice, None) if choice in ("required", "auto") else ("function", choice)
    if choice == "auto":
        parallel = False  # else nothing is enforced
    constraint = forcing.constraint(TYPED, kind, function, parallel, thinking)
    content, calls = parsed(llm, walk(llm, constraint, seed), thinking, TYPED)
    assert all(call.complete for call in calls)
    if choice != "auto":
        assert calls and content == ""
    if choice != "required" or not parallel:
        assert len(calls) <= 1
    for call in calls:
        keys = set(json.loads(call.arguments))
        assert call.name in ("get", "get_all", "now") and (function is None or call.name == function)
        assert keys <= {"city", "days"} if call.name == "get" else keys <= {"city"} if call.name == "get_all" else not keys
        assert call.name != "get" or "city" in keys


def test_a_call_cant_be_spelled_in_letters_where_there_must_be_none(llm, forcing):
    """A mask of the tag's own token alone leaves `<`, `tool_call`, `>`."""
    constraint = forcing.constraint(TOOLS, "none", None, True, True)
    ids = [llm.tokenizer.encode(c)[0] for c in "say <tool_call"]
    close, tag = llm.tokenizer.encode(">")[0], llm.tokenizer.encode("<tool_call>")[0]
    assert not constraint(ids)[close] and constraint(ids)[tag] == constraint([])[tag] == False  # noqa: E712
    hidden = llm.tokenizer.encode("<user>")
    assert not constraint(ids + hidden)[close], "a special token is hidden from the text, so it can't break the tag up"
    assert constraint(ids + [close + 1])[close] and all(constraint(ids)[i] for i in llm.end_ids)


def test_a_name_is_not_ended_early_and_a_tag_is_its_own_token(llm, forcing):
    """`get` is the beginning of `get_all`; `<` is how a model that was never taught to would begin `<tool_call>`."""
    constraint = forcing.constraint(TYPED, "function", "get_all", True, False)

    def allowed(text):
        ids = llm.tokenizer.encode(text)
        return {llm.tokenizer.bytes_of(i).decode() for i in constraint(ids).nonzero().flatten().tolist()}

    assert allowed("") == {"\n", "<tool_call>"} and allowed("\n\n") == {"<tool_call>"}
    assert allowed("<tool_call>\n<function=get") == {"_"}
    assert allowed("<tool_call>\n<function=get_all>\n<") == {"p", "/"}
    done = "<tool_call>\n<function=get_all>\n</function>\n</tool_call>"
    assert allowed(done) == {"<|end|>"}


def test_the_allowed_tokens_are_those_whose_bytes_the_grammar_takes(llm):
    """The masks skip tokens that can't matter; here every token is tried in every state that a call goes through."""
    vocabulary = Vocabulary(llm.tokenizer, llm.config.vocab_size, llm.end_ids)
    grammar = Grammar({"f": (("a",), frozenset())}, start="think")
    masks, state = Masks(grammar, vocabulary), State(Place("think"))
    text = "so <think></thi</think>\n<tool_call>\n<function=f>\n<parameter=a>\nx<5</para\n</parameter>\n</function>\n</tool_call>"
    for byte in text.encode():
        mask = masks.allowed(state)
        for i, raw in llm.tokenizer.token_bytes.items():
            if i in llm.end_ids:
                assert mask[i] == grammar.may_end(state)
            elif i not in llm.tokenizer.special_ids and mask[i] != (grammar.feed(state, raw) is not None):
                others = [t for t in vocabulary.tags if mask[llm.tokenizer.encode(t.decode())[0]]]
                assert not mask[i] and any(t.startswith(raw) for t in others), "only spelled tags are left out"
        state = grammar.step(state, byte)
    assert state.place.kind == "done" and not masks.allowed(state)[llm.tokenizer.size :].any()


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 400))
def test_what_may_follow_depends_on_the_output_ids_alone(llm, forcing, seed, at):
    """A request that starts over, or is asked twice, gets the same answer."""
    ids = walk(llm, forcing.constraint(TYPED, "required", None, True, True), seed)[: at + 1]
    used, fresh = (forcing.constraint(TYPED, "required", None, True, True) for _ in range(2))
    used(ids)
    assert torch.equal(used(ids[: len(ids) // 2]), fresh(ids[: len(ids) // 2]))
    assert torch.equal(used(ids[:-1]), used(ids[:-1])) and used(ids[:-1])[ids[-1]]


def test_a_constraint_survives_retraction_and_neighbours(forcing):
    """Two forced requests and a free one in a memory that can't hold them all: each says what it says alone."""
    prompt = list(range(40, 90))
    params = [SamplingParams(max_tokens=90, temperature=1.0, seed=s) for s in (1, 2, 3)]
    asked = [("required", None), ("function", "now"), ("auto", None)]

    def answers(llm, together):
        requests = [r for p in params for r in llm.requests(prompt, p)]
        for request, (choice, function) in zip(requests, asked, strict=True):
            request.constraint = forcing.constraint(TYPED, choice, function, True, False)
        for group in [requests] if together else [[r] for r in requests]:
            llm.run(group)
        return [r.output_ids for r in requests], llm

    alone, _ = answers(chat_llm(), together=False)
    crowded, llm = answers(chat_llm(max_total_tokens=176), together=True)
    assert llm.engine.scheduler.retractions > 0 and crowded == alone
    assert alone == answers(chat_llm(sequential=True), together=False)[0], "the plain loop obeys it too"
    _, (call,) = parsed(llm, alone[1], False, TYPED)
    assert (call.name, call.arguments, call.complete) == ("now", "{}", True)
    assert parsed(llm, alone[0], False, TYPED)[1]


@pytest.mark.parametrize(
    ("tools", "choice", "function", "message"),
    [
        (None, "required", None, "expected tools to choose from"),
        (TYPED, "function", "got", "expected a function of tools, got 'got'"),
        (None, "function", "get", "expected a function of tools, got 'get'"),
        ([tool("f") | {"type": "x"}], "auto", None, r"tools\[0\].type: expected 'function'"),
    ],
)
def test_what_cant_be_forced_is_refused(forcing, tools, choice, function, message):
    with pytest.raises(ValueError, match=message):
        forcing.constraint(tools, choice, function, True, True)


def test_malformed_required_keys_and_a_model_without_an_end_are_refused(llm, forcing):
    broken = tool("f", a={"type": "string"})
    broken["function"]["parameters"]["required"] = "a"
    with pytest.raises(ValueError, match=r"tools\[0\].function.parameters.required: expected a list of names"):
        forcing.constraint([broken], "required", None, True, True)
    with pytest.raises(ValueError, match="an end token, got a model without end tokens"):
        Vocabulary(llm.tokenizer, llm.config.vocab_size, frozenset())
    with pytest.raises(ValueError, match="a token for every byte, and an end token, got one without byte 97"):
        Vocabulary(llm.tokenizer, llm.config.vocab_size, frozenset(llm.tokenizer.encode("a")))


def test_reasoning_tokens_are_counted_up_to_what_ends_them(llm):
    """The closing tag is reasoning, a call that ends it is not, and without an end all of it is."""
    encode, count = llm.tokenizer.encode, reasoning_tokens
    assert count(encode("abc</think>de"), llm.tokenizer, True) == 4
    assert count(encode("abc<tool_call>\n<function=f>"), llm.tokenizer, True) == 3
    assert count(encode("abc"), llm.tokenizer, True) == 3
    assert count(encode("abc"), llm.tokenizer, False) == 0
    assert count(encode("<think>ab</think>cd"), llm.tokenizer, False) == 4
    assert opens_reasoning(encode("<|user|>hi<|end|><|assistant|><think>"), llm.tokenizer)
    assert not opens_reasoning(encode("<|assistant|><think></think>"), llm.tokenizer)
