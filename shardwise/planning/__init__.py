# SPDX-License-Identifier: Apache-2.0
"""Plans: the engine on a pretended mesh, its bytes, collectives and peak memory."""
