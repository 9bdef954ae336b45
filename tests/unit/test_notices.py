# SPDX-License-Identifier: Apache-2.0
"""Warnings for people: once, from one rank, and from another where only that one knows."""

from __future__ import annotations

import logging

import pytest

from shardwise.notices import warn_once

log = logging.getLogger("tests.notices")


def test_a_warning_comes_once_from_the_rank_that_speaks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    warn_once(log, "all ranks know %s", "this")
    assert caplog.messages == []
    warn_once(log, "only this rank knows %s", "this", first=True)
    warn_once(log, "only this rank knows %s", "this", first=True)
    assert caplog.messages == ["only this rank knows this"]
    monkeypatch.setenv("RANK", "0")
    for value in ("this", "this", "that"):  # what another rank kept to itself is still new here
        warn_once(log, "all ranks know %s", value)
    assert caplog.messages[1:] == ["all ranks know this", "all ranks know that"]
    for value in (1, 2):
        warn_once(log, "one subject, value %d", value, about="subject")
    assert caplog.messages[3:] == ["one subject, value 1"]
