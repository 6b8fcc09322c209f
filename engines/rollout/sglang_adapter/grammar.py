"""Grammars inside SGLang's scheduler: its own llguidance backend, which can begin in the middle of a text.

SGLang follows a grammar from a request's first token. A request that was begun elsewhere has tokens behind it: what it
asks for names them beside the grammar, and the backend takes them before SGLang samples.
"""

# SGLang lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["GrammarOrder", "install"]


class GrammarOrder(msgspec.Struct, array_like=True, frozen=True):
    """What a request asks of the backend, in the place of SGLang's EBNF.

    >>> GrammarOrder.read(GrammarOrder("start: /a+/", [7]).written())
    GrammarOrder(grammar='start: /a+/', begun=[7])

    Attributes:
        grammar: llguidance's dialect of Lark.
        begun: tokens sampled already.
    """

    grammar: str
    begun: list[int]

    def written(self) -> str:
        """As a string, which is what SGLang passes on."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def read(cls, written: str) -> GrammarOrder:
        """The opposite."""
        return msgspec.json.decode(written, type=cls)


def install(manager: Any, scheduler: Any) -> None:
    """Give SGLang's GrammarManager the backend, if the model has a tokenizer. Any: SGLang's own classes.

    SGLang makes none by itself where it is started without a tokenizer, as it is here: texts are ours.
    """
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, InvalidGrammarObject
    from sglang.srt.constrained.llguidance_backend import GuidanceBackend

    from engines.rollout.embedded.loading import load_tokenizer

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
            """Keeps nothing: SGLang's cache grows with every grammar there was."""

    config = scheduler.model_config
    tokenizer = load_tokenizer(config.model_path)
    if tokenizer is not None:
        ends = {*(config.hf_eos_token_id or ()), tokenizer.eos_token_id} - {None}
        manager.grammar_backend = Backend(
            tokenizer=tokenizer, n_vocab=max(config.vocab_size, len(tokenizer)), eos_token_ids=ends
        )
