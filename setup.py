# SPDX-License-Identifier: Apache-2.0
"""The packages of a wheel: ``shardwise``, and inside it the benchmarks for ``shardwise bench``."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["shardwise", "shardwise.*"]), "shardwise._bench.benchmarks"],
    package_dir={"shardwise._bench.benchmarks": "benchmarks"},
)
