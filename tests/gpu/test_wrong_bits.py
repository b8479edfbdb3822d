"""The self-test accuses no device that is sound."""

from __future__ import annotations

from roundpipe.selftest.session import selftest


def test_sound_devices_are_whole(target):
    findings = list(selftest(target.pool(2), rounds=1, most_bytes=1_000_000))
    assert [finding for finding in findings if not finding.ok] == []
    assert {finding.check for finding in findings} == {"links", "compute", "training"}
