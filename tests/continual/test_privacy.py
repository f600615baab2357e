"""Secrets and personal data in text."""

import pytest

from glm5.continual.privacy import scrub_personal, scrub_secrets


@pytest.mark.parametrize(("text", "expected"), [
    ("key sk-proj-abcdefghijklmnop1234 end", "key <api-key> end"),
    ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "<api-key>"),
    ("AKIAIOSFODNN7EXAMPLE", "<api-key>"),
    ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF", "<web-token>"),
    ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "<private-key>\nx"),
    ("-----BEGIN PRIVATE KEY-----\ncut off", "<private-key>"),
    ('password = "hunter22"', '<password>"'),
    ("postgres://me:word@host/db", "<url-password>"),
    ("the password is long", "the password is long"),
    ("skill-based task sk-1", "skill-based task sk-1"),
    ("", ""),
])
def test_secrets(text, expected):
    assert scrub_secrets(text)[0] == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("write to a.b+c@mail.example.org.", "write to <email>."),
    ("call +49 30 901820 now", "call <phone> now"),
    ("(555) 123-4567", "<phone>"),
    ("card 4111 1111 1111 1111", "card <card>"),  # passes Luhn's check
    ("order 4111 1111 1111 1112", "order 4111 1111 1111 1112"),  # does not
    ("DE89 3704 0044 0532 0130 00", "<bank-account>"),
    ("DE88 3704 1144 1532 1130 11", "DE88 3704 1144 1532 1130 11"),
    ("version 1.2.3 of 2024-01-02, 12345", "version 1.2.3 of 2024-01-02, 12345"),
    ("12 + 30 = 42", "12 + 30 = 42"),
])
def test_personal_data(text, expected):
    assert scrub_personal(text)[0] == expected


def test_counts():
    assert scrub_personal("a@b.cc and d@e.ff")[1] == {"email": 2}
    assert scrub_secrets("nothing")[1] == {}
