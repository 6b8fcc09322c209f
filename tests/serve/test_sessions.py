"""Sessions: an agent without any training code leaves token-exact, versioned trajectories."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data import DataProto
from asyncrl.interfaces import Generation
from asyncrl.serve.call import Call, EventStream
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import Limits
from asyncrl.serve.sessions import Session, Sessions


def chat(*messages):
    return {"model": "tiny", "messages": list(messages)}


def user(content):
    return {"role": "user", "content": content}


async def test_a_later_turn_begins_with_exactly_the_ids_sampled_before(serve, text):
    encode = text.renderer.tokenizer.encode
    odd = [token for letter in "again" for token in encode(letter, add_special_tokens=False)]
    whole = encode("again", add_special_tokens=False)
    assert odd != whole  # the model's tokens differ from the tokenizer's
    end = text.renderer.end_of_turn_id
    async with serve(lambda prompt: [*odd, end]) as served:
        headers = {"X-Session-ID": "chat-7"}
        messages = [user("say it")]
        for _ in range(3):
            answer = await served.post("/v1/chat/completions", chat(*messages), headers=headers)
            messages += [answer["choices"][0]["message"], user("again")]
        first, second, third = (request.prompt_token_ids for request in served.engines[0].requests)
        assert second[: len(first) + len(odd) + 1] == (*first, *odd, end)
        assert third[: len(second) + len(odd) + 1] == (*second, *odd, end)
        appended = text.renderer.extend([user("say it")], [end], [user("again")])
        assert list(second[len(first) + len(odd) + 1 :]) == appended
        status = await served.get("/sessions/chat-7")
        assert (status["turns"], status["branches"]) == (3, 1)


async def test_a_reward_writes_a_file_of_trajectory_columns(serve, text):
    async with serve(lambda prompt: "it<|end|>") as served:
        url = "/sessions/task-1/v1/chat/completions"
        answer = await served.post(url, chat(user("say it")))
        engine = served.engines[0]
        await engine.prepare_weights({}, version=4)
        await engine.commit_weights(4)
        await served.post(url, chat(user("say it"), answer["choices"][0]["message"], user("again")))
        [branch] = (await served.get("/sessions/task-1/trajectories"))["trajectories"]
        kept = await served.post("/sessions/task-1/reward", {"reward": 0.5, "info": {"task": 3}})
        assert kept["kept"] == "00000000.asyncrl"
        rows = DataProto.load_from_disk(served.folder / "00000000.asyncrl")
        assert rows.batch["input_ids"][0].tolist() == branch["input_ids"]
        versions = rows.batch["weight_versions"][0].tolist()
        assert versions == branch["weight_versions"]
        sampled = len(text.renderer.tokenizer.encode("it<|end|>", add_special_tokens=False))
        assert [version for version in versions if version >= 0] == [0] * sampled + [4] * sampled
        assert rows.batch["loss_mask"][0].tolist() == [version >= 0 for version in versions]
        assert rows.batch["rewards"].tolist() == [0.5]
        assert rows.non_tensor_batch["info"][0] == {"task": 3}
        await served.get("/sessions/task-1", status=404)


async def test_branches_share_a_turn_that_is_trained_once(serve):
    async with serve(lambda prompt: "it<|end|>") as served:
        url = "/sessions/s/v1/chat/completions"
        answer = await served.post(url, chat(user("say it")))
        message = answer["choices"][0]["message"]
        await served.post(url, chat(user("say it"), message, user("again")))
        await served.post(url, chat(user("say it"), message, user("please")))
        await served.post(url, chat(user("another")))
        branches = (await served.get("/sessions/s/trajectories"))["trajectories"]
        per_turn = sum(branches[2]["loss_mask"])
        assert [sum(branch["loss_mask"]) for branch in branches] == [2 * per_turn, per_turn, per_turn]
        status = await served.get("/sessions/s")
        assert status["tokens"] < sum(len(branch["input_ids"]) for branch in branches)


async def test_branches_that_share_much_are_returned_within_a_bound(serve):
    async with serve(lambda prompt: [prompt[-1] + 1], limits=Limits(session_tokens=20)) as served:
        await served.post("/sessions/s/generate", {"prompt_token_ids": [5, 6]})
        for last in (10, 20, 30, 40):
            await served.post("/sessions/s/generate", {"prompt_token_ids": [5, 6, 7, last]})
        branches = (await served.get("/sessions/s/trajectories"))["trajectories"]
        assert [len(branch["input_ids"]) for branch in branches] == [5] * 4
        await served.post("/sessions/s/generate", {"prompt_token_ids": [5, 6, 7, 50]})
        refused = await served.get("/sessions/s/trajectories", status=409)
        assert "have 25 tokens, at most 20 are returned" in refused["error"]["message"]
        assert (await served.get("/sessions/s"))["tokens"] == 3 + 5 * 2


async def test_groups_are_stored_together(serve):
    async with serve(lambda prompt: "it<|end|>") as served:
        for number in (0, 1):
            await served.post(f"/sessions/s{number}/v1/chat/completions", chat(user("say it")))
            kept = await served.post(
                f"/sessions/s{number}/reward", {"reward": float(number), "group": "g", "group_size": 2}
            )
        assert kept["kept"] == "00000000.asyncrl"
        rows = DataProto.load_from_disk(served.folder / "00000000.asyncrl")
        assert rows.batch["rewards"].tolist() == [0.0, 1.0]
        assert rows.batch["row"].tolist() == [0, 1]


async def test_a_tool_call_is_recognised_when_a_client_sends_it_back(serve, text):
    call = 'sum:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    async with serve(lambda prompt: call) as served:
        url = "/sessions/s/v1/chat/completions"
        answer = await served.post(url, {**chat(user("say it")), "tools": tools})
        message = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        await served.post(url, {**chat(user("say it"), message, result), "tools": tools})
        status = await served.get("/sessions/s")
        assert (status["turns"], status["branches"]) == (2, 1)


HALF = '{"x": "\\ud83d"}'  # half of a character
NUMBER = '{"x": [1e999]}'  # infinite
DEEP = '{"x": ' + "[" * 900 + "]" * 900 + "}"


@pytest.mark.parametrize(
    "arguments", [HALF, NUMBER, DEEP, "[1]"], ids=["half a character", "number", "deep", "no object"]
)
async def test_a_call_that_cannot_be_encoded_again_is_text(serve, arguments):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    call = '<tool_call>{"name": "f", "arguments": ' + arguments + "}</tool_call><|end|>"
    replies = iter(["it<|end|>", call, "it<|end|>"])
    async with serve(lambda prompt: next(replies)) as served:
        url = "/sessions/s/v1/chat/completions"
        answer = await served.post(url, {**chat(user("say it")), "tools": tools, "max_tokens": 4000})
        messages = [user("say it"), answer["choices"][0]["message"], user("again")]
        answer = await served.post(url, {**chat(*messages), "tools": tools, "max_tokens": 4000})
        message = answer["choices"][0]["message"]
        assert "<tool_call>" in message["content"]
        assert not message.get("tool_calls")
        await served.post(url, {**chat(*messages, message, user("again")), "tools": tools})
        status = await served.get("/sessions/s")
        assert (status["turns"], status["branches"]) == (3, 1)
        called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}
        error = await served.post(url, {**chat(user("say it"), called, user("again")), "tools": tools}, status=400)
        assert "arguments of a tool call" in error["error"]["message"]


async def test_token_prompts_continue_a_turn(serve):
    async with serve(lambda prompt: [prompt[-1] + 1, prompt[-1] + 2]) as served:
        await served.post("/sessions/t/generate", {"prompt_token_ids": [5, 6]})
        await served.post("/sessions/t/generate", {"prompt_token_ids": [5, 6, 7, 8, 20]})
        await served.post("/sessions/t/generate", {"prompt_token_ids": [5, 6, 9]})
        branches = (await served.get("/sessions/t/trajectories"))["trajectories"]
        assert [branch["input_ids"] for branch in branches] == [[5, 6, 7, 8, 20, 21, 22], [5, 6, 9, 10, 11]]
        assert branches[0]["loss_mask"] == [False, False, True, True, False, True, True]


async def test_a_client_that_samples_in_pieces_continues_one_conversation(serve):
    async with serve(lambda prompt: [prompt[-1] + 1, prompt[-1] + 2]) as served:
        for prompt in ([5, 6], [5, 6, 7, 8], [5, 6, 7, 8, 9, 10]):
            await served.post("/sessions/t/generate", {"prompt_token_ids": prompt})
        await served.post("/sessions/t/reward", {"reward": 1.0, "turn_rewards": [0.0, 0.0, 1.0]})
        batch = DataProto.load_from_disk(served.folder / "00000000.asyncrl")
        assert batch.batch["input_ids"].values().tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
        assert batch.batch["turns"].values().tolist() == [-1, -1, 0, 0, 1, 1, 2, 2]
        assert batch.batch["branches"].values().tolist() == []  # a line
        assert len(set(batch.meta_info["summary"]["turn_anchors"][0])) == 3


async def test_token_prompts_branch_after_a_turn_that_is_followed_already(serve):
    async with serve(lambda prompt: [prompt[-1] + 1, prompt[-1] + 2]) as served:
        for prompt in ([5, 6], [5, 6, 7, 8, 20], [5, 6, 7, 8, 30], [5, 6]):
            await served.post("/sessions/t/generate", {"prompt_token_ids": prompt})
        await served.post("/sessions/t/generate", {"prompt_token_ids": [5, 6, 7, 8, 40]})
        branches = (await served.get("/sessions/t/trajectories"))["trajectories"]
        assert [(branch["input_ids"][4:], sum(branch["loss_mask"])) for branch in branches] == [
            ([20, 21, 22], 4),
            ([30, 31, 32], 2),  # its first turn is trained on in the branch before
            ([40, 41, 42], 4),  # of two equal answers the one that nothing follows
        ]
        assert (await served.get("/sessions/t"))["tokens"] == 4 + 3 + 3 + 4 + 3


async def test_a_reward_may_follow_the_last_event_immediately(serve):
    async with serve(lambda prompt: "it<|end|>") as served:
        body = {"prompt_token_ids": [5, 6], "stream": True}
        async with served.client.post(f"{served.url}/sessions/s/generate", json=body) as answer:
            async for line in answer.content:
                if b'"finish_reason":"stop"' in line:
                    kept = await served.post("/sessions/s/reward", {"reward": 1.0})
        assert kept["branches"] == 1
        body = {**chat(user("say it")), "stream": True}
        async with served.client.post(f"{served.url}/sessions/s/v1/chat/completions", json=body) as answer:
            async for line in answer.content:
                if b"[DONE]" in line:
                    kept = await served.post("/sessions/s/reward", {"reward": 1.0})
        assert kept["kept"] == "00000001.asyncrl"


async def test_each_completion_of_a_stream_is_in_the_session_before_its_end_is_sent(serve, monkeypatch):
    record, send, order = Call.record, EventStream.send, []

    def recorded(*arguments):
        order.append("turn")
        record(*arguments)

    async def sent(events, content, **more):
        order.extend("end" for choice in content.choices if choice.finish_reason)
        await send(events, content, **more)

    monkeypatch.setattr(Call, "record", recorded)
    monkeypatch.setattr(EventStream, "send", sent)
    async with serve(lambda prompt: "it<|end|>") as served:
        body = {"model": "tiny", "prompt": [5, 6], "n": 2, "stream": True}
        await served.events("/sessions/s/v1/completions", body)
        assert order == ["turn", "end"] * 2
        assert (await served.get("/sessions/s"))["turns"] == 2


async def test_a_session_does_not_end_between_the_last_token_and_its_turn(serve, monkeypatch):
    async with serve(lambda prompt: "it<|end|>") as served:
        url, body = "/sessions/s/v1/chat/completions", chat(user("say it"))
        await served.post(url, body)
        collect = Call.collect_all

        async def then_reward(call, requests):
            generated = await collect(call, requests)
            refused = await served.post("/sessions/s/reward", {"reward": 1.0}, status=409)
            assert "1 requests of session 's' are running" in refused["error"]["message"]
            return generated

        monkeypatch.setattr(Call, "collect_all", then_reward)
        await served.post(url, {**body, "n": 2})
        status = await served.get("/sessions/s")
        assert (status["turns"], status["requests"]) == (3, 0)
        refused = await served.post("/sessions/s/reward", {"reward": 1.0, "turn_rewards": [1.0, 0.0]}, status=400)
        assert "2 turn_rewards for 3 turns" in refused["error"]["message"]
        await served.post("/sessions/s/reward", {"reward": 1.0, "turn_rewards": [1.0, 0.0, 0.0]})


def test_a_prompt_of_ids_continues_the_longest_turn_that_it_begins_with():
    dice, session, longest = random.Random(0), Session("s", ""), 0
    for _ in range(300):
        before = dice.choice(session._nodes).token_ids() if session._nodes else ()
        prompt = (*before, *dice.choices((1, 2), k=dice.randrange(0 if before else 1, 4)))
        place = session.token_prompt(prompt)
        ends = [tuple(node.token_ids()) for node in session._nodes]
        begun = max((len(ids) for ids in ends if prompt[: len(ids)] == ids), default=0)
        assert len(prompt) - len(place.appended) == begun
        sampled = tuple(dice.choices((1, 2), k=dice.randrange(1, 3)))
        session.add(place, turn(sampled), {"role": "assistant", "content": ""})
        longest = max(longest, begun)
    assert longest > 20


def turn(sampled):
    count = len(sampled)
    return Generation(token_ids=sampled, log_probs=(-0.5,) * count, weight_versions=(0,) * count, finish_reason="stop")


def test_idle_sessions_are_dropped_whatever_is_used_before_them():
    now = 0.0
    sessions = Sessions(Limits(session_idle_s=10.0), lambda: now)

    def end(session):
        sessions.add(session, session.token_prompt((1, 2)), turn((3,)), {"role": "assistant", "content": ""})
        sessions.leave(session)

    _, late = sessions.use("running", ""), sessions.use("late", "")
    now = 5.0
    end(sessions.use("idle", ""))
    now = 9.0
    end(late)
    now = 16.0
    assert sessions.get("idle", "") is None
    assert (len(sessions), sessions.tokens) == (2, 3)
    now = 30.0
    assert sessions.get("late", "") is None
    assert (len(sessions), sessions.tokens) == (1, 0)


def with_a_turn(sessions, name):
    session = sessions.use(name, "")
    sessions.add(session, session.token_prompt((1, 2)), turn((3,)), {"role": "assistant", "content": ""})
    sessions.leave(session)
    return session


def test_an_attempt_to_store_a_session_is_a_use_of_it():
    now = 0.0
    sessions = Sessions(Limits(session_idle_s=10.0), lambda: now)
    with_a_turn(sessions, "a")
    for attempt_s in (8.0, 16.0, 24.0):
        now = attempt_s
        with pytest.raises(OSError, match="full"), sessions.ending(sessions.find("a", "")):
            raise OSError("full")
    now = 40.0
    assert sessions.get("a", "") is None


def test_a_session_that_was_dropped_is_not_stored():
    sessions = Sessions(Limits(), lambda: 0.0)
    session = with_a_turn(sessions, "a")
    sessions.drop(session)
    other = with_a_turn(sessions, "a")
    with pytest.raises(APIError, match="there is no session 'a'"), sessions.ending(session):
        pytest.fail("it is stored")
    assert (sessions.get("a", ""), sessions.tokens) == (other, 3)


def test_who_speaks_is_part_of_a_conversation(text):
    session = Session("s", "")

    def ask(speaker, *more):
        return session.chat_prompt([{**user("hi"), "name": speaker}, *more], (), text)

    session.add(ask("alice"), turn((7,)), {"role": "assistant", "content": "it"})
    answered = [{"role": "assistant", "content": "it", "name": "policy"}, user("again")]
    assert ask("alice", *answered).parent is not None
    assert ask("bob", *answered).parent is None


def test_one_key_cannot_take_all_sessions():
    sessions = Sessions(Limits(sessions_per_key=2, captured_tokens_per_key=3), lambda: 0.0)
    sessions.several_keys = True
    first, second = (sessions.use(name, "alice") for name in "ab")
    for _ in range(2):
        with pytest.raises(APIError, match="this key has 2 sessions with 0 tokens"):
            sessions.use("c", "alice")
        sessions.use("c", "bob")
    sessions.leave(second)
    sessions.add(first, first.token_prompt((1, 2)), turn((3,)), {"role": "assistant", "content": ""})
    with pytest.raises(APIError, match="this key has 1 sessions with 3 tokens"):
        sessions.use("b", "alice")
    assert sessions.use("a", "alice") is first  # what has begun goes on
    sessions.several_keys = False
    sessions.leave(sessions.use("b", "alice"))
    sessions.several_keys = True
    for _ in range(2):
        sessions.leave(first)
    sessions.drop(first)
    sessions.use("c", "alice")


async def test_a_refused_request_leaves_no_session(serve):
    async with serve() as served:
        served.state.context_tokens = 3
        await served.post("/sessions/a/generate", {"prompt_token_ids": [5, 6, 7]}, status=400)
        assert len(served.state.sessions) == 0


async def test_sessions_have_bounds(serve):
    limits = Limits(sessions=1, session_tokens=4)
    async with serve(limits=limits) as served:
        await served.post("/sessions/a/generate", {"prompt_token_ids": [5, 6]})
        refused = await served.post("/sessions/b/generate", {"prompt_token_ids": [5, 6]}, status=503)
        assert "1 sessions are held" in refused["error"]["message"]
        await served.post("/sessions/a/generate", {"prompt_token_ids": [5, 6]}, status=409)
        async with served.client.delete(f"{served.url}/sessions/a") as answer:
            assert (await answer.json())["tokens"] == 5
        await served.post("/sessions/b/generate", {"prompt_token_ids": [5, 6]})
        await served.post("/sessions/c/reward", {"reward": 1.0}, status=404)
        await served.post("/sessions/b/reward", {"reward": "x"}, status=400)
        await served.post("/sessions/ü/generate", {"prompt_token_ids": [5, 6]}, status=400)


@pytest.mark.parametrize("used", [0, 1])
def test_the_scratch_template_is_rendered_incrementally(text, used):
    history = [user("a"), {"role": "assistant", "content": "b"}] * (used + 2) + [user("c")]
    assert text.report.incremental
    assert text.extend(history, [], [user("d")], ()) == text.renderer.extend(history, [], [user("d")])


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab\u00e9\u2713 <tol_ca>", max_size=6), max_size=8),
    stops=st.lists(st.text(alphabet="ab\u2713", min_size=1, max_size=3), max_size=1),
    cuts=st.lists(st.integers(1, 3), min_size=1, max_size=20),
)
def test_pieces_of_a_stream_join_to_the_whole_text(tokenizer, pieces, stops, cuts):
    from asyncrl.serve.text import TextStream

    def decode(ids):
        return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    whole = "".join(pieces)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    stream = TextStream(decode, stop=stops, hold="<to")
    given_out, at = [], 0
    for cut in cuts * (len(ids) + 1):
        given_out.append(stream.feed(ids[at : at + cut]))
        at += cut
        if at >= len(ids):
            break
    given_out.append(stream.finish())
    ends = [at for stop in stops if (at := whole.find(stop)) >= 0]
    expected = whole[: min(ends, default=len(whole))]
    assert "".join(given_out) + stream.held == expected
    assert "<to" not in "".join(given_out)


def test_a_whole_answer_is_decoded_once():
    from asyncrl.serve.text import TextStream

    decoded = 0

    def decode(ids):
        nonlocal decoded
        decoded += len(ids)
        return bytes(ids).decode()

    stream = TextStream(decode)
    assert (stream.feed([*b"it again"]) + stream.finish(), decoded) == ("it again", 8)


def test_bytes_that_make_no_character_are_not_decoded_again_and_again():
    from asyncrl.serve.text import TextStream

    decoded = 0

    def decode(ids):
        nonlocal decoded
        decoded += len(ids)
        return bytes(ids).decode(errors="replace")

    stream, invalid, whole = TextStream(decode), [0x80] * 2000, [*b"so"]
    text = "".join(stream.feed([each]) for each in (*invalid, *whole)) + stream.finish()
    assert text == bytes((*invalid, *whole)).decode(errors="replace")
    assert decoded < 200 * len(invalid)
