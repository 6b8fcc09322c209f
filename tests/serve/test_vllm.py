"""vLLM's /inference/v1/generate over a scripted engine."""

from __future__ import annotations

import pytest

PATH = "/inference/v1/generate"
BODY = {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "skip_special_tokens": False}}


def body(**sampling):
    return {**BODY, "sampling_params": {**BODY["sampling_params"], **sampling}}


async def test_tokens_in_tokens_log_probs_and_versions_out(serve):
    async with serve(lambda prompt: [8, 9, 10]) as served:
        answer = await served.post(PATH, {**body(logprobs=2, prompt_logprobs=1), "return_token_ids": True})
        (choice,) = answer["choices"]
        assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([8, 9, 10], "stop", None)
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 3}]
        content = choice["logprobs"]["content"]
        assert [(entry["token_id"], entry["token"], entry["logprob"]) for entry in content] == [
            (token, f"token_id:{token}", -0.5) for token in (8, 9, 10)
        ]
        assert [entry["top_logprobs"][0]["token_id"] for entry in content] == [8, 9, 10]
        assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        assert answer["prompt_token_ids"] == [5, 6, 7]
        nothing, *places = answer["prompt_logprobs"]
        assert nothing is None
        assert [str(token) in place for token, place in zip((6, 7), places, strict=True)] == [True, True]
        assert (await served.post(PATH, BODY))["choices"][0]["logprobs"] is None
        (choice,) = (await served.post(PATH, body(stop_token_ids=[10], seed=3, min_p=0.1, logprobs=0)))["choices"]
        assert choice["stop_reason"] == 10
        assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [1, 1, 1]
        sampling = served.engines[0].requests[-1].sampling
        assert (sampling.max_new_tokens, sampling.seed, sampling.min_p) == (8, 3, 0.1)


async def test_several_choices_have_seeds_of_their_own(serve):
    async with serve(lambda prompt: [8, 9]) as served:
        answer = await served.post(PATH, body(n=3, seed=5))
        assert [(each["index"], each["token_ids"]) for each in answer["choices"]] == [(at, [8, 9]) for at in range(3)]
        assert answer["usage"]["completion_tokens"] == 6
        assert len({request.sampling.seed for request in served.engines[0].requests}) == 3


async def test_turns_of_a_session_continue_each_other(serve):
    async with serve(lambda prompt: [9, 10]) as served:
        first = await served.post(f"/sessions/s{PATH}", BODY)
        longer = [*BODY["token_ids"], *first["choices"][0]["token_ids"], 11]
        await served.post(f"/sessions/s{PATH}", {**BODY, "token_ids": longer})
        status = await served.get("/sessions/s")
        assert (status["turns"], status["branches"]) == (2, 1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({**BODY, "token_ids": []}, "token_ids"),
        ({**BODY, "features": {}}, "features"),
        ({**BODY, "stream": True}, "stream"),
        ({**BODY, "output_mode": "text"}, "output_mode"),
        (body(n=65), "at most 64 choices"),
        (body(extra_args={}), "sampling_params.extra_args is not served"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(serve, wrong, said):
    async with serve() as served:
        assert said in (await served.post(PATH, wrong, status=400))["error"]["message"]
        await served.post(PATH, {**BODY, "model": "other"}, status=404)
