"""Random requests, and what a server streams back for one of them."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

CHARACTERS = range(32, 127)  # tokens of the tiny model that are printable characters
MAX_MODEL_LEN = 512
NUM_LOGPROBS = 2
TIMEOUT_SECONDS = 900  # without a token; a request that waits its turn has none for long


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        number: Its place in the order of arrival.
        after: Seconds since the arrival before it.
        prompt: Token ids.
        max_tokens: Tokens to generate, all of them: an end token does not end it.
        cut_after: Tokens after which the client closes the connection, or None.
        logprobs: Whether it asks for the log probabilities of the likeliest tokens.
    """

    number: int
    after: float
    prompt: list[int]
    max_tokens: int
    cut_after: int | None
    logprobs: bool

    def body(self) -> dict[str, Any]:
        """Return the request as the server's API wants it."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": NUM_LOGPROBS if self.logprobs else None,
        }


def requests(seed: int, rate: float) -> Iterator[Request]:
    """Yield requests for ever; equal arguments give equal ones.

    Groups arrive as a Poisson process. Most are of one request; some bring a dozen at once, which
    is when the cache runs out and requests are preempted; and between groups the servers may fall
    idle.

    Args:
        seed: Of all that is random.
        rate: Requests a second, on average.
    """
    source = random.Random(seed)
    prefixes = [_text(source, 160) for _ in range(4)]
    number = 0
    while True:
        size = 1 if source.random() < 0.9 else source.randint(4, 14)
        mean_size = 0.9 + 0.1 * 9
        for place in range(size):
            after = 0.0 if place else source.expovariate(rate / mean_size)
            yield _request(source, number, after, prefixes)
            number += 1


def _request(
    source: random.Random, number: int, after: float, prefixes: list[list[int]]
) -> Request:
    if source.random() < 0.7:
        prompt = _text(source, source.randint(1, 32))
    else:
        prompt = _text(source, source.randint(64, 380))
        if source.random() < 0.4:  # hits the prefix cache while its blocks are there
            prompt = (source.choice(prefixes) + prompt)[:380]
    max_tokens = source.randint(1, MAX_MODEL_LEN - 380 - 2)
    cut_after = source.randrange(max_tokens) if source.random() < 0.15 else None
    return Request(number, after, prompt, max_tokens, cut_after, source.random() < 0.25)


def _text(source: random.Random, length: int) -> list[int]:
    return [source.choice(CHARACTERS) for _ in range(length)]


@dataclass
class Answer:
    """What came back for one request.

    Attributes:
        tokens: Token ids, up to the cut if there was one.
        logprobs: For each token the log probabilities of the likeliest; empty if not asked for.
        finish_reason: As the server gave it, or None.
        error: What went wrong, or empty.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""


def likeliest(choice: dict[str, Any]) -> list[dict[int, float]]:
    """Return the log probabilities of the likeliest tokens, for each token of a server's choice."""
    return [
        {int(token.removeprefix("token_id:")): value for token, value in top.items()}
        for top in choice["logprobs"]["top_logprobs"]
    ]


def ask(address: str, request: Request) -> Answer:
    """Send a request and read its tokens; at its cut, close the connection and read no further."""
    answer = Answer()
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.netloc, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(request.body()),
            {"Content-Type": "application/json"},
        )
        with connection.getresponse() as response:
            if response.status != http.HTTPStatus.OK:
                answer.error = f"status {response.status}: {response.read(500)!r}"
                return answer
            _read(response, request, answer)
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
        answer.error = repr(error)
    finally:
        connection.close()
    return answer


def _read(response: http.client.HTTPResponse, request: Request, answer: Answer) -> None:
    if request.cut_after == 0:
        return
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"])
            return
        (choice,) = event["choices"]
        answer.tokens += choice["token_ids"] or []
        answer.finish_reason = choice["finish_reason"]
        if choice["logprobs"]:
            answer.logprobs += likeliest(choice)
        if request.cut_after is not None and len(answer.tokens) >= request.cut_after:
            return
