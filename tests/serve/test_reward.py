"""The served reward model over HTTP, with a scorer that counts characters."""

import asyncio
import threading

import httpx
import pytest

from glm5.env.rewards.scoring import RewardModelClient
from glm5.errors import DataError
from glm5.serve.reward import build_reward_app
from glm5.wire import HttpClient
from tests.env.scripted_model import served


class Counting:
    """A conversation's score is its number of characters, its reward that over 10. Records the passes."""

    def __init__(self):
        self.passes = []
        self.hold = threading.Event()
        self.hold.set()

    def render(self, messages):
        if not messages:
            raise DataError("conversation: empty")
        return [0] * sum(len(message["content"]) for message in messages)

    def score(self, conversations):
        self.passes.append(len(conversations))
        assert self.hold.wait(10)
        if any(len(ids) > 10 for ids in conversations):
            raise ValueError("a defect")
        return [float(len(ids)) for ids in conversations], [len(ids) / 10 for ids in conversations]


@pytest.fixture
def scoring():
    scorer = Counting()
    with served(build_reward_app(scorer, "counter")) as url:
        yield scorer, url


def conversation(length):
    return [{"role": "assistant", "content": "x" * length}]


def test_scores_in_the_order_of_the_conversations(scoring):
    _, url = scoring
    answer = httpx.post(f"{url}/score", json={"conversations": [conversation(3), conversation(1)]})
    assert answer.json() == {"scores": [3.0, 1.0], "rewards": [0.3, 0.1], "model": "counter"}
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "model": "counter"}


@pytest.mark.parametrize("body", [{}, {"conversations": []}, {"conversations": ["x"]}, {"conversations": [[1]]},
                                  {"conversations": [[]]}, {"conversations": 3}])
def test_bad_bodies_are_refused(scoring, body):
    answer = httpx.post(f"{scoring[1]}/score", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_requests_that_wait_are_scored_together_and_a_defect_stays_where_it_happened(scoring):
    scorer, url = scoring

    async def run():
        http = HttpClient()
        client = RewardModelClient(url, http)
        scorer.hold.clear()
        first = asyncio.create_task(client.score(conversation(1)))
        while not scorer.passes:
            await asyncio.sleep(0.01)
        others = [asyncio.create_task(client.score(conversation(number))) for number in (2, 3, 4)]
        await asyncio.sleep(0.3)
        scorer.hold.set()
        try:
            return await asyncio.gather(first, *others)
        finally:
            http.close()

    assert asyncio.run(run()) == [0.1, 0.2, 0.3, 0.4]
    assert scorer.passes == [1, 3]
    assert httpx.post(f"{url}/score", json={"conversations": [conversation(11)]}).status_code == 500
    assert httpx.post(f"{url}/score", json={"conversations": [conversation(5)]}).json()["rewards"] == [0.5]
