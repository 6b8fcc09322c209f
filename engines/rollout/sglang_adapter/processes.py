"""What runs in SGLang's own processes: they end with their parent, pieces of a stream tell versions, and grammars work.

SGLang computes the version of every token, and tells it when a request has ended. A stream needs it earlier: what is
sampled reaches its reader at once, and the reader's process cannot know whether a token came from before or after a
change of the weights, because tokens and answers to commands come through different sockets.

SGLang's hooks are its own interface for plugins; this one adds to each piece what the scheduler knows at that moment.
"""

# SGLang lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import multiprocessing
from typing import Any

from engines.rollout.engine_process import die_with_parent

__all__ = ["run_detokenizer", "run_scheduler"]

_PIECES = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
_GRAMMARS = "sglang.srt.constrained.grammar_manager.GrammarManager.__init__"


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """SGLang's ``run_scheduler_process``, with the hooks. Any: SGLang's own arguments, passed on."""
    _end_with_parent()
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PIECES, _tell_versions, HookType.AFTER)
    HookRegistry.register(_GRAMMARS, _follow_grammars, HookType.AFTER)
    run_scheduler_process(*arguments, **named)


def run_detokenizer(*arguments: Any, **named: Any) -> None:
    """SGLang's ``run_detokenizer_process``. Any: SGLang's own arguments, passed on."""
    _end_with_parent()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **named)


def _end_with_parent() -> None:
    """SGLang asks the kernel for this without looking whether its parent is there still.

    A parent that dies while the process is being made (which imports SGLang, for many seconds) would be outlived.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    die_with_parent(parent.pid)


def _tell_versions(_result: None, pieces: Any, *, req: Any) -> None:
    """After a request's new tokens were put among the pieces of this step."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    if pieces.rids and pieces.rids[-1] == req.rid and pieces.weight_versions[-1] is None:
        pieces.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=pieces.current_weight_version,
            num_output_tokens=len(req.output_ids_through_stop),
        )


def _follow_grammars(_result: None, manager: Any, scheduler: Any) -> None:
    """After the scheduler's grammar manager was made."""
    from engines.rollout.sglang_adapter.grammar import install

    install(manager, scheduler)
