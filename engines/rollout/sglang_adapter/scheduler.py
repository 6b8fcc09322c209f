"""What runs in SGLang's own process beside its scheduler: pieces of a stream tell versions, and grammars are followed.

SGLang computes the version of every token, and tells it when a request has ended. A stream needs it earlier: what is
sampled reaches its reader at once, and the reader's process cannot know whether a token came from before or after a
change of the weights, because tokens and answers to commands come through different sockets.

SGLang's hooks are its own interface for plugins; this one adds to each piece what the scheduler knows at that moment.
"""

# SGLang lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

__all__ = ["run_scheduler"]

_PIECES = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
_GRAMMARS = "sglang.srt.constrained.grammar_manager.GrammarManager.__init__"


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """SGLang's ``run_scheduler_process``, with the hook. Any: SGLang's own arguments, passed on."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PIECES, _tell_versions, HookType.AFTER)
    HookRegistry.register(_GRAMMARS, _follow_grammars, HookType.AFTER)
    run_scheduler_process(*arguments, **named)


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
