import pytest

from glm5.errors import ConfigError
from glm5.rl.config import BreakerConfig
from glm5.rl.registry import DEAD_AFTER_S, Description, Registry


def describe(service_id, capacity=4, tasksets=("shell",), url=None, **more):
    return Description(id=service_id, url=url or f"http://{service_id}/", capacity=capacity, tasksets=tasksets, **more)


def test_a_silent_service_is_dead_and_gets_no_work_until_it_speaks():
    registry = Registry()
    registry.register(describe("a"), now=0.0)
    assert registry.choose("shell", now=DEAD_AFTER_S - 0.1).url == "http://a"
    assert registry.choose("shell", now=DEAD_AFTER_S) is None
    assert registry.shares(DEAD_AFTER_S) == {}
    assert registry.heartbeat("a", now=DEAD_AFTER_S)
    assert registry.shares(DEAD_AFTER_S + 1) == {"shell": 1.0}


def test_an_unknown_service_must_register_first():
    assert not Registry().heartbeat("a", now=0.0)


def test_work_goes_to_the_service_with_the_most_room_and_never_beyond_capacity():
    registry = Registry()
    registry.register(describe("small", 2), now=0.0)
    registry.register(describe("large", 4, ("shell", "repair")), now=0.0)
    chosen = []
    for _ in range(7):
        service = registry.choose("shell", now=0.0)
        chosen.append(service and service.service_id)
        if service:
            service.begin(0.0)
    assert chosen.count("large") == 4 and chosen.count("small") == 2 and chosen[-1] is None
    assert chosen[:2] == ["large", "large"]


def test_a_service_three_times_as_fast_runs_three_times_as_many():
    registry = Registry()
    registry.register(describe("slow", 100), now=0.0)
    registry.register(describe("fast", 100), now=0.0)
    for name, duration_s in (("slow", 30.0), ("fast", 10.0)):
        service = next(one for one in registry.all() if one.service_id == name)
        service.end(0.0, duration_s=duration_s, failed=False, is_probe=service.begin(0.0))
    for _ in range(40):
        registry.choose("shell", now=0.0).begin(0.0)
    assert {service.service_id: service.running for service in registry.all()} == {"slow": 10, "fast": 30}


def test_durations_are_smoothed_and_failures_do_not_count():
    registry = Registry()
    registry.register(describe("a"), now=0.0)
    (service,) = registry.all()
    for duration_s, failed in ((4.0, False), (36.0, False), (0.1, True)):
        service.end(0.0, duration_s=duration_s, failed=failed, is_probe=service.begin(0.0))
    assert service.episode_s == 5.0 and service.finished == 3 and service.running == 0


def test_a_service_starts_no_more_episodes_in_a_second_than_it_says():
    registry = Registry()
    registry.register(describe("a", 100, speed=4.0), now=0.0)
    started = []
    for tick in range(30):
        now = tick / 10
        while (service := registry.choose("shell", now)) is not None:
            service.begin(now)
            started.append(now)
    assert started[:3] == [0.0, 0.3, 0.5] and len(started) == 12


def test_the_largest_wish_counts_and_room_is_that_of_all_services_together():
    registry = Registry()
    registry.register(describe("a", 3, ("shell", "repair"), ratio=2.0), now=0.0)
    registry.register(describe("b", 3, ratio=0.5), now=0.0)
    assert registry.shares(0.0) == {"shell": 2.0, "repair": 2.0}
    assert registry.has_room("shell", 6, 0.0) and registry.has_room("repair", 8, 0.0)  # 8 will never fit into 3
    registry.choose("repair", 0.0).begin(0.0)
    assert not registry.has_room("shell", 6, 0.0) and registry.has_room("shell", 5, 0.0)
    assert not registry.has_room("repair", 8, 0.0) and not registry.has_room("unknown", 1, 0.0)


def test_a_service_that_fails_gets_nothing_until_a_probe_succeeds():
    registry = Registry(BreakerConfig(window=4, failure_share=0.5, backoff_s=2.0))
    registry.register(describe("a", 8), now=0.0)
    (service,) = registry.all()
    assert service.end(1.0, duration_s=1.0, failed=True, is_probe=service.begin(1.0)) == "open"
    assert registry.shares(2.9) == {} and registry.choose("shell", 2.9) is None
    assert registry.choose("shell", 3.0) is service and service.begin(3.0)
    assert registry.choose("shell", 3.1) is None  # one at a time
    assert service.end(3.5, duration_s=0.5, failed=False, is_probe=True) == "closed"
    assert registry.shares(3.5) == {"shell": 1.0}


def test_a_service_that_registers_again_keeps_the_count_of_what_still_runs():
    registry = Registry()
    registry.register(describe("a", 2), now=0.0)
    for service in registry.all() * 2:
        service.begin(0.0)
    registry.register(describe("a", 2, url="http://b"), now=1.0)
    assert registry.all()[0].url == "http://b" and registry.choose("shell", now=1.0) is None


def test_a_restarted_service_replaces_what_ran_at_its_url():
    registry = Registry()
    registry.register(describe("old", url="http://a"), now=0.0)
    registry.register(describe("new", url="http://a"), now=50.0)
    assert [service.service_id for service in registry.all()] == ["new"]


@pytest.mark.parametrize("wrong", [{"kind": "engine"}, {"capacity": 0}, {"ratio": 0.0}, {"speed": -1.0},
                                   {"tasksets": ()}])
def test_a_description_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        describe("a", **wrong)
