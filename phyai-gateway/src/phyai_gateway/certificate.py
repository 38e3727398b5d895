"""Until when a certificate is valid, so that an expired one is told at start and not by robots."""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

log = logging.getLogger(__name__)
SOON = timedelta(days=14)
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_SEQUENCE, _VERSION, _UTC_TIME, _TIME = 0x30, 0xA0, 0x17, 0x18


def expiry(cert: Path) -> datetime:
    """Return the end of the first certificate in a PEM file; raises OSError, ValueError."""
    text = cert.read_text("ascii", "replace")
    pem = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
    der = memoryview(ssl.PEM_cert_to_DER_cert(pem))
    signed, _ = _value(_value(der, _SEQUENCE)[0], _SEQUENCE)
    if signed[0] == _VERSION:
        signed = _value(signed, _VERSION)[1]
    for tag in (0x02, _SEQUENCE, _SEQUENCE):  # serial number, algorithm, issuer
        signed = _value(signed, tag)[1]
    validity, _ = _value(signed, _SEQUENCE)
    end = _value(validity, validity[0])[1]
    written = bytes(_value(end, end[0])[0]).decode("ascii")
    if end[0] == _UTC_TIME:  # two digits of the year, which turn in 1950
        written = ("19" if written >= "50" else "20") + written
    elif end[0] != _TIME:
        raise ValueError("validity must be a time")
    return datetime.strptime(written, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def warn(cert: Path) -> None:
    """Log if the certificate is no longer valid, or soon will not be; never raises."""
    try:
        end = expiry(cert)
    except (OSError, ValueError, IndexError):
        return  # who loads it says what is wrong
    left = end - datetime.now(UTC)
    if left < timedelta(0):
        log.error("TLS certificate expired on %s: clients will refuse it. Renew it.", end.date())
    elif left < SOON:
        log.warning("TLS certificate expires on %s. Renew it.", end.date())


def _value(der: memoryview, tag: int) -> tuple[memoryview, memoryview]:
    """Return the value of the element that DER begins with, and what follows it."""
    if der[0] != tag:
        raise ValueError(f"element must have tag {tag:#x}; got {der[0]:#x}")
    length, at = der[1], 2
    if length & 0x80:
        count = length & 0x7F
        length, at = int.from_bytes(der[2 : 2 + count], "big"), 2 + count
    if at + length > len(der):
        raise ValueError("element must fit its surroundings; it does not")
    return der[at : at + length], der[at + length :]
