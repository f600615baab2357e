from glm5.rl.pacing import KeptShare, may_start_groups


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


def test_oversampling_starts_what_the_kept_share_asks_for_within_its_bound():
    wanted = {"eta": 0, "step": 0, "batch_groups": 16, "accepted": 6}
    assert may_start_groups(**wanted, in_flight=0, kept=0.5) == 10  # no oversampling
    assert may_start_groups(**wanted, in_flight=4, kept=0.5, oversample=4.0) == 16
    assert may_start_groups(**wanted, in_flight=4, kept=0.1, oversample=1.5) == 11
    assert may_start_groups(**wanted, in_flight=0, kept=0.0, oversample=2.0) == 20
    assert may_start_groups(**{**wanted, "accepted": 16}, in_flight=0, kept=0.5, oversample=2.0) == 0
    assert may_start_groups(**{**wanted, "accepted": 20}, in_flight=0, kept=0.5, oversample=2.0) == 0


def test_the_kept_share_begins_at_one_and_follows_what_happens():
    share = KeptShare()
    assert share.value == 1.0
    share.record(False)
    assert share.value == 31 / 32
    for number in range(2000):
        share.record(number % 4 == 0)
    assert 0.2 < share.value < 0.3
