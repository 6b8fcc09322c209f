from collections.abc import AsyncIterator

from asyncrl.interfaces import GenerationChunk, GenerationRequest, SamplingParams
from asyncrl.rollout.worker import MeteredEngine, TokenMeter


class ThreeChunks:
    """Delivers chunks of 2, 2 and 1 tokens and notices whether it was left early."""

    def __init__(self) -> None:
        self.left = False

    async def _stream(self) -> AsyncIterator[GenerationChunk]:
        try:
            for size in (2, 2, 1):
                yield GenerationChunk(token_ids=(7,) * size, log_probs=(0.0,) * size, weight_versions=(0,) * size)
        finally:
            self.left = True

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        return self._stream()

    async def abort(self, request_id: str) -> bool:
        return False


REQUEST = GenerationRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_new_tokens=5))


async def test_tokens_count_as_in_flight_until_the_work_ends():
    meter = TokenMeter()
    with meter.account("train") as account:
        engine = MeteredEngine(ThreeChunks(), meter, account)
        seen = [len(chunk.token_ids) async for chunk in engine.generate(REQUEST)]
        assert (seen, meter.in_flight("train"), meter.delivered("train")) == ([2, 2, 1], 5, 5)
    assert (meter.in_flight("train"), meter.delivered("train"), meter.delivered("eval")) == (0, 5, 0)


async def test_leaving_early_counts_what_was_delivered_and_leaves_the_engine_too():
    meter, inner = TokenMeter(), ThreeChunks()
    with meter.account("eval") as account:
        stream = MeteredEngine(inner, meter, account).generate(REQUEST)
        async for _chunk in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
    assert meter.delivered("eval") == 2
    assert inner.left
