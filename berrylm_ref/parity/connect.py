"""Which protocol a server speaks."""

from .client import Api, Http, Refused
from .completions_api import CompletionsApi
from .generate_api import GenerateApi

PROTOCOLS = {"generate": GenerateApi, "completions": CompletionsApi}


def connect(http: Http, protocol: str, trial: list[int]) -> Api:
    """Try ``protocol`` ("auto": /generate, then completions) with the prompt ``trial``. ValueError if nothing can be compared."""
    if protocol not in ("auto", *PROTOCOLS):
        raise ValueError(f"parity: protocol: expected 'auto' or one of {sorted(PROTOCOLS)}, got {protocol!r}")
    if protocol == "auto":
        try:
            api: Api = GenerateApi(http, trial)
        except Refused as error:
            if error.status not in (404, 405):
                raise
            api = CompletionsApi(http, trial)
    else:
        api = PROTOCOLS[protocol](http, trial)
    if len(api.lacks) == 3:
        raise ValueError(
            f"{http.url}: the {api.name} protocol gives neither log-probabilities nor token ids here, so that nothing can be "
            "compared. Start the server with log-probabilities allowed (vLLM: --max-logprobs 1 or more), or use --protocol"
        )
    return api


def limits(api: Api) -> list[str]:
    """What the server lacks, and what can still be measured."""
    if not api.lacks:
        return []
    left = {
        "log-probabilities of the prompt's tokens": "|delta logprob| over prompts",
        "the ids of the generated tokens": "greedy agreement, identical ids, multi-turn and decoded tokens",
        "log-probabilities of the generated tokens": "|delta logprob| on decoded tokens",
    }
    out = [f"the server's {api.name} protocol does not give {what}: no {left[what]}" for what in api.lacks]
    still = [text for what, text in left.items() if what not in api.lacks]
    return [*out, "still measured: " + "; ".join(still)]
