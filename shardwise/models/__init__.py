# SPDX-License-Identifier: Apache-2.0
"""Reference models, plain torch modules that know nothing of sharding."""
