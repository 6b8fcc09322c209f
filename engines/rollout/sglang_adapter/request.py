"""One request, between its reader here and SGLang."""

# SGLang lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from asyncrl.errors import AsyncRLError, EngineError, InvalidDataError
from engines.rollout.embedded.reader import Reader
from engines.rollout.embedded.row import Row
from engines.rollout.sglang_adapter.grammar import GrammarOrder

if TYPE_CHECKING:
    from engines.rollout.sglang_adapter.launching import SGLangOptions

__all__ = ["SGLangRequest"]


class SGLangRequest:
    """A row, who reads it, and the task that fills it.

    Args:
        row: what is to be filled.
        vocabulary: token ids are 0 to one less.

    Attributes:
        row: what was sampled so far.
        reader: of the row.
        asked_as: SGLang's name for it; None while it waits to be asked for.
        drains: it had come when a drain was ordered, which lets it finish.
        aborted: SGLang was told to end it.
    """

    def __init__(self, row: Row, *, vocabulary: int) -> None:
        self.row = row
        sampling = row.sampling
        cut = sampling.top_p < 1.0 or 0 < sampling.top_k < vocabulary
        self.reader = Reader(row)
        self.asked_as: str | None = None
        self.drains = False
        self.aborted = False
        self._truncated = sampling.temperature > 0 and cut
        self._filling: asyncio.Task[None] | None = None

    def begin(self, filling: Coroutine[Any, Any, None]) -> None:
        """Fill the row by ``filling``; another one that does so is given up, and SGLang told."""
        if self._filling is not None:
            self._filling.cancel()
        self.asked_as = None
        self._filling = asyncio.create_task(filling, name=f"request {self.row.request_id}")

    async def stop(self) -> None:
        """Nobody reads it any more."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])

    def end_here(self) -> None:
        """Abort it with what has come; SGLang is told, and hears it when it goes on."""
        if not self.row.ended:
            self.row.finish_reason = "abort"
        if self._filling is not None:
            self._filling.cancel()
        self.reader.wake()

    def fail(self, error: AsyncRLError) -> None:
        """It ends with ``error``, after what has come."""
        if not self.row.ended:
            self.row.error = error
        self.reader.wake()

    def ask(self, number: int, *, salt: str, options: SGLangOptions) -> Any:
        """What SGLang is asked for. Any: its class is known only where SGLang is."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        row, sampling = self.row, self.row.sampling
        # SGLang aborts by prefix of a name: no name may begin another.
        self.asked_as = f"{number}."
        asked: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": row.length_limit - len(row.tokens),
            "stop_token_ids": sorted(row.stop_token_ids),
        }
        if sampling.top_k:
            asked["top_k"] = sampling.top_k
        elif self._truncated:
            asked["top_k"] = options.truncation_tokens
        if sampling.grammar:
            asked["ebnf"] = GrammarOrder(sampling.grammar, row.tokens[row.prompt_length :]).written()
        if options.deterministic:
            asked["sampling_seed"] = row.seed % (1 << 63)
        return GenerateReqInput(
            rid=self.asked_as,
            input_ids=list(row.tokens),
            sampling_params=asked,
            stream=True,
            return_logprob=True,
            return_sampling_mask=self._truncated,
            cache_salt=salt,
        )

    @staticmethod
    def probe(number: int) -> Any:
        """One greedy token."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        return GenerateReqInput(
            rid=f"{number}.",
            input_ids=[0],
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            stream=True,
            cache_salt=f"probe {number}",
        )

    def take(self, piece: dict[str, Any]) -> int:
        """Take over what a piece of the stream brings; returns how many tokens.

        Raises:
            EngineError: it does not follow what has come, does not say versions, or SGLang failed.
            InvalidDataError: SGLang does not take the request.
        """
        row, told = self.row, piece["meta_info"]
        seen = len(row.versions)
        new = told["completion_tokens"] - seen
        if new:
            # Pieces of an end by abort bring the last token once more: only the number of all says what is new.
            tokens = piece["output_ids"][-new:] if new > 0 else []
            log_probs = self._log_probs(told)[-new:]
            versions = [
                int(span["version"])
                for span in told.get("weight_versions", ())
                for _ in range(max(span["start"], seen), span["end"])
            ]
            if not new == len(tokens) == len(log_probs) == len(versions):
                raise EngineError(
                    f"after {seen} tokens SGLang told of {told['completion_tokens']}, with {len(tokens)} ids, "
                    f"{len(log_probs)} log-probs and {len(versions)} versions"
                )
            for token, log_prob, version in zip(tokens, log_probs, versions, strict=True):
                row.append(token, log_prob, version)
                if row.ended:
                    break
        if told["finish_reason"] is not None and not row.ended:
            self._end(told["finish_reason"])
        self.reader.wake()
        return len(row.versions) - seen

    def _log_probs(self, told: dict[str, Any]) -> list[float]:
        if self._truncated:
            return list(told["output_token_sampling_logprobs"])
        return [log_prob for log_prob, *_ in told["output_token_logprobs"]]

    def _end(self, reason: dict[str, Any]) -> None:
        kind, status = reason["type"], reason.get("status_code")
        if kind != "abort":
            self.row.finish_reason = kind
        elif status is None:
            self.row.finish_reason = "abort"
        elif status == 400:
            raise InvalidDataError(f"request {self.row.request_id!r}: {reason['message']}")
        else:
            raise EngineError(f"SGLang gave request {self.row.request_id!r} up: {reason['message']}")
