"""One request in SGLang: the order that SGLang gets, and the tokens that its stream brings."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable
from itertools import repeat
from typing import TYPE_CHECKING, Any

from asyncrl.errors import AsyncRLError, EngineError, InvalidDataError
from asyncrl.interfaces import TopLogProbs
from engines.rollout.request import Reader, Row
from engines.rollout.sglang.scheduler import NOTHING_LEFT, GrammarOrder

if TYPE_CHECKING:
    from engines.rollout.sglang.launch import SGLangOptions

# SGLang lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false


class SGLangRequest:
    """A row, its reader, and the task that fills it.

    ``sglang_id`` is SGLang's id of the request, None while SGLang does not have it. ``aborted``: SGLang is to end it.
    """

    def __init__(self, row: Row, *, vocabulary: int) -> None:
        self.row = row
        sampling = row.sampling
        cut = sampling.top_p < 1.0 or 0 < sampling.top_k < vocabulary
        self.reader = Reader(row)
        self.sglang_id: str | None = None
        self.aborted = False
        self._before = 0
        """Tokens that the row had when SGLang got the request."""
        self._truncated = sampling.temperature > 0 and cut
        self._filling: asyncio.Task[None] | None = None

    def begin(self, filling: Coroutine[Any, Any, None]) -> None:
        """Fill the row by ``filling`` instead of by the task that fills it now, whose end aborts it in SGLang."""
        if self._filling is not None:
            self._filling.cancel()
        self.sglang_id = None
        self._filling = asyncio.create_task(filling, name=f"request {self.row.request_id}")

    async def stop(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])

    def end_here(self) -> None:
        """Abort the request with the tokens it has; SGLang gets the order when it goes on."""
        if not self.row.ended:
            self.row.finish_reason = "abort"
        if self._filling is not None:
            self._filling.cancel()
        self.reader.wake()

    def fail(self, error: AsyncRLError) -> None:
        """End the request with ``error``, after the tokens it has."""
        if not self.row.ended:
            self.row.error = error
        self.reader.wake()

    def order(self, number: int, *, salt: str, options: SGLangOptions, adapter: str | None = None) -> Any:
        """Return SGLang's request, for an adapter under SGLang's name. Any: its class is known only where SGLang is.

        Tokens that the row has are part of its prompt: it goes on after them.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        row, sampling = self.row, self.row.sampling
        # SGLang aborts by prefix: no id may begin with another one.
        self.sglang_id = f"{number}."
        self._before = len(row.versions)
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": row.length_limit - len(row.tokens),
            "stop_token_ids": sorted(row.stop_token_ids),
        }
        if sampling.top_k:
            params["top_k"] = sampling.top_k
        elif self._truncated:
            params["top_k"] = options.truncation_tokens
        if sampling.grammar:
            params["ebnf"] = GrammarOrder(sampling.grammar, row.tokens[row.prompt_length :]).written()
        processor = None
        if row.logits is not None:
            from engines.rollout.sglang.logits import Processor, written

            params["custom_params"], processor = written(row.logits.rules), Processor.to_str()
        if sampling.ignore_eos:
            params["ignore_eos"] = True
        if options.deterministic:
            params["sampling_seed"] = row.seed % (1 << 63)
        return GenerateReqInput(
            rid=self.sglang_id,
            input_ids=list(row.tokens),
            sampling_params=params,
            custom_logit_processor=processor,
            stream=True,
            return_logprob=True,
            logprob_start_len=-1 if sampling.prompt_log_probs is None or row.versions else 0,
            top_logprobs_num=max(sampling.top_log_probs, sampling.prompt_log_probs or 0),
            return_sampling_mask=self._truncated,
            cache_salt=salt,
            lora_path=adapter,
        )

    @staticmethod
    def probe(number: int) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        return GenerateReqInput(
            rid=f"{number}.",
            input_ids=[0],
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            stream=True,
            cache_salt=f"probe {number}",
        )

    def take(self, piece: dict[str, Any], *, version: int | None = None) -> int:
        """Append the tokens of a piece of the stream to the row; return how many.

        They are of ``version``, or of those that SGLang stamped.

        Raises:
            EngineError: the piece leaves tokens out, has no versions or log-probs that are not finite, or SGLang
                failed.
            InvalidDataError: SGLang does not take the request, or its parameters forbid every token.
        """
        row, info = self.row, piece["meta_info"]
        if (info["finish_reason"] or {}).get("err_type") == NOTHING_LEFT:
            raise row.no_token_error()
        held = len(row.versions)
        seen = held - self._before
        new = info["completion_tokens"] - seen
        if new:
            # The last piece of an aborted request repeats the last token: only the number of all tokens counts.
            tokens = piece["output_ids"][-new:] if new > 0 else []
            log_probs = self._log_probs(info)[-new:]
            versions = [
                int(span["version"])
                for span in info.get("weight_versions", ())
                for _ in range(max(span["start"], seen), span["end"])
            ]
            if not new == len(tokens) == len(log_probs) == len(versions):
                raise EngineError(
                    f"after {seen} tokens SGLang reported {info['completion_tokens']}, with {len(tokens)} ids, "
                    f"{len(log_probs)} log-probs and {len(versions)} versions"
                )
            if not held and row.sampling.prompt_log_probs is not None:
                count, prompt = row.sampling.prompt_log_probs, slice(1, row.prompt_length)
                row.prompt_log_probs[:] = [log_prob for log_prob, *_ in info["input_token_logprobs"][prompt]]
                tops_of_prompt = info.get("input_top_logprobs") or [()] * row.prompt_length
                row.prompt_tops[:] = [_top(top, count) for top in tops_of_prompt[prompt]]
            tops: Iterable[TopLogProbs | None] = repeat(None)
            if count := row.sampling.top_log_probs:
                tops = [_top(top, count) for top in info["output_top_logprobs"][-new:]]
            for token, log_prob, stamped, top in zip(tokens, log_probs, versions, tops, strict=False):
                sampled_under = stamped if version is None else version
                if not math.isfinite(log_prob):
                    raise EngineError(f"the model's log-probs are not finite under weight version {sampled_under}")
                row.append(token, log_prob, sampled_under, top)
                if row.ended:
                    break
        if info["finish_reason"] is not None and not row.ended:
            self._end(info["finish_reason"])
        self.reader.wake()
        return len(row.versions) - held

    def _log_probs(self, info: dict[str, Any]) -> list[float]:
        if self._truncated:
            return list(info["output_token_sampling_logprobs"])
        return [log_prob for log_prob, *_ in info["output_token_logprobs"]]

    def _end(self, reason: dict[str, Any]) -> None:
        kind, status = reason["type"], reason.get("status_code")
        if kind != "abort":
            self.row.finish_reason = kind
        elif status is None:
            self.row.finish_reason = "abort"
        elif status == 400:
            raise InvalidDataError(f"request {self.row.request_id!r}: {reason['message']}")
        else:
            raise EngineError(f"SGLang gave up request {self.row.request_id!r}: {reason['message']}")


def _top(entries: Any, count: int) -> TopLogProbs:
    """Return the ``count`` likeliest tokens that could be sampled. Any: SGLang's (log-prob, id, text), in order."""
    return tuple((token, log_prob) for log_prob, token, *_ in entries[:count] if log_prob > -math.inf)
