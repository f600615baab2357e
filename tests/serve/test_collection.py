"""Recorded sessions of a served model: all chat dialects, streams, consent, feedback, and what is refused."""

import json
import os

import anthropic
import httpx
import openai
import pytest

from glm5.errors import ConfigError
from glm5.process import spawn, stop, wait_ready
from glm5.serve.collection import Collection
from glm5.tokenizer.bpe import load_tokenizer

from .conftest import MODEL


@pytest.fixture(scope="module")
def collecting(checkpoint, tmp_path_factory):
    """(URL, directory of the collection) of a server that records and wants a key."""
    root = tmp_path_factory.mktemp("collecting")
    process = spawn(["serve", str(checkpoint), "--port", "0", "--ready-file", str(root / "ready"), "--max-slots", "4",
                     "--threads", "1", "--api-key", "k1", "--api-key", "k2", "--collect", str(root / "c")],
                    root / "log")
    try:
        yield wait_ready(process, root / "ready", root / "log"), root / "c"
    finally:
        stop(process)


def records(directory, name="responses"):
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def post(url, body, key="k1", **headers):
    return httpx.post(f"{url}/feedback", json=body, headers={"authorization": f"Bearer {key}", **headers})


def test_every_dialect_is_recorded_once_and_exactly(collecting, checkpoint):
    url, directory = collecting
    messages = [{"role": "user", "content": "the quick"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k1", max_retries=0) as client:
        whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5,
                                               extra_body={"thinking": {"type": "disabled"}})
        stream = list(client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5, stream=True))
        client.responses.create(model=MODEL, input="the quick", max_output_tokens=5, instructions="Be brief.")
    with anthropic.Anthropic(base_url=url, auth_token="k2", api_key=None, max_retries=0) as client:
        client.messages.create(model=MODEL, messages=messages, max_tokens=5)
    found = records(directory)
    assert [record["messages"][:-1] for record in found] == [
        messages, messages, [{"role": "system", "content": "Be brief."}, *messages], messages]
    assert whole.id.endswith(found[0]["response_id"]) and stream[0].id.endswith(found[1]["response_id"])
    assert found[0]["messages"][-1]["content"] == whole.choices[0].message.content
    tokenizer = load_tokenizer(checkpoint)
    assert found[0]["prompt_ids"] == tokenizer.render(messages, None, True, False).ids
    assert len(found[0]["output_ids"]) == len(found[0]["logprobs"]) == 5 and found[0]["finish_reason"] == "length"
    assert len({found[number]["owner"] for number in range(3)}) == 1 and found[3]["owner"] != found[0]["owner"]
    assert "k1" not in found[0]["owner"]
    assert os.stat(directory / "responses.jsonl").st_mode & 0o077 == 0


def test_a_client_can_keep_its_exchange_to_itself(collecting):
    url, directory = collecting
    before = len(records(directory))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "secret"}], "max_tokens": 2}
    key = {"authorization": "Bearer k1"}
    for extra, headers in (({"store": False}, {}), ({}, {"x-glm5-collect": "no"}), ({"n": 2}, {})):
        answer = httpx.post(f"{url}/v1/chat/completions", json={**body, **extra}, headers={**key, **headers})
        assert answer.status_code == 200
    assert httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 2},
                      headers=key).status_code == 200
    assert len(records(directory)) == before


def test_feedback(collecting):
    url, directory = collecting
    token = "0123456789abcdef01234567"
    for body in ({"thumbs": "up"}, {"score": 0.25, "comment": "c" * 5000}, {"thumbs": "down", "correction": "better"},
                 {"correction": "only this"}):
        answer = post(url, {"response_id": f"chatcmpl-{token}", **body})
        assert (answer.status_code, answer.json()["recorded"]) == (200, True)
    found = records(directory, "feedback")
    assert [record["score"] for record in found] == [1.0, 0.25, 0.0, None]
    assert {record["response_id"] for record in found} == {token}
    assert len(found[1]["comment"]) == 4000 and found[2]["correction"] == "better"


@pytest.mark.parametrize("body", [
    {}, {"response_id": "x", "thumbs": "up"}, {"score": 2}, {"score": True}, {"score": "1"},
    {"thumbs": "sideways"}, {"thumbs": "up", "score": 1}, {"comment": "nice"}, {"correction": ""}, {"thumbs": 1}])
def test_feedback_that_says_nothing_is_refused(collecting, body):
    url, directory = collecting
    before = len(records(directory, "feedback"))
    given = {"response_id": "msg_0123456789abcdef01234567", **body} if body else body
    assert post(url, given).status_code == 400
    assert post(url, {"response_id": "0123456789abcdef01234567", "thumbs": "up"}, key="no").status_code == 401
    assert len(records(directory, "feedback")) == before


def test_without_the_option_nothing_is_recorded(server):
    answer = httpx.post(f"{server.url}/feedback", json={"response_id": "0" * 24, "thumbs": "up"})
    assert answer.status_code == 404


def test_a_directory_that_cannot_be_written_is_refused_and_a_full_disk_costs_no_answer(tmp_path, small_disk):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--collect"):
        Collection(tmp_path / "file")
    collection = Collection(small_disk / "c")
    feedback = {"response_id": "0" * 24, "score": 1.0, "correction": "x" * 400_000}
    with pytest.raises(Exception, match="could not be written"):
        collection.add_feedback(feedback, "me")
    assert collection.failed == 1 and (small_disk / "c" / "feedback.jsonl").read_text() == ""
    assert collection.add_feedback({**feedback, "correction": "short"}, "me")["recorded"]
    assert [record["correction"] for record in records(small_disk / "c", "feedback")] == ["short"]
