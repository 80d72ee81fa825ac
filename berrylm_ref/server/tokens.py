"""POST /tokenize and /detokenize: what the server's prompts look like as ids, and back."""

import asyncio
from typing import Any

from fastapi import APIRouter
from pydantic import StrictBool, StrictInt, StrictStr

from ..chat.template import ChatTemplate
from ..engine.llm import LLM
from .body import Body, Many
from .calls import refusal
from .chat_protocol import check_messages, check_tools, template_messages
from .protocol import ApiError, check_model


class TokenizeRequest(Body):
    """Either ``prompt`` or ``messages``, which the chat template writes as the chat route would."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Many[dict[str, Any]] | None = None
    tools: Many[dict[str, Any]] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None


class DetokenizeRequest(Body):
    """Ids of the tokenizer."""

    model: StrictStr | None = None
    tokens: Many[StrictInt]


def token_routes(llm: LLM, model_name: str) -> APIRouter:
    template = ChatTemplate.from_folder(llm.folder) if llm.folder and llm.tokenizer else None
    routes = APIRouter()

    def check(body: TokenizeRequest | DetokenizeRequest, field: str) -> None:
        check_model(body.model, model_name)
        if llm.tokenizer is None:
            raise ApiError(400, f"{field}: expected a model with a tokenizer, its folder has no tokenizer.json", field)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Ids of a prompt; by default, as in the other routes, nothing is added to it."""
        check(body, "prompt")
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: expected exactly one of prompt and messages", "prompt")
        try:
            tokens = await asyncio.to_thread(chat_ids if body.messages is not None else text_ids, body)
        except ValueError as error:
            raise refusal(error, {"prompts": "prompt"}) from error
        return {"tokens": tokens, "count": len(tokens), "max_model_len": llm.config.max_position_embeddings}

    def text_ids(body: TokenizeRequest) -> list[int]:
        for name in ("tools", "add_generation_prompt"):
            if getattr(body, name) is not None:
                raise ValueError(f"tokenize: {name}: expected only with messages, got it with prompt")
        if any("\ud800" <= c <= "\udfff" for c in body.prompt):
            raise ValueError("tokenize: prompt: expected Unicode text, got half a surrogate pair in it")
        return llm.tokenizer.fast.encode_batch_fast([body.prompt], add_special_tokens=bool(body.add_special_tokens))[0].ids

    def chat_ids(body: TokenizeRequest) -> list[int]:
        if template is None:
            raise ValueError("tokenize: messages: expected a model with a chat template, its folder has none")
        if body.add_special_tokens:
            raise ValueError("tokenize: add_special_tokens: expected false with messages: the template writes them, got true")
        check_messages(body.messages)
        check_tools(body.tools)
        begins, messages = body.add_generation_prompt is not False, template_messages(body.messages)
        return template.encode(messages, body.tools, tokenizer=llm.tokenizer, add_generation_prompt=begins)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of ``tokens``, special ones as they are written; bytes that are no UTF-8 become U+FFFD."""
        check(body, "tokens")
        unknown = next((i for i in body.tokens if i not in llm.tokenizer.token_bytes), None)
        if unknown is not None:
            raise ApiError(400, f"tokens: expected ids that the tokenizer knows, got {unknown}", "tokens")
        return {"prompt": await asyncio.to_thread(llm.tokenizer.decode, body.tokens, skip_special=False)}

    return routes
