"""The modelled decoder, with hand-worked numbers."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.simulation import run_virtually
from asyncrl.simulation.model import ModelledDecoder


def test_tokens_carry_the_version_they_were_sampled_under():
    async def story() -> tuple[dict[int, int], float]:
        decoder = ModelledDecoder(tokens_per_s=2, weight_version=5)
        request = asyncio.create_task(decoder.generate(10))  # a token every half second
        await asyncio.sleep(2.2)
        decoder.commit(6)  # after 4 tokens
        await asyncio.sleep(1)
        decoder.commit(7)  # after 6
        counts = await request
        return dict(counts), asyncio.get_running_loop().time()

    counts, at_s = run_virtually(story())
    assert counts == {5: 4, 6: 2, 7: 4}
    assert at_s == pytest.approx(5.0)


def test_requests_above_the_saturation_share_the_speed():
    async def story() -> list[float]:
        decoder = ModelledDecoder(tokens_per_s=1, saturation=2)
        clock = asyncio.get_running_loop().time

        async def request(tokens: int) -> float:
            await decoder.generate(tokens)
            return clock()

        return list(await asyncio.gather(request(2), request(2), request(2), request(4)))

    # Four share the speed of two: 2 tokens each take 4 s. Then the last one is alone: 2 more tokens take 2 s.
    assert run_virtually(story()) == pytest.approx([4.0, 4.0, 4.0, 6.0])


def test_a_request_that_is_cancelled_leaves_its_share_to_the_others():
    async def story() -> float:
        decoder = ModelledDecoder(tokens_per_s=1, saturation=1)
        first, second = asyncio.create_task(decoder.generate(10)), asyncio.create_task(decoder.generate(4))
        await asyncio.sleep(4)  # 2 tokens each
        first.cancel()
        await second
        assert decoder.running == 0
        return asyncio.get_running_loop().time()

    assert run_virtually(story()) == pytest.approx(6.0)


def test_a_pace_of_zero_stops_the_decoder():
    async def story() -> float:
        decoder = ModelledDecoder(tokens_per_s=1)
        request = asyncio.create_task(decoder.generate(3))
        await asyncio.sleep(1)
        decoder.set_pace(0)
        await asyncio.sleep(100)
        decoder.set_pace(0.5)
        await request
        return asyncio.get_running_loop().time()

    assert run_virtually(story()) == pytest.approx(105.0)
