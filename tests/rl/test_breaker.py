from glm5.rl.breaker import CircuitBreaker
from glm5.rl.config import BreakerConfig

CONFIG = BreakerConfig(window=8, failure_share=0.5, backoff_s=2.0, max_backoff_s=5.0)


def run(breaker, results, now=0.0):
    return [breaker.record(failed, breaker.begin(now), now) for failed in results]


def test_it_opens_at_the_share_and_not_before_a_quarter_of_the_window_is_known():
    assert run(CircuitBreaker(CONFIG), [True]) == [None]  # 1 is less than a quarter of 8
    breaker = CircuitBreaker(CONFIG)
    assert run(breaker, [False, False, True]) == [None, None, None] and breaker.allows(0.0)
    assert run(breaker, [True]) == ["open"]  # 2 of 4
    assert breaker.state(0.0) == "open" and not breaker.allows(1.9) and breaker.times_opened == 1


def test_old_results_leave_the_window():
    breaker = CircuitBreaker(CONFIG)
    assert run(breaker, [False] * 8 + [True] * 3) == [None] * 11  # 3 of the last 8
    assert run(breaker, [True]) == ["open"]


def test_each_failed_probe_doubles_the_pause_up_to_the_longest():
    breaker = CircuitBreaker(CONFIG)
    run(breaker, [True, True])
    now, pauses = 0.0, []
    for _ in range(4):
        start = now
        while not breaker.allows(now):
            now += 0.5
        pauses.append(now - start)
        assert breaker.state(now) == "half_open" and run(breaker, [True], now) == ["open"]
    assert pauses == [2.0, 4.0, 5.0, 5.0] and breaker.times_opened == 5


def test_a_good_probe_closes_it_and_forgets_the_past():
    breaker = CircuitBreaker(CONFIG)
    run(breaker, [True, True])
    is_probe = breaker.begin(2.0)
    assert is_probe and not breaker.allows(2.0)  # one at a time
    assert breaker.record(False, is_probe, 2.5) == "closed"
    assert breaker.state(2.5) == "closed" and run(breaker, [True], 2.5) == [None]
    assert run(breaker, [True], 2.5) == ["open"] and not breaker.allows(4.4) and breaker.allows(4.5)  # 2 s again


def test_what_began_before_it_opened_does_not_close_it():
    breaker = CircuitBreaker(CONFIG)
    early = breaker.begin(0.0)
    run(breaker, [True, True])
    assert breaker.record(False, early, 1.0) is None and breaker.state(1.0) == "open"
