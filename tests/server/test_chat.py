"""The chat route through the real openai client over a real socket, every feature streaming and not."""

import openai
import pytest
from served import all_free

from berrylm_ref import SamplingParams
from berrylm_ref.chat import ReasoningParser
from berrylm_ref.chat.template import ChatTemplate

OFF = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


def prompt_of(llm, messages, **options):
    return ChatTemplate.from_folder(llm.folder).encode(messages, tokenizer=llm.tokenizer, **options)


def test_an_answer_is_what_the_library_generates(ask, scripted):
    """The route adds the template before the model and the parser behind it, and nothing else."""
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "Zürich 漢?"}]
    prompt = prompt_of(scripted.llm, messages)
    (want,) = scripted.llm.generate([prompt], SamplingParams(temperature=0, max_tokens=40))
    found = ask.both(messages=messages, temperature=0, max_tokens=40)
    assert found["choices"][0]["message"]["reasoning_content"] == ReasoningParser().parse(want.text)[0]
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (len(prompt), 40, len(prompt) + 40)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 40}


def test_thinking_on_and_off(ask, scripted):
    """PRS-5: the prompt opens `<think>` or closes it, and the parser starts where the prompt ended."""
    scripted.says = "I should</think>\n\nHello"
    assert ask.one() == ("I should", "Hello", [], "stop")
    scripted.says = "Hello"
    assert ask.one(**OFF) == (None, "Hello", [], "stop")
    scripted.says = "I should add"
    assert ask.one(max_tokens=8) == ("I should", None, [], "length"), "what never closes is all reasoning"
    assert ask.one(max_tokens=8, **OFF) == (None, "I should", [], "length")
    assert ask.both(**OFF)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_every_kind_of_message_reaches_the_template(ask, scripted):
    """developer is system, parts are joined, empty or null assistant content is accepted (API-1), results find their calls."""
    calls = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{i}"}}'}} for i in ("one", "two")
    ]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None},
        {"role": "tool", "tool_call_id": "two", "content": "2"},
        {"role": "tool", "tool_call_id": "one", "content": "1"},
    ]
    scripted.says = "x"
    begin = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}]
    same = [*begin, *messages[2:5], messages[6], messages[5]]
    assert ask.both(messages=messages)["usage"]["prompt_tokens"] == len(prompt_of(scripted.llm, same))


def test_defaults_come_from_the_models_generation_config(ask):
    """temperature 0.7 and top_k 20 stand there; what a request says itself wins, null says nothing."""

    def said(**body):
        return ask.answer(max_tokens=30, **body).choices[0].message.model_extra["reasoning_content"]

    assert said() == said(temperature=0.7, extra_body={"top_k": 20}) == said(temperature=None)
    assert len({said(), said(temperature=1.5), said(extra_body={"top_k": 0}), said(temperature=0)}) == 4
    assert said(seed=2) != said(seed=1) == said(seed=1)


def test_every_sampling_field_reaches_the_sampler(ask, scripted):
    """A field taken and dropped looks like one that works: each changes the answer, to what the library says with it."""
    prompt = prompt_of(scripted.llm, [{"role": "user", "content": "hi"}])
    base, seen = {"temperature": 1.0, "max_tokens": 24, "seed": 5}, set()
    fields = {
        "temperature": 0.4, "seed": 6, "max_tokens": 20, "top_p": 0.5, "top_k": 3, "min_p": 0.3, "presence_penalty": 2.0,
        "frequency_penalty": 2.0, "repetition_penalty": 1.8, "ignore_eos": True, "stop": ["z"],
    }  # fmt: skip
    for name, value in fields.items():
        params = {"top_k": 20, **base, name: value}  # top_k 20 is the model's default
        (want,) = scripted.llm.generate([prompt], SamplingParams(**params))
        found = ask.answer(**base | {"extra_body": {name: value}}).choices[0]
        assert (found.message.model_extra["reasoning_content"] or "") == ReasoningParser().parse(want.text)[0], name
        assert found.finish_reason == want.finish_reason
        seen.add((want.text, want.finish_reason))
    assert len(seen) >= len(fields) - 1, "only ignore_eos may change nothing here"


def test_several_choices_with_seed_and_an_early_end(ask, scripted):
    """ENG-2: indices, a reason for each, the prompt counted once; the end of one choice does not end the others."""
    scripted.says = ["a</think>b", "longer thoughts</think>and a longer answer", "c</think>d"]
    found = ask.both(n=3)
    assert [c["message"]["content"] for c in found["choices"]] == ["b", "and a longer answer", "d"]
    assert [c["finish_reason"] for c in found["choices"]] == ["stop"] * 3
    assert found["usage"]["completion_tokens"] == sum(len(scripted.tokens(text)) for text in scripted.says)
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 + 16 + 2}
    scripted.says = None
    drawn = [c["message"]["reasoning_content"] for c in ask.both(n=3, seed=7, temperature=1.0, max_tokens=16)["choices"]]
    assert len(set(drawn)) == 3, "choices of one seed differ, and are the same in both modes"


def test_a_stop_string_across_chunks(ask, scripted):
    """API-4: none of it is sent; a tail that could have become one is sent at the end; reasoning is text like any other."""
    scripted.says = "ok</think>The quick brown fox"
    assert ask.one(stop=["own fox"]) == ("ok", "The quick br", [], "stop")
    assert ask.one(stop="own fox!") == ("ok", "The quick brown fox", [], "stop")
    assert ask.one(stop=["own foxes"], max_tokens=20)[1:] == ("The quick brown f", [], "length")
    assert ask.one(stop=["k</think>"])[:2] == ("o", None)


def test_characters_split_over_tokens(ask, scripted):
    """API-5: a token is a byte here; no U+FFFD unless the text ends within a character, and logprobs have the raw bytes."""
    scripted.says = "é</think>🫐é漢 ok"
    assert ask.one() == ("é", "🫐é漢 ok", [], "stop")
    assert ask.one(max_tokens=5)[1] == "\ufffd"
    found = ask.both(logprobs=True)["choices"][0]["logprobs"]
    assert b"".join(bytes(x["bytes"]) for x in found) == (scripted.says + "<|end|>").encode()


def test_logprobs_of_every_token(ask, scripted):
    """Chosen and alternatives, in the order of the tokens, also where a chunk brings none of the text of its token."""
    scripted.says = "hm</think>漢"
    found = ask.both(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]
    ids = scripted.tokens(scripted.says)
    assert [x["token"] for x in found[:3]] == ["h", "m", "</think>"] and len(found) == len(ids)
    (want,) = scripted.llm.generate([prompt_of(scripted.llm, [{"role": "user", "content": "hi"}])], SamplingParams(logprobs=3))
    assert [x["logprob"] for x in found] == pytest.approx([x.logprob for x in want.logprobs])
    assert all(len(x["top_logprobs"]) == 3 and x["top_logprobs"][0]["logprob"] >= x["logprob"] for x in found)
    assert ask.both(logprobs=True)["choices"][0]["logprobs"][0]["top_logprobs"] == []


def test_the_usage_chunk_comes_only_when_asked(ask, scripted):
    """API-2: clients that read choices[0] crash on it; the numbers are those without streaming (Asker.both compares them)."""
    scripted.says = "a</think>b"
    for options in ({}, {"stream_options": {"include_usage": False}}):
        assert all(c.choices and "usage" not in c.model_fields_set for c in ask.answer(stream=True, **options))
    *others, last = ask.answer(stream=True, stream_options={"include_usage": True}, n=2, temperature=0)
    assert last.choices == [] and all("usage" in c.model_fields_set and c.usage is None for c in others)
    assert last.usage.completion_tokens_details.reasoning_tokens == 2 * 2


def test_turn_two_hits_the_prefix_cache(ask, scripted):
    """The prompt of turn two begins with that of turn one and its answer, if the client sends the reasoning back."""
    scripted.says = "The user wants a poem, and I know none by heart.</think>" + "All the world's a stage. " * 4
    messages = [{"role": "user", "content": "Something by Shakespeare, please, as long as it is short."}]
    first = ask.answer(messages=messages)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    said = first.choices[0].message
    messages += [said.model_dump(), {"role": "user", "content": "More!"}]
    second = ask.answer(messages=messages)
    had = first.usage.total_tokens - 1  # the end token has not run
    assert had > 200 and second.usage.prompt_tokens_details.cached_tokens == had // 64 * 64


def test_limits_of_the_context(ask, scripted, http):
    """API-1: context - 1 tokens yield one more, context tokens are refused; unset max_tokens is what the memory holds."""
    llm = scripted.llm
    assert ask.both(max_completion_tokens=1)["usage"]["completion_tokens"] == 1
    empty = len(prompt_of(llm, [{"role": "user", "content": ""}]))
    sizes = llm.engine.cache.pool.sizes
    found = ask.answer("x" * (sizes.pages * sizes.page_size - empty - 1))
    assert found.usage.completion_tokens == 1 and found.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError) as error:
        ask.answer("x" * (llm.config.max_position_embeddings - empty), stream=True)
    assert error.value.code == "context_length_exceeded" and error.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="KV memory") as error:
        ask.answer("hi", max_completion_tokens=16_000)
    assert error.value.param == "max_completion_tokens"


def test_clients_that_leave_free_their_slots(ask, scripted):
    """ENG-1 on this route: four streams closed after a few chunks, four plain ones after 0.2 s, then one that is answered."""
    long = {"max_tokens": 2500, "extra_body": {"ignore_eos": True}}
    for _ in range(4):
        with ask.answer(stream=True, **long) as chunks:
            for _, _ in zip(range(3), chunks, strict=False):
                pass
        with pytest.raises(openai.APITimeoutError):
            ask.answer(timeout=0.2, **long)
    scripted.says = "a</think>b"
    assert ask.one() == ("a", "b", [], "stop")
    all_free(scripted.llm.engine)
