# SPDX-License-Identifier: Apache-2.0
"""From buffers to modules: groups, units and their phases, and the public verbs."""
