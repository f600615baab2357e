"""Secrets and personal data in text: found by rules, replaced by the name of what they are. Pure functions.

Rules know forms, not meaning: names and addresses of people pass. Card numbers must have a right check digit, bank
accounts right check digits, so that other long numbers stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

SECRETS: dict[str, re.Pattern[str]] = {
    "private-key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    "api-key": re.compile(r"\b(?:sk|pk|rk)[-_](?:[A-Za-z0-9]+[-_])*[A-Za-z0-9]{16,}\b|\bgh[pousr]_[A-Za-z0-9]{20,}\b|"
                          r"\bgithub_pat_\w{20,}\b|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bxox[abeprs]-[\w-]{10,}|"
                          r"\bAIza[\w-]{35}\b|\bhf_[A-Za-z0-9]{20,}\b|\bglpat-[\w-]{20,}"),
    "web-token": re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"),
    "password": re.compile(r"(?i)\b(?:password|passwd|pwd|secret|api[_-]?key|access[_-]?token)\b[\"']?\s*[:=]\s*"
                           r"[\"']?[^\s\"',;]{6,}"),
    "url-password": re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@]+:[^\s/@]+@\S+"),
}
"""What gives access to something."""
_EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
_PHONE = re.compile(r"(?<![\w.])(?:\+|00)\d{1,3}[\s.-]?(?:\(\d{1,4}\)[\s.-]?)?\d{2,4}(?:[\s.-]?\d{2,4}){2,4}(?![\w.])|"
                    r"(?<![\w.])\(?\d{3}\)?[\s.-]\d{3}[\s.-]\d{4}(?![\w.])")
_CARD = re.compile(r"(?<![\d.])\d(?:[ -]?\d){12,18}(?![\d.])")
_ACCOUNT = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")


def scrub_secrets(text: str) -> tuple[str, Counter[str]]:
    """``text`` with every secret replaced by its kind in angle brackets, and how many there were of each."""
    found: Counter[str] = Counter()
    for kind, pattern in SECRETS.items():
        text = _replace(text, pattern, kind, lambda match: True, found)
    return text, found


def scrub_personal(text: str) -> tuple[str, Counter[str]]:
    """The same for e-mail addresses, card and bank account numbers, and telephone numbers."""
    found: Counter[str] = Counter()
    text = _replace(text, _EMAIL, "email", lambda match: True, found)
    text = _replace(text, _ACCOUNT, "bank-account", _is_account, found)
    text = _replace(text, _CARD, "card", _is_card, found)
    text = _replace(text, _PHONE, "phone", lambda match: True, found)
    return text, found


def _replace(text: str, pattern: re.Pattern[str], kind: str, is_real: Callable[[str], bool],
             found: Counter[str]) -> str:
    def replacement(match: re.Match[str]) -> str:
        if not is_real(match[0]):
            return match[0]
        found[kind] += 1
        return f"<{kind}>"

    return pattern.sub(replacement, text)


def _is_card(text: str) -> bool:
    """Luhn's check (ISO/IEC 7812-1)."""
    digits = [int(character) for character in text if character.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _is_account(text: str) -> bool:
    """The check digits of an IBAN (ISO 13616)."""
    plain = text.replace(" ", "")
    return int("".join(str(int(character, 36)) for character in plain[4:] + plain[:4])) % 97 == 1
