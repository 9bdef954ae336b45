# SPDX-License-Identifier: Apache-2.0
"""What every test session needs: no rank may outlive it."""

from __future__ import annotations

from tests.ranks import shut_down


def pytest_sessionfinish() -> None:
    shut_down()  # after Ctrl-C too; the ranks of a session that was killed notice by themselves
