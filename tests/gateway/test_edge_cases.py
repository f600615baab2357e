"""The eighteen cases in which recording an agent goes wrong, one test each: real processes, real HTTP, exact ids.

What happened is checked against the engine's own log: the ids that it was sent and those that its script gave back.
"""

import concurrent.futures
import time

import anthropic
import httpx
import openai
import pytest

from tests.gateway.conftest import CALL, TOOLS

SYSTEM = {"role": "system", "content": "add numbers"}
USER = {"role": "user", "content": "what is three and four"}
AGAIN = {"role": "user", "content": "make three"}


def tool_result(text, call_id="call_x"):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def sampled(trajectory):
    """The trained ids of a trajectory."""
    return [token for token, mask in zip(trajectory["ids"], trajectory["loss_mask"], strict=True) if mask]


def prompts(engine_log):
    """The prompts that the engine was sent, in order."""
    return [request["input_ids"] for request in engine_log()["requests"]]


@pytest.fixture
def encode(tokenizer):
    """Ids of text in which special tokens are written as such."""
    return lambda text: tokenizer.encode(text, allow_special=True)


def test_01_thinking_that_templates_drop_stays_in_the_ids_unless_the_session_says_otherwise(
        agent, script, engine_log, tokenizer):
    script("because</think>seven<|user|>", "so</think>three<|user|>")
    keeping, clearing = agent(enable_thinking=True), agent(enable_thinking=True, clear_thinking=True)
    for client in (keeping, clearing):
        answer = client.reply([USER])
        assert answer.pop("reasoning_content") == "because"  # the client drops it
        client.reply([USER, answer, AGAIN])
    kept, cleared = (tokenizer.decode(prompts(engine_log)[index]) for index in (1, 3))
    assert "<think>because</think>seven<|user|>make three" in kept
    assert "because" not in cleared and "<|assistant|></think>seven<|user|>make three" in cleared
    assert keeping.trajectories()["kinds"] == {"root": 1, "extend": 1}
    result = clearing.trajectories()
    assert (result["kinds"], result["reasons"]) == ({"root": 1, "fork": 1}, {"thinking": 1})
    assert len(result["trajectories"]) == 2


def test_02_a_split_that_no_encoder_makes_is_kept(agent, script, engine_log, tokenizer, encode):
    script({"text": "seven three<|user|>", "spelled": True}, "the answer<|user|>")
    client = agent()
    answer = client.reply([USER])
    assert answer["content"] == "seven three"
    client.reply([USER, answer, AGAIN])
    spelled = [token for letter in "seven three" for token in tokenizer.encode(letter)]
    assert spelled != tokenizer.encode("seven three")
    first, second = prompts(engine_log)
    assert second[:len(first) + len(spelled)] == first + spelled
    (trajectory,) = client.trajectories()["trajectories"]
    assert sampled(trajectory) == spelled + encode("<|user|>the answer<|user|>")


def test_03_nothing_stands_between_the_sampled_end_of_a_turn_and_what_follows(agent, script, engine_log, encode):
    script("seven<|user|>", "three<|user|>")
    client = agent()
    client.reply([USER, client.reply([USER]), AGAIN])
    first, second = prompts(engine_log)
    assert second == first + encode("seven<|user|>") + encode("make three") + encode("<|assistant|></think>")


@pytest.mark.parametrize("closing", ["<|user|>", "<|observation|>"])
def test_04_a_stop_token_that_opens_the_next_message_is_not_doubled(agent, script, engine_log, encode, closing):
    is_call = closing == "<|observation|>"
    script(f"{CALL if is_call else 'seven'}{closing}", "three<|user|>")
    client = agent()
    answer = client.reply([USER], tools=TOOLS)
    client.reply([USER, answer, tool_result("7") if is_call else AGAIN], tools=TOOLS)
    (role,) = encode(closing)
    assert prompts(engine_log)[1].count(role) == (1 if is_call else 2)
    assert client.trajectories()["mismatches"] == 0


def test_05_the_end_that_a_truncated_turn_lacks_is_added_and_not_trained(agent, script, engine_log, encode):
    script("the answer is seven<|user|>", "three<|user|>")
    client = agent()
    response = client.chat([USER], max_tokens=2).json()["choices"][0]
    assert response["finish_reason"] == "length"
    client.reply([USER, response["message"], AGAIN])
    cut = encode("the answer is seven<|user|>")[:2]
    first, second = prompts(engine_log)
    (user,) = encode("<|user|>")
    assert second[len(first):len(first) + 3] == [*cut, user]
    (trajectory,) = client.trajectories()["trajectories"]
    assert trajectory["loss_mask"][len(first) + 2] is False
    assert sampled(trajectory) == cut + encode("three<|user|>")


def test_06_arguments_that_a_client_writes_anew_keep_their_ids(agent, script, engine_log, encode):
    call = CALL.replace("</tool_call>", "<arg_key>note</arg_key><arg_value>é \"x\"</arg_value></tool_call>")
    script(f"{call}<|observation|>", "seven<|user|>")
    client = agent()
    answer = client.reply([USER], tools=TOOLS)
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b": 2, "note": "é \\"x\\""}'
    answer["tool_calls"][0]["function"]["arguments"] = '{ "note":"\\u00e9 \\"x\\"","b":2.0,"a":1 }'
    client.reply([USER, answer, tool_result("3")], tools=TOOLS)
    first, second = prompts(engine_log)
    output = encode(f"{call}<|observation|>")
    assert second[:len(first) + len(output)] == first + output
    answer["tool_calls"][0]["function"]["arguments"] = '{"note": "e", "b": 2, "a": 1}'  # another value is a change
    client.reply([USER, answer, tool_result("3")], tools=TOOLS)
    assert client.trajectories()["reasons"] == {"answer": 1}


def test_07_spellings_of_the_same_message_extend_and_a_new_system_prompt_is_counted(agent, script):
    script(f"{CALL}<|observation|>", "seven<|user|>", "three<|user|>")
    client = agent()
    answer = client.reply([SYSTEM, USER], tools=TOOLS)
    for content in (None, "", [{"type": "text", "text": " \n"}]):
        calls = [{**answer["tool_calls"][0], "id": "made anew"}]
        question = {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}
        history = [{**SYSTEM, "content": "add numbers \n"}, question,
                   {**answer, "content": content, "tool_calls": calls}, tool_result("3", "made anew")]
        client.reply(history + [AGAIN] * (content is not None), tools=TOOLS)
    dated = [{**SYSTEM, "content": "add numbers. today is Monday"}, USER, answer, tool_result("3")]
    client.reply(dated, tools=TOOLS)
    result = client.trajectories()
    assert result["kinds"] == {"root": 1, "extend": 3, "fork": 1}
    assert (result["mismatches"], result["reasons"]) == (1, {"system": 1})
    assert result["roles"] == {"main": result["turns"]}


def test_08_sub_agents_and_auxiliary_calls_under_one_key_are_told_apart(agent, script, encode):
    script({"text": "three<|user|>", "delay_s": 0.1}, "seven<|user|>")
    settings = {"aux_models": ["small-*"], "aux_prompts": ["Summarise"]}
    for roles, trained in ((None, 6), (["main"], 2)):
        client = agent(**settings, **({"trained_roles": roles} if roles else {}))
        first = client.reply([SYSTEM, USER], tools=TOOLS)
        explore = {"role": "system", "content": "explore the files"}
        requests = [
            {"messages": [SYSTEM, USER, first, AGAIN], "tools": TOOLS},
            *({"messages": [explore, {"role": "user", "content": f"look at {n}"}], "tools": TOOLS} for n in range(4)),
            {"messages": [{"role": "system", "content": "a title, please"}, USER]},
            {"messages": [SYSTEM, {"role": "user", "content": "is it safe"}], "tools": TOOLS, "model": "small-1"},
            {"messages": [{"role": "system", "content": "Summarise briefly"}, USER], "tools": TOOLS},
        ]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda request: client.reply(**request), requests))  # noqa: B023
        result = client.trajectories()
        assert result["roles"] == {"main": 2, "sub": 4, "aux": 3} and result["mismatches"] == 0
        ids = [token for item in result["trajectories"] for token in sampled(item)]
        assert len(result["trajectories"]) == (5 if roles is None else 1)
        assert ids.count(encode("<|user|>")[0]) == trained


def test_09_compaction_starts_a_root_and_every_sampled_id_is_trained_once(agent, script, encode):
    script("three<|user|>", "four<|user|>")
    client = agent()
    answer = client.reply([SYSTEM, USER])
    client.reply([SYSTEM, USER, answer, AGAIN])
    summary = {"role": "user", "content": "so far: three, four. go on"}
    third = client.reply([SYSTEM, summary])
    client.reply([SYSTEM, summary, third, AGAIN])
    result = client.trajectories()
    assert (result["kinds"], result["mismatches"]) == ({"root": 2, "extend": 2}, 0)
    assert result["roles"] == {"main": 4}
    assert [sampled(item) for item in result["trajectories"]] == [encode("three<|user|>four<|user|>")] * 2
    turns = [turn for item in result["trajectories"] for turn in item["turn_ids"]]
    assert len(turns) == len(set(turns)) == 4


def test_10_a_retry_gets_the_recorded_answer_even_after_other_calls(agent, script, engine_log):
    script("three<|user|>", "seven<|user|>")
    client = agent()
    body = {"messages": [USER]}
    first = client.post("chat/completions", body)
    client.reply([SYSTEM, USER])
    retried = client.post("chat/completions", body, **{"x-stainless-retry-count": "1"})
    assert retried.content == first.content and len(prompts(engine_log)) == 2
    streams = [client.post("messages", {"messages": [USER], "max_tokens": 9, "stream": True},
                           **{"idempotency-key": "k1"}) for _ in range(2)]
    assert streams[0].content == streams[1].content and "message_stop" in streams[0].text
    other = client.post("chat/completions", body)  # no mark, and other calls since: a new sample
    assert other.json()["id"] != first.json()["id"]
    assert len(prompts(engine_log)) == 4 and client.trajectories()["turns"] == 4


def test_11_streams_are_made_from_whole_answers_and_kept_alive(agent, script, engine_log, encode):
    script({"text": f"because</think>the answer {CALL}<|observation|>", "delay_s": 2.3})
    client = agent(enable_thinking=True)
    tools = [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}]
    with anthropic.Anthropic(base_url=client.anthropic_url, api_key=client.api_key, max_retries=0) as api, \
            api.messages.stream(model="m", max_tokens=99, tools=tools, messages=[USER]) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.content[0].thinking, message.content[1].text) == ("because", "the answer ")
    assert message.content[2].input == {"a": 1, "b": 2} and message.stop_reason == "tool_use"
    for path, body in (("chat/completions", {"messages": [USER]}), ("responses", {"input": "hi"}),
                       ("completions", {"prompt": "hi", "max_tokens": 99})):
        script({"text": "x</think>seven<|user|>", "delay_s": 2.1})
        text = client.post(path, {**body, "stream": True}).text
        assert text.startswith(": keep-alive\n\n") and "seven" in text
    assert all(request["stream"] is False for request in engine_log()["requests"])
    first = client.trajectories()["trajectories"][0]
    assert sampled(first) == encode(f"because</think>the answer {CALL}<|observation|>")


def test_12_sampling_is_the_sessions_and_what_cannot_be_recorded_is_refused(agent, script, engine_log):
    script("the answer is seven<|user|>")
    client = agent(sampling={"temperature": 0.7, "max_new_tokens": 6})
    client.chat([USER], temperature=0, top_p=0.1, max_tokens=3)
    client.post("messages", {"messages": [USER], "temperature": 0.2, "max_tokens": 1000})
    first, second = (request["sampling_params"] for request in engine_log()["requests"])
    assert (first["temperature"], first["top_p"], first["max_new_tokens"]) == (0.7, 1.0, 3)
    assert (second["temperature"], second["top_p"], second["max_new_tokens"]) == (0.7, 1.0, 6)
    for path, body in (("chat/completions", {"messages": [USER], "n": 2}), ("completions", {"prompt": "x", "n": 2}),
                       ("completions", {"prompt": ["x", "y"]}), ("chat/completions", {"messages": [USER], "stop": "a"}),
                       ("messages", {"messages": [USER], "max_tokens": 9, "stop_sequences": ["a"]}),
                       ("messages", {"messages": [USER], "max_tokens": 9, "tools": [{"name": "add"}],
                                     "tool_choice": {"type": "any"}}),
                       ("responses", {"input": "x", "text": {"format": {"type": "json_object"}}})):
        response = client.post(path, body)
        assert response.status_code == 400 and "in a recorded session" in response.text
    assert client.trajectories()["turns"] == 2


def test_13_a_client_that_leaves_aborts_the_engine_and_trains_nothing(agent, script, engine_log):
    script({"text": "seven<|user|>", "delay_s": 5})
    client = agent()
    for path, body in (("chat/completions", {"messages": [USER]}), ("messages", {"messages": [USER], "max_tokens": 9})):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{client.base_url}/{path}", headers=client.headers, timeout=0.3, json={"model": "m", **body})
    deadline = time.monotonic() + 10
    while engine_log()["aborted"] < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine_log()["aborted"] == 2
    result = client.trajectories()
    assert (result["turns"], result["abandoned"], result["trajectories"]) == (0, 2, [])


def test_14_a_call_that_cannot_be_parsed_is_text_and_keeps_its_ids(agent, script, encode):
    broken = "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    script(f"{broken}<|observation|>", CALL.replace("add", "unknown") + "<|observation|>", "seven<|user|>")
    client = agent()
    first = client.reply([USER], tools=TOOLS)
    assert first == {"role": "assistant", "content": broken}
    second = client.reply([USER, first, tool_result("error: bad call")], tools=TOOLS)
    assert second["tool_calls"][0]["function"]["name"] == "unknown"
    client.reply([USER, first, tool_result("error: bad call"), second, tool_result("error: no such tool")], tools=TOOLS)
    result = client.trajectories()
    kept = f"{broken}<|observation|>{CALL.replace('add', 'unknown')}<|observation|>seven<|user|>"
    assert sampled(result["trajectories"][0]) == encode(kept) and result["mismatches"] == 0


@pytest.mark.parametrize(("path", "body"), [
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]})])
def test_15_images_whose_placeholders_nobody_agrees_on_are_refused(agent, script, engine_log, path, body):
    script("seven<|user|>")
    client = agent()
    response = client.post(path, body)
    assert response.status_code == 400 and "text" in response.json()["error"]["message"]
    assert prompts(engine_log) == [] and client.trajectories()["turns"] == 0


def test_16_an_answer_that_a_weight_update_cuts_in_two_is_one_turn_of_two_versions(agent, script, engine_log, encode):
    script({"text": "the answer is seven<|user|>", "abort_after": 2}, version=4)
    client = agent()
    assert client.reply([USER])["content"] == "the answer is seven"
    output = encode("the answer is seven<|user|>")
    first, second = engine_log()["requests"]
    assert second["input_ids"] == first["input_ids"] + output[:2]
    limits = [request["sampling_params"]["max_new_tokens"] for request in (first, second)]
    assert limits[0] - limits[1] == 2
    (trajectory,) = client.trajectories()["trajectories"]
    assert sampled(trajectory) == output
    assert trajectory["versions"][len(first["input_ids"]):] == [4, 4] + [5] * (len(output) - 2)


def test_17_any_model_name_is_served_and_a_long_prompt_fails_as_agents_expect(agent, script):
    script("seven<|user|>")
    client = agent()
    long = [{"role": "user", "content": "word " * 3000}]
    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as api:
        assert api.chat.completions.create(model="gpt-x", messages=[USER]).model == "gpt-x"
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(model="gpt-x", messages=long)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in str(caught.value)
    with anthropic.Anthropic(base_url=client.anthropic_url, api_key=client.api_key, max_retries=0) as api:
        assert api.messages.create(model="claude-x", max_tokens=9, messages=[USER]).model == "claude-x"
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* 4096 maximum") as refused:
            api.messages.create(model="claude-x", max_tokens=9, messages=long)
    assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_18_requests_after_the_reward_are_gone_in_every_dialect(agent, script, engine_log):
    script("seven<|user|>")
    client = agent()
    client.reply([USER])
    first = client.finish("ok", 0.5).json()
    for path, body in (("chat/completions", {"messages": [USER]}), ("completions", {"prompt": "x"}),
                       ("responses", {"input": "x"}), ("messages", {"messages": [USER], "max_tokens": 9}),
                       ("messages/count_tokens", {"messages": [USER]})):
        late = client.post(path, body)
        assert late.status_code == 410 and "is closed" in late.json()["error"]["message"]
    assert len(prompts(engine_log)) == 1
    assert client.finish("ok", 0.5).json() == first and first["turns"] == 1
