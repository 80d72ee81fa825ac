"""JSON over HTTP, and what every protocol brings home."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class Answer:
    """What a server said about one prompt; None where it said nothing.

    ids: the greedy tokens; logprobs: one for each of them; prompt_logprobs: one for each prompt id from position
    ``scored_from`` on (1 at least: nothing stands before position 0).
    """

    ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_logprobs: list[float] | None = None
    scored_from: int = 1
    cached_tokens: int | None = None


class Refused(ValueError):
    """The server answered with an error status."""

    def __init__(self, url: str, status: int, text: str):
        super().__init__(f"{url}: expected status 200, got {status}: {text[:500]}")
        self.status, self.text = status, text


class Api(Protocol):
    """A way to ask a server. ``lacks``: what it did not give when it was tried, in words."""

    name: str
    lacks: list[str]

    def answer(self, ids: list[int], new_tokens: int, score_from: int | None = None) -> Answer:
        """Greedy tokens after ``ids``, past any end token. ``score_from`` asks for the prompt's logprobs behind that position as
        well, so that the prefix before it may come from the cache; a protocol that only scores whole prompts takes 0 alone and
        scores nothing for others.
        """


@dataclass
class Http:
    """POST and GET of JSON below one address."""

    url: str
    api_key: str | None = None
    timeout: float = 600.0
    headers: dict[str, str] = field(init=False)

    def __post_init__(self):
        self.url = self.url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"parity: url: expected http://host:port, got {self.url!r}")
        self.headers = {"Content-Type": "application/json"}
        if self.api_key:
            self.headers["Authorization"] = f"Bearer {self.api_key}"

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._send(urllib.request.Request(self.url + path, json.dumps(body).encode(), self.headers))

    def get(self, path: str) -> Any:
        return self._send(urllib.request.Request(self.url + path, headers=self.headers))

    def _send(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                text = response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            raise Refused(request.full_url, error.code, error.read().decode(errors="replace")) from error
        except urllib.error.URLError as error:
            raise ValueError(f"parity: url: expected a server at {self.url}, got: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:  # it died in its answer, or speaks something else
            raise ValueError(f"parity: url: expected a whole answer of {request.full_url}, got {error!r}") from error
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"{request.full_url}: expected JSON, got {text[:200]!r}") from error


@contextmanager
def reading(url: str, found: Any) -> Iterator[None]:
    """Errors of a look into ``found`` become a ValueError with what the server at ``url`` sent instead."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{url}: expected an answer of this protocol's form, got {str(found)[:200]}") from error


def missing(answer: Answer) -> list[str]:
    """What a trial answer to a scoring request lacks."""
    names = {
        "prompt_logprobs": "log-probabilities of the prompt's tokens",
        "ids": "the ids of the generated tokens",
        "logprobs": "log-probabilities of the generated tokens",
    }
    return [text for name, text in names.items() if getattr(answer, name) is None]
