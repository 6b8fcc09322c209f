"""What a request has got so far, and how it goes on elsewhere."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.errors import EngineError, InvalidDataError
from asyncrl.interfaces import GenerationChunk, GenerationRequest

__all__ = ["Continuation"]


class Continuation:
    """A request over the engines that worked on it, one after the other.

    Tokens are taken once, in order, each with its log-prob and version; :meth:`request` is what the next engine is
    asked for: prompt and tokens so far, none of which it delivers again.

    >>> from asyncrl.interfaces import SamplingParams
    >>> asked = GenerationRequest(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(max_new_tokens=3))
    >>> state = Continuation(asked)
    >>> _ = state.take(GenerationChunk(token_ids=(7,), log_probs=(-1.0,), weight_versions=(4,)))
    >>> again = state.request()
    >>> again.prompt_token_ids, again.continued_tokens, state.version
    ((1, 7), 1, 4)

    The examples of the methods begin with the same ``asked``: at most three tokens.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._tokens: list[int] = []
        self._moves = 0
        self.version = 0
        """Version of the newest token: no engine with older weights may go on."""

    @property
    def tokens(self) -> int:
        """Tokens taken.

        >>> state = Continuation(asked)
        >>> _ = state.take(GenerationChunk(token_ids=(7, 8), log_probs=(-1.0, -1.0), weight_versions=(4, 4)))
        >>> state.tokens
        2
        """
        return len(self._tokens)

    @property
    def left(self) -> int:
        """Tokens that may still come.

        >>> state = Continuation(asked)
        >>> _ = state.take(GenerationChunk(token_ids=(7, 8), log_probs=(-1.0, -1.0), weight_versions=(4, 4)))
        >>> state.left
        1
        """
        return self._request.sampling.max_new_tokens - self._request.continued_tokens - len(self._tokens)

    def request(self) -> GenerationRequest:
        """What to ask the next engine for, under an id of its own: the last engine may hold the old one still.

        >>> state = Continuation(asked)
        >>> state.request() is asked
        True
        >>> _ = state.take(GenerationChunk(token_ids=(7,), log_probs=(-1.0,), weight_versions=(4,)))
        >>> again = state.request()
        >>> again.request_id, again.prompt_token_ids, again.continued_tokens
        ('a~1', (1, 7), 1)
        """
        asked = self._request
        if not self._moves and not self._tokens:
            self._moves = 1
            return asked
        name = asked.request_id if not self._moves else f"{asked.request_id}~{self._moves}"
        self._moves += 1
        return replace(
            asked,
            request_id=name,
            prompt_token_ids=(*asked.prompt_token_ids, *self._tokens),
            continued_tokens=asked.continued_tokens + len(self._tokens),
        )

    def take(self, chunk: GenerationChunk) -> GenerationChunk:
        """Take a chunk in, and return it.

            >>> state = Continuation(asked)
            >>> _ = state.take(GenerationChunk(token_ids=(7,), log_probs=(-1.0,), weight_versions=(4,)))
            >>> state.take(GenerationChunk(token_ids=(8,), log_probs=(-1.0,), weight_versions=(3,)))
            Traceback (most recent call last):
            asyncrl.errors.EngineError: a token of weight version 3 came after one of 4

        Raises:
            EngineError: it is not what an engine may say (a token without log-prob or version, a version that falls,
                more tokens than were asked for). Nothing of it is taken.
            InvalidDataError: the likeliest tokens were asked for, and the engine tells none.
        """
        versions = chunk.weight_versions
        if not len(chunk.token_ids) == len(chunk.log_probs) == len(versions):
            raise EngineError(
                f"{len(chunk.token_ids)} tokens came with {len(chunk.log_probs)} log-probs and {len(versions)} versions"
            )
        if len(chunk.token_ids) > self.left:
            raise EngineError(f"{len(chunk.token_ids)} tokens came where {self.left} were left to come")
        if self._request.sampling.top_log_probs and len(chunk.top_log_probs) != len(versions):
            # The request's fault, not the engine's: it would be refused wherever it goes.
            raise InvalidDataError("the engine does not tell the likeliest tokens: ask without top_log_probs")
        if versions:
            before = self.version
            for version in versions:
                if version < before:
                    raise EngineError(f"a token of weight version {version} came after one of {before}")
                before = version
            self.version = before
            self._tokens += chunk.token_ids
        return chunk
