"""The rules of :mod:`engines.rollout.logits` in SGLang's sampler, as a custom logit processor.

SGLang's own penalties leave out the prompt and what was sampled before a request came to it, and it has neither bad
words nor allowed tokens. With ours the three engines have one law, and log-probs of what is sampled from.
"""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

import msgspec
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from engines.rollout.logits import LogitRules, RowLogits
from engines.rollout.sglang.scheduler import NOTHING_LEFT

# SGLang lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false


def written(rules: LogitRules) -> dict[str, Any]:
    """Return the ``custom_params`` of a request with these rules."""
    return {"rules": msgspec.json.encode(rules).decode()}


class Processor(DisallowedTokensLogitsProcessor):
    """Changes the logits of the requests that have rules; the processor itself has no state.

    Of this base SGLang knows that top-k and top-p may be reported beside it (``return_sampling_mask``).
    """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        changed = logits.to(torch.float32, copy=True)
        for at, params in enumerate(custom_param_list or ()):
            if "row" not in params:  # SGLang makes this dictionary for each request, and keeps it with it
                params["row"] = RowLogits(msgspec.json.decode(params["rules"], type=LogitRules))
            request = params["__req__"]
            params["row"].apply(changed[at], [*request.origin_input_ids, *request.output_ids])
            if changed[at].max() == -math.inf:
                request.to_finish = FINISH_ABORT("no token is left", HTTPStatus.BAD_REQUEST, NOTHING_LEFT)
                changed[at] = logits[at]  # SGLang has to sample something, which is dropped
        return changed
