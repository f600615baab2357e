from collections import Counter

from glm5.rl.pacing import RatioPicker, may_start_groups


def test_synchronous_pacing_starts_one_batch_and_then_waits_for_the_step():
    assert may_start_groups(eta=0, step=0, batch_groups=16, accepted=0, in_flight=0) == 16
    assert may_start_groups(eta=0, step=0, batch_groups=16, accepted=10, in_flight=6) == 0
    assert may_start_groups(eta=0, step=1, batch_groups=16, accepted=16, in_flight=0) == 16


def test_eta_allows_that_many_batches_ahead():
    assert may_start_groups(eta=2, step=5, batch_groups=4, accepted=20, in_flight=3) == 9


def test_a_dropped_group_makes_room_for_another():
    full = may_start_groups(eta=0, step=0, batch_groups=4, accepted=3, in_flight=1)
    after_drop = may_start_groups(eta=0, step=0, batch_groups=4, accepted=3, in_flight=0)
    assert (full, after_drop) == (0, 1)


def test_pacing_is_never_negative_after_a_rollback():
    assert may_start_groups(eta=1, step=2, batch_groups=4, accepted=40, in_flight=0) == 0


def test_ratios_hold_in_every_window_of_one_round():
    picker = RatioPicker({"calculator": 2.0, "shell": 1.0, "repair": 1.0})
    names = [picker.pick({"calculator", "shell", "repair"}) for _ in range(40)]
    for start in range(0, 40, 4):
        assert Counter(names[start:start + 4]) == {"calculator": 2, "shell": 1, "repair": 1}


def test_an_absent_taskset_earns_no_credit_for_a_burst():
    picker = RatioPicker({"calculator": 1.0, "shell": 1.0})
    assert [picker.pick({"calculator"}) for _ in range(10)] == ["calculator"] * 10
    after = [picker.pick({"calculator", "shell"}) for _ in range(4)]
    assert Counter(after) == {"calculator": 2, "shell": 2}


def test_no_available_taskset_gives_none():
    assert RatioPicker({"calculator": 1.0}).pick({"other"}) is None
