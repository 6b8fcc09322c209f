"""SGLang's body of /generate over a scripted engine."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from asyncrl.serve.limits import Limits

BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8}}


async def test_tokens_in_tokens_and_log_probs_out(serve, text):
    async with serve(lambda prompt: "it again<|end|>") as served:
        answer = await served.post("/generate", {**BODY, "return_logprob": True, "top_logprobs_num": 2, "rid": "r1"})
        ids, info = answer["output_ids"], answer["meta_info"]
        assert answer["text"] == "it again"
        assert text.renderer.decode(ids) == "it again<|end|>"
        assert info["output_token_logprobs"] == [[-0.5, token, None] for token in ids]
        assert [len(place) for place in info["output_top_logprobs"]] == [2] * len(ids)
        assert (info["input_token_logprobs"], info["output_token_logprobs_length"]) == ([], len(ids))
        assert (info["id"], info["prompt_tokens"], info["completion_tokens"]) == ("r1", 3, len(ids))
        assert info["finish_reason"] == {"type": "stop", "matched": ids[-1]}
        assert info["weight_version"] == "0"
        assert info["weight_versions"] == [{"version": 0, "start": 0, "end": len(ids)}]
        short = await served.post("/generate", {**BODY, "sampling_params": {"max_new_tokens": 1}})
        assert short["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
        assert "output_token_logprobs" not in short["meta_info"]
        plain = await served.post(
            "/generate", {"text": "say it again", "return_logprob": True, "return_text_in_logprobs": True}
        )
        assert list(served.engines[0].requests[-1].prompt_token_ids) == text.encode("say it again")
        assert served.engines[0].requests[-1].sampling.max_new_tokens == 128
        spelled = [entry[2] for entry in plain["meta_info"]["output_token_logprobs"]]
        assert "".join(spelled) == "it again<|end|>"


async def test_an_answer_that_the_context_ends_has_the_length_that_it_has(serve):
    async with serve(lambda prompt: [8, 9]) as served:
        decode = served.engines[0]._decode

        async def cut(request, running):
            async for chunk in decode(request, running):
                yield structs.replace(chunk, finish_reason=chunk.finish_reason and "length")

        served.engines[0]._decode = cut
        answer = await served.post("/generate", BODY)
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


async def test_several_samples_are_a_list(serve):
    async with serve(lambda prompt: "it again<|end|>") as served:
        answers = await served.post("/sessions/s/generate", {**BODY, "sampling_params": {"n": 2, "seed": 5}})
        assert [answer["text"] for answer in answers] == ["it again"] * 2
        assert len({request.sampling.seed for request in served.engines[0].requests}) == 2
        assert len((await served.get("/sessions/s/trajectories"))["trajectories"]) == 2


async def test_the_log_probs_of_a_prompt_alone(serve):
    async with serve(lambda prompt: [9]) as served:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
        for start, ids in ((0, [5, 6, 7]), (1, [6, 7])):
            answer = await served.post("/sessions/s/generate", {**body, "logprob_start_len": start})
            entries = answer["meta_info"]["input_token_logprobs"]
            assert [entry[1] for entry in entries] == ids
            assert entries[0][0] is None
            assert all(entry[0] < 0 for entry in entries[1:])
            assert (answer["output_ids"], answer["text"]) == ([], "")
            assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        await served.get("/sessions/s", status=404)  # nothing was sampled in it


async def test_a_stream_ends_with_the_whole_answer(serve):
    async with serve(lambda prompt: "it again, glädly<|end|>") as served:
        body = {**BODY, "sampling_params": {"max_new_tokens": 80}, "return_logprob": True, "rid": "r"}
        whole = await served.post("/generate", body)
        lines = await served.events("/generate", {**body, "stream": True})
        assert lines[-1] == "data: [DONE]"
        parts = [json.loads(line[6:]) for line in lines[:-1]]
        assert parts[-1] == whole
        assert len(parts) > 1
        assert [part["meta_info"]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)


async def test_events_of_a_long_stream_are_further_apart(serve):
    async with serve(lambda prompt: [9] * 1000) as served:
        for interval, counts in ((None, [1, 2, 255, 257, 259]), (100, [1, 101, 201, 901, 1000])):
            given = {"max_new_tokens": 1000, "stream_interval": interval}
            body = {"input_ids": [5], "sampling_params": given, "return_logprob": True, "stream": True}
            parts = [json.loads(line[6:]) for line in (await served.events("/generate", body))[:-1]]
            sent = [len(part["output_ids"]) for part in parts]
            assert set(counts) <= set(sent)
            assert (sent[-1], len(sent) < 600) == (1000, True)


async def test_events_that_repeat_a_long_prompt_are_few(serve):
    body = {"input_ids": [5] * 1280, "return_logprob": True, "logprob_start_len": 0, "stream": True}
    async with serve(lambda prompt: [9] * 200) as served:
        lines = await served.events("/generate", {**body, "sampling_params": {"max_new_tokens": 200}})
        parts = [json.loads(line[6:]) for line in lines[:-1]]
        assert {len(part["meta_info"]["input_token_logprobs"]) for part in parts} == {1280}
        assert [len(part["output_ids"]) for part in parts] == [1, *range(11, 122, 10), *range(132, 200, 11), 200]


@pytest.mark.parametrize(("prompt", "answer"), [(1, 40), (30, 60), (90, 10)])
async def test_all_events_of_a_stream_have_at_most_twice_the_log_probs_that_an_answer_may_have(serve, prompt, answer):
    async with serve(lambda prompt: [9] * answer, limits=Limits(likeliest_tokens=300)) as served:
        body = {"input_ids": [5] * prompt, "sampling_params": {"max_new_tokens": answer}, "stream": True}
        body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        parts = [json.loads(line[6:])["meta_info"] for line in (await served.events("/generate", body))[:-1]]
        places = [each for part in parts for side in ("input", "output") for each in part[f"{side}_top_logprobs"]]
        assert sum(len(place or ()) for place in places) <= 600
        assert (len(parts) >= 2, len(parts[-1]["output_top_logprobs"])) == (True, answer)


async def test_a_bound_beyond_the_context_makes_events_no_rarer(serve):
    async with serve(lambda prompt: [9] * 40, limits=Limits(likeliest_tokens=300)) as served:
        served.state.context_tokens = 50
        body = {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 2, "stream": True}
        counts = [
            len(await served.events("/generate", {**body, "sampling_params": {"max_new_tokens": most}}))
            for most in (49, 10_000)
        ]
        assert counts[0] == counts[1] > 3


async def test_a_turn_is_captured_after_the_one_that_it_continues(serve):
    async with serve(lambda prompt: [9, 10]) as served:
        first = await served.post("/sessions/s/generate", BODY)
        longer = [*BODY["input_ids"], *first["output_ids"], 11]
        await served.post("/sessions/s/generate", {**BODY, "input_ids": longer})
        status = await served.get("/sessions/s")
        assert (status["turns"], status["branches"]) == (2, 1)


async def test_sampling_params_reach_the_engine(serve):
    async with serve(lambda prompt: "it again, gladly") as served:
        given = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "stop": ["again"]}
        given |= {"stop_token_ids": [9], "frequency_penalty": 0.5, "ignore_eos": True, "logit_bias": {"7": 1.0}}
        given |= {"sampling_seed": 3, "n": 1, "no_stop_trim": True}
        answer = await served.post("/generate", {"input_ids": [5], "sampling_params": given})
        assert answer["text"].endswith("again")
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "again"}
        sampling = served.engines[0].requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 0, 3)
        assert (sampling.stop, sampling.stop_token_ids) == (("again",), (9,))
        assert (sampling.frequency_penalty, sampling.ignore_eos, sampling.logit_bias) == (0.5, True, ((7, 1.0),))
        await served.post("/generate", {"input_ids": [5], "sampling_params": {"min_new_tokens": 2}})
        assert served.engines[0].requests[-1].sampling.min_tokens == 2
        for form in ({"json_schema": '{"type": "object"}'}, {"regex": "a+"}, {"ebnf": 'root ::= "a"'}):
            await served.post("/generate", {"input_ids": [5], "sampling_params": form})
            assert served.engines[0].requests[-1].sampling.grammar


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({**BODY, "prompt_token_ids": [1]}, "input_ids is of SGLang's body, prompt_token_ids of asyncrl's"),
        ({**BODY, "max_new_tokens": 3}, "max_new_tokens of asyncrl's"),
        ({**BODY, "temperature": 1.0}, "temperature of asyncrl's"),
        ({"prompt_token_ids": [1], "sampling_params": {}}, "sampling_params is of SGLang's body"),
        ({"sampling_params": {}}, "give input_ids or text"),
        ({**BODY, "text": "x"}, "give input_ids or text"),
        ({}, "prompt_token_ids are missing"),
        ({"input_ids": [[1], [2]]}, "input_ids[0]"),
        ({**BODY, "lora_path": "x"}, "lora_path"),
        ({"input_ids": [1], "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex"),
        ({"input_ids": [1], "sampling_params": {"n": 2}, "stream": True}, "n = 2 is not served"),
        ({"input_ids": [1], "sampling_params": {"n": 65}}, "at most 64 choices"),
        ({"input_ids": [1], "sampling_params": {"regex": "a", "ebnf": "b"}}, "regex and ebnf"),
        ({"input_ids": [1], "sampling_params": {"json_schema": "no"}}, "json_schema is no JSON"),
        ({"input_ids": []}, "input_ids"),
        ({**BODY, "rid": "r" * 129}, "rid"),
    ],
)
async def test_mixtures_and_what_is_not_served_are_refused_by_name(serve, body, said):
    async with serve() as served:
        assert said in (await served.post("/generate", body, status=400))["error"]["message"]


async def test_without_a_tokenizer_there_are_ids_alone(serve):
    async with serve(lambda prompt: [9, 10], with_text=False) as served:
        answer = await served.post("/generate", BODY)
        assert answer["output_ids"] == [9, 10]
        assert "text" not in answer
        await served.post("/generate", {"text": "x"}, status=501)
