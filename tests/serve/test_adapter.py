"""External engines behind the adapter: real HTTP, real log-probs of a tiny dense model."""

import asyncio
import threading

import httpx
import pytest
import torch

from glm5.engine.config import EngineConfig
from glm5.engine.engine import Engine
from glm5.errors import CheckpointError, ConfigError, EngineError, ServiceError
from glm5.model.dense import load_dense
from glm5.rl.config import RLConfig
from glm5.rl.operation import EngineSource, WeightsConfig
from glm5.rl.push import check_canary, push
from glm5.rl.self_test import PROMPTS, self_test
from glm5.rl.weights import publish
from glm5.serve.adapter import build_adapter, run_adapter
from glm5.serve.external import ENGINES, wait_until_well
from tests.dense import write_dense
from tests.env.scripted_model import served
from tests.serve.foreign_engine import FAKES


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_dense(tmp_path_factory.mktemp("dense") / "model", "qwen3")


class Stack:
    """A fake external engine, the adapter in front of it, and a client."""

    def __init__(self, kind, directory, raw_logprobs=False):
        self.kind, self.directory, self.raw = kind, directory, raw_logprobs

    def __enter__(self):
        self.engine = Engine.from_directory(self.directory, [258], EngineConfig(max_slots=8, max_context=300))
        self.fake = FAKES[self.kind](self.engine, self.raw)
        self._upstream = served(self.fake.app())
        self.upstream = self._upstream.__enter__()
        foreign = ENGINES[self.kind](self.upstream)
        self._adapter = served(build_adapter(foreign, self.upstream, self.directory, 3, 300))
        self.url = self._adapter.__enter__()
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        return self

    def __exit__(self, *_):
        self.http.close()
        self._adapter.__exit__(None, None, None)
        self._upstream.__exit__(None, None, None)
        self.engine.close()

    def generate(self, ids, **sampling):
        body = {"input_ids": ids, "return_prompt_logprob": True,
                "sampling_params": {"stop_token_ids": [258], "max_new_tokens": 8, **sampling}}
        answer = self.http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def expected_logprobs(model, ids, start):
    with torch.no_grad():
        logprobs_TW = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    return [float(logprobs_TW[t - 1, ids[t]]) for t in range(start, len(ids))]


@pytest.mark.parametrize("kind", sorted(ENGINES))
def test_the_token_protocol_in_front_of_an_external_engine(kind, directory, tmp_path):
    model = load_dense(directory)
    prompt = list(range(30, 50))
    with Stack(kind, directory) as stack:
        assert stack.http.get("/get_model_info").json()["max_context"] == 300
        answer = stack.generate(prompt)
        ids = prompt + answer["output_ids"]
        assert answer["logprobs"] == pytest.approx(expected_logprobs(model, ids, len(prompt)), abs=1e-4)
        assert answer["prompt_logprobs"][0] is None
        assert answer["prompt_logprobs"][1:] == pytest.approx(expected_logprobs(model, prompt, 1), abs=1e-4)
        assert set(answer["weight_versions"]) == {3}
        assert stack.generate(prompt, max_new_tokens=0)["output_ids"] == []
        # new weights: published, pushed with its canary, and every later token carries their version
        other = load_dense(write_dense(tmp_path / "other", "qwen3", seed=4))
        published = publish(other, tmp_path / "run", version=5, step=1, parent=None, tokenizer_dir=directory)
        report = push(stack.http, stack.url, published)
        assert report.version == 5 and report.canary_error < 1e-4
        answer = stack.generate(prompt)
        assert set(answer["weight_versions"]) == {5}
        ids = prompt + answer["output_ids"]
        assert answer["logprobs"] == pytest.approx(expected_logprobs(other, ids, len(prompt)), abs=1e-4)
        check_canary(stack.http, stack.url, published)
        stats = stack.http.get("/stats").json()
        assert stats["weight_version"] == 5 and stats["weight_updates"] == 1 and stats["busy_s"] > 0
        # directories that an engine could die of never reach it
        broken = tmp_path / "broken"
        broken.mkdir()
        for path, version, message in ((broken, 6, "no config.json"), (published.directory, 4, "versions only grow"),
                                       (write_dense(tmp_path / "wrong", "llama"), 6, "differ in name")):
            refused = stack.http.post("/update_weights_from_disk", json={"model_path": str(path),
                                                                         "weight_version": version})
            assert refused.status_code == 400 and message in refused.json()["message"]
        assert set(stack.generate(prompt)["weight_versions"]) == {5}


@pytest.mark.parametrize("kind", sorted(ENGINES))
def test_an_answer_across_a_weight_update_has_a_version_per_token(kind, directory, tmp_path):
    """vLLM freezes the request and names both versions; SGLang returns what it has, and the rest is asked again."""
    with Stack(kind, directory) as stack:
        stack.engine.pause()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(stack.generate(
            [40, 41], max_new_tokens=200, stop_token_ids=[])))
        thread.start()
        stack.engine.resume()
        while not stack.fake.running or not any(item.sequence.output_ids for item in list(stack.fake.running)):
            pass
        updated = stack.http.post("/update_weights_from_disk", json={"model_path": str(directory), "weight_version": 9})
        assert updated.json()["success"]
        thread.join(60)
        versions = answers[0]["weight_versions"]
        assert versions == sorted(versions) and versions[0] == 3 and len(versions) == len(answers[0]["output_ids"])
        if kind == "vllm":
            assert answers[0]["finish_reason"] == "length" and len(versions) == 200 and versions[-1] == 9
            assert "mode=keep" in stack.fake.log
        else:
            assert answers[0]["finish_reason"] in ("abort", "length") and set(versions) == {3}


def test_every_update_gives_vllm_another_cache_salt(directory):
    with Stack("vllm", directory) as stack:
        stack.generate([1])
        stack.generate([1])
        stack.http.post("/update_weights_from_disk", json={"model_path": str(directory), "weight_version": 4})
        stack.generate([1])
        salts = [item["cache_salt"] for item in stack.fake.log if isinstance(item, dict)]
    assert salts[0] == salts[1] != salts[2]


def test_only_a_rollback_brings_back_an_earlier_version(directory):
    with Stack("vllm", directory) as stack:
        body = {"model_path": str(directory), "weight_version": 2}
        refused = stack.http.post("/update_weights_from_disk", json=body)
        assert refused.status_code == 400 and "3 is in force and versions only grow" in refused.json()["message"]
        assert stack.http.post("/update_weights_from_disk", json={**body, "rollback": True}).json()["success"]
        before = stack.http.get("/stats").json()
        assert set(stack.generate([40, 41])["weight_versions"]) == {2}
        assert stack.http.get("/stats").json()["steps"] == before["steps"] + 1


def config(kind, url, temperature=1.0, tolerance=0.02):
    return RLConfig(name="t", tasksets={"coin": 1.0}, temperature=temperature,
                    engine=EngineSource(kind=kind, url=url, tolerance=tolerance))


@pytest.mark.parametrize("kind", sorted(ENGINES))
def test_the_self_test_accepts_the_same_weights_and_refuses_others_in_one_line(kind, directory, tmp_path):
    with Stack(kind, directory) as stack:
        found = self_test(load_dense(directory), directory, stack.url, config(kind, stack.upstream, temperature=0.7))
        assert found.largest < 1e-3 and found.tokens > len(PROMPTS) * 40
        other = load_dense(write_dense(tmp_path / "other", "qwen3", seed=4))
        with pytest.raises(EngineError, match=r"log-probs of prompt tokens differ .* at most 0\.02") as error:
            self_test(other, directory, stack.url, config(kind, stack.upstream))
        assert "\n" not in str(error.value)


def test_the_self_test_notices_log_probs_from_before_the_temperature(directory):
    with Stack("vllm", directory, raw_logprobs=True) as stack:
        model = load_dense(directory)
        self_test(model, directory, stack.url, config("vllm", stack.upstream))
        with pytest.raises(EngineError, match="log-probs of sampled tokens differ"):
            self_test(model, directory, stack.url, config("vllm", stack.upstream, temperature=0.5))


def test_what_is_not_passed_on_or_does_not_fit_is_refused(directory):
    with Stack("vllm", directory) as stack:
        for body, message in (({"input_ids": [1], "stream": True}, "stream"),
                              ({"input_ids": [1] * 300}, "maximum context length is 300"),
                              ({"input_ids": [1], "sampling_params": {"top_logprobs": 2}}, "not passed on")):
            answer = stack.http.post("/generate", json=body)
            assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    # the engine has gone: the adapter says so and the gateway may try again
    foreign = ENGINES["vllm"](stack.upstream)
    with served(build_adapter(foreign, stack.upstream, directory, 0, 300)) as url:
        assert httpx.post(f"{url}/generate", json={"input_ids": [1]}, trust_env=False).status_code == 503
        assert httpx.get(f"{url}/health_generate", trust_env=False).status_code == 500


def test_an_engine_that_is_not_there_and_a_kind_that_is_none(directory, tmp_path):
    with pytest.raises(ServiceError, match="no engine answers there"):
        asyncio.run(wait_until_well(ENGINES["sglang"]("http://127.0.0.1:9"), "http://127.0.0.1:9", 0))
    with pytest.raises(ConfigError, match="kind='tgi'"):
        run_adapter("tgi", "http://127.0.0.1:9", directory, 0, "127.0.0.1", 0, None)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        run_adapter("vllm", "http://127.0.0.1:9", tmp_path, 0, "127.0.0.1", 0, None)
    with pytest.raises(ConfigError, match="give a url for sglang and vllm"):
        EngineSource(kind="vllm")
    with pytest.raises(ConfigError, match=r'set weights\.transport = "disk"'):
        RLConfig(name="t", tasksets={"coin": 1.0}, engine=EngineSource(kind="vllm", url="http://127.0.0.1:9"),
                 weights=WeightsConfig(transport="delta"))
