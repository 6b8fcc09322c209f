"""Code that runs in SGLang's scheduler process: versions in every piece of a stream, and grammars.

SGLang computes the version of every token, and sends it when a request has ended. A stream needs it earlier: what is
sampled reaches its reader at once, and the reader's process cannot know whether a token came from before or after a
change of the weights, because tokens and answers to commands come through different sockets. SGLang's hooks are its
own interface for plugins; ours adds to each piece the versions that the scheduler knows at that moment.

Without an accelerator SGLang's adapters need memory that torch cannot lock there; they get ordinary memory.

SGLang follows a grammar from a request's first token. A request that was begun elsewhere has tokens behind it: its
order names them beside the grammar, and the grammar backend takes them before SGLang samples.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

# SGLang lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

_PIECES = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
NOTHING_LEFT = "nothing_left"
"""SGLang's ``err_type`` of a request whose parameters forbid every token."""

_GRAMMARS = "sglang.srt.constrained.grammar_manager.GrammarManager.__init__"


_PINNING = (
    "sglang.srt.lora.lora_manager.LoRAManager.__init__",
    "sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter_from_tensors",
    "sglang.srt.lora.backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch",
)
"""What SGLang does for adapters in memory that is locked for an accelerator; without one torch cannot lock any."""


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """SGLang's ``run_scheduler_process``, with our hooks. Any: SGLang's own arguments, passed on."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PIECES, _add_versions, HookType.AFTER)
    HookRegistry.register(_GRAMMARS, _install_grammars, HookType.AFTER)
    if not torch.accelerator.is_available():
        for name in _PINNING:
            HookRegistry.register(name, _without_pinning, HookType.AROUND)
    run_scheduler_process(*arguments, **named)


def _add_versions(_result: None, pieces: Any, *, req: Any) -> None:
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    if pieces.rids and pieces.rids[-1] == req.rid and pieces.weight_versions[-1] is None:
        pieces.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=pieces.current_weight_version,
            num_output_tokens=len(req.output_ids_through_stop),
        )


class _Unpinned(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.pin_memory:
            return args[0]
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def _without_pinning(original: Any, *arguments: Any, **named: Any) -> Any:
    with _Unpinned():
        return original(*arguments, **named)


class GrammarOrder(msgspec.Struct, array_like=True, frozen=True):
    """A grammar (llguidance's Lark) and the tokens sampled already, in the place of SGLang's EBNF."""

    grammar: str
    begun: list[int]

    def written(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def read(cls, written: str) -> GrammarOrder:
        return msgspec.json.decode(written, type=cls)


def _install_grammars(_result: None, manager: Any, scheduler: Any) -> None:
    """Give SGLang's GrammarManager a backend: SGLang makes none where it is started without a tokenizer, as here."""
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, InvalidGrammarObject
    from sglang.srt.constrained.llguidance_backend import GuidanceBackend

    from engines.rollout.request import load_tokenizer

    class Backend(GuidanceBackend):
        def dispatch_ebnf(self, key_string: str) -> BaseGrammarObject:
            from llguidance import LLMatcher

            order = GrammarOrder.read(key_string)
            try:
                made = self._from_serialized(LLMatcher.grammar_from_lark(order.grammar))
                for token in order.begun:
                    made.accept_token(token)
            except ValueError as error:
                return InvalidGrammarObject(str(error))
            return made

        def set_cache(self, key: tuple[str, str], value: BaseGrammarObject) -> None:
            """Do not cache: SGLang's cache grows with every grammar."""

    config = scheduler.model_config
    tokenizer = load_tokenizer(config.model_path)
    if tokenizer is not None:
        ends = {*(config.hf_eos_token_id or ()), tokenizer.eos_token_id} - {None}
        manager.grammar_backend = Backend(
            tokenizer=tokenizer, n_vocab=max(config.vocab_size, len(tokenizer)), eos_token_ids=ends
        )
