from glm5.rl.registry import DEAD_AFTER_S, Registry


def test_a_silent_service_is_dead_and_gets_no_work_until_it_speaks():
    registry = Registry()
    registry.register("a", "http://a/", 4, ["shell"], now=0.0)
    assert registry.choose("shell", now=DEAD_AFTER_S - 0.1).url == "http://a"
    assert registry.choose("shell", now=DEAD_AFTER_S) is None
    assert registry.served(DEAD_AFTER_S) == set()
    assert registry.heartbeat("a", now=DEAD_AFTER_S)
    assert registry.served(DEAD_AFTER_S + 1) == {"shell"}


def test_an_unknown_service_must_register_first():
    assert not Registry().heartbeat("a", now=0.0)


def test_work_goes_to_the_service_with_the_most_room_and_never_beyond_capacity():
    registry = Registry()
    registry.register("small", "http://s", 2, ["shell"], now=0.0)
    registry.register("large", "http://l", 4, ["shell", "repair"], now=0.0)
    chosen = []
    for _ in range(7):
        service = registry.choose("shell", now=0.0)
        chosen.append(service and service.service_id)
        if service:
            service.running += 1
    assert chosen.count("large") == 4 and chosen.count("small") == 2 and chosen[-1] is None
    assert chosen[:2] == ["large", "large"]


def test_a_service_that_registers_again_keeps_the_count_of_what_still_runs():
    registry = Registry()
    registry.register("a", "http://a", 2, ["shell"], now=0.0)
    registry.get("a").running = 2
    registry.register("a", "http://b", 2, ["shell"], now=1.0)
    assert registry.get("a").url == "http://b" and registry.choose("shell", now=1.0) is None
