"""Every dialect in a recorded session: the official clients, exact ids, one tree."""

import anthropic
import openai
import pytest

from tests.gateway.conftest import CALL, TOOLS
from tests.gateway.test_edge_cases import USER, prompts, sampled

ANTHROPIC_TOOLS = [{"name": "add", "description": "Adds.", "input_schema": TOOLS[0]["function"]["parameters"]}]
RESPONSE_TOOLS = [{"type": "function", **TOOLS[0]["function"]}]
REPLIES = (f"because</think>the answer {CALL}<|observation|>", "so</think>seven<|user|>", "x</think>three<|user|>")


def check_one_trajectory(client, engine_log, tokenizer, kinds):
    """All turns lie on one path whose ids are those that the engine saw and sampled."""
    seen = prompts(engine_log)
    outputs = [tokenizer.encode(text, allow_special=True) for text in REPLIES]
    for first, output, second in zip(seen, outputs, seen[1:], strict=False):
        assert second[:len(first) + len(output)] == first + output
    result = client.trajectories()
    (trajectory,) = result["trajectories"]
    assert trajectory["ids"] == seen[-1] + outputs[len(seen) - 1]
    assert sampled(trajectory) == [token for output in outputs[:len(seen)] for token in output]
    assert (result["mismatches"], result["kinds"]) == (0, kinds)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_over_the_anthropic_client_is_one_trajectory(agent, script, engine_log, tokenizer, stream):
    script(*REPLIES)
    client = agent(enable_thinking=True)
    messages = [USER]
    with anthropic.Anthropic(base_url=client.anthropic_url, api_key=client.api_key, max_retries=0) as api:
        assert [model.id for model in api.models.list()] == ["glm5"]
        request = {"model": "m", "max_tokens": 200, "tools": ANTHROPIC_TOOLS, "system": "add numbers"}
        counted = api.messages.count_tokens(model="m", tools=ANTHROPIC_TOOLS, system="add numbers", messages=messages)
        for turn in range(3):
            if stream:
                with api.messages.stream(messages=messages, **request) as events:
                    message = events.get_final_message()
            else:
                message = api.messages.create(messages=messages, **request)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            calls = [block for block in message.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": block.id, "content": "3"} for block in calls]
            messages.append({"role": "user", "content": results or "again"})
            assert message.stop_reason == ("tool_use" if turn == 0 else "end_turn")
            assert message.content[0].thinking == ("because", "so", "x")[turn]
    assert counted.input_tokens == len(prompts(engine_log)[0])
    check_one_trajectory(client, engine_log, tokenizer, {"root": 1, "extend": 2})


@pytest.mark.parametrize("stored", [False, True])
def test_responses_go_on_by_their_id_or_by_their_items(agent, script, engine_log, tokenizer, stored):
    script(*REPLIES)
    client = agent(enable_thinking=True)
    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as api:
        request = {"model": "m", "tools": RESPONSE_TOOLS, "instructions": "add numbers", "store": stored}
        items, previous = [{"role": "user", "content": "what is three and four"}], None
        for turn in range(3):
            if turn == 2:
                stream = api.responses.create(input=items, previous_response_id=previous, stream=True, **request)
                response = list(stream)[-1].response
            else:
                response = api.responses.create(input=items, previous_response_id=previous, **request)
            calls = [item for item in response.output if item.type == "function_call"]
            new = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
            new = new or [{"role": "user", "content": "again"}]
            previous = response.id if stored else None
            items = new if stored else [*items, *(item.model_dump() for item in response.output), *new]
            assert response.status == "completed"
        assert response.output_text == "three"
        with pytest.raises(openai.NotFoundError, match="resp_unknown"):
            api.responses.create(model="m", input="x", previous_response_id="resp_unknown")
    check_one_trajectory(client, engine_log, tokenizer, {"root": 1, "extend": 2})


def test_raw_completions_extend_what_was_sampled(agent, script, engine_log, tokenizer):
    script({"text": "seven three<|user|>", "spelled": True})
    client = agent()
    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as api:
        first = api.completions.create(model="m", prompt="what is", max_tokens=5).choices[0]
        assert (first.text, first.finish_reason) == ("seven", "length")
        chunks = list(api.completions.create(model="m", prompt="what isseven and", max_tokens=5, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "seven"
        api.completions.create(model="m", prompt=prompts(engine_log)[1], max_tokens=2)
    spelled = [token for letter in "seven" for token in tokenizer.encode(letter)]
    one, two, three = prompts(engine_log)
    assert two == one + spelled + tokenizer.encode(" and") and three == two
    result = client.trajectories()
    assert result["kinds"] == {"root": 1, "extend": 2} and result["mismatches"] == 0
    assert sorted(map(sampled, result["trajectories"]), key=len) == [spelled[:2], spelled * 2]


def test_a_session_may_change_its_dialect_from_turn_to_turn(agent, script, engine_log, tokenizer):
    script(*REPLIES)
    client = agent(enable_thinking=True)
    first = client.post("responses", {"input": [USER], "tools": RESPONSE_TOOLS}).json()
    arguments = next(item["arguments"] for item in first["output"] if item["type"] == "function_call")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    history = [USER, {"role": "assistant", "content": "the answer ", "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c", "content": "3"}]
    second = client.reply(history, tools=TOOLS)
    blocks = [{"type": "text", "text": "the answer"},
              {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1, "b": 2}}]
    third = client.post("messages", {"max_tokens": 99, "tools": ANTHROPIC_TOOLS, "messages": [
        USER, {"role": "assistant", "content": blocks},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
        {"role": "assistant", "content": second["content"]}, {"role": "user", "content": "again"}]}).json()
    assert third["content"][-1] == {"type": "text", "text": "three"}
    check_one_trajectory(client, engine_log, tokenizer, {"root": 1, "extend": 2})
