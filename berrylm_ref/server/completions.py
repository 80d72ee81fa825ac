"""POST /v1/completions."""

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from ..engine.llm import LLM
from ..engine.request import Request
from .calls import prepared
from .delivery import deliver
from .gate import Gate
from .protocol import CompletionAnswer, CompletionRequest, check_model, check_stream

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
    state = http.app.state
    check_model(body.model, state.model_name)
    check_stream(body.stream, body.stream_options)
    requests = await prepared(lambda: made(body, state.llm, state.engine), {"prompts": "prompt", "prompt_logprobs": "logprobs"})
    answer = CompletionAnswer(body, requests, state.model_name, state.llm.tokenizer)
    return await deliver(http, state.engine, answer, requests, bool(body.stream), body.stream_options)


def made(body: CompletionRequest, llm: LLM, gate: Gate) -> list[Request]:
    """The call's requests, prompt by prompt; ValueError for what can't run."""
    params = body.sampling_params()
    gate.check_choices(len(body.prompts()) * params.n)  # before anything is made of them
    requests = [request for prompt in body.prompts() for request in llm.requests(prompt, params)]
    for request in requests:
        llm.check_fits(request)
    return requests
