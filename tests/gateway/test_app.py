"""The gateway as its clients see it: real processes, real HTTP, the official client."""

import concurrent.futures
import os
import signal
import sqlite3
import time

import httpx
import openai
import pytest

from tests.gateway.conftest import CALL, ENGINE, TOOLS, gateway_arguments, open_session, running, start
from tests.gateway.scripted_engine import scripted_logprob

SYSTEM = {"role": "system", "content": "add numbers"}
USER = {"role": "user", "content": "what is three and four"}


def tool_result(text, call_id="call_x"):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def sampled(trajectory):
    """The trained ids of a trajectory."""
    return [token for token, mask in zip(trajectory["ids"], trajectory["loss_mask"], strict=True) if mask]


def wait_for(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    raise TimeoutError


# What is recorded


def test_an_episode_is_recorded_as_the_engine_saw_it(agent, script, engine_log, tokenizer):
    script(f"{CALL}<|observation|>", "the answer is seven<|user|>", version=7)
    client = agent()
    answer = client.reply([SYSTEM, USER], tools=TOOLS)
    call = answer["tool_calls"][0]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("add", '{"a": 1, "b": 2}')
    assert answer["content"] is None
    final = client.reply([SYSTEM, USER, answer, tool_result("3", call["id"])], tools=TOOLS)
    assert final == {"role": "assistant", "content": "the answer is seven"}
    first, second = engine_log()["requests"]
    result = client.trajectories()
    (trajectory,) = result["trajectories"]
    outputs = [tokenizer.encode(text, allow_special=True)
               for text in (f"{CALL}<|observation|>", "the answer is seven<|user|>")]
    assert second["input_ids"][:len(first["input_ids"] + outputs[0])] == first["input_ids"] + outputs[0]
    assert trajectory["ids"] == second["input_ids"] + outputs[1]
    assert sampled(trajectory) == outputs[0] + outputs[1]
    for token, mask, logprob, version in zip(*(trajectory[key] for key in ("ids", "loss_mask", "logprobs", "versions")),
                                             strict=True):
        assert (logprob, version) == ((scripted_logprob(token), 7) if mask else (0.0, -1))
    assert (result["turns"], result["mismatches"], result["kinds"]) == (2, 0, {"root": 1, "extend": 1})
    whole = tokenizer.render([SYSTEM, USER, answer, tool_result("3"), final], tools=TOOLS, clear_thinking=False)
    assert trajectory["ids"][:-1] == whole.ids


def test_ids_that_no_encoder_would_choose_are_kept(agent, script, tokenizer):
    script({"text": "seven three<|user|>", "spelled": True}, "the answer<|user|>")
    client = agent()
    answer = client.reply([USER])
    assert answer["content"] == "seven three"
    client.reply([USER, answer, {"role": "user", "content": "and"}])
    result = client.trajectories()
    (trajectory,) = result["trajectories"]
    spelled = sampled(trajectory)[:11]
    assert len(tokenizer.encode("seven three")) < 11 and tokenizer.decode(spelled) == "seven three"
    assert result["mismatches"] == 0


def test_a_client_that_rewrites_calls_ids_and_spaces_still_extends(agent, script):
    script(f"the answer {CALL}<|observation|>", "seven<|user|>")
    client = agent()
    answer = client.reply([SYSTEM, USER], tools=TOOLS)
    answer["tool_calls"] = [{"id": "own", "type": "function",
                             "function": {"name": "add", "arguments": '{ "b":2.0,"a":1 }'}}]
    answer["content"] = [{"type": "text", "text": answer["content"] + "\n"}]
    client.reply([{**SYSTEM, "role": "developer", "content": "add numbers  "}, USER, answer, tool_result("3", "own")],
                 tools=TOOLS)
    assert client.trajectories()["kinds"] == {"root": 1, "extend": 1}


def test_a_rewritten_history_forks_and_is_counted(agent, script):
    script("three<|user|>", "four<|user|>", "seven<|user|>")
    client = agent()
    answer = client.reply([USER])
    client.reply([USER, answer, USER])
    client.reply([USER, {**answer, "content": "something else"}, USER])
    client.reply([{**USER, "content": "the answer"}])
    result = client.trajectories()
    assert result["mismatches"] == 1 and result["kinds"] == {"root": 2, "extend": 1, "rewrite": 1}
    assert len(result["trajectories"]) == 3
    turns = [turn for item in result["trajectories"] for turn in item["turn_ids"]]
    assert len(turns) == len(set(turns)) == 4


def test_parallel_calls_are_branches_and_shared_turns_are_trained_once(agent, script, tokenizer):
    script("three<|user|>", {"text": "seven<|user|>", "delay_s": 0.2})
    client = agent()
    answer = client.reply([USER])
    requests = [[USER, answer, {"role": "user", "content": f"make {number}"}] for number in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(client.reply, requests))
    assert all(item["content"] == "seven" for item in answers)
    result = client.trajectories()
    assert result["kinds"] == {"root": 1, "extend": 8}
    assert len(result["trajectories"]) == 8
    three, seven = (tokenizer.encode(f"{word}<|user|>", allow_special=True) for word in ("three", "seven"))
    assert sorted(map(sampled, result["trajectories"]), key=len) == [seven] * 7 + [three + seven]


def test_an_unparseable_tool_call_is_text_and_its_ids_are_kept(agent, script, tokenizer):
    broken = "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    script(f"{broken}<|observation|>", "seven<|user|>")
    client = agent()
    answer = client.reply([USER], tools=TOOLS)
    assert answer == {"role": "assistant", "content": broken}
    client.reply([USER, answer, tool_result("error: bad call")], tools=TOOLS)
    result = client.trajectories()
    kept = tokenizer.encode(f"{broken}<|observation|>seven<|user|>", allow_special=True)
    assert sampled(result["trajectories"][0]) == kept
    assert result["mismatches"] == 0


def test_prompts_follow_the_switches_of_the_session(agent, script, engine_log, tokenizer):
    script("because</think>seven<|user|>")
    for thinking, declared in ((True, True), (False, False)):
        client = agent(enable_thinking=thinking, declare_tools=declared)
        answer = client.reply([USER], tools=TOOLS)
        prompt = tokenizer.decode(engine_log()["requests"][-1]["input_ids"])
        assert prompt.endswith("<|assistant|><think>" if thinking else "<|assistant|></think>")
        assert ("<tools>" in prompt) == declared
        assert answer.get("reasoning_content") == ("because" if thinking else None)


def test_undeclared_tools_still_type_the_arguments(agent, script):
    script(CALL.replace("<arg_value>2", "<arg_value>2x") + "<|observation|>")
    arguments = agent(declare_tools=False).reply([USER], tools=TOOLS)["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"a": 1, "b": "2x"}'


# What is sampled


def test_the_session_decides_sampling_and_the_client_can_only_shorten(agent, script, engine_log, tokenizer):
    script("the answer is seven<|user|>")
    client = agent(sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": 6, "seed": 100})
    assert client.chat([USER], temperature=0, top_p=0.1, max_tokens=1000, seed=5).status_code == 200
    response = client.chat([USER], max_completion_tokens=2).json()
    assert response["choices"][0]["finish_reason"] == "length"
    first, second = (item["sampling_params"] for item in engine_log()["requests"])
    assert first == {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": 6, "seed": 101,
                     "stop_token_ids": list(tokenizer.stop_ids)}
    assert (second["max_new_tokens"], second["seed"]) == (2, 102)
    assert response["usage"]["completion_tokens"] == 2
    assert response["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("extra", [
    {"n": 2}, {"stop": ["\n"]}, {"logit_bias": {"5": 1}}, {"tool_choice": "required"},
    {"response_format": {"type": "json_object"}}, {"max_tokens": 0}, {"max_tokens": "many"}, {"tools": "add"}])
def test_what_cannot_be_recorded_is_refused_by_name(agent, script, engine_log, extra):
    script("seven<|user|>")
    client = agent()
    response = client.chat([USER], **extra)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == next(iter(extra)) and next(iter(extra)) in error["message"]
    assert client.chat([USER], n=1, tool_choice="auto", stop=None).status_code == 200
    assert len(engine_log()["requests"]) == 1


def test_limits_give_errors_that_the_official_client_understands(agent, script):
    script("seven three<|user|>")
    client = agent(max_turns=1)
    api = openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0)
    with api:
        api.chat.completions.create(model="m", messages=[USER])
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(model="m", messages=[SYSTEM, USER])
    assert caught.value.code == "turn_limit_exceeded"
    script("seven three<|user|>", max_context=4096)
    spent = agent(max_tokens=1)
    assert spent.chat([USER]).json()["choices"][0]["finish_reason"] == "length"
    assert spent.chat([SYSTEM, USER]).json()["error"]["code"] == "token_limit_exceeded"


def test_a_prompt_longer_than_the_context_is_refused_as_openai_does(agent, script):
    client = agent()
    response = client.chat([{"role": "user", "content": "word " * 3000}])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in response.json()["error"]["message"]
    assert client.trajectories()["turns"] == 0


# How it is answered


def test_the_official_client_gets_the_same_answer_streamed_and_whole(agent, script):
    script(f"because</think>the answer {CALL}{CALL}<|observation|>")
    client = agent(enable_thinking=True)
    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as api:
        assert [model.id for model in api.models.list()] == ["glm5"]
        whole = api.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
        chunks = list(api.chat.completions.create(model="m", messages=[USER], tools=TOOLS, stream=True,
                                                  stream_options={"include_usage": True}))
    message = whole.choices[0].message
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == message.content == "the answer "
    extras = [delta.model_extra or {} for delta in deltas]
    assert [extra["reasoning_content"] for extra in extras if extra] == ["because"]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    starts, arguments = [call for call in calls if call.id], [call for call in calls if not call.id]
    assert [(call.index, call.id, call.function.name) for call in starts] == [
        (index, starts[index].id, call.function.name) for index, call in enumerate(message.tool_calls)]
    assert [call.function.arguments for call in arguments] == [call.function.arguments for call in message.tool_calls]
    assert len({call.id for call in starts}) == 2
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_ids_and_log_probs_are_given_to_those_who_ask(agent, script, engine_log, tokenizer):
    script("seven<|user|>")
    answer = agent().chat([USER], logprobs=True, return_token_ids=True).json()
    ids = tokenizer.encode("seven<|user|>", allow_special=True)
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"] == engine_log()["requests"][0]["input_ids"]
    content = answer["choices"][0]["logprobs"]["content"]
    assert [item["logprob"] for item in content] == [scripted_logprob(token) for token in ids]
    assert content[0]["token"] == tokenizer.decode(ids[:1])
    assert content[0]["bytes"] == list(content[0]["token"].encode())


def test_a_slow_stream_is_kept_alive_and_errors_stay_errors(agent, script):
    script({"text": "seven<|user|>", "delay_s": 2.5})
    slow = agent().chat([USER], stream=True)
    assert slow.text.startswith(": keep-alive\n\n") and slow.text.endswith("data: [DONE]\n\n")
    assert '"content": "seven"' in slow.text
    script({"answer": '{"output_ids": [1], "logprobs": [], "weight_versions": [1], "finish_reason": "stop"}'})
    fast = agent().chat([USER], stream=True)
    assert fast.status_code == 502 and "lengths [1, 0, 1]" in fast.json()["error"]["message"]


# Retries, disconnects, endings


def test_the_same_request_again_gets_the_stored_answer_until_something_else_happens(agent, script, engine_log):
    script("three<|user|>", "seven<|user|>")
    client = agent()
    first, again = client.chat([USER]), client.chat([USER])
    assert first.content == again.content
    assert len(engine_log()["requests"]) == 1
    answer = first.json()["choices"][0]["message"]
    client.reply([USER, answer, USER])
    assert client.chat([USER]).json()["id"] != first.json()["id"]
    assert client.trajectories()["kinds"] == {"root": 2, "extend": 1}


def test_the_same_request_twice_at_once_is_one_turn(agent, script, engine_log):
    script({"text": "seven<|user|>", "delay_s": 0.3})
    client = agent()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: client.chat([USER]), range(2))
    assert first.json()["id"] == second.json()["id"]
    assert len(engine_log()["requests"]) == 1


def test_a_client_that_leaves_aborts_the_engine_and_leaves_nothing_to_train(agent, script, engine_log):
    script({"text": "seven<|user|>", "delay_s": 5})
    client = agent()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{client.base_url}/chat/completions", headers=client.headers, timeout=0.3,
                   json={"model": "m", "messages": [USER]})
    wait_for(lambda: engine_log()["aborted"] == 1)
    script("seven<|user|>")
    assert client.reply([USER])["content"] == "seven"  # the same body: a new call, not the aborted one
    result = client.trajectories()
    assert (result["turns"], result["abandoned"], len(result["trajectories"])) == (1, 1, 1)


def test_calls_after_the_end_are_gone_and_a_repeated_finish_is_not(agent, script):
    script("seven<|user|>")
    client = agent()
    client.reply([USER])
    first, again = client.finish("ok", 0.5), client.finish("ok", 0.5)
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json() and len(first.json()["trajectories"]) == 1
    assert client.finish("ok", 1.0).status_code == 410
    late = client.chat([USER])
    assert late.status_code == 410 and late.json()["error"]["code"] == "session_closed"
    assert httpx.get(f"{client.base_url}/models", headers=client.headers).status_code == 410
    reopened = httpx.post(client.control.rpartition("/")[0], json={"session_id": client.session_id})
    assert reopened.status_code == 410


def test_a_call_that_runs_when_its_session_is_finished_ends(agent, script, engine_log):
    script({"text": "seven<|user|>", "delay_s": 5})
    client = agent()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.chat, [USER])
        wait_for(lambda: len(engine_log()["requests"]) == 1)
        assert client.finish("cancelled", None).json()["turns"] == 0
        assert call.result(timeout=3).status_code == 410
    wait_for(lambda: engine_log()["aborted"] == 1)


def test_sessions_expire(agent, script):
    script("seven<|user|>")
    client = agent(ttl_s=2)
    client.reply([USER])
    wait_for(lambda: client.chat([USER]).status_code == 410, 10)
    assert client.finish().json()["error"]["code"] == "session_expired"


def test_only_the_holder_of_the_key_may_call(agent, gateway):
    client = agent()
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": client.api_key + "x"}):
        response = httpx.get(f"{client.base_url}/models", headers=headers)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{client.base_url}/models", headers={"x-api-key": client.api_key}).status_code == 200
    missing = httpx.get(f"{gateway.url}/sessions/nobody/v1/models")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "session_not_found"
    unknown = httpx.post(f"{client.base_url}/embeddings", headers=client.headers, json={})
    assert unknown.status_code == 404 and "error" in unknown.json()


def test_a_session_is_created_once(agent, gateway):
    client = agent(max_turns=3)
    again = httpx.post(f"{gateway.url}/sessions",
                       json={"session_id": client.session_id, "enable_thinking": False, "max_turns": 3}).json()
    assert (again["base_url"], again["api_key"]) == (client.base_url, client.api_key)
    other = httpx.post(f"{gateway.url}/sessions", json={"session_id": client.session_id, "max_turns": 4})
    assert other.status_code == 409


@pytest.mark.parametrize(("body", "named"), [
    ({}, "session_id"), ({"session_id": "x", "temperatur": 1}, "temperatur"),
    ({"session_id": "x", "ttl_s": -1}, "ttl_s"),
    ({"session_id": "x", "sampling": {"topp": 1}}, "sampling.topp"), ([], "list")])
def test_wrong_settings_are_named(gateway, body, named):
    response = httpx.post(f"{gateway.url}/sessions", json=body)
    assert response.status_code == 400 and named in response.json()["error"]["message"]


@pytest.mark.parametrize(("text", "named"), [
    ('{"session_id": "x", "ttl_s": NaN}', "NaN is not JSON"), ('{"session_id": "x", "ttl_s": 1e400}', "ttl_s"),
    ('{"session_id": "x", "sampling": {"temperature": -5}}', "sampling.temperature"),
    ('{"session_id": "\\ud800"}', "session_id"), ('{"session_id": ".."}', "session_id")])
def test_numbers_that_are_none_and_names_that_no_url_carries_are_refused(gateway, text, named):
    response = httpx.post(f"{gateway.url}/sessions", content=text)
    assert response.status_code == 400 and named in response.json()["error"]["message"]


def test_wrong_endings_are_named(agent):
    client = agent()
    assert "outcome" in client.finish("won", 1.0).json()["error"]["message"]
    assert "reward" in client.finish("ok", "much").json()["error"]["message"]
    for reward in ("NaN", "1e999", "-Infinity"):
        text = f'{{"outcome": "ok", "reward": {reward}}}'
        response = httpx.post(client.base_url.removesuffix("/v1") + "/finish", content=text)
        assert response.status_code == 400
    assert client.finish("agent_error", None).status_code == 200


# Crashes


def test_a_turn_is_on_disk_before_its_answer_and_a_killed_gateway_goes_on(engine, script, tokenizer_dir, tmp_path):
    script("three<|user|>", "seven<|user|>")
    arguments, ready_file = gateway_arguments(tokenizer_dir, tmp_path, engine.url), tmp_path / "gateway.json"
    first = start(arguments, ready_file)
    client = open_session(first.url)
    before = client.chat([USER])
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(10)
    with sqlite3.connect(tmp_path / "store.sqlite") as database:
        assert database.execute("SELECT count(*) FROM turns").fetchone()[0] == 1
    database.close()
    with running(arguments, ready_file) as second:
        client.control = client.control.replace(first.url, second.url)
        client.base_url = client.base_url.replace(first.url, second.url)
        assert client.chat([USER]).content == before.content
        client.reply([USER, before.json()["choices"][0]["message"], USER])
        result = client.trajectories()
    assert result["kinds"] == {"root": 1, "extend": 1} and len(result["trajectories"]) == 1


def test_a_session_moves_when_its_engine_dies(script, engine, tokenizer_dir, tmp_path):
    script("three<|user|>")
    engines = [start([str(ENGINE), str(tokenizer_dir), str(tmp_path / f"engine{n}.json")], tmp_path / f"engine{n}.json")
               for n in range(2)]
    try:
        for item in engines:
            httpx.post(f"{item.url}/script", json={"replies": ["three<|user|>", "seven<|user|>"]})
        arguments = gateway_arguments(tokenizer_dir, tmp_path, *(item.url for item in engines))
        with running(arguments, tmp_path / "gateway.json") as gateway:
            clients = [open_session(gateway.url) for _ in range(4)]
            answers = [client.reply([USER]) for client in clients]
            loads = {item["url"]: item["sessions"] for item in httpx.get(f"{gateway.url}/stats").json()["engines"]}
            assert sorted(loads.values()) in ([1, 3], [2, 2])
            os.kill(engines[0].process.pid, signal.SIGKILL)
            for client, answer in zip(clients, answers, strict=True):
                assert client.reply([USER, answer, USER])["content"] == "seven"
                assert client.trajectories()["kinds"] == {"root": 1, "extend": 1}
            stats = httpx.get(f"{gateway.url}/stats").json()
            assert {item["url"]: item["alive"] for item in stats["engines"]} == {
                engines[0].url: False, engines[1].url: True}
    finally:
        for item in engines:
            item.process.kill()
            item.process.wait(10)


def test_an_engine_that_restarts_is_waited_for(tokenizer_dir, tmp_path):
    ready_file = tmp_path / "engine.json"
    arguments = [str(ENGINE), str(tokenizer_dir), str(ready_file)]
    with running(arguments, ready_file) as first:
        url = first.url
        with running(gateway_arguments(tokenizer_dir, tmp_path, url), tmp_path / "gateway.json") as gateway:
            client = open_session(gateway.url)
            answer = client.reply([USER])
            first.process.kill()
            first.process.wait(10)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                call = pool.submit(client.reply, [USER, answer, USER])
                time.sleep(0.3)
                assert not call.done()
                with running([*arguments, url.rpartition(":")[2]], ready_file):
                    assert call.result(timeout=20)["content"] == "ok"
